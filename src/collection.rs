//! The paged KV collection: shapes, strides, and where a page's rows lie. All offsets are 64-bit.

use crate::abi::collection::{pkv_cache_view, pkv_collection, pkv_collection_options};
use crate::abi::types::{pkv_buffer, pkv_tensor};
use crate::context::{Backend, Context};
use crate::cpu::isa::Isa;
use crate::dtype::{DType, Element, Plain};
use crate::error::{Error, Result};
use crate::view::check_pointer;
use crate::workspace::HostBuffer;
use std::ops::Deref;
use std::ptr::null_mut;

/// Extents of a collection, checked: none is 0, no product overflows.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub dtype: DType,
    pub scale_dtype: Option<DType>,
    pub num_blocks: usize,
    pub num_layers: usize,
    pub page_size: usize,
    pub num_heads: usize,
    pub head_size: usize,
    pub is_mla: bool,
    /// Columns that share a scale, at most head_size.
    pub granularity: usize,
    /// Scales of a head's row: ceil(head_size / granularity); 0 without scales.
    pub groups: usize,
}

impl Shape {
    pub fn check(o: &pkv_collection_options) -> Result<Self> {
        use DType::*;
        let dtype =
            DType::from_abi(o.dtype).filter(|d| matches!(d, F32 | F16 | BF16 | F8E4M3 | F8E5M2)).ok_or_else(|| {
                Error::dtype("options.dtype", format!("is {}, must be F32, F16, BF16, F8_E4M3 or F8_E5M2", o.dtype))
            })?;
        let scale_dtype = match o.scale_dtype {
            0 => None,
            n => Some(DType::from_abi(n).filter(|d| matches!(d, F32 | BF16 | F8E8M0)).ok_or_else(|| {
                Error::dtype("options.scale_dtype", format!("is {n}, must be NONE, F32, BF16 or F8_E8M0"))
            })?),
        };
        if scale_dtype.is_some() && !dtype.is_fp8() {
            let message = format!("must be NONE: a {} cache is not quantised", dtype.name());
            return Err(Error::dtype("options.scale_dtype", message));
        }
        for (n, name) in [
            (o.num_blocks, "num_blocks"),
            (o.num_layers, "num_layers"),
            (o.page_size, "page_size"),
            (o.num_heads, "num_heads"),
            (o.head_size, "head_size"),
        ] {
            if n == 0 {
                return Err(Error::shape(format!("options.{name}"), "is 0, must be at least 1"));
            }
        }
        if o.is_mla > 1 {
            return Err(Error::value("options.is_mla", format!("is {}, must be 0 or 1", o.is_mla)));
        }
        if o.reserved != 0 {
            return Err(Error::value("options.reserved", "must be 0"));
        }
        if scale_dtype.is_none() && o.quantization_granularity != 0 {
            let message = format!("is {}, must be 0 without a scale_dtype", o.quantization_granularity);
            return Err(Error::value("options.quantization_granularity", message));
        }
        let head_size = o.head_size as usize;
        let granularity = match o.quantization_granularity as usize {
            0 => head_size,
            g => g.min(head_size),
        };
        let shape = Shape {
            dtype,
            scale_dtype,
            num_blocks: o.num_blocks as usize,
            num_layers: o.num_layers as usize,
            page_size: o.page_size as usize,
            num_heads: o.num_heads as usize,
            head_size,
            is_mla: o.is_mla == 1,
            granularity,
            groups: if scale_dtype.is_some() { head_size.div_ceil(granularity) } else { 0 },
        };
        let bytes = [shape.kv_dim(), shape.num_layers, shape.page_size, shape.num_heads, head_size, dtype.size(), 4]
            .into_iter()
            .try_fold(shape.num_blocks, usize::checked_mul);
        if bytes.is_none_or(|b| b > isize::MAX as usize) {
            return Err(Error::shape("options.num_blocks", "the product of the extents is more than memory can hold"));
        }
        Ok(shape)
    }

    /// Keys and values, or the one latent row of MLA.
    pub fn kv_dim(&self) -> usize {
        if self.is_mla { 1 } else { 2 }
    }

    /// Elements of one token's row: all heads.
    pub fn row_elements(&self) -> usize {
        self.num_heads * self.head_size
    }

    fn rows(&self) -> usize {
        self.num_blocks * self.kv_dim() * self.num_layers * self.page_size
    }

    pub fn blocks_bytes(&self) -> usize {
        self.rows() * self.row_elements() * self.dtype.size()
    }

    pub fn scales_bytes(&self) -> usize {
        self.rows() * self.num_heads * self.groups * self.scale_dtype.map_or(0, DType::size)
    }
}

/// Who owns the storage, and frees it on drop.
#[derive(Debug)]
enum Storage {
    Borrowed,
    Host {
        _blocks: HostBuffer,
        _scales: HostBuffer,
    },
    #[cfg(feature = "cuda")]
    Device {
        _blocks: crate::cuda::DeviceBuffer,
        _scales: crate::cuda::DeviceBuffer,
    },
}

#[derive(Debug)]
pub struct Collection {
    context_id: u64,
    isa: Isa,
    shape: Shape,
    /// As given, so that `info` gives back what `create` took.
    given_granularity: u32,
    blocks: *mut u8,
    scales: *mut u8,
    _storage: Storage,
}

// SAFETY: addresses; who may write which slot when is the caller's contract.
unsafe impl Send for Collection {}
// SAFETY: as above.
unsafe impl Sync for Collection {}

impl Deref for Collection {
    type Target = Shape;
    fn deref(&self) -> &Shape {
        &self.shape
    }
}

impl Collection {
    pub fn new(ctx: &Context, options: &pkv_collection_options) -> Result<Self> {
        let shape = Shape::check(options)?;
        let borrowed = [&options.blocks, &options.scales].map(|b| !b.data.is_null() || b.size != 0);
        let (blocks, scales, storage) = if borrowed[0] || borrowed[1] {
            let scale_size = shape.scale_dtype.map_or(1, DType::size);
            let blocks = borrow(&options.blocks, shape.blocks_bytes(), shape.dtype.size(), ctx, "options.blocks")?;
            let scales = borrow(&options.scales, shape.scales_bytes(), scale_size, ctx, "options.scales")?;
            (blocks, scales, Storage::Borrowed)
        } else {
            match ctx.backend() {
                Backend::Cpu => {
                    let blocks = HostBuffer::zeroed(shape.blocks_bytes(), "options.blocks")?;
                    let scales = HostBuffer::zeroed(shape.scales_bytes(), "options.scales")?;
                    (blocks.as_ptr(), scales.as_ptr(), Storage::Host { _blocks: blocks, _scales: scales })
                }
                #[cfg(feature = "cuda")]
                Backend::Cuda(device) => {
                    let blocks = device.zeroed(shape.blocks_bytes(), "options.blocks")?;
                    let scales = device.zeroed(shape.scales_bytes(), "options.scales")?;
                    (blocks.as_ptr(), scales.as_ptr(), Storage::Device { _blocks: blocks, _scales: scales })
                }
            }
        };
        Ok(Collection {
            context_id: ctx.id(),
            isa: ctx.isa,
            shape,
            given_granularity: options.quantization_granularity,
            blocks,
            scales,
            _storage: storage,
        })
    }

    /// The collection of a call: there, and of the call's context.
    ///
    /// # Safety
    /// `ptr` is NULL or a live handle.
    pub unsafe fn of<'a>(ptr: *const pkv_collection, ctx: &Context) -> Result<&'a Collection> {
        // SAFETY: by contract.
        let collection = unsafe { &crate::abi::handle(ptr, "params.collection")?.0 };
        ctx.check_owns(collection.context_id, "params.collection")?;
        Ok(collection)
    }

    pub fn options(&self) -> pkv_collection_options {
        let s = &self.shape;
        pkv_collection_options {
            struct_size: size_of::<pkv_collection_options>(),
            dtype: s.dtype as i32,
            scale_dtype: s.scale_dtype.map_or(0, |d| d as i32),
            num_blocks: s.num_blocks as u32,
            num_layers: s.num_layers as u32,
            page_size: s.page_size as u32,
            num_heads: s.num_heads as u32,
            head_size: s.head_size as u32,
            is_mla: u32::from(s.is_mla),
            quantization_granularity: self.given_granularity,
            reserved: 0,
            blocks: pkv_buffer { data: self.blocks.cast(), size: s.blocks_bytes() },
            scales: pkv_buffer { data: self.scales.cast(), size: s.scales_bytes() },
        }
    }

    /// Keys (0) or values (1) of a layer. `names` are what the caller calls the two numbers.
    pub fn cache(&self, kv_idx: u32, layer_idx: u32, names: [&str; 2]) -> Result<Cache> {
        let s = &self.shape;
        if kv_idx as usize >= s.kv_dim() {
            let message = match kv_idx {
                1 => "an MLA collection has keys only".into(),
                _ => format!("is {kv_idx}, must be 0 (keys) or 1 (values)"),
            };
            return Err(Error::value(names[0], message));
        }
        if layer_idx as usize >= s.num_layers {
            return Err(Error::value(names[1], format!("is {layer_idx}, the collection has {} layers", s.num_layers)));
        }
        let plane = kv_idx as usize * s.num_layers + layer_idx as usize;
        let planes = s.kv_dim() * s.num_layers;
        let page = s.page_size * s.row_elements();
        let scale_page = s.page_size * s.num_heads * s.groups;
        let scales = match s.scale_dtype {
            // SAFETY: the plane lies within the first block's scales.
            Some(d) => unsafe { self.scales.add(plane * scale_page * d.size()) },
            None => null_mut(),
        };
        Ok(Cache {
            shape: *s,
            isa: self.isa,
            // SAFETY: the plane lies within the first block.
            blocks: unsafe { self.blocks.add(plane * page * s.dtype.size()) },
            scales,
            block_stride: planes * page,
            scale_block_stride: planes * scale_page,
        })
    }
}

/// NULL where nothing is needed; else large enough and aligned.
fn borrow(buffer: &pkv_buffer, needed: usize, align: usize, ctx: &Context, name: &str) -> Result<*mut u8> {
    if needed == 0 {
        return Ok(null_mut());
    }
    if buffer.data.is_null() {
        return Err(Error::null(format!("{name}.data")));
    }
    if buffer.size < needed {
        return Err(Error::shape(
            format!("{name}.size"),
            format!("is {} bytes, the collection needs {needed}", buffer.size),
        ));
    }
    check_pointer(buffer.data.cast(), needed, align, ctx.call_mode(), &format!("{name}.data"))?;
    Ok(buffer.data.cast())
}

/// One layer's keys or values: `[num_blocks, page_size, num_heads, head_size]` over the collection's storage.
#[derive(Clone, Copy, Debug)]
pub struct Cache {
    pub shape: Shape,
    /// What the CPU kernels convert its rows with.
    pub isa: Isa,
    blocks: *mut u8,
    scales: *mut u8,
    /// Elements from one block to the next.
    pub block_stride: usize,
    pub scale_block_stride: usize,
}

// SAFETY: addresses; the accessors carry the aliasing contract.
unsafe impl Send for Cache {}
// SAFETY: as above.
unsafe impl Sync for Cache {}

impl Deref for Cache {
    type Target = Shape;
    fn deref(&self) -> &Shape {
        &self.shape
    }
}

impl Cache {
    /// Addresses for device kernels.
    pub fn blocks_ptr(&self) -> *mut u8 {
        self.blocks
    }

    /// NULL without scales.
    pub fn scales_ptr(&self) -> *mut u8 {
        self.scales
    }

    /// Elements from `blocks_ptr` to the row of a slot.
    #[inline(always)]
    pub fn row_offset(&self, block: usize, slot: usize) -> usize {
        debug_assert!(block < self.num_blocks && slot < self.page_size);
        block * self.block_stride + slot * self.row_elements()
    }

    #[inline(always)]
    pub fn scale_offset(&self, block: usize, slot: usize) -> usize {
        debug_assert!(block < self.num_blocks && slot < self.page_size);
        block * self.scale_block_stride + slot * self.num_heads * self.groups
    }

    /// A token's row of all heads, `[num_heads * head_size]`.
    ///
    /// # Safety
    /// Host storage; nobody writes the row while the slice lives.
    #[inline(always)]
    pub unsafe fn row<'a, T: Plain>(&self, block: usize, slot: usize) -> &'a [T] {
        debug_assert_eq!(T::DTYPE, self.dtype);
        // SAFETY: in the storage by row_offset; the rest by contract.
        unsafe {
            std::slice::from_raw_parts(self.blocks.cast::<T>().add(self.row_offset(block, slot)), self.row_elements())
        }
    }

    /// # Safety
    /// Host storage; nobody else reads or writes the row while the slice lives.
    #[inline(always)]
    pub unsafe fn row_mut<'a, T: Plain>(&self, block: usize, slot: usize) -> &'a mut [T] {
        debug_assert_eq!(T::DTYPE, self.dtype);
        // SAFETY: in the storage by row_offset; the rest by contract.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.blocks.cast::<T>().add(self.row_offset(block, slot)),
                self.row_elements(),
            )
        }
    }

    /// Scale of a group of a head's row, as f32.
    ///
    /// # Safety
    /// Host storage with scales; nobody writes the row's scales meanwhile.
    #[inline(always)]
    pub unsafe fn scale(&self, block: usize, slot: usize, head: usize, group: usize) -> f32 {
        let i = self.scale_offset(block, slot) + head * self.groups + group;
        // SAFETY: in the storage by scale_offset; the dtype is the storage's.
        unsafe {
            match self.scale_dtype {
                Some(DType::BF16) => self.scales.cast::<half::bf16>().add(i).read().to_f32(),
                Some(DType::F8E8M0) => crate::dtype::E8m0(self.scales.add(i).read()).to_f32(),
                _ => self.scales.cast::<f32>().add(i).read(),
            }
        }
    }

    /// Store a group's scale, `s` a finite positive f32, rounded as the scale dtype wants. Gives back what was stored.
    ///
    /// # Safety
    /// Host storage with scales; nobody else uses the row's scales meanwhile.
    #[inline(always)]
    pub unsafe fn set_scale(&self, block: usize, slot: usize, head: usize, group: usize, s: f32) -> f32 {
        let i = self.scale_offset(block, slot) + head * self.groups + group;
        // SAFETY: in the storage by scale_offset; the dtype is the storage's.
        unsafe {
            match self.scale_dtype {
                Some(DType::BF16) => {
                    let stored = half::bf16::from_f32(s);
                    self.scales.cast::<half::bf16>().add(i).write(stored);
                    stored.to_f32()
                }
                Some(DType::F8E8M0) => {
                    let stored = crate::dtype::E8m0::from_f32(s);
                    self.scales.add(i).write(stored.0);
                    stored.to_f32()
                }
                _ => {
                    self.scales.cast::<f32>().add(i).write(s);
                    s
                }
            }
        }
    }

    pub fn to_abi(&self) -> pkv_cache_view {
        let tensor = |data: *mut u8, dtype: DType, columns: usize, block_stride: usize| pkv_tensor {
            data: data.cast(),
            dtype: dtype as i32,
            ndim: 4,
            shape: [self.num_blocks, self.page_size, self.num_heads, columns].map(|n| n as i64),
            stride: [block_stride, self.num_heads * columns, columns, 1].map(|n| n as i64),
        };
        let absent = pkv_tensor { data: null_mut(), dtype: 0, ndim: 0, shape: [0; 4], stride: [0; 4] };
        pkv_cache_view {
            blocks: tensor(self.blocks, self.dtype, self.head_size, self.block_stride),
            scales: self.scale_dtype.map_or(absent, |d| tensor(self.scales, d, self.groups, self.scale_block_stride)),
        }
    }
}

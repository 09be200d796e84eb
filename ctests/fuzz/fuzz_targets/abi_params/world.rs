//! What a kernel call is about: a context, a collection over memory of ours, a batch.

use super::call::{Image, element, place_array, spoil_array};
use super::gguf_random::Random;
use super::memory::Memory;
use super::source::Source;
use pagedkv::abi::batch::pkv_batch;
use pagedkv::abi::collection::{
    pkv_collection, pkv_collection_create, pkv_collection_destroy, pkv_collection_options, pkv_collection_storage_size,
};
use pagedkv::abi::context::{pkv_context, pkv_context_create, pkv_context_options, pkv_task_fn};
use pagedkv::abi::status::PKV_OK;
use pagedkv::abi::types::*;
use pagedkv::abi::weight::{pkv_gguf_weight, pkv_gguf_weight_destroy};
use std::ffi::c_void;
use std::mem::offset_of;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

pub fn dtype_size(dtype: i32) -> Option<usize> {
    match dtype {
        PKV_F32 | PKV_U32 | PKV_I32 => Some(4),
        PKV_F16 | PKV_BF16 => Some(2),
        PKV_F8_E4M3 | PKV_F8_E5M2 | PKV_F8_E8M0 | PKV_U8 | PKV_I8 => Some(1),
        PKV_I64 => Some(8),
        _ => None,
    }
}

/// Numbers around 1; wild: any bits.
pub fn fill(random: &mut Random, dtype: i32, bytes: &mut [u8], wild: bool) {
    if wild {
        return random.fill(bytes);
    }
    match dtype {
        PKV_F32 => bytes.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&random.uniform(-2.0, 2.0).to_ne_bytes())),
        PKV_F16 => bytes
            .chunks_exact_mut(2)
            .for_each(|b| b.copy_from_slice(&half::f16::from_f32(random.uniform(-2.0, 2.0)).to_ne_bytes())),
        PKV_BF16 => bytes
            .chunks_exact_mut(2)
            .for_each(|b| b.copy_from_slice(&half::bf16::from_f32(random.uniform(-2.0, 2.0)).to_ne_bytes())),
        // fp8 around 1: all mantissas, the middle exponents.
        PKV_F8_E4M3 | PKV_F8_E5M2 => bytes.iter_mut().for_each(|b| *b = (random.next() as u8 & 0x9f) | 0x20),
        PKV_F8_E8M0 => bytes.iter_mut().for_each(|b| *b = 120 + (random.next() % 10) as u8),
        _ => random.fill(bytes),
    }
}

/// The engine's threads: one, in the wrong order.
pub unsafe extern "C" fn serially(_: *mut c_void, count: u32, run: pkv_task_fn, task: *mut c_void) {
    for i in (0..count).rev() {
        // SAFETY: as the header wants it: each index once, before returning.
        unsafe { run.expect("a task")(task, i) };
    }
}

pub const DEFAULTS: pkv_context_options = pkv_context_options {
    struct_size: size_of::<pkv_context_options>(),
    abi_version: 1,
    backend: 0,
    device: 0,
    log_level: 0,
    log: None,
    log_user: null_mut(),
    parallel_for: None,
    parallel_user: null_mut(),
    num_threads: 1,
    reserved: 0,
};

/// Contexts that live as long as the process: one thread, two, and the engine's.
pub fn context(i: usize) -> *mut pkv_context {
    static MADE: OnceLock<[usize; 3]> = OnceLock::new();
    MADE.get_or_init(|| {
        [
            pkv_context_options { ..DEFAULTS },
            pkv_context_options { num_threads: 2, ..DEFAULTS },
            pkv_context_options { num_threads: 3, parallel_for: Some(serially), ..DEFAULTS },
        ]
        .map(|options| {
            let mut ctx = null_mut();
            // SAFETY: good options, a place for the handle.
            assert_eq!(unsafe { pkv_context_create(&options, &mut ctx, null_mut()) }, PKV_OK);
            ctx as usize
        })
    })[i] as *mut pkv_context
}

/// The collection a kernel wants.
pub struct Wanted {
    pub dtypes: &'static [i32],
    /// Scale dtypes of an fp8 cache.
    pub scales: &'static [i32],
    pub is_mla: u32,
    pub num_heads: usize,
    pub head_size: usize,
    /// One scale a row.
    pub whole_rows: bool,
}

pub struct World {
    pub memory: Memory,
    pub ctx: *mut pkv_context,
    pub collection: *mut pkv_collection,
    pub options: pkv_collection_options,
    pub weights: Vec<*mut pkv_gguf_weight>,
    pub batch: Image,
    pub row_offsets: Vec<u32>,
    pub cache_lengths: Vec<u32>,
    table: Vec<u32>,
    /// The collection is of another context.
    pub foreign: bool,
}

impl World {
    pub fn new(source: &mut Source<'_>, wanted: Wanted) -> World {
        let page_size = source.pick(&[4, 1, 2, 3, 7, 16]);
        let batch_size = source.within(0, 3);
        let (mut row_offsets, mut cache_lengths, mut pages) = (vec![0], Vec::new(), Vec::new());
        for _ in 0..batch_size {
            let (cached, new) = (source.below(13) as u32, source.below(6) as u32);
            row_offsets.push(row_offsets[row_offsets.len() - 1] + new);
            cache_lengths.push(cached);
            pages.push((cached + new).div_ceil(page_size) as usize);
        }
        let max_pages = pages.iter().copied().max().unwrap_or(0) + source.below(2);
        let table_stride = max_pages + source.below(2);
        let mut blocks: Vec<u32> = (0..(pages.iter().sum::<usize>() + source.below(3)).max(1) as u32).collect();
        let num_blocks = blocks.len() as u32;
        for i in (1..blocks.len()).rev() {
            blocks.swap(i, source.random.next() as usize % (i + 1));
        }
        // Entries that no sequence owns are garbage.
        let mut table = vec![u32::MAX; batch_size * table_stride];
        for (b, &n) in pages.iter().enumerate() {
            let own = blocks.split_off(blocks.len() - n);
            table[b * table_stride..][..n].copy_from_slice(&own);
        }
        let most_new = row_offsets.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
        let batch = pkv_batch {
            struct_size: size_of::<pkv_batch>(),
            input_row_offsets: null(),
            cache_lengths: null(),
            lookup_table: null(),
            lookup_table_stride: if table_stride == max_pages && source.below(2) == 0 {
                0
            } else {
                table_stride as i64
            },
            batch_size: batch_size as u32,
            max_pages: max_pages as u32,
            max_seq_length: most_new + source.below(2) as u32,
            max_cache_length: cache_lengths.iter().copied().max().unwrap_or(0) + source.below(2) as u32,
        };

        let dtype = source.pick(wanted.dtypes);
        let scale_dtype = if matches!(dtype, PKV_F8_E4M3 | PKV_F8_E5M2) { source.pick(wanted.scales) } else { 0 };
        let granularity = match scale_dtype {
            0 => 0,
            _ if wanted.whole_rows => source.pick(&[0, wanted.head_size as u32, 1 << 20]),
            _ => source.pick(&[0, 128, 5, 64, wanted.head_size as u32, 1]),
        };
        let mut options = pkv_collection_options {
            struct_size: size_of::<pkv_collection_options>(),
            dtype,
            scale_dtype,
            num_blocks,
            num_layers: source.within(1, 2) as u32,
            page_size,
            num_heads: wanted.num_heads as u32,
            head_size: wanted.head_size as u32,
            is_mla: wanted.is_mla,
            quantization_granularity: granularity,
            reserved: 0,
            blocks: pkv_buffer { data: null_mut(), size: 0 },
            scales: pkv_buffer { data: null_mut(), size: 0 },
        };
        let mut memory = Memory::default();
        let mine = source.below(3);
        let foreign = source.once_in(64);
        let mut collection = null_mut();
        // SAFETY: good options over memory of the size that the library asks for.
        unsafe {
            let (blocks, scales) = (&raw mut options.blocks.size, &raw mut options.scales.size);
            let (mut blocks_bytes, mut scales_bytes) = (0, 0);
            assert_eq!(pkv_collection_storage_size(&options, &mut blocks_bytes, &mut scales_bytes, null_mut()), PKV_OK);
            blocks.write(blocks_bytes);
            scales.write(scales_bytes);
            let random = &mut source.random;
            options.blocks.data =
                memory.alloc("cache blocks", blocks_bytes, 0, |bytes| fill(random, dtype, bytes, false)).cast();
            if scales_bytes > 0 {
                options.scales.data = memory
                    .alloc("cache scales", scales_bytes, 0, |bytes| fill(random, scale_dtype, bytes, false))
                    .cast();
            }
            let status = pkv_collection_create(
                context((mine + usize::from(foreign)) % 3),
                &options,
                &mut collection,
                null_mut(),
            );
            assert_eq!(status, PKV_OK, "collection refused: {options:?}");
        }
        let (ctx, batch) = (context(mine), Image::of(&batch));
        World {
            memory,
            ctx,
            collection,
            options,
            weights: Vec::new(),
            batch,
            row_offsets,
            cache_lengths,
            table,
            foreign,
        }
    }

    pub fn tokens(&self) -> usize {
        self.row_offsets[self.row_offsets.len() - 1] as usize
    }

    /// Changes the batch by a little: lengths that leave the table, blocks that are not there or have two owners, offsets that fall.
    pub fn spoil_batch(&mut self, source: &mut Source<'_>) {
        match source.below(8) {
            0 => spoil_array(&mut self.row_offsets, source),
            1 => spoil_array(&mut self.cache_lengths, source),
            2 => spoil_array(&mut self.table, source),
            3 if !self.cache_lengths.is_empty() => {
                let i = source.below(self.cache_lengths.len());
                self.cache_lengths[i] = self.cache_lengths[i].wrapping_add(source.pick(&[1, 5, 40, u32::MAX]));
            }
            4 => {
                let i = source.below(self.row_offsets.len());
                self.row_offsets[i] = self.row_offsets[i].wrapping_add(source.pick(&[1, 2, 30, u32::MAX]));
            }
            5 | 6 if self.table.iter().any(|&block| block != u32::MAX) => {
                let used: Vec<usize> = (0..self.table.len()).filter(|&i| self.table[i] != u32::MAX).collect();
                let i = source.pick(&used);
                self.table[i] =
                    if source.below(2) == 0 { self.options.num_blocks } else { self.table[source.pick(&used)] };
            }
            _ => {
                // The scalars, which follow the three pointers.
                let offset = offset_of!(pkv_batch, lookup_table_stride) + 4 * source.below(6);
                let value = source.awkward(u64::from(self.batch.get::<u32>(offset)));
                self.batch.set(offset, value as u32);
            }
        }
    }

    /// The batch with arrays as long as it says.
    pub fn placed_batch(&mut self) -> Image {
        let mut image = self.batch.clone();
        let batch_size = image.get::<u32>(offset_of!(pkv_batch, batch_size)) as usize;
        let max_pages = image.get::<u32>(offset_of!(pkv_batch, max_pages)) as usize;
        let stride = match image.get::<i64>(offset_of!(pkv_batch, lookup_table_stride)) {
            0 => max_pages,
            n => usize::try_from(n).unwrap_or(0),
        };
        let reach = batch_size.saturating_sub(1).saturating_mul(stride).saturating_add(max_pages).min(1 << 40);
        let memory = &mut self.memory;
        image.set(
            offset_of!(pkv_batch, input_row_offsets),
            place_array(memory, "input_row_offsets", &self.row_offsets, batch_size + 1),
        );
        image.set(
            offset_of!(pkv_batch, cache_lengths),
            place_array(memory, "cache_lengths", &self.cache_lengths, batch_size),
        );
        image.set(offset_of!(pkv_batch, lookup_table), place_array(memory, "lookup_table", &self.table, reach));
        image
    }

    /// The slots of the batch's new tokens in one cache of one layer may be written.
    pub fn allow_new_rows(&mut self, kv: usize, layer: usize) {
        let o = &self.options;
        let batch_size = self.batch.get::<u32>(offset_of!(pkv_batch, batch_size)) as usize;
        let stride = match self.batch.get::<i64>(offset_of!(pkv_batch, lookup_table_stride)) {
            0 => self.batch.get::<u32>(offset_of!(pkv_batch, max_pages)) as usize,
            n => n as usize,
        };
        let (page_size, heads, layers) = (o.page_size as usize, o.num_heads as usize, o.num_layers as usize);
        let planes = if o.is_mla == 1 { 1 } else { 2 };
        let groups = match o.quantization_granularity {
            0 => 1,
            g => o.head_size.div_ceil(g.min(o.head_size)) as usize,
        };
        let row = heads * o.head_size as usize * dtype_size(o.dtype).expect("a collection has it");
        let scale_row = heads * groups * dtype_size(o.scale_dtype).unwrap_or(0);
        let (blocks, scales) = (o.blocks.data, o.scales.data);
        for b in 0..batch_size {
            let cached = element(&self.cache_lengths, b) as usize;
            let new = (element(&self.row_offsets, b + 1) - element(&self.row_offsets, b)) as usize;
            for p in cached..cached + new {
                let block = element(&self.table, b * stride + p / page_size) as usize;
                let slot = ((block * planes + kv) * layers + layer) * page_size + p % page_size;
                self.memory.allow(blocks.cast(), slot * row..(slot + 1) * row);
                if scale_row > 0 {
                    self.memory.allow(scales.cast(), slot * scale_row..(slot + 1) * scale_row);
                }
            }
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // SAFETY: handles made here, used by no call any more.
        unsafe {
            pkv_collection_destroy(self.collection);
            self.weights.iter().for_each(|&w| pkv_gguf_weight_destroy(w));
        }
    }
}

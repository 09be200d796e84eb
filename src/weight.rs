//! A GGUF weight matrix: borrowed as it lies, or a packed copy.

use crate::abi::weight::{PKV_WEIGHT_PACK, pkv_gguf_weight_options};
use crate::context::{Backend, Context};
use crate::cpu::isa::Level;
use crate::cpu::qgemm::{self, pack::RawRows};
use crate::error::{Error, Result};
use crate::gguf::{self, Format};
use crate::workspace::HostBuffer;

#[derive(Debug)]
pub struct Weight {
    context_id: u64,
    pub format: &'static Format,
    pub rows: usize,
    pub cols: usize,
    pub storage: Storage,
}

#[derive(Debug)]
pub enum Storage {
    /// The caller's blocks, row by row.
    Borrowed(Rows),
    /// A copy interleaved for the kernels (see `cpu::qgemm`).
    Packed(Packed),
    /// A tight copy of the rows, for the plain reference.
    Copied(Vec<u8>),
}

/// Packed groups of sixteen rows, one after the other.
#[derive(Debug)]
pub struct Packed(HostBuffer);

impl Packed {
    fn new(ctx: &Context, format: &Format, raw: RawRows<'_>, cols: usize) -> Result<Self> {
        let bytes = qgemm::packed_bytes(format.id, raw.rows, cols);
        let buffer = HostBuffer::huge(bytes, "options.data")?;
        let groups = raw.rows.div_ceil(qgemm::ROWS);
        ctx.threads.run(groups, |g| {
            let len = bytes / groups;
            // SAFETY: the buffer holds `groups` groups of this length, and each is one task's alone.
            let out = unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr().add(g * len), len) };
            #[cfg(target_arch = "x86_64")]
            if let Some(avx2) = ctx.isa.avx2() {
                return qgemm::pack_group(avx2, format.id, raw, cols, g, out);
            }
            qgemm::pack_group(qgemm::portable::Portable, format.id, raw, cols, g, out);
        })?;
        Ok(Packed(buffer))
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: every byte was written by `new`; nobody writes since.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.0.len()) }
    }
}

/// Raw rows in the caller's memory.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    data: *const u8,
    row_bytes: usize,
    stride: usize,
}

// SAFETY: the caller keeps borrowed data alive and unchanged while the weight lives.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}

impl Rows {
    /// All `rows` rows with what lies between them.
    pub fn span(&self, rows: usize) -> &[u8] {
        // SAFETY: `Weight::new` saw all rows lie within data_size.
        unsafe { std::slice::from_raw_parts(self.data, (rows - 1) * self.stride + self.row_bytes) }
    }

    pub fn stride(&self) -> usize {
        self.stride
    }

    pub fn row(&self, r: usize) -> &[u8] {
        // SAFETY: `Weight::new` saw all rows lie within data_size; callers index below `rows`.
        unsafe { std::slice::from_raw_parts(self.data.add(r * self.stride), self.row_bytes) }
    }
}

impl Weight {
    pub fn new(ctx: &Context, o: &pkv_gguf_weight_options) -> Result<Self> {
        match ctx.backend() {
            Backend::Cpu => {}
            #[cfg(feature = "cuda")]
            Backend::Cuda(_) => return Err(Error::unsupported("ctx", "GGUF matmuls have no CUDA kernels yet")),
        }
        let format = gguf::format(o.encoding).ok_or_else(|| {
            Error::unsupported("options.encoding", format!("{} is not a GGUF encoding this library has", o.encoding))
        })?;
        if o.flags & !PKV_WEIGHT_PACK != 0 {
            return Err(Error::value("options.flags", format!("is {:#x}, only PKV_WEIGHT_PACK exists", o.flags)));
        }
        let positive = |n: i64, name: &str| {
            usize::try_from(n)
                .ok()
                .filter(|&n| n > 0)
                .ok_or_else(|| Error::shape(name, format!("is {n}, must be at least 1")))
        };
        let rows = positive(o.rows, "options.rows")?;
        let cols = positive(o.cols, "options.cols")?;
        if cols % format.block_elements != 0 {
            let message =
                format!("is {cols}, must be a multiple of {}'s block of {}", format.name, format.block_elements);
            return Err(Error::shape("options.cols", message));
        }
        let overflow = |name: &str| Error::shape(name, "the matrix is larger than memory can hold");
        let row_bytes =
            (cols / format.block_elements).checked_mul(format.block_bytes).ok_or_else(|| overflow("options.cols"))?;
        let stride = match o.row_bytes {
            0 => row_bytes,
            n => usize::try_from(n).ok().filter(|&n| n >= row_bytes).ok_or_else(|| {
                Error::shape(
                    "options.row_bytes",
                    format!("is {n}, a row of {cols} {} columns is {row_bytes} bytes", format.name),
                )
            })?,
        };
        let needed = (rows - 1)
            .checked_mul(stride)
            .and_then(|n| n.checked_add(row_bytes))
            .filter(|&n| {
                n <= isize::MAX as usize && rows.checked_mul(cols).is_some_and(|e| e <= isize::MAX as usize / 4)
            })
            .ok_or_else(|| overflow("options.rows"))?;
        if o.data_size < needed {
            return Err(Error::shape(
                "options.data_size",
                format!("is {}, {rows} rows span {needed} bytes", o.data_size),
            ));
        }
        if o.data.is_null() {
            return Err(Error::null("options.data"));
        }
        let borrowed = Rows { data: o.data.cast(), row_bytes, stride };
        let storage = if o.flags & PKV_WEIGHT_PACK != 0 && ctx.isa.level() > Level::Reference {
            let raw = RawRows { data: borrowed.span(rows), rows, row_bytes: stride };
            Storage::Packed(Packed::new(ctx, format, raw, cols)?)
        } else if o.flags & PKV_WEIGHT_PACK != 0 {
            let mut copy = Vec::new();
            copy.try_reserve_exact(rows * row_bytes).map_err(|_| Error::no_memory("options.data", rows * row_bytes))?;
            (0..rows).for_each(|r| copy.extend_from_slice(borrowed.row(r)));
            Storage::Copied(copy)
        } else {
            Storage::Borrowed(borrowed)
        };
        Ok(Weight { context_id: ctx.id(), format, rows, cols, storage })
    }

    pub fn context_id(&self) -> u64 {
        self.context_id
    }

    /// Raw blocks of row `r`, for the reference.
    pub fn row(&self, r: usize) -> &[u8] {
        match &self.storage {
            Storage::Packed(_) => unreachable!("the reference runs only on contexts that do not pack"),
            Storage::Borrowed(rows) => rows.row(r),
            Storage::Copied(data) => {
                let n = data.len() / self.rows;
                &data[r * n..][..n]
            }
        }
    }
}

//! The ragged batch: which rows are whose, at which position, in which block and slot.

use crate::abi::batch::pkv_batch;
use crate::collection::Collection;
use crate::error::{Error, Result};
use crate::view::{Mode, check_pointer};
use std::ops::Range;

/// A checked batch. On the host (`Mode::Host`) every array has been read and agrees with the collection; otherwise only scalars and addresses are known.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    pub batch_size: usize,
    pub max_pages: usize,
    pub max_seq_length: usize,
    pub max_cache_length: usize,
    pub page_size: usize,
    pub table_stride: usize,
    /// Addresses as given, for device kernels.
    pub raw: RawBatch,
    /// `[batch_size + 1]`; empty unless on the host.
    row_offsets: &'a [u32],
    /// `[batch_size]`; empty unless on the host.
    cache_lengths: &'a [u32],
}

#[derive(Clone, Copy, Debug)]
pub struct RawBatch {
    pub input_row_offsets: *const u32,
    pub cache_lengths: *const u32,
    pub lookup_table: *const u32,
}

// SAFETY: addresses of arrays that are only read during the call.
unsafe impl Send for RawBatch {}
// SAFETY: as above.
unsafe impl Sync for RawBatch {}

/// How a call uses the cache, for the checks that depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheUse {
    Read,
    /// The new tokens' slots are written: no two may be the same.
    WriteNew,
}

/// # Safety
/// `data` is NULL or points to `len` readable `u32` on the host while `'a` lasts.
unsafe fn array<'a>(data: *const u32, len: usize, name: &str) -> Result<&'a [u32]> {
    if len == 0 {
        return Ok(&[]);
    }
    check_pointer(data.cast(), len * 4, 4, Mode::Host, name)?;
    // SAFETY: not NULL, aligned; readable by contract.
    Ok(unsafe { std::slice::from_raw_parts(data, len) })
}

impl<'a> Batch<'a> {
    /// # Safety
    /// `batch` is NULL or a struct whose arrays are as the header says, for as long as the call lasts.
    pub unsafe fn check(
        batch: *const pkv_batch,
        collection: &Collection,
        cache_use: CacheUse,
        mode: Mode,
    ) -> Result<Self> {
        // SAFETY: by contract.
        let b = unsafe { crate::abi::read(batch, "params.batch")? };
        let stride = match b.lookup_table_stride {
            0 => b.max_pages as usize,
            s => usize::try_from(s).ok().filter(|&s| s >= b.max_pages as usize).ok_or_else(|| {
                let message = format!("is {s}, must be 0 or at least max_pages = {}", b.max_pages);
                Error::shape("params.batch.lookup_table_stride", message)
            })?,
        };
        let entries = (b.batch_size as usize)
            .checked_mul(stride)
            .filter(|n| n.checked_mul(4).is_some_and(|b| b <= isize::MAX as usize));
        if entries.is_none() {
            return Err(Error::shape(
                "params.batch.lookup_table_stride",
                format!("batch_size {} x {stride} overflows", b.batch_size),
            ));
        }
        let raw = RawBatch {
            input_row_offsets: b.input_row_offsets,
            cache_lengths: b.cache_lengths,
            lookup_table: b.lookup_table,
        };
        let mut out = Batch {
            batch_size: b.batch_size as usize,
            max_pages: b.max_pages as usize,
            max_seq_length: b.max_seq_length as usize,
            max_cache_length: b.max_cache_length as usize,
            page_size: collection.page_size,
            table_stride: stride,
            raw,
            row_offsets: &[],
            cache_lengths: &[],
        };
        if mode == Mode::Query || out.batch_size == 0 {
            return Ok(out);
        }
        if mode == Mode::Device {
            check_pointer(
                raw.input_row_offsets.cast(),
                (out.batch_size + 1) * 4,
                4,
                mode,
                "params.batch.input_row_offsets",
            )?;
            check_pointer(raw.cache_lengths.cast(), out.batch_size * 4, 4, mode, "params.batch.cache_lengths")?;
            if out.max_pages > 0 {
                check_pointer(
                    raw.lookup_table.cast(),
                    stride * out.batch_size * 4,
                    4,
                    mode,
                    "params.batch.lookup_table",
                )?;
            }
            return Ok(out);
        }
        // SAFETY: by contract.
        unsafe {
            out.row_offsets = array(raw.input_row_offsets, out.batch_size + 1, "params.batch.input_row_offsets")?;
            out.cache_lengths = array(raw.cache_lengths, out.batch_size, "params.batch.cache_lengths")?;
        }
        if out.max_pages > 0 {
            let reach = (out.batch_size - 1) * stride + out.max_pages;
            check_pointer(raw.lookup_table.cast(), reach * 4, 4, mode, "params.batch.lookup_table")?;
        }
        out.check_contents(collection, cache_use)?;
        Ok(out)
    }

    fn check_contents(&self, collection: &Collection, cache_use: CacheUse) -> Result<()> {
        if self.row_offsets[0] != 0 {
            let message = format!("is {}, must be 0", self.row_offsets[0]);
            return Err(Error::value("params.batch.input_row_offsets[0]", message));
        }
        for b in 0..self.batch_size {
            let (from, to) = (self.row_offsets[b], self.row_offsets[b + 1]);
            if to < from {
                let message = format!("is {to}, falls below {from} before it");
                return Err(Error::value(format!("params.batch.input_row_offsets[{}]", b + 1), message));
            }
            if (to - from) as usize > self.max_seq_length {
                let message = format!("is {}, sequence {b} brings {} new tokens", self.max_seq_length, to - from);
                return Err(Error::value("params.batch.max_seq_length", message));
            }
            if self.cache_lengths[b] as usize > self.max_cache_length {
                let message = format!("is {}, cache_lengths[{b}] is {}", self.max_cache_length, self.cache_lengths[b]);
                return Err(Error::value("params.batch.max_cache_length", message));
            }
            let pages = self.pages(b);
            if pages > self.max_pages {
                let message = format!(
                    "is {}, sequence {b} with {} positions needs {pages} columns",
                    self.max_pages,
                    self.length(b)
                );
                return Err(Error::page_table("params.batch.max_pages", message));
            }
            if let Some(column) = self.table_row(b).iter().position(|&id| id as usize >= collection.num_blocks) {
                let message =
                    format!("is {}, the collection has {} blocks", self.table_row(b)[column], collection.num_blocks);
                return Err(Error::page_table(format!("params.batch.lookup_table[{b}][{column}]"), message));
            }
        }
        if cache_use == CacheUse::WriteNew { self.check_distinct_slots() } else { Ok(()) }
    }

    /// No slot may be written twice in one call: it would depend on timing which row stays.
    fn check_distinct_slots(&self) -> Result<()> {
        // (block, first slot, end slot, sequence): the slots of one page that one sequence writes.
        let mut writes = Vec::new();
        for b in 0..self.batch_size {
            let mut p = self.cache_length(b);
            let end = self.length(b);
            while p < end {
                let (block, slot) = self.locate(b, p);
                let n = (self.page_size - slot).min(end - p);
                writes.push((block, slot, slot + n, b));
                p += n;
            }
        }
        writes.sort_unstable();
        for pair in writes.windows(2) {
            let (block, _, end, first) = pair[0];
            let (next_block, start, _, second) = pair[1];
            if block == next_block && start < end {
                let message = format!("sequences {first} and {second} both write slot {start} of block {block}");
                return Err(Error::page_table(format!("params.batch.lookup_table[{second}]"), message));
            }
        }
        Ok(())
    }

    /// Number of new tokens, T. Host only.
    pub fn tokens(&self) -> usize {
        self.row_offsets.last().copied().unwrap_or(0) as usize
    }

    /// Rows of sequence `b` in a ragged tensor.
    pub fn rows(&self, b: usize) -> Range<usize> {
        self.row_offsets[b] as usize..self.row_offsets[b + 1] as usize
    }

    pub fn new_tokens(&self, b: usize) -> usize {
        self.rows(b).len()
    }

    /// Tokens cached before this call.
    pub fn cache_length(&self, b: usize) -> usize {
        self.cache_lengths[b] as usize
    }

    /// Positions of sequence `b` once its new tokens are cached.
    pub fn length(&self, b: usize) -> usize {
        self.cache_length(b) + self.new_tokens(b)
    }

    /// The first sequence of more than so many positions. Host only, otherwise none.
    pub fn first_longer_than(&self, positions: usize) -> Option<usize> {
        (0..self.cache_lengths.len()).find(|&b| self.length(b) > positions)
    }

    pub fn pages(&self, b: usize) -> usize {
        self.length(b).div_ceil(self.page_size)
    }

    /// The blocks of sequence `b`, one a page, as far as it has pages.
    pub fn table_row(&self, b: usize) -> &'a [u32] {
        let pages = self.pages(b);
        if pages == 0 {
            return &[];
        }
        // SAFETY: pages <= max_pages, which `check` saw to lie in the caller's table; only ever read.
        unsafe { std::slice::from_raw_parts(self.raw.lookup_table.add(b * self.table_stride), pages) }
    }

    /// Block and slot of position `p` of sequence `b`.
    #[inline]
    pub fn locate(&self, b: usize, p: usize) -> (usize, usize) {
        (self.table_row(b)[p / self.page_size] as usize, p % self.page_size)
    }

    /// Positions a table of rotations must cover: one past the last new token's. On a device only the caller's bounds are known; a query has no arrays.
    pub fn rope_positions(&self, mode: Mode) -> usize {
        match mode {
            Mode::Query => 0,
            Mode::Device if self.batch_size == 0 => 0,
            Mode::Device => self.max_seq_length.saturating_add(self.max_cache_length),
            Mode::Host => {
                (0..self.batch_size).filter(|&b| self.new_tokens(b) > 0).map(|b| self.length(b)).max().unwrap_or(0)
            }
        }
    }

    /// The sequence that row `t` belongs to.
    pub fn sequence_of(&self, t: usize) -> usize {
        self.row_offsets.partition_point(|&o| o as usize <= t) - 1
    }

    /// Position of row `t`, and its sequence.
    pub fn position(&self, t: usize) -> (usize, usize) {
        let b = self.sequence_of(t);
        (b, self.cache_length(b) + t - self.row_offsets[b] as usize)
    }
}

/// Which cached rows are copied for each sequence into a contiguous buffer (`buffer_row_offsets`, `cache_offsets`).
#[derive(Clone, Copy, Debug)]
pub struct BufferRows<'a> {
    pub raw_row_offsets: *const u32,
    pub raw_cache_offsets: *const u32,
    row_offsets: &'a [u32],
    cache_offsets: &'a [u32],
}

// SAFETY: addresses of arrays that are only read during the call.
unsafe impl Send for BufferRows<'_> {}
// SAFETY: as above.
unsafe impl Sync for BufferRows<'_> {}

impl<'a> BufferRows<'a> {
    /// # Safety
    /// The arrays are NULL or as the header says, for as long as the call lasts.
    pub unsafe fn check(
        row_offsets: *const u32,
        cache_offsets: *const u32,
        batch: &Batch<'_>,
        mode: Mode,
    ) -> Result<Self> {
        let mut out = BufferRows {
            raw_row_offsets: row_offsets,
            raw_cache_offsets: cache_offsets,
            row_offsets: &[],
            cache_offsets: &[],
        };
        if mode == Mode::Query || batch.batch_size == 0 {
            return Ok(out);
        }
        let n = batch.batch_size;
        if mode == Mode::Device {
            check_pointer(row_offsets.cast(), (n + 1) * 4, 4, mode, "params.buffer_row_offsets")?;
            if !cache_offsets.is_null() {
                check_pointer(cache_offsets.cast(), n * 4, 4, mode, "params.cache_offsets")?;
            }
            return Ok(out);
        }
        // SAFETY: by contract.
        unsafe {
            out.row_offsets = array(row_offsets, n + 1, "params.buffer_row_offsets")?;
            if !cache_offsets.is_null() {
                out.cache_offsets = array(cache_offsets, n, "params.cache_offsets")?;
            }
        }
        if out.row_offsets[0] != 0 {
            return Err(Error::value("params.buffer_row_offsets[0]", format!("is {}, must be 0", out.row_offsets[0])));
        }
        for b in 0..n {
            let (from, to) = (out.row_offsets[b], out.row_offsets[b + 1]);
            if to < from {
                let message = format!("is {to}, falls below {from} before it");
                return Err(Error::value(format!("params.buffer_row_offsets[{}]", b + 1), message));
            }
            let (start, end) = (out.first_position(b), out.first_position(b) + (to - from) as usize);
            if end > batch.length(b) {
                let at =
                    if out.cache_offsets.is_empty() { "params.buffer_row_offsets" } else { "params.cache_offsets" };
                let message =
                    format!("positions {start}..{end} are asked of sequence {b}, which has {}", batch.length(b));
                let index = if out.cache_offsets.is_empty() { b + 1 } else { b };
                return Err(Error::value(format!("{at}[{index}]"), message));
            }
        }
        Ok(out)
    }

    /// Rows of the buffer in use. Host only.
    pub fn total(&self) -> usize {
        self.row_offsets.last().copied().unwrap_or(0) as usize
    }

    /// Buffer rows of sequence `b`.
    pub fn rows(&self, b: usize) -> Range<usize> {
        self.row_offsets[b] as usize..self.row_offsets[b + 1] as usize
    }

    /// Cache position that the first of them holds.
    pub fn first_position(&self, b: usize) -> usize {
        self.cache_offsets.get(b).map_or(0, |&o| o as usize)
    }

    /// Sequence and cache position of buffer row `r`.
    pub fn locate(&self, r: usize) -> (usize, usize) {
        let b = self.row_offsets.partition_point(|&o| o as usize <= r) - 1;
        (b, self.first_position(b) + r - self.row_offsets[b] as usize)
    }
}

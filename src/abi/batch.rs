//! The ragged batch of a step.

/// What changes with every step: how many new tokens each sequence brings, how many it has cached, and where its pages lie.
///
/// Row t of a ragged tensor belongs to sequence b with input_row_offsets[b] <= t < input_row_offsets[b + 1]; its position is
/// cache_lengths[b] + t - input_row_offsets[b]. Position p lies in block lookup_table[b][p / page_size], slot p % page_size. A sequence may bring
/// no new tokens, and blocks may be shared by sequences that only read them. With batch_size 0 the pointers are not looked at.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_batch {
    /// sizeof(pkv_batch)
    pub struct_size: usize,
    /// [batch_size + 1], first 0, never falling; the last is the number of new tokens.
    pub input_row_offsets: *const u32,
    /// [batch_size], tokens already in the cache, the new ones not counted.
    pub cache_lengths: *const u32,
    /// [batch_size, lookup_table_stride]: page number -> block; entries past a sequence's pages are never read.
    pub lookup_table: *const u32,
    /// Elements from one row of lookup_table to the next; 0 = max_pages.
    pub lookup_table_stride: i64,
    pub batch_size: u32,
    /// Columns of lookup_table.
    pub max_pages: u32,
    /// At least the most new tokens of any sequence (a promise; checked on CPU).
    pub max_seq_length: u32,
    /// At least the largest cache_length. CUDA calls plan for max_seq_length + max_cache_length positions.
    pub max_cache_length: u32,
}

super::versioned!(pkv_batch: 56);

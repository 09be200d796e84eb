// Where a row of a ragged batch lies: its sequence, its position, its slot in the pages. The structs are also the
// launch structs' parts, mirrored in Rust (src/cuda/params.rs); sizes are asserted on both sides.
//
// The host cannot read device arrays, so nothing in them is trusted: a page beyond the table or a block id beyond the
// pool gives no slot.
#pragma once
#include "device/common.cuh"

struct BatchParams {
    const u32 *row_offsets;   // [batch_size + 1]
    const u32 *cache_lengths; // [batch_size]
    const u32 *lookup_table;  // [batch_size, table_stride]
    i64 table_stride;
    u32 batch_size, max_pages;
};
static_assert(sizeof(BatchParams) == 40, "mirrored in Rust");

// The key or the value cache of one layer; strides count elements.
struct CacheParams {
    void *blocks;     // [num_blocks, page_size, num_heads, head_size], the last dimension contiguous
    void *scales;     // [num_blocks, page_size, num_heads, groups], likewise; may be null
    i64 block_stride; // from block to block
    i64 slot_stride;  // from position to position in a block; heads follow each other at head_size
    i64 scale_block_stride;
    i64 scale_slot_stride; // heads follow each other at `groups`
    u32 num_blocks, page_size, num_heads, head_size;
    u32 granularity, groups; // columns that share a scale, at most head_size; scales a row and head
    i32 dtype, scale_dtype;  // DTYPE_*
};
static_assert(sizeof(CacheParams) == 80, "mirrored in Rust");

struct TokenPlace {
    u32 sequence;
    u64 position;
};

// The sequence `b` with offsets[b] <= row < offsets[b + 1]; sequences without rows are passed over. Needs row <
// offsets[count], count >= 1.
PKV_DEVICE u32 find_sequence(const u32 *offsets, u32 count, u32 row) {
    u32 lo = 0, hi = count - 1;
    while (lo < hi) {
        const u32 mid = lo + (hi - lo) / 2;
        if (offsets[mid + 1] <= row) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

// False for a row past the batch's tokens (padded buffers).
PKV_DEVICE bool find_token(const BatchParams &batch, u64 token, TokenPlace &place) {
    if (token >= batch.row_offsets[batch.batch_size]) return false;
    place.sequence = find_sequence(batch.row_offsets, batch.batch_size, u32(token));
    place.position = u64(batch.cache_lengths[place.sequence]) + (token - batch.row_offsets[place.sequence]);
    return true;
}

// Element offsets of the slot of a position in `blocks` and `scales` (head 0, column 0); false where the table does not
// lead to one.
struct Slot {
    i64 blocks, scales;
};
PKV_DEVICE bool find_slot(const BatchParams &batch, const CacheParams &cache, u32 sequence, u64 position, Slot &slot) {
    const u64 page = position / cache.page_size;
    if (page >= batch.max_pages) return false;
    const u32 block = batch.lookup_table[i64(sequence) * batch.table_stride + i64(page)];
    if (block >= cache.num_blocks) return false;
    const i64 in_page = i64(position - page * cache.page_size);
    slot.blocks = block * cache.block_stride + in_page * cache.slot_stride;
    slot.scales = block * cache.scale_block_stride + in_page * cache.scale_slot_stride;
    return true;
}

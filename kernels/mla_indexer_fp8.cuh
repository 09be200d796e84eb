// The indexer: two launches a window of query rows, on one stream. Naively, for row t at position p:
//     score[s] = k_scale[s] * sum_h q_s[t, h] * max(0, q[t, h] . k[s])      for the keys s that p sees
//     output_indices[t] = the top_k best, best first
// A window is as many rows as fit the scratch for scores, which therefore does not grow with the number of rows.
//
// Launch structs, mirrored in src/cuda/mla_indexer_fp8.rs; strides count elements.
#pragma once
#include "device/batch.cuh"
#include "device/float.cuh"

struct MlaIndexerScoreParams {
    BatchParams batch;
    CacheParams cache; // keys e4m3, one f32 scale a row
    const u8 *q;       // [tokens, num_heads, depth] e4m3; depth = cache.head_size
    const float *q_s;  // [tokens, num_heads]
    float *scores;     // [rows, score_stride]; only what a row sees is written
    i64 q_token_stride, q_head_stride, q_s_stride, score_stride;
    u64 first_row, rows; // of the window
    u64 max_keys;        // no row sees more
    u32 num_heads;
    u32 causal;
    u32 q_vector, k_vector; // 1: rows of q (of the cache) start on 16 bytes, depth a multiple of 16
};
static_assert(sizeof(MlaIndexerScoreParams) == 216, "mirrored in Rust");

struct MlaIndexerSelectParams {
    BatchParams batch;    // the table is not used
    const float *scores;  // [rows, score_stride]
    u64 *sorted;          // [rows, sort_size]; null where sort_size <= SORT_IN_SHARED
    i32 *output_indices;  // [tokens, top_k]
    float *output_scores; // [tokens, top_k]; may be null
    i64 score_stride, indices_stride, output_scores_stride;
    u64 first_row, rows, max_keys;
    u32 top_k;
    u32 sort_size; // power of two >= min(top_k, max_keys)
    u32 causal, reserved;
};
static_assert(sizeof(MlaIndexerSelectParams) == 136, "mirrored in Rust");

// Keys that a row of the batch sees.
PKV_DEVICE u64 keys_seen(const BatchParams &batch, const TokenPlace &place, u32 causal, u64 max_keys) {
    const u64 length = u64(batch.cache_lengths[place.sequence]) +
                       (batch.row_offsets[place.sequence + 1] - batch.row_offsets[place.sequence]);
    const u64 seen = causal ? place.position + 1 : length;
    return seen < max_keys ? seen : max_keys;
}

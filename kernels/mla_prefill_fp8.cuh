// MLA prefill with fp8 weights: a short sequence of launches on one stream. Naively, with n_b cached rows a sequence:
//     finish q's rope part and the new cache rows                          mla_rope_rmsnorm_quantize.cu
//     codes, scales = quantise(cache rows [:C])  per 128 columns           mla_prefill_fp8_latent.cu
//     KV[r, n] = sum_g (codes[r, g] . W[n, g]) * scales[r, g] * Ws[n/128, g]    mla_prefill_fp8_project.cu
//     o[t, h] = softmax(mask(scale * q[t, h] . [K[h], k_rope]^T)) V[h]          mla_prefill_fp8_attention.cu
// Heads go through the last two steps in groups, which bounds the scratch that K and V take.
//
// Launch structs, each mirrored in src/cuda/mla_prefill_fp8.rs; strides count elements. Scratch written by one launch
// and read by the next: codes, scales, k_rope, keys, values. T is the dtype of the activations.
//
// No array on the device is trusted: rows are cut to `rows` (of the buffer) and `tokens` (of q).
#pragma once
#include "device/batch.cuh"
#include "device/float.cuh"

constexpr u32 SCALE_BLOCK = 128; // columns of a latent row, and features by columns of kv_b_proj, that share a scale

// A run-time dtype's 16 bytes, and the columns that scratch rows are padded to (with zeros).
constexpr u32 COLUMN_PAD = 8;

struct BufferParams {
    const u32 *row_offsets;   // [batch_size + 1]
    const u32 *cache_offsets; // [batch_size]; may be null: all 0
    u64 rows; // rows that the scratch has; those past row_offsets[batch_size] are nobody's, and no work is done on them
};
static_assert(sizeof(BufferParams) == 24, "mirrored in Rust");

struct MlaPrefillLatentParams {
    BatchParams batch;
    CacheParams cache;
    BufferParams buffer;
    u8 *codes;        // [rows, latent] e4m3
    float *scales;    // [latent / 128, scale_stride]: a group's scales of all rows are neighbours
    void *k_rope;     // [rows, rope_stride] T, zeros past rope_width
    i64 scale_stride; // rows rounded up to 128
    u32 latent, rope_width, rope_stride;
    u32 vector; // 1: four columns of a cached row are aligned to their size and share a scale
};
static_assert(sizeof(MlaPrefillLatentParams) == 192, "mirrored in Rust");

struct MlaPrefillProjectParams {
    const u8 *codes;            // [rows, latent] e4m3
    const float *scales;        // [latent / 128, scale_stride]
    const u8 *weight;           // [features, latent] e4m3
    const float *weight_scales; // [ceil(features / 128), latent / 128]
    const u32 *rows_used;       // how many of `rows` are a sequence's
    void *keys;                 // [heads, rows, key_stride] T, zeros past nope
    void *values;               // [heads, rows, value_stride] T, zeros past value_width
    i64 scale_stride, weight_stride, weight_scale_stride;
    u64 rows;
    u32 latent, features;
    u32 first_head, heads; // of this group
    u32 nope, value_width; // features of a head: K's, then V's
    u32 key_stride, value_stride;
    u32 vector; // 1: rows of `weight` start on 16 bytes
    u32 reserved;
};
static_assert(sizeof(MlaPrefillProjectParams) == 128, "mirrored in Rust");

enum : u32 { MASK_CAUSAL = 0, MASK_NULL = 1, MASK_SLIDING_WINDOW_CAUSAL = 2, MASK_CHUNKED_CAUSAL = 3 };

struct MlaPrefillAttentionParams {
    BatchParams batch; // the table is not used
    BufferParams buffer;
    const void *q;      // [tokens, num_heads, nope + rope_width] T
    const void *keys;   // [heads, rows, key_stride] T
    const void *values; // [heads, rows, value_stride] T
    const void *k_rope; // [rows, rope_stride] T
    void *output;       // [tokens, num_heads, value_width] T
    float *lse;         // [tokens, num_heads]; may be null
    i64 q_token_stride, q_head_stride, output_token_stride, output_head_stride, lse_stride;
    u64 tokens;
    u32 num_heads, first_head, heads; // of all, of this group
    u32 nope, rope_width, value_width;
    u32 key_stride, value_stride, rope_stride;
    u32 mask, mask_width; // MASK_*; the window or the chunk
    u32 alibi;
    float scale;
    u32 q_vector, output_vector; // 1: 8 columns of q are aligned to 16 bytes, 2 columns of output to their size
    u32 reserved;
};
static_assert(sizeof(MlaPrefillAttentionParams) == 224, "mirrored in Rust");

// Buffer rows of a sequence: the first, and how many (none where the offsets make no sense).
struct BufferRange {
    u64 first;
    u32 count;
    u64 position; // in the cache, of the first
};
PKV_DEVICE BufferRange buffer_range(const BufferParams &buffer, u32 sequence) {
    const u64 from = buffer.row_offsets[sequence];
    u64 to = buffer.row_offsets[sequence + 1];
    if (to > buffer.rows) to = buffer.rows;
    return {from, to > from ? u32(to - from) : 0u, buffer.cache_offsets ? buffer.cache_offsets[sequence] : 0u};
}

// Launch structs: what the host fills and a kernel gets by value. Each is mirrored in Rust, `#[repr(C)]`, with the same
// size assertion; strides count elements, the last dimension of every tensor is contiguous.
//
// `vector` is 1 where the host found that every row of every tensor starts on 16 bytes and every extent that a lane
// takes at once is a multiple of what 16 bytes hold; else the kernel goes element by element.
#pragma once
#include "device/batch.cuh"

struct KvStoreParams {
    BatchParams batch;
    CacheParams cache;
    const void *values; // [tokens, num_heads, head_size], the entry's dtype
    i64 token_stride, head_stride;
    u64 tokens; // rows of `values`; those past the batch's tokens are left alone
    u32 vector, reserved;
};
static_assert(sizeof(KvStoreParams) == 160, "mirrored in Rust");

struct KvGatherParams {
    BatchParams batch;
    CacheParams cache;
    void *out; // [rows, num_heads, head_size], the entry's dtype
    i64 row_stride, head_stride;
    u64 rows;                      // rows of `out`; those past buffer_row_offsets[batch_size] are left alone
    const u32 *buffer_row_offsets; // [batch_size + 1]
    const u32 *cache_offsets;      // [batch_size]; may be null: all 0
    u32 vector, reserved;
};
static_assert(sizeof(KvGatherParams) == 176, "mirrored in Rust");

struct MlaRopeRmsnormQuantizeParams {
    BatchParams batch;
    CacheParams cache;
    const void *q_rope;  // [tokens, num_heads, rope_width]
    void *q_rope_output; // [tokens, num_heads, rope_width]; may be the memory of q_rope
    const void *kv; // [tokens, latent + rope_width]; may be null: the rows lie in the cache and are finished in place
    const void *freqs; // [max_positions, rope_width]: cos0, sin0, cos1, sin1, ...
    const void *gamma; // [latent]
    i64 q_token_stride, q_head_stride, output_token_stride, output_head_stride, kv_stride, freqs_stride;
    u64 tokens, max_positions;
    u32 num_heads, rope_width, latent; // latent + rope_width = cache.head_size
    u32 half_split;                    // 0: pairs (2i, 2i + 1); 1: pairs (i, i + rope_width / 2)
    i32 freqs_dtype, gamma_dtype;      // DTYPE_F32 or the entry's
    float epsilon;
    u32 vector;
    u32 q_warps; // warps a token that share its query heads
    u32 reserved;
};
static_assert(sizeof(MlaRopeRmsnormQuantizeParams) == 264, "mirrored in Rust");

struct MergeAttentionParams {
    const void *output_a, *output_b; // [tokens, num_heads, width]
    void *output;                    // may be the memory of a or of b
    const float *lse_a, *lse_b;      // [tokens, num_heads]
    float *lse;                      // may be null, or the memory of a or of b
    i64 a_token_stride, a_head_stride, b_token_stride, b_head_stride, output_token_stride, output_head_stride;
    i64 lse_a_stride, lse_b_stride, lse_stride; // from token to token; heads are contiguous
    u64 tokens;
    u32 num_heads, width, vector, reserved;
};
static_assert(sizeof(MergeAttentionParams) == 144, "mirrored in Rust");

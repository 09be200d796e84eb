// How the kernels of scores load query rows: a part of a row's heads at a time, a share a thread.
#pragma once
#include "mla_indexer_fp8.cuh"

namespace score {
constexpr u32 HEADS = 64, DEPTH = 128, LOADING = 128; // heads of a part, most columns, threads that load
constexpr u32 PIECES = HEADS * DEPTH / 16 / LOADING;  // of 16 codes, a thread's share of a part
} // namespace score

// 16 codes from `column` on, zeros past `depth`.
PKV_DEVICE uint4 load_codes(const u8 *row, u32 column, u32 depth, bool vector) {
    if (vector) return column < depth ? *reinterpret_cast<const uint4 *>(row + column) : uint4{0, 0, 0, 0};
    u32 words[4] = {};
    PKV_UNROLL
    for (u32 i = 0; i < 16; i++)
        if (column + i < depth) words[i / 4] |= u32(row[column + i]) << 8 * (i % 4);
    return {words[0], words[1], words[2], words[3]};
}

struct HeadCodes {
    uint4 codes[score::PIECES];
    float weight;
};
// The share of `thread` of the heads first_head .. first_head + HEADS of a row, zeros past the last head.
PKV_DEVICE void load_heads(const MlaIndexerScoreParams &p, HeadCodes &mine, u64 row, u32 first_head, u32 thread) {
    using namespace score;
    const u32 depth = p.cache.head_size, pieces = round_up(depth, 16u) / 16;
    const u8 *q = p.q + i64(row) * p.q_token_stride;
    PKV_UNROLL
    for (u32 j = 0; j < PIECES; j++) {
        const u32 i = thread + j * LOADING, head = i / pieces, column = i % pieces * 16;
        mine.codes[j] = uint4{0, 0, 0, 0};
        if (head < HEADS && first_head + head < p.num_heads)
            mine.codes[j] = load_codes(q + i64(first_head + head) * p.q_head_stride, column, depth, p.q_vector);
    }
    const u32 head = first_head + thread;
    mine.weight = thread < HEADS && head < p.num_heads ? p.q_s[i64(row) * p.q_s_stride + head] : 0.0f;
}

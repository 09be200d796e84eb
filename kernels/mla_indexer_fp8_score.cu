// Scores of a window of query rows against all the keys they see, to scratch.
//
// Naively a dot product for every row, head and key. Here a block takes 128 keys of a sequence, 32 a warp, and goes
// over the rows of its tile one by one: the row's heads against the keys on tensor cores (A = keys, B = heads), then
// relu, weight and sum over the heads in registers, in one fixed order, so that a score's bits depend on its row and
// its key alone. Products of fp8 codes must be exact and their sum f32, which fp8 tensor cores do not promise: codes
// become f16, exactly, on their way to shared memory, once for the keys, and for a row's heads once a block, while the
// row before is worked on.
//
// A tile's rows may belong to several sequences (decoding: every row to its own); the block loads keys anew for each.
#include "device/mma.cuh"
#include "device/warp.cuh"
#include "mla_indexer_fp8_score.cuh"

namespace score {
constexpr u32 WARPS = 4, THREADS = WARPS * WARP, KEYS = WARPS * 32, ROWS = 16;
// Shared memory: keys [KEYS][STRIDE] f16, twice heads [HEADS][STRIDE] f16, twice head weights [HEADS] f32, key scales
// [KEYS] f32, where each key lies [KEYS] i64. The 8 columns more than the depth shift eight rows' 16-byte pieces to
// different banks.
constexpr u32 STRIDE = DEPTH + 8;
constexpr u32 KEYS_AT = 0, HEADS_AT = KEYS * STRIDE * 2, HEADS_BYTES = HEADS * STRIDE * 2;
constexpr u32 WEIGHTS_AT = HEADS_AT + 2 * HEADS_BYTES, SCALES_AT = WEIGHTS_AT + 2 * HEADS * 4;
constexpr u32 SLOTS_AT = SCALES_AT + KEYS * 4, SHARED_BYTES = SLOTS_AT + KEYS * 8;
static_assert(SHARED_BYTES == 71680, "src/cuda/mla_indexer_fp8.rs launches with it");
static_assert(KEYS == THREADS, "a thread finds a key's slot");
static_assert(THREADS == LOADING, "all load heads");
} // namespace score

// 16 codes as f16 to two 16-byte pieces of a row. Eight neighbouring lanes have eight neighbouring pairs of pieces: the
// upper four begin with the second of theirs, so that the eight stores of a moment go to different banks.
PKV_DEVICE void store_as_f16(u16 *row, u32 column, const uint4 &codes) {
    const uint4 lo{e4m3x2_to_f16x2(u16(codes.x)), e4m3x2_to_f16x2(u16(codes.x >> 16)), e4m3x2_to_f16x2(u16(codes.y)),
                   e4m3x2_to_f16x2(u16(codes.y >> 16))};
    const uint4 hi{e4m3x2_to_f16x2(u16(codes.z)), e4m3x2_to_f16x2(u16(codes.z >> 16)), e4m3x2_to_f16x2(u16(codes.w)),
                   e4m3x2_to_f16x2(u16(codes.w >> 16))};
    uint4 *out = reinterpret_cast<uint4 *>(row + column);
    const u32 first = column / 64 & 1;
    out[first] = first ? hi : lo;
    out[first ^ 1] = first ? lo : hi;
}

// Keys first_key .. first_key + KEYS of a sequence, as far as `end`, and their scales. A key that the table leads
// nowhere reads nothing and scores NaN, which ranks after all others.
PKV_DEVICE void load_key_tile(const MlaIndexerScoreParams &p, u8 *shared, u32 sequence, u64 first_key, u64 end) {
    using namespace score;
    u16 *keys = reinterpret_cast<u16 *>(shared + KEYS_AT);
    float *scales = reinterpret_cast<float *>(shared + SCALES_AT);
    i64 *slots = reinterpret_cast<i64 *>(shared + SLOTS_AT);
    Slot slot;
    const bool held =
        first_key + threadIdx.x < end && find_slot(p.batch, p.cache, sequence, first_key + threadIdx.x, slot);
    slots[threadIdx.x] = held ? slot.blocks : -1;
    scales[threadIdx.x] = held ? static_cast<const float *>(p.cache.scales)[slot.scales] : f32_nan();
    __syncthreads();
    const u32 depth = p.cache.head_size, pieces = round_up(depth, 16u) / 16;
    for (u32 i = threadIdx.x; i < KEYS * pieces; i += THREADS) {
        const u32 key = i / pieces, column = i % pieces * 16;
        uint4 codes{0, 0, 0, 0};
        if (slots[key] >= 0)
            codes = load_codes(static_cast<const u8 *>(p.cache.blocks) + slots[key], column, depth, p.k_vector);
        store_as_f16(keys + key * STRIDE, column, codes);
    }
}

PKV_DEVICE void store_heads(const MlaIndexerScoreParams &p, u8 *shared, u32 buffer, const HeadCodes &mine) {
    using namespace score;
    const u32 pieces = round_up(p.cache.head_size, 16u) / 16;
    u16 *heads = reinterpret_cast<u16 *>(shared + HEADS_AT + buffer * HEADS_BYTES);
    PKV_UNROLL
    for (u32 j = 0; j < PIECES; j++) {
        const u32 i = threadIdx.x + j * THREADS, head = i / pieces, column = i % pieces * 16;
        if (head < HEADS) store_as_f16(heads + head * STRIDE, column, mine.codes[j]);
    }
    if (threadIdx.x < HEADS) reinterpret_cast<float *>(shared + WEIGHTS_AT)[buffer * HEADS + threadIdx.x] = mine.weight;
}

// One row's heads of a buffer against this warp's 32 keys: total[m][i] of key 16 m + 8 i + lane / 4 grows by the heads
// 2 t, 2 t + 1 of every eight (t = lane % 4).
PKV_DEVICE void add_heads(const u8 *shared, u32 buffer, u32 steps, u32 heads_used, float (&total)[2][2]) {
    using namespace score;
    const u32 lane = lane_id();
    const u16 *keys = reinterpret_cast<const u16 *>(shared + KEYS_AT) + warp_id() * 32 * STRIDE;
    const u16 *heads = reinterpret_cast<const u16 *>(shared + HEADS_AT + buffer * HEADS_BYTES);
    const float *weights = reinterpret_cast<const float *>(shared + WEIGHTS_AT) + buffer * HEADS;
    float dot[2][HEADS / 8][4] = {};
    for (u32 k = 0; k < 16 * steps; k += 16) {
        u32 a[2][4];
        PKV_UNROLL
        for (u32 m = 0; m < 2; m++) ldmatrix_x4(a[m], keys + (16 * m + lane % 16) * STRIDE + k + lane / 16 * 8);
        PKV_UNROLL
        for (u32 n = 0; n < HEADS / 8; n += 2) {
            if (8 * n >= heads_used) continue;
            u32 r[4];
            ldmatrix_x4(r, heads + (8 * n + lane % 8 + lane / 16 * 8) * STRIDE + k + lane / 8 % 2 * 8);
            const u32 b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
            PKV_UNROLL
            for (u32 m = 0; m < 2; m++) {
                mma_m16n8k16<f16>(dot[m][n], a[m], b0);
                mma_m16n8k16<f16>(dot[m][n + 1], a[m], b1);
            }
        }
    }
    PKV_UNROLL
    for (u32 n = 0; n < HEADS / 8; n++) {
        if (8 * n >= heads_used) continue;
        const float2 weight = *reinterpret_cast<const float2 *>(weights + 8 * n + lane % 4 * 2);
        PKV_UNROLL
        for (u32 m = 0; m < 2; m++) {
            PKV_UNROLL
            for (u32 i = 0; i < 2; i++) {
                const float lo = dot[m][n][2 * i], hi = dot[m][n][2 * i + 1];
                total[m][i] = fmaf(weight.x, lo < 0.0f ? 0.0f : lo, total[m][i]); // a NaN stays one
                total[m][i] = fmaf(weight.y, hi < 0.0f ? 0.0f : hi, total[m][i]);
            }
        }
    }
}

PKV_KERNEL(mla_indexer_fp8_score, MlaIndexerScoreParams, score::THREADS, 2) {
    using namespace score;
    PKV_DYNAMIC_SHARED(u8, shared);
    const u64 row_tiles = ceil_div(p.rows, u64(ROWS));
    const u64 first_key = blockIdx.x / row_tiles * KEYS;
    const u64 tile = p.first_row + blockIdx.x % row_tiles * ROWS;
    const u64 window_end = p.first_row + p.rows, tokens = p.batch.row_offsets[p.batch.batch_size];
    u64 end = tile + ROWS < window_end ? tile + ROWS : window_end;
    if (end > tokens) end = tokens;
    const u32 steps = round_up(p.cache.head_size, 16u) / 16, head_parts = ceil_div(p.num_heads, HEADS);
    const u32 lane = lane_id();

    for (u64 row = tile; row < end;) {
        TokenPlace place;
        find_token(p.batch, row, place);
        const u64 sequence_end = p.batch.row_offsets[place.sequence + 1];
        const u64 run_end = sequence_end < end ? sequence_end : end;
        if (run_end <= row) { // offsets that fall
            row++;
            continue;
        }
        TokenPlace last = place;
        last.position += run_end - 1 - row;
        const u64 most = keys_seen(p.batch, last, p.causal, p.max_keys);
        const u64 first_position = place.position - row; // of row 0, were it of this sequence (modulo 2^64)
        if (p.causal && place.position < first_key) row += first_key - place.position; // those see none of the tile
        if (row >= run_end || first_key >= most) {
            row = run_end;
            continue;
        }
        load_key_tile(p, shared, place.sequence, first_key, most);
        HeadCodes mine;
        load_heads(p, mine, row, 0, threadIdx.x);
        store_heads(p, shared, 0, mine);
        __syncthreads();
        float total[2][2] = {};
        u32 part = 0;
        for (u32 buffer = 0; row < run_end; buffer ^= 1) {
            const bool row_done = part + 1 == head_parts;
            const u64 next_row = row_done ? row + 1 : row;
            const u32 next_part = row_done ? 0 : part + 1;
            if (next_row < run_end) load_heads(p, mine, next_row, next_part * HEADS, threadIdx.x);
            add_heads(shared, buffer, steps, p.num_heads - part * HEADS, total);
            if (row_done) {
                // Over the four lanes that share a key; then each lane takes one of the warp's 32 keys.
                float mine_total = 0.0f;
                PKV_UNROLL
                for (u32 m = 0; m < 2; m++) {
                    PKV_UNROLL
                    for (u32 i = 0; i < 2; i++) {
                        const float all = group_sum<4>(total[m][i]);
                        if (lane % 4 == 2 * m + i) mine_total = all;
                        total[m][i] = 0.0f;
                    }
                }
                const u32 key = warp_id() * 32 + lane % 4 * 8 + lane / 4;
                const TokenPlace here{place.sequence, first_position + row};
                if (first_key + key < keys_seen(p.batch, here, p.causal, p.max_keys))
                    p.scores[i64(row - p.first_row) * p.score_stride + i64(first_key + key)] =
                        __fmul_rn(mine_total, reinterpret_cast<const float *>(shared + SCALES_AT)[key]);
            }
            if (next_row < run_end) store_heads(p, shared, buffer ^ 1, mine);
            row = next_row;
            part = next_part;
            __syncthreads();
        }
    }
}

// ---- any depth: a thread a row and key ----

PKV_KERNEL(mla_indexer_fp8_score_plain, MlaIndexerScoreParams, 128, 1) {
    const u64 key_tiles = ceil_div(p.max_keys, u64(128));
    const u64 row = p.first_row + blockIdx.x / key_tiles, key = blockIdx.x % key_tiles * 128 + threadIdx.x;
    TokenPlace place;
    if (!find_token(p.batch, row, place)) return;
    if (key >= keys_seen(p.batch, place, p.causal, p.max_keys)) return;
    float &score = p.scores[i64(row - p.first_row) * p.score_stride + i64(key)];
    Slot slot;
    if (!find_slot(p.batch, p.cache, place.sequence, key, slot)) {
        score = f32_nan();
        return;
    }
    const e4m3 *k = static_cast<const e4m3 *>(p.cache.blocks) + slot.blocks;
    float total = 0.0f;
    for (u32 h = 0; h < p.num_heads; h++) {
        const u8 *q = p.q + i64(row) * p.q_token_stride + i64(h) * p.q_head_stride;
        float dot = 0.0f;
        for (u32 c = 0; c < p.cache.head_size; c++) dot = fmaf(to_f32(e4m3{q[c]}), to_f32(k[c]), dot);
        total = fmaf(p.q_s[i64(row) * p.q_s_stride + h], dot < 0.0f ? 0.0f : dot, total);
    }
    score = __fmul_rn(total, static_cast<const float *>(p.cache.scales)[slot.scales]);
}

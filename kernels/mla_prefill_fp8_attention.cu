// Ragged attention of new tokens over their sequence's gathered keys, one head a block:
//     s[k] = scale * (q_nope . K[k] + q_rope . k_rope[k]) + slope * (k - p)   for the keys k that position p sees
//     o = sum_k exp(s[k] - lse) V[k],   lse = log sum_k exp(s[k]);   no key: o = 0, lse = -inf
//
// Naively a row of scores a query. Here, online softmax over tiles of keys, in base 2. Every mask is a range of keys
// that only moves up with the position, so a block visits the tiles between its first row's first and its last row's
// last key, and only the tiles at the ends compare positions. Tiles begin at multiples of the tile size from the
// sequence's first buffer row whatever the block: a tile that a row does not see leaves its numbers as they are, so a
// row's bits do not depend on the rows beside it.
//
// Two kernels. `tensor`: f16 and bf16, heads up to 256 + 128 columns (wider V in passes of 128): 16 queries a warp,
// scores and probabilities in registers, K and V each in one buffer of shared memory and each loaded while the other is
// worked on. `plain`: fma only, any width, the one for f32: 4 queries a warp, a lane a key, then a lane a column.
//
// 0 * NaN: a masked key's probability is 0, but its V may hold NaN or infinity (a window's dropped page, say). So
// before a tile that some row sees in part is multiplied, what is not finite in its V is added to the rows that do see
// it, and then zeroed.
#include "device/mma.cuh"
#include "mla_prefill_fp8_attention.cuh"

// ---- tensor cores ----

template <u32 QK_, u32 V_, u32 WARPS_> struct Config {
    static constexpr u32 QK = QK_, V = V_, WARPS = WARPS_; // padded columns of a key and of a value
    static constexpr u32 THREADS = WARPS * WARP, ROWS = WARPS * 16, KEYS = 64;
    // Shared memory, 16-bit elements: queries [ROWS][QK], keys [KEYS][QK], values [KEYS][V]; 8 more columns a row shift
    // eight rows' pieces to different banks.
    static constexpr u32 QK_STRIDE = QK + 8, V_STRIDE = V + 8;
    static constexpr u32 Q_AT = 0, K_AT = ROWS * QK_STRIDE, V_AT = K_AT + KEYS * QK_STRIDE;
    static constexpr u32 SHARED_BYTES = 2 * (V_AT + KEYS * V_STRIDE);
    static_assert(QK % 16 == 0 && V % 16 == 0 && SHARED_BYTES <= 99 * 1024, "fits every architecture from sm_80 on");
};
// src/cuda/mla_prefill_fp8.rs launches with these.
using Narrow = Config<96, 64, 4>;
using Standard = Config<192, 128, 8>;
using StandardFew = Config<192, 128, 4>;
using Wide = Config<256, 128, 4>;
static_assert(Narrow::SHARED_BYTES == 35840 && Standard::SHARED_BYTES == 94208 && StandardFew::SHARED_BYTES == 68608 &&
                  Wide::SHARED_BYTES == 84992,
              "mirrored in Rust");

// A key in shared memory is [nope, padded to 8][rope, padded to 8][zeros]; so is a query.
template <class T, class C>
PKV_DEVICE void load_queries(const MlaPrefillAttentionParams &p, const Work &w, u16 *shared) {
    const u16 *q =
        static_cast<const u16 *>(p.q) + i64(w.tile.first_token) * p.q_token_stride + i64(w.head) * p.q_head_stride;
    constexpr u32 PIECES = C::QK / 8;
    if (p.q_vector) {
        const u32 used = (p.nope + p.rope_width) / 8;
        for (u32 i = threadIdx.x; i < C::ROWS * PIECES; i += C::THREADS) {
            const u32 row = i / PIECES, piece = i % PIECES;
            const bool valid = row < w.tile.rows && piece < used;
            cp_async_16(shared + C::Q_AT + row * C::QK_STRIDE + 8 * piece,
                        valid ? q + i64(row) * p.q_token_stride + 8 * piece : q, valid);
        }
        return;
    }
    const u32 rope_at = round_up(p.nope, COLUMN_PAD);
    for (u32 i = threadIdx.x; i < C::ROWS * C::QK; i += C::THREADS) {
        const u32 row = i / C::QK, c = i % C::QK;
        const u32 column = c < p.nope ? c : c < rope_at ? ~0u : c - rope_at < p.rope_width ? c - rope_at + p.nope : ~0u;
        shared[C::Q_AT + row * C::QK_STRIDE + c] =
            row < w.tile.rows && column != ~0u ? q[i64(row) * p.q_token_stride + column] : u16(0);
    }
}

template <class C>
PKV_DEVICE void load_keys(const MlaPrefillAttentionParams &p, const Work &w, u16 *shared, u32 first_key) {
    constexpr u32 PIECES = C::QK / 8;
    const u32 nope_pieces = p.key_stride / 8, used = nope_pieces + p.rope_stride / 8;
    const u16 *keys = static_cast<const u16 *>(p.keys) + i64(w.head - p.first_head) * i64(p.buffer.rows) * p.key_stride;
    const u16 *ropes = static_cast<const u16 *>(p.k_rope);
    for (u32 i = threadIdx.x; i < C::KEYS * PIECES; i += C::THREADS) {
        const u32 key = i / PIECES, piece = i % PIECES;
        const bool valid = first_key + key < w.tile.keys && piece < used;
        const i64 row = i64(w.tile.key_row + first_key + key);
        const u16 *from = !valid                ? keys
                          : piece < nope_pieces ? keys + row * p.key_stride + 8 * piece
                                                : ropes + row * p.rope_stride + 8 * (piece - nope_pieces);
        cp_async_16(shared + C::K_AT + key * C::QK_STRIDE + 8 * piece, from, valid);
    }
}

template <class C>
PKV_DEVICE void load_values(const MlaPrefillAttentionParams &p, const Work &w, u16 *shared, u32 first_key) {
    constexpr u32 PIECES = C::V / 8;
    const u16 *values =
        static_cast<const u16 *>(p.values) + i64(w.head - p.first_head) * i64(p.buffer.rows) * p.value_stride;
    for (u32 i = threadIdx.x; i < C::KEYS * PIECES; i += C::THREADS) {
        const u32 key = i / PIECES, c = i % PIECES * 8;
        const bool valid = first_key + key < w.tile.keys && w.value_first + c < p.value_stride;
        const i64 row = i64(w.tile.key_row + first_key + key);
        cp_async_16(shared + C::V_AT + key * C::V_STRIDE + c,
                    valid ? values + row * p.value_stride + w.value_first + c : values, valid);
    }
}

// What is not finite in the V of a tile that is seen in part goes to the rows that see it, then out of the tile.
template <class T, class C>
PKV_DEVICE void take_out_not_finite(u16 *shared, u32 first_key, const Softmax &softmax, float (&out)[C::V / 8][4]) {
    u16 *values = shared + C::V_AT;
    int found = 0;
    for (u32 i = threadIdx.x; i < C::KEYS * C::V; i += C::THREADS)
        found |= not_finite<T>(values[i / C::V * C::V_STRIDE + i % C::V]);
    if (!__syncthreads_or(found)) return;
    add_not_finite<T>(softmax, out, first_key, C::KEYS,
                      [&](u32 key, u32 column) { return values[key * C::V_STRIDE + column]; });
    __syncthreads();
    for (u32 i = threadIdx.x; i < C::KEYS * C::V; i += C::THREADS) {
        u16 &x = values[i / C::V * C::V_STRIDE + i % C::V];
        if (not_finite<T>(x)) x = 0;
    }
    __syncthreads();
}

template <class T, class C> PKV_DEVICE void attention(const MlaPrefillAttentionParams &p) {
    PKV_DYNAMIC_SHARED(u16, shared);
    const Work w = find_work(p, C::ROWS, C::V);
    if (w.tile.rows == 0) return;
    const u32 lane = lane_id(), warp_row = warp_id() * 16;
    const TileKeys seen = tile_keys(p, w.tile);
    Softmax softmax = softmax_of(p, w, warp_row);

    float out[C::V / 8][4] = {};
    const u32 begin = seen.some.first / C::KEYS * C::KEYS, end = seen.some.end;
    if (begin < end) {
        load_queries<T, C>(p, w, shared);
        load_keys<C>(p, w, shared, begin);
        cp_async_commit();
    }
    for (u32 first_key = begin; first_key < end; first_key += C::KEYS) {
        cp_async_wait<0>();
        __syncthreads(); // K is here; everybody is done with the last V
        load_values<C>(p, w, shared, first_key);
        cp_async_commit();

        float score[C::KEYS / 8][4] = {};
        PKV_UNROLL
        for (u32 k = 0; k < C::QK; k += 16) {
            u32 a[4];
            ldmatrix_x4(a, shared + C::Q_AT + (warp_row + lane % 16) * C::QK_STRIDE + k + lane / 16 * 8);
            PKV_UNROLL
            for (u32 n = 0; n < C::KEYS / 8; n += 2) {
                u32 r[4];
                ldmatrix_x4(r, shared + C::K_AT + (8 * n + lane % 8 + lane / 16 * 8) * C::QK_STRIDE + k +
                                   lane / 8 % 2 * 8);
                const u32 b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
                mma_m16n8k16<T>(score[n], a, b0);
                mma_m16n8k16<T>(score[n + 1], a, b1);
            }
        }

        const bool partial = seen.partial(first_key, C::KEYS);
        float shrink[2];
        take_scores(p, w.tile, softmax, score, first_key, partial, shrink);
        shrink_rows(out, shrink);

        cp_async_wait<0>();
        __syncthreads(); // V is here; everybody is done with K
        if (first_key + C::KEYS < end) load_keys<C>(p, w, shared, first_key + C::KEYS);
        cp_async_commit();
        if (partial) take_out_not_finite<T, C>(shared, first_key, softmax, out);

        PKV_UNROLL
        for (u32 k = 0; k < C::KEYS; k += 16) {
            const float(&s0)[4] = score[k / 8], (&s1)[4] = score[k / 8 + 1];
            const u32 a[4] = {from_f32x2<T>(s0[0], s0[1]), from_f32x2<T>(s0[2], s0[3]), from_f32x2<T>(s1[0], s1[1]),
                              from_f32x2<T>(s1[2], s1[3])};
            PKV_UNROLL
            for (u32 n = 0; n < C::V / 8; n += 2) {
                u32 r[4];
                ldmatrix_x4_trans(r, shared + C::V_AT + (k + lane % 8 + lane / 8 % 2 * 8) * C::V_STRIDE + 8 * n +
                                         lane / 16 * 8);
                const u32 b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
                mma_m16n8k16<T>(out[n], a, b0);
                mma_m16n8k16<T>(out[n + 1], a, b1);
            }
        }
    }

    store_rows<T>(p, w, softmax, out);
}

// ---- fma only ----

namespace plain {
constexpr u32 WARPS = 4, THREADS = WARPS * WARP, WARP_ROWS = 4, ROWS = WARPS * WARP_ROWS, KEYS = WARP, COLUMNS = 32,
              V = 128;
// shared memory, f32: 32 columns of the queries [ROWS][COLUMNS], of the keys [KEYS][KEY_STRIDE]
constexpr u32 KEY_STRIDE = COLUMNS + 1, SHARED_BYTES = (ROWS * COLUMNS + KEYS * KEY_STRIDE) * 4;
static_assert(SHARED_BYTES == 6272, "src/cuda/mla_prefill_fp8.rs launches with it");
} // namespace plain

template <class T> PKV_DEVICE void plain_attention(const MlaPrefillAttentionParams &p) {
    using namespace plain;
    PKV_DYNAMIC_SHARED(float, queries);
    float *keys_part = queries + ROWS * COLUMNS;
    const Work w = find_work(p, ROWS, V);
    if (w.tile.rows == 0) return;
    const u32 lane = lane_id(), warp_row = warp_id() * WARP_ROWS;
    KeyRange seen[WARP_ROWS];
    PKV_UNROLL
    for (u32 r = 0; r < WARP_ROWS; r++)
        seen[r] = visible(p, w.tile, warp_row + r < w.tile.rows ? warp_row + r : w.tile.rows - 1);
    const u32 begin = visible(p, w.tile, 0).first / KEYS * KEYS, end = visible(p, w.tile, w.tile.rows - 1).end;
    const float slope = p.alibi ? alibi_slope(w.head, p.num_heads) : 0.0f;
    const T *q =
        static_cast<const T *>(p.q) + i64(w.tile.first_token) * p.q_token_stride + i64(w.head) * p.q_head_stride;
    const i64 head_rows = i64(w.head - p.first_head) * i64(p.buffer.rows) + i64(w.tile.key_row);
    const T *keys = static_cast<const T *>(p.keys) + head_rows * p.key_stride;
    const T *values = static_cast<const T *>(p.values) + head_rows * p.value_stride + w.value_first;
    const T *ropes = static_cast<const T *>(p.k_rope) + i64(w.tile.key_row) * p.rope_stride;
    const u32 columns = p.value_width - w.value_first < V ? p.value_width - w.value_first : V;

    float out[WARP_ROWS][V / WARP] = {}, top[WARP_ROWS], sum[WARP_ROWS] = {};
    PKV_UNROLL
    for (u32 r = 0; r < WARP_ROWS; r++) top[r] = -f32_inf();
    for (u32 first_key = begin; first_key < end; first_key += KEYS) {
        float score[WARP_ROWS] = {};
        for (u32 first = 0; first < p.nope + p.rope_width; first += COLUMNS) {
            __syncthreads();
            for (u32 i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
                const u32 row = i / COLUMNS, c = first + i % COLUMNS;
                const bool valid = row < w.tile.rows && c < p.nope + p.rope_width;
                queries[i] = valid ? to_f32(q[i64(row) * p.q_token_stride + c]) : 0.0f;
            }
            for (u32 i = threadIdx.x; i < KEYS * COLUMNS; i += THREADS) {
                const u32 key = i / COLUMNS, c = first + i % COLUMNS;
                const i64 row = i64(first_key) + key;
                float x = 0.0f;
                if (first_key + key < w.tile.keys) {
                    if (c < p.nope) x = to_f32(keys[row * p.key_stride + c]);
                    else if (c < p.nope + p.rope_width) x = to_f32(ropes[row * p.rope_stride + (c - p.nope)]);
                }
                keys_part[key * KEY_STRIDE + i % COLUMNS] = x;
            }
            __syncthreads();
            for (u32 c = 0; c < COLUMNS; c++) {
                const float k = keys_part[lane * KEY_STRIDE + c];
                PKV_UNROLL
                for (u32 r = 0; r < WARP_ROWS; r++) score[r] = fmaf(queries[(warp_row + r) * COLUMNS + c], k, score[r]);
            }
        }
        const u32 key = first_key + lane;
        PKV_UNROLL
        for (u32 r = 0; r < WARP_ROWS; r++) {
            const i64 query = i64(w.tile.position + warp_row + r) - i64(w.tile.key_first);
            float s = score[r] * p.scale;
            if (p.alibi) s += slope * float(i64(key) - query);
            if (key < seen[r].first || key >= seen[r].end) s = -f32_inf();
            const float best = fmaxf(top[r], warp_max(s)), base = best == -f32_inf() ? 0.0f : best;
            const float shrink = expf(top[r] - base);
            top[r] = best;
            score[r] = expf(s - base);
            sum[r] = fmaf(sum[r], shrink, warp_sum(score[r]));
            PKV_UNROLL
            for (u32 c = 0; c < V / WARP; c++) out[r][c] *= shrink;
        }
        for (u32 k = 0; k < KEYS && first_key + k < end; k++) {
            float v[V / WARP];
            PKV_UNROLL
            for (u32 c = 0; c < V / WARP; c++)
                v[c] = lane + WARP * c < columns ? to_f32(values[i64(first_key + k) * p.value_stride + lane + WARP * c])
                                                 : 0.0f;
            PKV_UNROLL
            for (u32 r = 0; r < WARP_ROWS; r++) {
                const float weight = __shfl_sync(FULL_MASK, score[r], k);
                if (first_key + k < seen[r].first || first_key + k >= seen[r].end) continue; // its V may be NaN
                PKV_UNROLL
                for (u32 c = 0; c < V / WARP; c++) out[r][c] = fmaf(weight, v[c], out[r][c]);
            }
        }
    }
    PKV_UNROLL
    for (u32 r = 0; r < WARP_ROWS; r++) {
        if (warp_row + r >= w.tile.rows) continue;
        const i64 token = i64(w.tile.first_token + warp_row + r);
        const bool none = seen[r].first == seen[r].end;
        if (p.lse && w.value_first == 0 && lane == 0)
            p.lse[token * p.lse_stride + w.head] = none ? -f32_inf() : top[r] + logf(sum[r]);
        T *to = static_cast<T *>(p.output) + token * p.output_token_stride + i64(w.head) * p.output_head_stride;
        PKV_UNROLL
        for (u32 c = 0; c < V / WARP; c++)
            if (lane + WARP * c < columns)
                to[w.value_first + lane + WARP * c] = from_f32<T>(none ? 0.0f : out[r][c] / sum[r]);
    }
}

#define PKV_ATTENTION(suffix, T)                                                                                       \
    PKV_KERNEL(mla_prefill_fp8_attention_narrow_##suffix, MlaPrefillAttentionParams, Narrow::THREADS, 1) {             \
        attention<T, Narrow>(p);                                                                                       \
    }                                                                                                                  \
    PKV_KERNEL(mla_prefill_fp8_attention_standard_##suffix, MlaPrefillAttentionParams, Standard::THREADS, 1) {         \
        attention<T, Standard>(p);                                                                                     \
    }                                                                                                                  \
    PKV_KERNEL(mla_prefill_fp8_attention_standard_few_##suffix, MlaPrefillAttentionParams, StandardFew::THREADS, 1) {  \
        attention<T, StandardFew>(p);                                                                                  \
    }                                                                                                                  \
    PKV_KERNEL(mla_prefill_fp8_attention_wide_##suffix, MlaPrefillAttentionParams, Wide::THREADS, 1) {                 \
        attention<T, Wide>(p);                                                                                         \
    }                                                                                                                  \
    PKV_KERNEL(mla_prefill_fp8_attention_plain_##suffix, MlaPrefillAttentionParams, plain::THREADS, 1) {               \
        plain_attention<T>(p);                                                                                         \
    }
PKV_ATTENTION(f16, f16)
PKV_ATTENTION(bf16, bf16)
PKV_KERNEL(mla_prefill_fp8_attention_plain_f32, MlaPrefillAttentionParams, plain::THREADS, 1) {
    plain_attention<float>(p);
}

// What the attention kernels share: which queries a block has and which keys they see, the softmax of a tile of scores
// in the fragments of mma and wgmma, what V holds that is not finite, and where a finished row goes.
#pragma once
#include "device/warp.cuh"
#include "mla_prefill_fp8.cuh"

constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;

#ifdef PKV_EMULATE
PKV_DEVICE float fast_exp2(float x) { return std::exp2(x); }
#else
PKV_DEVICE float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// ---- which rows, which keys ----

// A block's rows are of one sequence. Sequence b gets the tiles from row_offsets[b] / TILE + b on, which leaves room
// for every start and can be searched; some tiles stay empty.
PKV_DEVICE u64 first_tile_of(const u32 *row_offsets, u32 b, u32 tile) { return u64(row_offsets[b]) / tile + b; }

struct QueryTile {
    u64 first_token;
    u32 rows;      // 0: nothing to do
    u64 position;  // of the first
    u64 key_row;   // buffer row of key 0
    u64 key_first; // position of key 0
    u32 keys;
};

PKV_DEVICE QueryTile find_tile(const MlaPrefillAttentionParams &p, u64 tile, u32 tile_rows) {
    QueryTile t{};
    const u32 *offsets = p.batch.row_offsets;
    u32 lo = 0, hi = p.batch.batch_size - 1; // the last sequence whose first tile is not past this one
    while (lo < hi) {
        const u32 mid = lo + (hi - lo + 1) / 2;
        if (first_tile_of(offsets, mid, tile_rows) <= tile) lo = mid;
        else hi = mid - 1;
    }
    const u64 before = first_tile_of(offsets, lo, tile_rows), from = offsets[lo];
    u64 to = offsets[lo + 1];
    if (to > p.tokens) to = p.tokens;
    if (tile < before) return t;
    t.first_token = from + (tile - before) * tile_rows;
    if (t.first_token >= to) return t;
    t.rows = to - t.first_token < tile_rows ? u32(to - t.first_token) : tile_rows;
    t.position = u64(p.batch.cache_lengths[lo]) + (t.first_token - from);
    const BufferRange range = buffer_range(p.buffer, lo);
    t.key_row = range.first;
    t.key_first = range.position;
    t.keys = range.count;
    return t;
}

struct KeyRange {
    u32 first, end; // of the sequence's buffer rows
};
PKV_DEVICE KeyRange visible(const MlaPrefillAttentionParams &p, const QueryTile &t, u32 row) {
    const u64 position = t.position + row;
    u64 first = 0, end = position + 1;
    switch (p.mask) {
    case MASK_NULL: end = ~0ull; break;
    case MASK_SLIDING_WINDOW_CAUSAL: first = end > p.mask_width ? end - p.mask_width : 0; break;
    case MASK_CHUNKED_CAUSAL: first = position / p.mask_width * p.mask_width; break;
    default: break;
    }
    first = first > t.key_first ? first - t.key_first : 0;
    end = end > t.key_first ? end - t.key_first : 0;
    if (end > t.keys) end = t.keys;
    if (first > end) first = end;
    return {u32(first), u32(end)};
}

// What the rows of a tile see: some of them, all of them (nothing where first > end).
struct TileKeys {
    KeyRange some, all;
    // Whether any row does not see all of these.
    PKV_INLINE bool partial(u32 first_key, u32 keys) const {
        return first_key < all.first || first_key + keys > all.end;
    }
};
PKV_DEVICE TileKeys tile_keys(const MlaPrefillAttentionParams &p, const QueryTile &t) {
    const KeyRange of_first = visible(p, t, 0), of_last = visible(p, t, t.rows - 1);
    return {{of_first.first, of_last.end}, {of_last.first, of_first.end}};
}

// ALiBi (arXiv 2108.12409), for any number of heads.
PKV_DEVICE float alibi_slope(u32 head, u32 heads) {
    const u32 power = 1u << (31 - __clz(heads));
    const float exponent =
        head < power ? float(head + 1) / float(power) : float(2 * (head - power) + 1) / float(2 * power);
    return exp2f(-8.0f * exponent);
}

struct Work {
    QueryTile tile;
    u32 head;        // of all
    u32 value_first; // first of the columns of V that this block is for
};
// blockIdx.x = (head * value passes + pass) * tiles + tile. A head's tiles run at about the same time and share its
// keys in L2; the last tiles, which have most keys under a causal mask, start first.
PKV_DEVICE Work find_work(const MlaPrefillAttentionParams &p, u32 tile_rows, u32 value_columns) {
    const u64 tiles = p.tokens / tile_rows + p.batch.batch_size;
    const u32 passes = ceil_div(p.value_width, value_columns);
    const u32 which = u32(blockIdx.x / tiles);
    Work w;
    w.tile = find_tile(p, tiles - 1 - blockIdx.x % tiles, tile_rows);
    w.head = p.first_head + which / passes;
    w.value_first = which % passes * value_columns;
    return w;
}
// ---- a tile of scores in fragments ----

// A lane's two rows of 16: of a fragment's elements, 0 and 1 are of the first, 2 and 3 of the second.
struct Softmax {
    u32 row[2]; // of the tile
    KeyRange seen[2];
    float top[2], sum[2]; // the largest score, in base 2; the sum of exp2(score - top) over this lane's columns
    float scale, slope;
};
PKV_DEVICE Softmax softmax_of(const MlaPrefillAttentionParams &p, const Work &w, u32 first_row) {
    Softmax s;
    PKV_UNROLL
    for (u32 half = 0; half < 2; half++) {
        s.row[half] = first_row + 8 * half + lane_id() / 4;
        s.seen[half] = visible(p, w.tile, s.row[half] < w.tile.rows ? s.row[half] : w.tile.rows - 1);
        s.top[half] = -f32_inf();
        s.sum[half] = 0.0f;
    }
    s.scale = p.scale * LOG2_E;
    s.slope = p.alibi ? alibi_slope(w.head, p.num_heads) * LOG2_E : 0.0f;
    return s;
}
// of_score(score, which of the lane's rows, column) for each.
template <u32 N, class F> PKV_DEVICE void each_score(float (&score)[N][4], F of_score) {
    PKV_UNROLL
    for (u32 n = 0; n < N; n++) {
        PKV_UNROLL
        for (u32 i = 0; i < 4; i++) of_score(score[n][i], i / 2, 8 * n + lane_id() % 4 * 2 + i % 2);
    }
}
// Dot products of the keys from first_key on become exp2(score - top); what was summed over the keys before, with the
// last top, is to be multiplied by `shrink`.
template <u32 N> PKV_DEVICE void take_scores(const MlaPrefillAttentionParams &p, const QueryTile &tile, Softmax &of,
                                             float (&score)[N][4], u32 first_key, bool partial, float (&shrink)[2]) {
    each_score(score, [&](float &s, u32, u32) { s *= of.scale; });
    if (p.alibi) {
        const i64 query = i64(tile.position) - i64(tile.key_first); // row 0, as a key's number
        each_score(score, [&](float &s, u32 half, u32 column) {
            s += of.slope * float(i64(first_key + column) - (query + of.row[half]));
        });
    }
    if (partial) {
        each_score(score, [&](float &s, u32 half, u32 column) {
            const u32 key = first_key + column;
            if (key < of.seen[half].first || key >= of.seen[half].end) s = -f32_inf();
        });
    }
    float base[2], part[2] = {};
    PKV_UNROLL
    for (u32 half = 0; half < 2; half++) {
        float best = of.top[half];
        PKV_UNROLL
        for (u32 n = 0; n < N; n++) best = fmaxf(fmaxf(best, score[n][2 * half]), score[n][2 * half + 1]);
        best = group_max<4>(best);
        base[half] = best == -f32_inf() ? 0.0f : best; // no key yet: keep -inf - -inf out
        shrink[half] = fast_exp2(of.top[half] - base[half]);
        of.top[half] = best;
    }
    each_score(score, [&](float &s, u32 half, u32) {
        s = fast_exp2(s - base[half]);
        part[half] += s;
    });
    PKV_UNROLL
    for (u32 half = 0; half < 2; half++)
        of.sum[half] = fmaf(of.sum[half], shrink[half], part[half]); // the four lanes of a row meet at the end
}
template <u32 N> PKV_DEVICE void shrink_rows(float (&out)[N][4], const float (&shrink)[2]) {
    PKV_UNROLL
    for (u32 n = 0; n < N; n++) {
        PKV_UNROLL
        for (u32 i = 0; i < 4; i++) out[n][i] *= shrink[i / 2];
    }
}

template <class T> PKV_DEVICE bool not_finite(u16 bits) {
    constexpr u16 exponent = dtype_of<T>::value == DTYPE_BF16 ? 0x7f80 : 0x7c00;
    return (bits & exponent) == exponent;
}
// What is not finite in the V of a tile goes to the rows that see it; value(key, column) are its bits.
template <class T, u32 N, class F>
PKV_DEVICE void add_not_finite(const Softmax &of, float (&out)[N][4], u32 first_key, u32 keys, F value) {
    PKV_UNROLL_NO
    for (u32 key = 0; key < keys; key++) {
        PKV_UNROLL
        for (u32 half = 0; half < 2; half++) {
            if (first_key + key < of.seen[half].first || first_key + key >= of.seen[half].end) continue;
            PKV_UNROLL
            for (u32 n = 0; n < N; n++) {
                PKV_UNROLL
                for (u32 i = 0; i < 2; i++) {
                    const u16 bits = value(key, 8 * n + lane_id() % 4 * 2 + i);
                    if (not_finite<T>(bits)) out[n][2 * half + i] += to_f32(T{bits});
                }
            }
        }
    }
}

template <class T, u32 N> PKV_DEVICE void store_rows(const MlaPrefillAttentionParams &p, const Work &w,
                                                     const Softmax &of, const float (&out)[N][4]) {
    PKV_UNROLL
    for (u32 half = 0; half < 2; half++) {
        const float total = group_sum<4>(of.sum[half]);
        if (of.row[half] >= w.tile.rows) continue;
        const i64 token = i64(w.tile.first_token + of.row[half]);
        const bool none = of.seen[half].first == of.seen[half].end;
        if (p.lse && w.value_first == 0 && lane_id() % 4 == 0)
            p.lse[token * p.lse_stride + w.head] = none ? -f32_inf() : (of.top[half] + log2f(total)) * LN_2;
        const float inverse = none ? 0.0f : 1.0f / total;
        T *to = static_cast<T *>(p.output) + token * p.output_token_stride + i64(w.head) * p.output_head_stride;
        PKV_UNROLL
        for (u32 n = 0; n < N; n++) {
            const u32 c = w.value_first + 8 * n + lane_id() % 4 * 2;
            const float lo = none ? 0.0f : out[n][2 * half] * inverse,
                        hi = none ? 0.0f : out[n][2 * half + 1] * inverse;
            if (p.output_vector) {
                if (c < p.value_width) *reinterpret_cast<u32 *>(to + c) = from_f32x2<T>(lo, hi);
            } else {
                if (c < p.value_width) to[c] = from_f32<T>(lo);
                if (c + 1 < p.value_width) to[c + 1] = from_f32<T>(hi);
            }
        }
    }
}

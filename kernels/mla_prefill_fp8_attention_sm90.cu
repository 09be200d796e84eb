// The attention of mla_prefill_fp8_attention.cu on Hopper's wgmma, for f16 and bf16 and keys of up to 192 columns:
//     s[k] = scale * (q_nope . K[k] + q_rope . k_rope[k]) + slope * (k - p),   o = sum_k exp(s[k] - lse) V[k]
// for every query and head. The same ranges of keys, the same online softmax in registers, over tiles that begin at
// multiples of the tile size; V wider than 128 columns in passes. Differently:
//   * a block is two warpgroups that multiply, 64 queries each, and one that loads keys and values, 128 at a time, each
//     into a ring of its own; a warpgroup without queries leaves. Most registers go to those that multiply;
//   * a warpgroup starts a tile's scores together with the last tile's sum over V: while one softmax is worked on, the
//     tensor core has that sum, and the other warpgroup's products. Probabilities stay in registers, as A;
//   * the warpgroup that loads takes out of V what is not finite where a tile is seen in part, from the 16-byte pieces
//     that each thread has copied itself, and says so; rows that see such a key then find it in global memory.
#include "device/ring.cuh"
#include "device/wgmma.cuh"
#include "mla_prefill_fp8_attention.cuh"

namespace attention_sm90 {
constexpr u32 GROUP = 128; // threads of a warpgroup
constexpr u32 MULTIPLYING = 2, THREADS = (MULTIPLYING + 1) * GROUP, ROWS = MULTIPLYING * 64, KEYS = 128, STAGES = 2;
constexpr u32 QK = 192, V = 128; // padded columns of a key and of a value
// A block is launched with 168 registers a thread; these are as many in all. With 40 the loads would spill.
constexpr u32 MULTIPLYING_REGISTERS = 224, LOADING_REGISTERS = 56;
static_assert(MULTIPLYING * MULTIPLYING_REGISTERS + LOADING_REGISTERS <= (MULTIPLYING + 1) * 168,
              "a block has so many");
// Shared memory, all in tiles of 64 columns, swizzled: a warpgroup's queries [64][QK]; stages of keys [KEYS][QK] and of
// values [KEYS][V]; the rings' barriers; whether a loading warp took something out of a stage's values.
constexpr u32 QUERY_TILE = 64 * 128, QUERY_BYTES = QK / 64 * QUERY_TILE, TILE = KEYS * 128;
constexpr u32 KEYS_AT = MULTIPLYING * QUERY_BYTES, KEY_BYTES = QK / 64 * TILE;
constexpr u32 VALUES_AT = KEYS_AT + STAGES * KEY_BYTES, VALUE_BYTES = V / 64 * TILE;
constexpr u32 KEY_RING_AT = VALUES_AT + STAGES * VALUE_BYTES, VALUE_RING_AT = KEY_RING_AT + Ring<STAGES>::BYTES;
constexpr u32 TAKEN_AT = VALUE_RING_AT + Ring<STAGES>::BYTES, SHARED_BYTES = TAKEN_AT + STAGES * (GROUP / WARP) * 4;
static_assert(SHARED_BYTES == 213088, "src/cuda/mla_prefill_fp8.rs launches with it");

struct Block {
    Work work;
    TileKeys seen;
    u32 first_key, tiles; // of keys
    u8 *shared;
    PKV_INLINE Ring<STAGES> key_ring() const { return Ring<STAGES>(shared + KEY_RING_AT); }
    PKV_INLINE Ring<STAGES> value_ring() const { return Ring<STAGES>(shared + VALUE_RING_AT); }
    PKV_INLINE u8 *keys(u32 tile) const { return shared + KEYS_AT + tile % STAGES * KEY_BYTES; }
    PKV_INLINE u8 *values(u32 tile) const { return shared + VALUES_AT + tile % STAGES * VALUE_BYTES; }
    // By loading warp.
    PKV_INLINE u32 *taken(u32 tile) const {
        return reinterpret_cast<u32 *>(shared + TAKEN_AT) + tile % STAGES * (GROUP / WARP);
    }
    PKV_INLINE u32 key_of(u32 tile) const { return first_key + tile * KEYS; }
};
} // namespace attention_sm90

// ---- the warpgroup that loads: keys 0, keys 1, values 0, keys 2, values 1, ... ----

template <class T> PKV_DEVICE u32 take_out_of_pair(u32 &pair) {
    const u32 found = (not_finite<T>(u16(pair)) ? 0xffffu : 0) | (not_finite<T>(u16(pair >> 16)) ? 0xffff0000u : 0);
    pair &= ~found;
    return found;
}

template <class T> PKV_DEVICE void load(const MlaPrefillAttentionParams &p, const attention_sm90::Block &b) {
    using namespace attention_sm90;
    const Ring<STAGES> key_ring = b.key_ring(), value_ring = b.value_ring();
    const QueryTile &t = b.work.tile;
    // This thread's piece of 16 bytes in a tile's columns, and the first of its rows; the next is 16 rows further.
    const u32 piece = threadIdx.x % 8, row = threadIdx.x % GROUP / 8, at = swizzle_128(row, piece * 16);
    const i64 head_row = i64(b.work.head - p.first_head) * i64(p.buffer.rows) + i64(t.key_row);
    // from: this thread's piece in the tile's first row.
    auto copy = [&](u8 *tile, const u16 *from, u32 stride, u32 rows_left) {
        PKV_UNROLL
        for (u32 i = 0; i < KEYS / 16; i++) {
            const bool valid = row + 16 * i < rows_left;
            cp_async_16(tile + at + 2048 * i, from + i64(valid ? row + 16 * i : 0) * stride, valid);
        }
    };
    auto load_keys = [&](u32 tile) {
        key_ring.wait_empty(tile);
        const u32 key = b.key_of(tile), nope_pieces = p.key_stride / 8, pieces = nope_pieces + p.rope_stride / 8;
        PKV_UNROLL
        for (u32 i = 0; i < QK / 64; i++) {
            const u32 c = 8 * i + piece;
            const bool nope = c < nope_pieces;
            const u32 stride = nope ? p.key_stride : p.rope_stride;
            const u16 *from = static_cast<const u16 *>(nope ? p.keys : p.k_rope) +
                              ((nope ? head_row : i64(t.key_row)) + key) * stride +
                              (c < pieces ? 8 * (nope ? c : c - nope_pieces) : 0);
            copy(b.keys(tile) + i * TILE, from, stride, c < pieces ? t.keys - key : 0);
        }
    };
    auto load_values = [&](u32 tile) {
        value_ring.wait_empty(tile);
        const u32 key = b.key_of(tile);
        PKV_UNROLL
        for (u32 i = 0; i < V / 64; i++) {
            const u32 c = b.work.value_first + 64 * i + 8 * piece;
            const bool used = c < p.value_stride;
            const u16 *from = static_cast<const u16 *>(p.values) + (head_row + key) * p.value_stride + (used ? c : 0);
            copy(b.values(tile) + i * TILE, from, p.value_stride, used ? t.keys - key : 0);
        }
    };
    auto announce_values = [&](u32 tile) {
        u32 found = 0;
        if (b.seen.partial(b.key_of(tile), KEYS)) {
            PKV_UNROLL_NO
            for (u32 i = 0; i < V / 64 * (KEYS / 16); i++) {
                u8 *mine = b.values(tile) + i / (KEYS / 16) * TILE + at + 2048 * (i % (KEYS / 16));
                uint4 x = *reinterpret_cast<const uint4 *>(mine);
                const u32 here = take_out_of_pair<T>(x.x) | take_out_of_pair<T>(x.y) | take_out_of_pair<T>(x.z) |
                                 take_out_of_pair<T>(x.w);
                if (here) operand_store_16(mine, x);
                found |= here;
            }
        }
        found = __any_sync(FULL_MASK, found != 0);
        if (lane_id() == 0) b.taken(tile)[warp_id() % 4] = found;
        value_ring.announce(tile);
    };
    load_keys(0);
    cp_async_commit();
    PKV_UNROLL_NO
    for (u32 tile = 1; tile <= b.tiles; tile++) {
        if (tile < b.tiles) load_keys(tile);
        cp_async_commit();
        cp_async_wait<1>();
        if (tile == 1) key_ring.announce(0);
        else announce_values(tile - 2);
        load_values(tile - 1);
        cp_async_commit();
        cp_async_wait<1>();
        if (tile < b.tiles) key_ring.announce(tile);
    }
    cp_async_wait<0>();
    announce_values(b.tiles - 1);
}

// ---- a warpgroup that multiplies ----

// This warpgroup's queries, each laid out as a key: [nope, padded to 8][rope, padded to 8][zeros].
PKV_DEVICE void load_queries(const MlaPrefillAttentionParams &p, const attention_sm90::Block &b, u8 *queries,
                             u32 first) {
    using namespace attention_sm90;
    const u16 *q = static_cast<const u16 *>(p.q) + i64(b.work.tile.first_token) * p.q_token_stride +
                   i64(b.work.head) * p.q_head_stride;
    const u32 thread = threadIdx.x % GROUP;
    if (p.q_vector) {
        PKV_UNROLL
        for (u32 i = 0; i < QUERY_BYTES / 16 / GROUP; i++) {
            const u32 row = thread / 8 + i / (QK / 64) * 16, piece = thread % 8 + i % (QK / 64) * 8;
            const bool valid = first + row < b.work.tile.rows && 8 * piece < p.nope + p.rope_width;
            cp_async_16(queries + piece / 8 * QUERY_TILE + swizzle_128(row, piece % 8 * 16),
                        valid ? q + i64(first + row) * p.q_token_stride + 8 * piece : q, valid);
        }
        cp_async_commit();
        cp_async_wait<0>();
        return;
    }
    const u32 nope_pieces = ceil_div(p.nope, COLUMN_PAD);
    PKV_UNROLL_NO
    for (u32 i = thread; i < QUERY_BYTES / 16; i += GROUP) {
        const u32 row = i / (QK / 8), piece = i % (QK / 8);
        const bool nope = piece < nope_pieces;
        const u32 column = nope ? 8 * piece : 8 * (piece - nope_pieces), width = nope ? p.nope : p.rope_width;
        const u16 *from = q + i64(first + row) * p.q_token_stride + (nope ? 0 : p.nope) + column;
        u32 words[4] = {};
        PKV_UNROLL
        for (u32 j = 0; j < 8; j++)
            if (first + row < b.work.tile.rows && column + j < width) words[j / 2] |= u32(from[j]) << 16 * (j % 2);
        operand_store_16(queries + piece / 8 * QUERY_TILE + swizzle_128(row, piece % 8 * 16),
                         uint4{words[0], words[1], words[2], words[3]});
    }
}

template <class T> PKV_DEVICE void multiply(const MlaPrefillAttentionParams &p, const attention_sm90::Block &b) {
    using namespace attention_sm90;
    const Ring<STAGES> key_ring = b.key_ring(), value_ring = b.value_ring();
    const Work &w = b.work;
    const u32 group = threadIdx.x / GROUP, thread = threadIdx.x % GROUP;
    u8 *queries = b.shared + group * QUERY_BYTES;
    load_queries(p, b, queries, group * 64);
    fence_async_proxy();
    named_barrier(1 + group, GROUP);

    Softmax softmax = softmax_of(p, w, group * 64 + thread / WARP * 16);
    float score[64] = {}, out[64] = {}, shrink[2];
    u32 probabilities[KEYS / 16][4];
    auto start_scores = [&](u32 tile) { // of keys that were waited for
        wgmma_hold(score);
        wgmma_fence();
        PKV_UNROLL
        for (u32 k = 0; k < QK / 16; k++)
            wgmma_m64n128k16<T>(score, k_major(queries + k / 4 * QUERY_TILE + k % 4 * 32),
                                k_major(b.keys(tile) + k / 4 * TILE + k % 4 * 32), k > 0);
        wgmma_commit();
    };
    auto start_sums = [&](u32 tile) {
        value_ring.wait_full(tile);
        wgmma_hold(out);
        wgmma_fence();
        PKV_UNROLL
        for (u32 k = 0; k < KEYS / 16; k++)
            wgmma_m64n128k16_n_major<T>(out, probabilities[k], n_major(b.values(tile) + 2048 * k, TILE), 1);
        wgmma_commit();
    };
    auto end_sums = [&](u32 tile) {
        const u32 *taken = b.taken(tile);
        const u32 found = taken[0] | taken[1] | taken[2] | taken[3];
        value_ring.release(tile);
        if (!found) return;
        const i64 row = i64(w.head - p.first_head) * i64(p.buffer.rows) + i64(w.tile.key_row) + b.key_of(tile);
        const u16 *values = static_cast<const u16 *>(p.values) + row * p.value_stride + w.value_first;
        add_not_finite<T>(softmax, fragments(out), b.key_of(tile), KEYS, [&](u32 key, u32 column) {
            return w.value_first + column < p.value_stride ? values[i64(key) * p.value_stride + column] : u16(0);
        });
    };
    auto take = [&](u32 tile) {
        take_scores(p, w.tile, softmax, fragments(score), b.key_of(tile), b.seen.partial(b.key_of(tile), KEYS), shrink);
    };
    auto round_probabilities = [&] {
        PKV_UNROLL
        for (u32 k = 0; k < KEYS / 16; k++) {
            PKV_UNROLL
            for (u32 i = 0; i < 4; i++)
                probabilities[k][i] = from_f32x2<T>(score[8 * k + 2 * i], score[8 * k + 2 * i + 1]);
        }
    };

    // Every tile's keys are waited for at the end of the step before, between its exponentials and the wait for its
    // sums: without a loop there, the compiler moves the exponentials below, where the tensor core has nothing to do.
    if (b.tiles > 0) {
        key_ring.wait_full(0);
        start_scores(0);
        wgmma_wait<0>();
        wgmma_hold(score);
        key_ring.release(0);
        take(0);
        if (b.tiles > 1) key_ring.wait_full(1);
        round_probabilities();
        PKV_UNROLL_NO
        for (u32 tile = 1; tile < b.tiles; tile++) {
            start_scores(tile);
            start_sums(tile - 1);
            wgmma_wait<1>();
            wgmma_hold(score);
            key_ring.release(tile);
            take(tile);
            wgmma_hold(score);
            if (tile + 1 < b.tiles) key_ring.wait_full(tile + 1);
            wgmma_wait<0>();
            wgmma_hold(out);
            end_sums(tile - 1);
            shrink_rows(fragments(out), shrink);
            round_probabilities();
        }
        start_sums(b.tiles - 1);
        wgmma_wait<0>();
        wgmma_hold(out);
        end_sums(b.tiles - 1);
    }
    store_rows<T>(p, w, softmax, fragments(out));
}

template <class T> PKV_DEVICE void mla_prefill_fp8_attention_sm90(const MlaPrefillAttentionParams &p) {
    using namespace attention_sm90;
    PKV_DYNAMIC_SHARED(u8, shared);
    Block b;
    b.work = find_work(p, ROWS, V);
    if (b.work.tile.rows == 0) return;
    b.shared = shared;
    b.seen = tile_keys(p, b.work.tile);
    b.first_key = b.seen.some.first / KEYS * KEYS;
    b.tiles = b.seen.some.end > b.first_key ? ceil_div(b.seen.some.end - b.first_key, KEYS) : 0;
    const u32 multiplying = ceil_div(b.work.tile.rows, 64u);
    b.key_ring().init(threadIdx.x, GROUP / WARP, multiplying * GROUP / WARP);
    b.value_ring().init(threadIdx.x, GROUP / WARP, multiplying * GROUP / WARP);
    __syncthreads();
    const u32 group = threadIdx.x / GROUP;
    if (group == MULTIPLYING) {
        registers_give<LOADING_REGISTERS>();
        if (b.tiles > 0) load<T>(p, b);
    } else if (group < multiplying) {
        registers_take<MULTIPLYING_REGISTERS>();
        multiply<T>(p, b);
    }
}

PKV_KERNEL(mla_prefill_fp8_attention_sm90_f16, MlaPrefillAttentionParams, attention_sm90::THREADS, 1) {
    mla_prefill_fp8_attention_sm90<f16>(p);
}
PKV_KERNEL(mla_prefill_fp8_attention_sm90_bf16, MlaPrefillAttentionParams, attention_sm90::THREADS, 1) {
    mla_prefill_fp8_attention_sm90<bf16>(p);
}

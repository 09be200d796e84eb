// The scores of mla_indexer_fp8_score.cu on Hopper's wgmma: keys are rows of A, heads columns of B, relu, weight and the
// sum over the heads in registers in the same order. Differently:
//   * a block takes 256 keys: two warpgroups that multiply, 128 keys each, and one that loads query rows into a ring of
//     parts of 64 heads. Keys stay in registers, as A, for all the rows of the block, which are as many as the grid leaves
//     (src/cuda/mla_indexer_fp8.rs); so only heads are read from shared memory;
//   * a warpgroup's first 64 keys are weighted while its last 64 are multiplied, and one warpgroup's while the other's are.
//
// Codes are f16 here as well: wgmma on e4m3 would be twice as fast, but cuts its sums to about 14 bits
// (device/wgmma.cuh), and scores would be off by more than they may. The sum over k may run in any order as long as A and
// B agree: of 16 codes, byte 4 t + i is element 2 t + i for i < 2, else 2 t + i + 6, so that a thread's share of a key's
// 16 codes is one word.
#include "device/ring.cuh"
#include "device/wgmma.cuh"
#include "mla_indexer_fp8_score.cuh"

namespace score_sm90 {
using namespace score;
constexpr u32 GROUP = 128, MULTIPLYING = 2, THREADS = (MULTIPLYING + 1) * GROUP, KEYS = 256, STAGES = 4;
static_assert(LOADING == GROUP && KEYS == MULTIPLYING * 128, "a warpgroup loads, a warpgroup has 128 keys");
// Shared memory: stages of heads, two tiles [64][64] f16 each, swizzled; of head weights [64] f32; barriers.
constexpr u32 TILE_BYTES = HEADS * 128, STAGE_BYTES = 2 * TILE_BYTES, WEIGHTS_AT = STAGES * STAGE_BYTES;
constexpr u32 RING_AT = WEIGHTS_AT + STAGES * HEADS * 4, SHARED_BYTES = RING_AT + Ring<STAGES>::BYTES;
static_assert(SHARED_BYTES == 66624, "src/cuda/mla_indexer_fp8.rs launches with it");
constexpr u32 STEPS = DEPTH / 16;

struct Run { // of neighbouring rows of one sequence that see some of the block's keys
    u32 sequence;
    u64 first_row, end_row, most; // most: keys that the last row sees
    u64 first_position;           // of row 0, were it of this sequence (modulo 2^64)
};
} // namespace score_sm90

PKV_DEVICE u64 first_key_of_block(const MlaIndexerScoreParams &p) {
    const u64 row_tiles = gridDim.x / ceil_div(p.max_keys, u64(score_sm90::KEYS));
    return blockIdx.x / row_tiles * score_sm90::KEYS;
}

// All the warpgroups walk over the same rows in the same order.
template <class F> PKV_DEVICE void each_run(const MlaIndexerScoreParams &p, F of_run) {
    using namespace score_sm90;
    const u64 row_tiles = gridDim.x / ceil_div(p.max_keys, u64(KEYS)), rows = ceil_div(p.rows, row_tiles);
    const u64 first_key = first_key_of_block(p), tokens = p.batch.row_offsets[p.batch.batch_size];
    u64 row = p.first_row + blockIdx.x % row_tiles * rows, end = row + rows;
    if (end > p.first_row + p.rows) end = p.first_row + p.rows;
    if (end > tokens) end = tokens;
    while (row < end) {
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
        const u64 most = keys_seen(p.batch, last, p.causal, p.max_keys), first_position = place.position - row;
        if (p.causal && place.position < first_key) row += first_key - place.position; // those see none of the keys
        if (row < run_end && first_key < most) of_run(Run{place.sequence, row, run_end, most, first_position});
        row = run_end;
    }
}

// ---- the warpgroup that loads ----

PKV_DEVICE void store_heads(const MlaIndexerScoreParams &p, u8 *shared, u32 slot, const HeadCodes &mine, u32 thread) {
    using namespace score_sm90;
    const u32 pieces = round_up(p.cache.head_size, 16u) / 16;
    u8 *stage = shared + slot * STAGE_BYTES;
    PKV_UNROLL
    for (u32 j = 0; j < PIECES; j++) {
        const u32 i = thread + j * LOADING, head = i / pieces, piece = i % pieces;
        if (head >= HEADS) continue;
        const uint4 &c = mine.codes[j];
        const uint4 lo{e4m3x2_to_f16x2(u16(c.x)), e4m3x2_to_f16x2(u16(c.y)), e4m3x2_to_f16x2(u16(c.z)),
                       e4m3x2_to_f16x2(u16(c.w))};
        const uint4 hi{e4m3x2_to_f16x2(u16(c.x >> 16)), e4m3x2_to_f16x2(u16(c.y >> 16)),
                       e4m3x2_to_f16x2(u16(c.z >> 16)), e4m3x2_to_f16x2(u16(c.w >> 16))};
        // Eight neighbouring lanes have a row's two tiles, whose pieces share banks: four begin with the second half.
        u8 *tile = stage + piece / 4 * TILE_BYTES;
        const u32 byte = piece % 4 * 32, first = piece / 4 * 16;
        operand_store_16(tile + swizzle_128(head, byte + first), first ? hi : lo);
        operand_store_16(tile + swizzle_128(head, byte + (first ^ 16)), first ? lo : hi);
    }
    if (thread < HEADS) reinterpret_cast<float *>(shared + WEIGHTS_AT)[slot * HEADS + thread] = mine.weight;
}

PKV_DEVICE void load(const MlaIndexerScoreParams &p, u8 *shared) {
    using namespace score_sm90;
    const Ring<STAGES> ring(shared + RING_AT);
    const u32 thread = threadIdx.x % GROUP, parts = ceil_div(p.num_heads, HEADS);
    if (p.cache.head_size <= DEPTH - 16) { // columns that nothing else is written to
        for (u32 i = thread * 16; i < WEIGHTS_AT; i += GROUP * 16) operand_store_16(shared + i, uint4{0, 0, 0, 0});
        named_barrier(1, GROUP);
    }
    u32 step = 0;
    each_run(p, [&](const Run &run) {
        HeadCodes next;
        load_heads(p, next, run.first_row, 0, thread);
        u64 row = run.first_row;
        u32 part = 0;
        while (row < run.end_row) {
            const HeadCodes mine = next;
            if (++part == parts) {
                part = 0;
                row++;
            }
            if (row < run.end_row) load_heads(p, next, row, part * HEADS, thread);
            const u32 slot = step % STAGES;
            ring.wait_empty(step);
            store_heads(p, shared, slot, mine, thread);
            ring.announce(step++);
        }
    });
}

// ---- a warpgroup that multiplies ----

// Four codes from `column` on, zeros past `depth`.
PKV_DEVICE u32 load_word(const u8 *row, u32 column, u32 depth, bool vector) {
    if (vector) return column < depth ? *reinterpret_cast<const u32 *>(row + column) : 0;
    u32 word = 0;
    PKV_UNROLL
    for (u32 i = 0; i < 4; i++)
        if (column + i < depth) word |= u32(row[column + i]) << 8 * i;
    return word;
}

PKV_DEVICE void multiply(const MlaIndexerScoreParams &p, u8 *shared) {
    using namespace score_sm90;
    const Ring<STAGES> ring(shared + RING_AT);
    const u32 lane = lane_id(), parts = ceil_div(p.num_heads, HEADS), depth = p.cache.head_size;
    // Key 64 m + 8 i + `warp_key` of the block is in row 8 i of this lane's fragments of A number m.
    const u32 warp_key = threadIdx.x / GROUP * 128 + warp_id() % 4 * 16 + lane / 4;
    const u32 my_key = warp_key + lane % 4 / 2 * 64 + lane % 2 * 8; // whose score this lane stores
    const u64 first_key = first_key_of_block(p);
    u32 step = 0;
    float dot[2][32] = {};
    each_run(p, [&](const Run &run) {
        u32 keys[2][STEPS][4];
        PKV_UNROLL
        for (u32 m = 0; m < 2; m++) {
            PKV_UNROLL
            for (u32 i = 0; i < 2; i++) {
                Slot slot;
                const u64 key = first_key + warp_key + 64 * m + 8 * i;
                const bool held = key < run.most && find_slot(p.batch, p.cache, run.sequence, key, slot);
                const u8 *row = static_cast<const u8 *>(p.cache.blocks) + (held ? slot.blocks : 0);
                PKV_UNROLL
                for (u32 k = 0; k < STEPS; k++) {
                    const u32 word = held ? load_word(row, 16 * k + lane % 4 * 4, depth, p.k_vector) : 0;
                    keys[m][k][i] = e4m3x2_to_f16x2(u16(word));
                    keys[m][k][i + 2] = e4m3x2_to_f16x2(u16(word >> 16));
                }
            }
        }
        Slot slot;
        const bool held =
            first_key + my_key < run.most && find_slot(p.batch, p.cache, run.sequence, first_key + my_key, slot);
        const float scale = held ? static_cast<const float *>(p.cache.scales)[slot.scales] : f32_nan();

        float total[2][2] = {};
        u32 part = 0;
        PKV_UNROLL_NO
        for (u64 row = run.first_row; row < run.end_row; step++) {
            const u32 slot_of_step = step % STAGES;
            ring.wait_full(step);
            const u8 *stage = shared + slot_of_step * STAGE_BYTES;
            const float *weights = reinterpret_cast<const float *>(shared + WEIGHTS_AT) + slot_of_step * HEADS;
            wgmma_hold(dot[0]);
            wgmma_hold(dot[1]);
            wgmma_fence();
            PKV_UNROLL
            for (u32 m = 0; m < 2; m++) {
                PKV_UNROLL
                for (u32 k = 0; k < STEPS; k++)
                    wgmma_m64n64k16<f16>(dot[m], keys[m][k], k_major(stage + k / 4 * TILE_BYTES + k % 4 * 32), k > 0);
                wgmma_commit();
            }
            PKV_UNROLL
            for (u32 m = 0; m < 2; m++) {
                if (m == 0) wgmma_wait<1>();
                else wgmma_wait<0>();
                wgmma_hold(dot[m]);
                PKV_UNROLL
                for (u32 n = 0; n < HEADS / 8; n++) {
                    const float2 weight = *reinterpret_cast<const float2 *>(weights + 8 * n + lane % 4 * 2);
                    PKV_UNROLL
                    for (u32 i = 0; i < 2; i++) {
                        const float lo = dot[m][4 * n + 2 * i], hi = dot[m][4 * n + 2 * i + 1];
                        total[m][i] = fmaf(weight.x, lo < 0.0f ? 0.0f : lo, total[m][i]); // a NaN stays one
                        total[m][i] = fmaf(weight.y, hi < 0.0f ? 0.0f : hi, total[m][i]);
                    }
                }
            }
            ring.release(step);
            if (++part < parts) continue;
            part = 0;
            float mine = 0.0f;
            PKV_UNROLL
            for (u32 m = 0; m < 2; m++) {
                PKV_UNROLL
                for (u32 i = 0; i < 2; i++) {
                    const float all = group_sum<4>(total[m][i]);
                    if (lane % 4 == 2 * m + i) mine = all;
                    total[m][i] = 0.0f;
                }
            }
            const TokenPlace here{run.sequence, run.first_position + row};
            if (first_key + my_key < keys_seen(p.batch, here, p.causal, p.max_keys))
                p.scores[i64(row - p.first_row) * p.score_stride + i64(first_key + my_key)] = __fmul_rn(mine, scale);
            row++;
        }
    });
}

PKV_KERNEL(mla_indexer_fp8_score_sm90, MlaIndexerScoreParams, score_sm90::THREADS, 1) {
    using namespace score_sm90;
    PKV_DYNAMIC_SHARED(u8, shared);
    Ring<STAGES>(shared + RING_AT).init(threadIdx.x, GROUP / WARP, MULTIPLYING * GROUP / WARP);
    __syncthreads();
    if (threadIdx.x < MULTIPLYING * GROUP) multiply(p, shared);
    else load(p, shared);
}

// The top_k best of each row of scores, best first, exactly: equal scores by position, NaN last.
//
// Naively, sort the row. Here a block a row
//   1. finds the k-th best by radix: scores map to unsigned keys in their order (-0 as +0, NaN below all), and three
//      histograms of 11, 11 and 10 bits each fix the next digits of the k-th largest key and how many are above it;
//   2. collects what is above, in any order, and of the keys equal to it the lowest positions;
//   3. sorts the k collected by (key, position) with a bitonic network, in shared memory, or in scratch where k is
//      large.
// Steps 2 and 3 make the result one value whatever the order in which threads arrive.
//
// The network's pairs at distances up to 32 lie within 64 neighbours, which one warp works on: no barrier of the block
// between those. Every second 16 entries lie backwards: so both entries of half a warp's pairs are in different banks
// at any distance, where in plain order those at distances below 16 would share every second one.
#include "device/warp.cuh"
#include "mla_indexer_fp8.cuh"

namespace selection {
constexpr u32 THREADS = 512, WARPS = THREADS / WARP, BINS = 2048, SORT_IN_SHARED = 4096;
// dynamic shared memory: histogram [BINS] u32, then the collected (key, position) [sort_size] u64
constexpr u32 COLLECTED_AT = BINS * 4;
static_assert(COLLECTED_AT + SORT_IN_SHARED * 8 <= 48 * 1024, "no attribute needed to launch");
} // namespace selection

// Larger for a better score.
PKV_DEVICE u32 order_key(float score) {
    const u32 bits = __float_as_uint(score);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
    if (bits == 0x80000000u) return 0x80000000u; // -0 as +0
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
PKV_DEVICE u64 sort_entry(u32 key, u32 position) { return u64(key) << 32 | u32(~position); } // larger first

PKV_DEVICE u32 place_of(u32 entry) { return entry ^ (entry >> 4 & 1) * 15; } // in `collected`

// The bin, from the top one down, in which the running count reaches `wanted`; the count above it. Histogram in shared
// memory, `wanted` at most its total; the caller synchronises before.
struct Digit {
    u32 bin, above;
};
PKV_DEVICE Digit find_digit(const u32 *histogram, u32 wanted, u32 *scratch) {
    using namespace selection;
    constexpr u32 OWN = BINS / THREADS;
    static_assert(OWN == 4, "read as one uint4: neighbours' loads lie in different banks");
    const u32 first = BINS - 1 - threadIdx.x * OWN; // this thread's bins, downwards
    const uint4 counts = *reinterpret_cast<const uint4 *>(histogram + first + 1 - OWN);
    const u32 own = counts.x + counts.y + counts.z + counts.w;
    u32 upto = own;
    PKV_UNROLL
    for (u32 step = 1; step < WARP; step *= 2) {
        const u32 other = __shfl_up_sync(FULL_MASK, upto, step);
        if (lane_id() >= step) upto += other;
    }
    if (lane_id() == WARP - 1) scratch[warp_id()] = upto;
    __syncthreads();
    for (u32 w = 0; w < warp_id(); w++) upto += scratch[w];
    u32 above = upto - own;
    if (above < wanted && wanted <= upto) { // one thread
        u32 bin = first;
        while (above + histogram[bin] < wanted) above += histogram[bin--];
        scratch[WARPS] = bin;
        scratch[WARPS + 1] = above;
    }
    __syncthreads();
    return {scratch[WARPS], scratch[WARPS + 1]};
}

PKV_KERNEL(mla_indexer_fp8_select, MlaIndexerSelectParams, selection::THREADS, 1) {
    using namespace selection;
    PKV_DYNAMIC_SHARED(u8, shared);
    __shared__ u32 scratch[WARPS + 2];
    __shared__ u32 collected_count;
    const u64 row = p.first_row + blockIdx.x;
    TokenPlace place;
    if (!find_token(p.batch, row, place)) return;
    const u32 seen = u32(keys_seen(p.batch, place, p.causal, p.max_keys));
    const u32 k = p.top_k < seen ? p.top_k : seen;
    const float *scores = p.scores + i64(row - p.first_row) * p.score_stride;
    u32 *histogram = reinterpret_cast<u32 *>(shared);
    u64 *collected =
        p.sorted ? p.sorted + i64(blockIdx.x) * p.sort_size : reinterpret_cast<u64 *>(shared + COLLECTED_AT);

    // The k-th best key, and how many of the keys equal to it are wanted (all: `equal_wanted` = their number).
    u32 threshold = 0, equal_wanted = seen, equal = seen;
    if (k < seen) {
        u32 wanted = k, known_mask = 0;
        for (u32 pass = 0; pass < 3; pass++) {
            const u32 shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, digit_mask = pass == 2 ? 0x3ffu : 0x7ffu;
            __syncthreads();
            for (u32 i = threadIdx.x; i < BINS; i += THREADS) histogram[i] = 0;
            __syncthreads();
            for (u32 s = threadIdx.x; s < seen; s += THREADS) {
                const u32 key = order_key(scores[s]);
                if ((key & known_mask) == threshold) atomicAdd(&histogram[key >> shift & digit_mask], 1u);
            }
            __syncthreads();
            const Digit digit = find_digit(histogram, wanted, scratch);
            threshold |= digit.bin << shift;
            known_mask |= digit_mask << shift;
            wanted -= digit.above;
            equal = histogram[digit.bin];
        }
        equal_wanted = wanted;
    }
    const bool take_equal = k == seen || equal == equal_wanted; // else only the lowest positions of them

    if (threadIdx.x == 0) collected_count = 0;
    __syncthreads();
    for (u32 from = warp_id() * WARP; from < seen; from += THREADS) {
        const u32 s = from + lane_id();
        const u32 key = s < seen ? order_key(scores[s]) : 0;
        const bool take = s < seen && (k == seen || key > threshold || (take_equal && key == threshold));
        const u32 takers = __ballot_sync(FULL_MASK, take);
        if (takers == 0) continue;
        u32 at = 0;
        if (lane_id() == 0) at = atomicAdd(&collected_count, u32(__popc(takers)));
        at = __shfl_sync(FULL_MASK, at, 0) + u32(__popc(takers & ((1u << lane_id()) - 1)));
        if (take) collected[place_of(at)] = sort_entry(key, s);
    }
    if (!take_equal) {
        u32 found = k - equal_wanted; // entries collected, or taken before this chunk
        for (u32 from = 0; found < k; from += THREADS) {
            const u32 s = from + threadIdx.x;
            const bool take = s < seen && order_key(scores[s]) == threshold;
            const u32 takers = __ballot_sync(FULL_MASK, take);
            __syncthreads();
            if (lane_id() == 0) scratch[warp_id()] = u32(__popc(takers));
            __syncthreads();
            u32 before = 0, all = 0;
            for (u32 w = 0; w < WARPS; w++) {
                if (w < warp_id()) before += scratch[w];
                all += scratch[w];
            }
            const u32 at = found + before + u32(__popc(takers & ((1u << lane_id()) - 1)));
            if (take && at < k) collected[place_of(at)] = sort_entry(threshold, s);
            found += all;
        }
    }
    // Sorted downwards; zeros (no entry is 0) fill up to a power of two.
    u32 size = 1;
    while (size < k) size *= 2;
    for (u32 i = k + threadIdx.x; i < size; i += THREADS) collected[place_of(i)] = 0;
    __syncthreads();
    for (u32 block = 2; block <= size; block *= 2) {
        for (u32 step = block / 2; step > 0; step /= 2) {
            for (u32 i = threadIdx.x; i < size / 2; i += THREADS) {
                const u32 first = (i & ~(step - 1)) * 2 + (i & (step - 1));
                u64 &lo = collected[place_of(first)], &hi = collected[place_of(first + step)];
                const u64 a = lo, b = hi;
                const bool down = (first & block) == 0;
                if (down == (a < b)) {
                    lo = b;
                    hi = a;
                }
            }
            const u32 next = step > 1 ? step / 2 : block;
            if (step <= WARP && next <= WARP && 2 * next <= size) __syncwarp();
            else __syncthreads();
        }
    }
    i32 *indices = p.output_indices + i64(row) * p.indices_stride;
    float *out = p.output_scores ? p.output_scores + i64(row) * p.output_scores_stride : nullptr;
    for (u32 i = threadIdx.x; i < p.top_k; i += THREADS) {
        const u32 position = i < k ? ~u32(collected[place_of(i)]) : 0;
        indices[i] = i < k ? i32(position) : -1;
        if (out) out[i] = i < k ? scores[position] : -f32_inf();
    }
}

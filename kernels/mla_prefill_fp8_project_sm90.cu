// The up-projection of mla_prefill_fp8_project.cu on Hopper's wgmma, for f16 and bf16: the same tile of 128 rows x 128
// features, the same pipeline of groups of 128 columns, the same scale folded into f32 sums once a group. Differently:
//   * a block is two warpgroups that multiply, 64 rows each, and one that loads. They meet at two barriers a stage: full
//     (loaded; the four loading warps) and empty (multiplied; the eight others). While one warpgroup folds scales in or
//     stores its half of a tile, the other has the tensor core;
//   * blocks are as many as multiprocessors and walk over the tiles; the loads of the next tile go on during the last
//     one's stores. Neighbouring blocks have neighbouring rows and share their features in L2;
//   * stages are swizzled as wgmma wants them, which is how cp.async writes them.
// Only rows that a sequence owns make tiles.
#include "device/ring.cuh"
#include "device/wgmma.cuh"
#include "mla_prefill_fp8_project.cuh"

namespace project_sm90 {
constexpr u32 ROWS = 128, FEATURES = 128, GROUP = 128; // threads of a warpgroup
constexpr u32 MULTIPLYING = 2, THREADS = (MULTIPLYING + 1) * GROUP, STAGES = 5;
constexpr u32 AHEAD = 3; // stages whose copies are under way; what is behind them is announced
static_assert(AHEAD < STAGES - 1, "a stage is announced while another is multiplied");
// Shared memory: stages of codes [128][128] and weight [128][128], swizzled; of row scales [128] f32; the finished tile;
// barriers.
constexpr u32 CODES = 0, WEIGHT = ROWS * SCALE_BLOCK, STAGE_BYTES = WEIGHT + FEATURES * SCALE_BLOCK;
constexpr u32 SCALES_AT = STAGES * STAGE_BYTES, TILE_AT = SCALES_AT + STAGES * ROWS * 4;
constexpr u32 TILE_STRIDE = FEATURES + 8; // eight rows' pieces in different banks
constexpr u32 RING_AT = TILE_AT + ROWS * TILE_STRIDE * 2, SHARED_BYTES = RING_AT + Ring<STAGES>::BYTES;
static_assert(SHARED_BYTES == 201296, "src/cuda/mla_prefill_fp8.rs launches with it");

struct Tiles {
    u32 rows, count, first_feature; // tiles along the rows, in all; the first's feature
};
} // namespace project_sm90

PKV_DEVICE project_sm90::Tiles tiles_of(const MlaPrefillProjectParams &p) {
    using namespace project_sm90;
    const u64 used = *p.rows_used < p.rows ? *p.rows_used : p.rows;
    const u32 width = p.nope + p.value_width, first = p.first_head * width / FEATURES,
              end = ceil_div((p.first_head + p.heads) * width, FEATURES);
    const u32 rows = u32(ceil_div(used, u64(ROWS)));
    return {rows, rows * (end - first), first * FEATURES};
}

PKV_DEVICE void load(const MlaPrefillProjectParams &p, u8 *shared) {
    using namespace project_sm90;
    const Ring<STAGES> ring(shared + RING_AT);
    const Tiles tiles = tiles_of(p);
    const u32 thread = threadIdx.x % GROUP, row = thread / 8, column = thread % 8 * 16, groups = p.latent / SCALE_BLOCK;
    const u32 at = swizzle_128(row, column); // 16 rows further it is 2048 bytes further
    u32 step = 0;
    for (u32 tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
        const u64 first_row = u64(tile % tiles.rows) * ROWS;
        const u32 first_feature = tiles.first_feature + tile / tiles.rows * FEATURES;
        const u32 rows_left = p.rows - first_row < ROWS ? u32(p.rows - first_row) : ROWS;
        const u32 features_left = p.features - first_feature < FEATURES ? p.features - first_feature : FEATURES;
        for (u32 g = 0; g < groups; g++, step++) {
            const u32 slot = step % STAGES;
            ring.wait_empty(step);
            u8 *stage = shared + slot * STAGE_BYTES;
            const u8 *codes = p.codes + i64(first_row) * p.latent + g * SCALE_BLOCK + column;
            const u8 *weight = p.weight + i64(first_feature) * p.weight_stride + g * SCALE_BLOCK + column;
            PKV_UNROLL
            for (u32 i = 0; i < ROWS / 16; i++) {
                const bool valid = row + 16 * i < rows_left;
                cp_async_16(stage + CODES + at + 2048 * i, codes + i64(valid ? row + 16 * i : 0) * p.latent, valid);
            }
            PKV_UNROLL
            for (u32 i = 0; i < FEATURES / 16; i++) {
                const bool valid = row + 16 * i < features_left;
                cp_async_16(stage + WEIGHT + at + 2048 * i, weight + i64(valid ? row + 16 * i : 0) * p.weight_stride,
                            valid);
            }
            if (thread < ROWS / 4) // scale_stride covers whole tiles
                cp_async_16(shared + SCALES_AT + (slot * ROWS + thread * 4) * 4,
                            p.scales + i64(g) * p.scale_stride + i64(first_row) + thread * 4);
            cp_async_commit();
            if (step >= AHEAD) {
                cp_async_wait<AHEAD>();
                ring.announce(step - AHEAD);
            }
        }
    }
    cp_async_wait<0>();
    for (u32 i = step < AHEAD ? 0 : step - AHEAD; i < step; i++) ring.announce(i);
}

template <class T> PKV_DEVICE void multiply(const MlaPrefillProjectParams &p, u8 *shared) {
    using namespace project_sm90;
    const Ring<STAGES> ring(shared + RING_AT);
    const Tiles tiles = tiles_of(p);
    const u32 lane = lane_id(), group = threadIdx.x / GROUP, thread = threadIdx.x % GROUP;
    const u32 group_row = group * 64, row = group_row + thread / WARP * 16 + lane / 4, groups = p.latent / SCALE_BLOCK;
    T *tile_rows = reinterpret_cast<T *>(shared + TILE_AT) + group_row * TILE_STRIDE;
    u32 step = 0;
    float part[64] = {};
    for (u32 tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
        const u64 first_row = u64(tile % tiles.rows) * ROWS;
        const u32 first_feature = tiles.first_feature + tile / tiles.rows * FEATURES;
        const float *weight_scales = p.weight_scales + i64(first_feature / FEATURES) * p.weight_scale_stride;
        float sum[64] = {};
        PKV_UNROLL_NO
        for (u32 g = 0; g < groups; g++, step++) {
            const float weight_scale = weight_scales[g];
            const u32 slot = step % STAGES;
            ring.wait_full(step);
            const u8 *codes = shared + slot * STAGE_BYTES + CODES + group_row * SCALE_BLOCK,
                     *weight = shared + slot * STAGE_BYTES + WEIGHT;
            wgmma_hold(part);
            wgmma_fence();
            PKV_UNROLL
            for (u32 k = 0; k < SCALE_BLOCK; k += 32)
                wgmma_m64n128k32_e4m3(part, k_major(codes + k), k_major(weight + k), k > 0);
            wgmma_commit();
            const float *scales = reinterpret_cast<const float *>(shared + SCALES_AT) + slot * ROWS + row;
            const float s[2] = {__fmul_rn(scales[0], weight_scale), __fmul_rn(scales[8], weight_scale)};
            wgmma_wait<0>();
            wgmma_hold(part);
            ring.release(step);
            PKV_UNROLL
            for (u32 i = 0; i < 64; i++) sum[i] = fmaf(part[i], s[i / 2 % 2], sum[i]);
        }
        named_barrier(1 + group, GROUP); // everybody is done with the last tile
        PKV_UNROLL
        for (u32 j = 0; j < 16; j++) {
            PKV_UNROLL
            for (u32 half = 0; half < 2; half++) {
                T *to = tile_rows + (row - group_row + 8 * half) * TILE_STRIDE + 8 * j + lane % 4 * 2;
                *reinterpret_cast<u32 *>(to) = from_f32x2<T>(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
            }
        }
        named_barrier(1 + group, GROUP);
        store_tile<TILE_STRIDE, FEATURES>(p, tile_rows, 64, first_row + group_row, first_feature, thread, GROUP);
    }
}

template <class T> PKV_DEVICE void mla_prefill_fp8_project_sm90(const MlaPrefillProjectParams &p) {
    using namespace project_sm90;
    PKV_DYNAMIC_SHARED(u8, shared);
    Ring<STAGES>(shared + RING_AT).init(threadIdx.x, GROUP / WARP, MULTIPLYING * GROUP / WARP);
    __syncthreads();
    if (threadIdx.x < MULTIPLYING * GROUP) multiply<T>(p, shared);
    else load(p, shared);
}

PKV_KERNEL(mla_prefill_fp8_project_sm90_f16, MlaPrefillProjectParams, project_sm90::THREADS, 1) {
    mla_prefill_fp8_project_sm90<f16>(p);
}
PKV_KERNEL(mla_prefill_fp8_project_sm90_bf16, MlaPrefillProjectParams, project_sm90::THREADS, 1) {
    mla_prefill_fp8_project_sm90<bf16>(p);
}

// The up-projection of quantised latent rows to the keys and values of a group of heads:
//     KV[r, n] = sum_g (sum_{k in g} codes[r, k] * W[n, k]) * s[r, g] * Ws[n / 128, g],    rounded to T
// with n running over the heads, per head its `nope` K features, then its V features.
//
// Naively a product of [rows, C] and [features, C]^T with a scale folded in every 128 columns. Here
//   * a tile is 128 rows x 128 features, the features starting at a multiple of 128, so that one Ws a group does for
//     all of it; a stage of the pipeline is one group: 128 codes = 128 bytes a row, and the tile's 128 row scales;
//   * a group's products are summed by the tensor core from zero, then enter the running sum times s * Ws by one fma:
//     what fp8 accumulation loses (see device/mma.cuh) stays within a group. T = float takes the exact products;
//   * the finished tile goes through shared memory, so that rows leave in 16-byte pieces, each to its head's K or V.
#include "device/mma.cuh"
#include "device/warp.cuh"
#include "mla_prefill_fp8_project.cuh"

namespace project {
constexpr u32 ROWS = 128, FEATURES = 128, THREADS = 256, STAGES = 3;
// warps 2 x 4 over the tile, each 64 x 32: 4 x 4 fragments of 16 x 8
constexpr u32 WARPS_N = 4, FRAGMENTS_M = 4, FRAGMENTS_N = 4;
// shared memory of a stage: codes [128][128], weight [128][128], row scales [128] f32
constexpr u32 CODES = 0, WEIGHT = ROWS * SCALE_BLOCK, SCALES = WEIGHT + FEATURES * SCALE_BLOCK;
constexpr u32 STAGE_BYTES = SCALES + ROWS * 4;
constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES;
static_assert(SHARED_BYTES == 99840 && SHARED_BYTES <= 99 * 1024, "src/cuda/mla_prefill_fp8.rs launches with it");
// The finished tile lies over the stages. With 8 more columns a row, the fragments' rows go to different banks: 8 of
// them, 4 words each, at a time in 16 bits; 4 of 8 words, half a warp, in 32.
constexpr u32 TILE_STRIDE = FEATURES + 8;
static_assert(ROWS * TILE_STRIDE * 4 <= SHARED_BYTES, "the tile fits over the stages");
} // namespace project

// Byte of column `column` (a multiple of 16) in row `row` of a 128-byte wide operand: the 16-byte pieces of a row are
// permuted by the row, so that eight rows' pieces of one column lie in different banks.
PKV_DEVICE u32 swizzle(u32 row, u32 column) { return row * SCALE_BLOCK + (column ^ (row & 7) << 4); }

PKV_DEVICE void load_stage(const MlaPrefillProjectParams &p, u8 *stage, u64 first_row, u32 first_feature, u32 group) {
    using namespace project;
    PKV_UNROLL
    for (u32 i = 0; i < ROWS * SCALE_BLOCK / 16 / THREADS; i++) {
        const u32 piece = threadIdx.x + i * THREADS, row = piece / 8, column = piece % 8 * 16;
        const bool valid = first_row + row < p.rows;
        const u64 from = valid ? first_row + row : 0;
        cp_async_16(stage + CODES + swizzle(row, column), p.codes + i64(from) * p.latent + group * SCALE_BLOCK + column,
                    valid);
    }
    const u8 *weight = p.weight + i64(first_feature) * p.weight_stride + group * SCALE_BLOCK;
    if (p.vector) {
        PKV_UNROLL
        for (u32 i = 0; i < FEATURES * SCALE_BLOCK / 16 / THREADS; i++) {
            const u32 piece = threadIdx.x + i * THREADS, row = piece / 8, column = piece % 8 * 16;
            const bool valid = first_feature + row < p.features;
            cp_async_16(stage + WEIGHT + swizzle(row, column), weight + i64(valid ? row : 0) * p.weight_stride + column,
                        valid);
        }
    } else {
        PKV_UNROLL_NO
        for (u32 i = threadIdx.x; i < FEATURES * SCALE_BLOCK; i += THREADS) {
            const u32 row = i / SCALE_BLOCK, column = i % SCALE_BLOCK;
            stage[WEIGHT + swizzle(row, column & ~15u) + (column & 15)] =
                first_feature + row < p.features ? weight[i64(row) * p.weight_stride + column] : 0;
        }
    }
    if (threadIdx.x < ROWS / 4) { // scale_stride covers whole tiles
        cp_async_16(stage + SCALES + threadIdx.x * 16,
                    p.scales + i64(group) * p.scale_stride + i64(first_row) + threadIdx.x * 4, true);
    }
}

template <class T> PKV_DEVICE void mla_prefill_fp8_project(const MlaPrefillProjectParams &p) {
    using namespace project;
    PKV_DYNAMIC_SHARED(u8, shared);
    const u32 row_tiles = u32(ceil_div(p.rows, u64(ROWS)));
    const u64 first_row = u64(blockIdx.x % row_tiles) * ROWS;
    if (first_row >= *p.rows_used) return;
    const u32 feature_tile = p.first_head * (p.nope + p.value_width) / FEATURES + blockIdx.x / row_tiles;
    const u32 first_feature = feature_tile * FEATURES, groups = p.latent / SCALE_BLOCK;
    const u32 lane = lane_id(), warp_row = warp_id() / WARPS_N * 64, warp_column = warp_id() % WARPS_N * 32;

    float sum[FRAGMENTS_M][FRAGMENTS_N][4] = {};
    PKV_UNROLL
    for (u32 g = 0; g < STAGES - 1; g++) {
        if (g < groups) load_stage(p, shared + g * STAGE_BYTES, first_row, first_feature, g);
        cp_async_commit();
    }
    for (u32 g = 0; g < groups; g++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (g + STAGES - 1 < groups)
            load_stage(p, shared + (g + STAGES - 1) % STAGES * STAGE_BYTES, first_row, first_feature, g + STAGES - 1);
        cp_async_commit();

        const u8 *stage = shared + g % STAGES * STAGE_BYTES;
        const float weight_scale = p.weight_scales[i64(feature_tile) * p.weight_scale_stride + g];
        float part[FRAGMENTS_M][FRAGMENTS_N][4] = {};
        PKV_UNROLL_NO // more fragments in flight than one step's would not fit the registers
            for (u32 k = 0; k < SCALE_BLOCK; k += 32) {
            u32 b[FRAGMENTS_N][2];
            PKV_UNROLL
            for (u32 n = 0; n < FRAGMENTS_N; n += 2) {
                u32 r[4];
                ldmatrix_x4(r, stage + WEIGHT +
                                   swizzle(warp_column + 8 * n + lane % 8 + lane / 16 * 8, k + lane / 8 % 2 * 16));
                b[n][0] = r[0];
                b[n][1] = r[1];
                b[n + 1][0] = r[2];
                b[n + 1][1] = r[3];
            }
            PKV_UNROLL
            for (u32 m = 0; m < FRAGMENTS_M; m++) {
                u32 a[4];
                ldmatrix_x4(a, stage + CODES + swizzle(warp_row + 16 * m + lane % 16, k + lane / 16 * 16));
                PKV_UNROLL
                for (u32 n = 0; n < FRAGMENTS_N; n++) {
                    if constexpr (sizeof(T) == 4) mma_m16n8k32_e4m3_exact(part[m][n], a, b[n]);
                    else mma_m16n8k32_e4m3(part[m][n], a, b[n]);
                }
            }
        }
        const float *scales = reinterpret_cast<const float *>(stage + SCALES) + warp_row + lane / 4;
        PKV_UNROLL
        for (u32 m = 0; m < FRAGMENTS_M; m++) {
            PKV_UNROLL
            for (u32 half = 0; half < 2; half++) {
                const float s = __fmul_rn(scales[16 * m + 8 * half], weight_scale);
                PKV_UNROLL
                for (u32 n = 0; n < FRAGMENTS_N; n++) {
                    PKV_UNROLL
                    for (u32 i = 2 * half; i < 2 * half + 2; i++) sum[m][n][i] = fmaf(part[m][n][i], s, sum[m][n][i]);
                }
            }
        }
    }
    __syncthreads(); // everybody is done with the stages, and no copy is under way
    T *tile = reinterpret_cast<T *>(shared);
    PKV_UNROLL
    for (u32 m = 0; m < FRAGMENTS_M; m++) {
        PKV_UNROLL
        for (u32 n = 0; n < FRAGMENTS_N; n++) {
            PKV_UNROLL
            for (u32 half = 0; half < 2; half++) {
                T *to =
                    tile + (warp_row + 16 * m + 8 * half + lane / 4) * TILE_STRIDE + warp_column + 8 * n + lane % 4 * 2;
                const float lo = sum[m][n][2 * half], hi = sum[m][n][2 * half + 1];
                if constexpr (sizeof(T) == 4) *reinterpret_cast<float2 *>(to) = float2{lo, hi};
                else *reinterpret_cast<u32 *>(to) = from_f32x2<T>(lo, hi);
            }
        }
    }
    __syncthreads();
    store_tile<TILE_STRIDE, FEATURES>(p, tile, ROWS, first_row, first_feature, threadIdx.x, THREADS);
}

PKV_KERNEL(mla_prefill_fp8_project_f32, MlaPrefillProjectParams, project::THREADS, 1) {
    mla_prefill_fp8_project<float>(p);
}
PKV_KERNEL(mla_prefill_fp8_project_f16, MlaPrefillProjectParams, project::THREADS, 1) {
    mla_prefill_fp8_project<f16>(p);
}
PKV_KERNEL(mla_prefill_fp8_project_bf16, MlaPrefillProjectParams, project::THREADS, 1) {
    mla_prefill_fp8_project<bf16>(p);
}

// What the tensor cores give through mma.sync when nothing else holds them up: the benchmark's yardstick for matrix
// work.
#include "device/mma.cuh"
#include "device/warp.cuh"

struct MatrixRateParams {
    float *sink; // [threads of the grid]; never written, which the compiler cannot know
    u64 rounds;
};
static_assert(sizeof(MatrixRateParams) == 16, "mirrored in gpu_bench.cpp");

// 8 independent accumulators a warp, 16 x 8 x 16 multiply-adds each a round.
PKV_KERNEL(matrix_rate, MatrixRateParams, 256, 2) {
    const u32 seed = threadIdx.x * 0x00010001u & 0x3f803f80u;
    const u32 a[4] = {seed, seed ^ 0x80u, seed ^ 0x800000u, seed}, b[2] = {seed, seed ^ 0x80u};
    float d[8][4] = {};
    PKV_UNROLL_NO
    for (u64 i = 0; i < p.rounds; i++) {
        PKV_UNROLL
        for (u32 n = 0; n < 8; n++) mma_m16n8k16<bf16>(d[n], a, b);
    }
    float sum = 0.0f;
    PKV_UNROLL
    for (u32 n = 0; n < 8; n++) sum += d[n][0] + d[n][1] + d[n][2] + d[n][3];
    if (sum == -1.0f) p.sink[u64(blockIdx.x) * blockDim.x + threadIdx.x] = sum;
}

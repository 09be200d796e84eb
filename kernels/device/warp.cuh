// Reductions with a fixed order of additions: the same bits for every launch.
//
//   WARP = 32, lane_id(), warp_id()    (blocks are one-dimensional)
//   warp_sum, warp_max                 every lane gets the result; butterfly over xor 16, 8, 4, 2, 1
//   group_max<WIDTH>(x)                the same within aligned groups of WIDTH lanes
//   block_sum<THREADS>(x, scratch)     scratch: THREADS / 32 floats of shared memory; synchronises the block before and
//   after its use
//
// All lanes of a warp (threads of a block) must take part.
#pragma once
#include "device/common.cuh"

constexpr u32 WARP = 32;
constexpr u32 FULL_MASK = 0xffffffffu;

PKV_DEVICE u32 lane_id() { return threadIdx.x & (WARP - 1); }
PKV_DEVICE u32 warp_id() { return threadIdx.x / WARP; }

template <u32 WIDTH = WARP> PKV_DEVICE float group_max(float x) {
    PKV_UNROLL
    for (u32 step = WIDTH / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, step));
    return x;
}
template <u32 WIDTH = WARP> PKV_DEVICE float group_sum(float x) {
    PKV_UNROLL
    for (u32 step = WIDTH / 2; step > 0; step /= 2) x += __shfl_xor_sync(FULL_MASK, x, step);
    return x;
}
PKV_DEVICE float warp_sum(float x) { return group_sum<WARP>(x); }
PKV_DEVICE float warp_max(float x) { return group_max<WARP>(x); }

template <u32 THREADS> PKV_DEVICE float block_sum(float x, float *scratch) {
    static_assert(THREADS % WARP == 0 && THREADS <= 1024, "whole warps");
    x = warp_sum(x);
    if constexpr (THREADS == WARP) return x;
    __syncthreads();
    if (lane_id() == 0) scratch[warp_id()] = x;
    __syncthreads();
    float sum = scratch[0];
    PKV_UNROLL
    for (u32 i = 1; i < THREADS / WARP; i++) sum += scratch[i];
    return sum;
}

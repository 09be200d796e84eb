// Reductions with a fixed order of additions: the same bits for every launch.
//
//   WARP = 32, lane_id(), warp_id()    (blocks are one-dimensional)
//   warp_sum, warp_max                 every lane gets the result; butterfly over xor 16, 8, 4, 2, 1
//   group_sum, group_max<WIDTH>(x)     the same within aligned groups of WIDTH lanes
//
// All lanes of a warp must take part.
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

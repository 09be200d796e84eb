// Common ground of every kernel. Header-free CUDA C++: NVRTC on a user's machine has no headers, so nothing here
// includes any.
//
// One source, three compilers:
//   nvcc / NVRTC       -I kernels (NVRTC gets the files by the names used in #include), --std=c++17 --fmad=false
//   g++ -DPKV_EMULATE  C++20, every name of CUDA's that a kernel may use comes from the shim `cuda_emu.h`
//
// Contents
//   u8 u16 u32 u64 i8 i32 i64          fixed-width integers
//   PKV_DEVICE                         before a free device function or template: static, inlined
//   PKV_INLINE                         the same for a member function
//   PKV_KERNEL(name, Params, max_threads, min_blocks) { ... p.field ... }
//                                      an entry point: extern "C", one POD struct by value named `p`, launch bounds
//   PKV_DYNAMIC_SHARED(T, name);       `T *name`: the launch's dynamic shared memory, 1024-byte aligned; once a kernel
//   PKV_ARCH                           80, 89, 90, 100, 120: what the code is compiled for
//   PKV_UNROLL, PKV_UNROLL_NO          before a loop: wholly, not at all
//   f32_inf(), f32_nan(), ceil_div, round_up
//   opaque(x)                          x, of which the compiler knows nothing: a switch over opaque(dtype) stays one
//                                      switch, where the compiler would else make a copy of the loops around it a case
//
// Kernels are compiled with --fmad=false: a product and a sum stay two roundings unless the source says fmaf. The CPU
// does the same, which is what makes their results comparable to the bit.
#pragma once

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

#ifdef PKV_EMULATE
#include "cuda_emu.h"
#else

#ifdef __CUDA_ARCH__
#define PKV_ARCH (__CUDA_ARCH__ / 10)
#else
#define PKV_ARCH 80 // nvcc's host pass; nothing device-side is compiled in it
#endif

#define PKV_DEVICE static __device__ __forceinline__
#define PKV_INLINE __device__ __forceinline__
#define PKV_UNROLL _Pragma("unroll")
#define PKV_UNROLL_NO _Pragma("unroll 1")
#define PKV_KERNEL(name, Params, max_threads, min_blocks)                                                              \
    extern "C" __global__ void __launch_bounds__(max_threads, min_blocks) name(const __grid_constant__ Params p)
#define PKV_DYNAMIC_SHARED(T, name)                                                                                    \
    extern __shared__ __align__(1024) u8 pkv_dynamic_shared[];                                                         \
    T *const name = reinterpret_cast<T *>(pkv_dynamic_shared)

#endif

PKV_DEVICE i32 opaque(i32 x) {
#ifndef PKV_EMULATE
    asm volatile("" : "+r"(x));
#endif
    return x;
}
PKV_DEVICE float f32_inf() { return __uint_as_float(0x7f800000u); }
PKV_DEVICE float f32_nan() { return __uint_as_float(0x7fc00000u); }
template <class T> PKV_DEVICE constexpr T ceil_div(T a, T b) { return (a + b - 1) / b; }
template <class T> PKV_DEVICE constexpr T round_up(T a, T b) { return ceil_div(a, b) * b; }

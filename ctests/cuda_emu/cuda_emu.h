// The CUDA names that kernels/ may use, for g++: the same .cu files compiled as C++20 with -DPKV_EMULATE run on the
// CPU.
//
// A block's threads are fibers of one OS thread; `emu.cpp` switches between them at every point where CUDA threads
// meet: __syncthreads,
// __syncwarp, shuffles, votes, ldmatrix, mma. Blocks are spread over OS threads. Tests only: this is about semantics,
// not speed.
//
// Strictness. A meeting that cannot complete (a lane that returned, a barrier that half the block skips, two different
// operations at one meeting) ends the process with the kernel, block and thread; so does an ldmatrix whose rows share
// banks of shared memory (slow, not wrong, but never meant). Dynamic shared memory starts as NaN bits. cp.async copies
// at once, in reverse order at the wait. wgmma (wgmma_model.h) ends the process where the fence before it, the fence of the async proxy after a
// write of its operands, or the wait after it is missing, or the threads of the warpgroup differ.
//
// Environment
//   PKV_EMU_REVERSE=1     blocks, and the threads between two meetings, run in reverse order
//   PKV_EMU_THREADS=n     OS threads that share the blocks of a launch (default 2)
// Built with -fsanitize=address, out-of-bounds accesses are reported with the .cu line; built with -fsanitize=thread,
// every CUDA thread is a fiber of its own to the race detector and only barriers order them: a missing barrier is a
// reported race (as compute-sanitizer's racecheck).
//
// Not modelled: TMA, clusters, textures, timing; the fp8 sums of mma.sync are f32.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifndef PKV_EMU_ARCH
#define PKV_EMU_ARCH 90
#endif
#define PKV_ARCH PKV_EMU_ARCH

struct dim3 {
    u32 x = 1, y = 1, z = 1;
};
struct uint3 {
    u32 x, y, z;
};
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

namespace pkv_emu {

struct Place { // of the running fiber
    uint3 thread, block;
    dim3 block_dim, grid_dim;
    u8 *dynamic_shared;
};
extern thread_local const Place *place;

struct Kernel {
    const char *name, *file;
    size_t params_size;
    u32 max_threads;
    void (*run)(const void *params);
    const Kernel *next;
};
struct Register {
    explicit Register(Kernel *kernel);
};

enum Meeting : u32 { SYNCWARP, SHUFFLE, VOTE, MATCH, LDMATRIX, MMA_F16, MMA_BF16, MMA_E4M3 };

// Waits until every lane of `mask` is here with the same `meeting`, each bringing `size` bytes (at most 64); then `all`
// points at lane 0's bytes, lane l's lie 64 * l further. What a lane that is not in the mask holds there is undefined.
const u8 *meet(Meeting meeting, u32 mask, const void *bytes, u32 size);
u32 barrier(u32 predicate, u32 combine); // __syncthreads; combine 0 count, 1 and, 2 or
void mma_fragments(float *d, const u32 *a, const u32 *b, Meeting type);
void cp_async(void *smem, const void *gmem, bool valid, u32 size); // 4 or 16 bytes
void cp_async_commit();
void cp_async_wait(u32 newest);
// Hopper. A warpgroup's wgmma reads its operands when its group is waited for, in reverse order when it is committed: a
// tile that is not there yet (cp.async is late then too), or not there any more, is read in one of them. Until the wait, d holds NaN.
u32 shared_address(const void *smem);
void mbarrier_init(u64 *bar, u32 count);
void mbarrier_arrive(u64 *bar);
void mbarrier_wait(u64 *bar, u32 parity);
void named_barrier(u32 id, u32 threads);
void fence_async_proxy();
void wgmma_fence();
void wgmma(float *d, u32 n, Meeting type, const u32 *a, u64 a_descriptor, u64 b_descriptor, bool add, bool n_major);
void wgmma_commit();
void wgmma_wait(u32 newest);
// Stores to shared memory for the tensor core, which it sees after a fence_async_proxy.
void generic_store(const void *smem, u32 size);
[[noreturn]] void fail(const char *what);

template <u32 N> void ldmatrix(u32 (&r)[N], const void *row, u32 count, bool trans) {
    const u32 lane = place->thread.x & 31;
    u8 mine[17] = {};
    if (lane < count * 8) {
        if (reinterpret_cast<u64>(row) & 15) fail("ldmatrix: row not 16-byte aligned");
        const u8 *p = static_cast<const u8 *>(row);
        for (u32 i = 0; i < 16; i++) mine[i] = p[i];
        mine[16] = reinterpret_cast<u64>(row) / 16 % 8; // its four banks
    }
    const u8 *all = meet(LDMATRIX, 0xffffffffu, mine, 17);
    const u32 g = lane / 4, t = lane % 4;
    for (u32 i = 0; i < count; i++) {
        u32 banks = 0;
        for (u32 line = 0; line < 8; line++) banks |= 1u << all[64 * (8 * i + line) + 16];
        if (banks != 0xff) fail("ldmatrix: rows of one matrix share banks");
        auto element = [&](u32 line, u32 column) -> u32 {
            const u8 *e = all + 64 * (8 * i + line) + 2 * column;
            return e[0] | u32(e[1]) << 8;
        };
        r[i] =
            trans ? element(2 * t, g) | element(2 * t + 1, g) << 16 : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
    }
}
template <u32 A> void mma(float (&d)[4], const u32 (&a)[A], const u32 (&b)[2], Meeting type) {
    mma_fragments(d, a, b, type);
}

template <class T> T shuffle(u32 mask, T value, u32 source_lane, bool in_range) {
    static_assert(sizeof(T) <= 8);
    const u8 *all = meet(SHUFFLE, mask, &value, sizeof(T));
    if (!in_range) return value;
    if (!(mask >> source_lane & 1)) fail("shuffle: reads a lane outside the mask");
    T result;
    __builtin_memcpy(&result, all + 64 * source_lane, sizeof(T));
    return result;
}
inline u32 vote(u32 mask, bool predicate) {
    const u32 value = predicate;
    const u8 *all = meet(VOTE, mask, &value, 4);
    u32 ballot = 0;
    for (u32 l = 0; l < 32; l++)
        if (mask >> l & 1) ballot |= u32(all[64 * l]) << l;
    return ballot;
}

} // namespace pkv_emu

#define threadIdx (::pkv_emu::place->thread)
#define blockIdx (::pkv_emu::place->block)
#define blockDim (::pkv_emu::place->block_dim)
#define gridDim (::pkv_emu::place->grid_dim)
#define warpSize 32

#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local // one block at a time runs on an OS thread
#define PKV_DEVICE [[maybe_unused]] static inline
#define PKV_INLINE inline
#define PKV_UNROLL
#define PKV_UNROLL_NO
#define PKV_KERNEL(name, Params, max_threads, min_blocks)                                                              \
    static void name(const Params &p);                                                                                 \
    static void name##_run(const void *params) { name(*static_cast<const Params *>(params)); }                         \
    static ::pkv_emu::Kernel name##_kernel{#name, __FILE__, sizeof(Params), max_threads, name##_run, nullptr};         \
    static ::pkv_emu::Register name##_register{&name##_kernel};                                                        \
    static void name(const Params &p)
#define PKV_DYNAMIC_SHARED(T, name) T *const name = reinterpret_cast<T *>(::pkv_emu::place->dynamic_shared)

// ---- meetings ----
inline void __syncthreads() { pkv_emu::barrier(0, 0); }
inline int __syncthreads_count(int predicate) { return int(pkv_emu::barrier(predicate != 0, 0)); }
inline int __syncthreads_and(int predicate) { return int(pkv_emu::barrier(predicate != 0, 1)); }
inline int __syncthreads_or(int predicate) { return int(pkv_emu::barrier(predicate != 0, 2)); }
inline void __syncwarp(u32 mask = 0xffffffffu) { pkv_emu::meet(pkv_emu::SYNCWARP, mask, nullptr, 0); }
template <class T> T __shfl_sync(u32 mask, T value, int source, int width = 32) {
    const u32 lane = threadIdx.x & 31;
    return pkv_emu::shuffle(mask, value, (lane & ~u32(width - 1)) + (u32(source) & u32(width - 1)), true);
}
template <class T> T __shfl_xor_sync(u32 mask, T value, int step, int width = 32) {
    const u32 lane = threadIdx.x & 31, source = lane ^ u32(step);
    return pkv_emu::shuffle(mask, value, source, source < ((lane & ~u32(width - 1)) + u32(width)));
}
template <class T> T __shfl_up_sync(u32 mask, T value, u32 step, int width = 32) {
    const u32 lane = threadIdx.x & 31;
    return pkv_emu::shuffle(mask, value, lane - step, (lane & u32(width - 1)) >= step);
}
template <class T> T __shfl_down_sync(u32 mask, T value, u32 step, int width = 32) {
    const u32 lane = threadIdx.x & 31;
    return pkv_emu::shuffle(mask, value, lane + step, (lane & u32(width - 1)) + step < u32(width));
}
inline u32 __ballot_sync(u32 mask, int predicate) { return pkv_emu::vote(mask, predicate != 0); }
inline int __any_sync(u32 mask, int predicate) { return pkv_emu::vote(mask, predicate != 0) != 0; }
inline int __all_sync(u32 mask, int predicate) { return pkv_emu::vote(mask, predicate != 0) == mask; }
template <class T> u32 __match_any_sync(u32 mask, T value) {
    const u8 *all = pkv_emu::meet(pkv_emu::MATCH, mask, &value, sizeof(T));
    u32 same = 0;
    for (u32 l = 0; l < 32; l++)
        if ((mask >> l & 1) && __builtin_memcmp(all + 64 * l, &value, sizeof(T)) == 0) same |= 1u << l;
    return same;
}

// ---- atomics and fences ----
inline void __threadfence() { asm volatile("" ::: "memory"); }
inline void __threadfence_block() { asm volatile("" ::: "memory"); }
template <class T> T atomicAdd(T *p, T value) {
    if constexpr (std::is_integral_v<T>) {
        return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
    } else {
        T old, sum;
        __atomic_load(p, &old, __ATOMIC_RELAXED);
        do sum = old + value;
        while (!__atomic_compare_exchange(p, &old, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        return old;
    }
}
template <class T> T atomicSub(T *p, T value) { return __atomic_fetch_sub(p, value, __ATOMIC_RELAXED); }
template <class T> T atomicOr(T *p, T value) { return __atomic_fetch_or(p, value, __ATOMIC_RELAXED); }
template <class T> T atomicAnd(T *p, T value) { return __atomic_fetch_and(p, value, __ATOMIC_RELAXED); }
template <class T> T atomicExch(T *p, T value) { return __atomic_exchange_n(p, value, __ATOMIC_RELAXED); }
template <class T> T atomicCAS(T *p, T expected, T desired) {
    __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
template <class T> T atomicMax(T *p, T value) {
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old < value && !__atomic_compare_exchange_n(p, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}
template <class T> T atomicMin(T *p, T value) {
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (value < old && !__atomic_compare_exchange_n(p, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}

// ---- integer and float intrinsics ----
inline u32 __float_as_uint(float x) { return __builtin_bit_cast(u32, x); }
inline i32 __float_as_int(float x) { return __builtin_bit_cast(i32, x); }
inline float __uint_as_float(u32 x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(i32 x) { return __builtin_bit_cast(float, x); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __popcll(u64 x) { return __builtin_popcountll(x); }
inline int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(u64 x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(u32 x) { return __builtin_ffs(int(x)); }
inline u32 __brev(u32 x) {
    u32 y = 0;
    for (u32 i = 0; i < 32; i++) y |= (x >> i & 1u) << (31 - i);
    return y;
}
inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
    const u64 bytes = u64(y) << 32 | x;
    u32 r = 0;
    for (u32 i = 0; i < 4; i++) r |= u32(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return r;
}
inline u32 __funnelshift_r(u32 lo, u32 hi, u32 shift) { return u32((u64(hi) << 32 | lo) >> (shift & 31)); }
inline u32 __funnelshift_l(u32 lo, u32 hi, u32 shift) { return u32((u64(hi) << 32 | lo) << (shift & 31) >> 32); }
inline u32 __umulhi(u32 a, u32 b) { return u32(u64(a) * b >> 32); }
template <class T> T __ldg(const T *p) { return *p; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
#define __expf(x) (std::exp(float(x))) // glibc has functions of these names
#define __logf(x) (std::log(float(x)))
#define __log2f(x) (std::log2(float(x)))
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(u32 x) { return float(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
inline u32 min(u32 a, int b) { return min(a, u32(b)); }
inline u32 min(int a, u32 b) { return min(u32(a), b); }
inline u32 max(u32 a, int b) { return max(a, u32(b)); }
inline u32 max(int a, u32 b) { return max(u32(a), b); }
[[noreturn]] inline void __trap() { pkv_emu::fail("__trap()"); }

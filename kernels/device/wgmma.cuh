// Hopper's tensor core: D[64][N] = A[64][K] * B[K][N] (+ D) of a warpgroup, four warps of which the first is a multiple
// of four. It runs beside the threads; A comes from registers or shared memory, B from shared memory. sm_90a alone.
//
// K is 32 bytes: 32 elements of 8 bits, 16 of 16. Warp w has rows 16 w .. 16 w + 15; with g = lane / 4 and t = lane % 4,
//   d[4 j + i] = D[16 w + g + 8 (i / 2)][8 j + 2 t + i % 2],
// which is mma's layout (device/mma.cuh), N / 8 times, and so is that of A in registers.
//
// In shared memory an operand lies in tiles of rows of 128 bytes, the tiles 1024-byte aligned; in row r the 16-byte
// piece c is found at piece c ^ (r & 7): swizzle_128(r, byte), the `128-byte swizzle`.
//   k_major(tile)                      rows are rows of A, columns of B, along k. Eight rows follow eight rows. The
//                                      32 bytes of a step: k_major(tile + 32 * step), within the 128 bytes
//   n_major(tile, next)                rows are k, along n (16 bits only): 64 columns a tile, the next 64 columns `next`
//                                      bytes further. A step of 16 rows: n_major(tile + 2048 * step, next)
//
// Order, in every thread of the warpgroup:
//   wgmma_fence(); wgmma(...) one or more; wgmma_commit(); ... wgmma_wait<n>(d): all but the newest n groups are done.
// Between the first wgmma and the wait nobody may touch d, registers of A, or A and B in shared memory. What else wrote
// those needs fence_async_proxy (device/mbarrier.cuh). wgmma_hold(d) keeps the compiler from moving accesses to d over it.
//
//   operand_store_16(smem, x)                 a store of 16 bytes of an operand
//   wgmma_m64n128k32_e4m3(d, a, b, add)       a, b: descriptors; add 0: D is not read. The products' sums keep about
//                                             14 bits (see below)
//   wgmma_m64n64k16<T>(d, a, b, add)          T = f16 or bf16, a u32[4], b a descriptor: products exact, sums f32
//   wgmma_m64n128k16<T>(d, a, b, add)         a, b: descriptors
//   wgmma_m64n128k16_n_major<T>(d, a, b, add) a u32[4], b of n_major
//   fragments(d)                              the same registers as mma's [N / 8][4]
//
// Nothing promises how fp8 products are summed; it has been measured that Hopper aligns a step's products and D to the
// largest of them and keeps 13 bits below its leading one. A sum that must be better goes through f16, exactly.
#pragma once
#include "device/float.cuh"
#include "device/mbarrier.cuh"

PKV_DEVICE u32 swizzle_128(u32 row, u32 byte) { return row * 128 + (byte ^ (row & 7) << 4); }

template <u32 N> PKV_DEVICE auto fragments(float (&d)[N]) -> float (&)[N / 4][4] {
    return reinterpret_cast<float(&)[N / 4][4]>(d);
}

PKV_DEVICE void operand_store_16(void *smem, const uint4 &x) {
    *static_cast<uint4 *>(smem) = x;
#ifdef PKV_EMULATE
    pkv_emu::generic_store(smem, 16);
#endif
}

#ifdef PKV_EMULATE
PKV_DEVICE u32 wgmma_address(const void *smem) { return pkv_emu::shared_address(smem); }
#else
PKV_DEVICE u32 wgmma_address(const void *smem) { return shared_address(smem); }
#endif

// Fields of the descriptor: address, leading offset, stride offset, in units of 16 bytes; swizzle of 128 bytes.
PKV_DEVICE u64 wgmma_descriptor(const void *tile, u32 leading, u32 stride) {
    return u64((wgmma_address(tile) & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | u64(1) << 62;
}
PKV_DEVICE u64 k_major(const void *tile) { return wgmma_descriptor(tile, 16, 1024); } // one swizzled row: no leading
PKV_DEVICE u64 n_major(const void *tile, u32 next) { return wgmma_descriptor(tile, next, 1024); }

#ifdef PKV_EMULATE

PKV_DEVICE void wgmma_fence() { pkv_emu::wgmma_fence(); }
PKV_DEVICE void wgmma_commit() { pkv_emu::wgmma_commit(); }
template <u32 N> PKV_DEVICE void wgmma_wait() { pkv_emu::wgmma_wait(N); }
template <u32 COUNT> PKV_DEVICE void wgmma_hold(float (&)[COUNT]) {}

PKV_DEVICE void wgmma_m64n128k32_e4m3(float (&d)[64], u64 a, u64 b, u32 add) {
    pkv_emu::wgmma(d, 128, pkv_emu::MMA_E4M3, nullptr, a, b, add != 0, false);
}
template <class T> constexpr pkv_emu::Meeting wgmma_type() {
    static_assert(sizeof(T) == 2, "f16 or bf16");
    return dtype_of<T>::value == DTYPE_BF16 ? pkv_emu::MMA_BF16 : pkv_emu::MMA_F16;
}
template <class T> PKV_DEVICE void wgmma_m64n64k16(float (&d)[32], const u32 (&a)[4], u64 b, u32 add) {
    pkv_emu::wgmma(d, 64, wgmma_type<T>(), a, 0, b, add != 0, false);
}
template <class T> PKV_DEVICE void wgmma_m64n128k16(float (&d)[64], u64 a, u64 b, u32 add) {
    pkv_emu::wgmma(d, 128, wgmma_type<T>(), nullptr, a, b, add != 0, false);
}
template <class T> PKV_DEVICE void wgmma_m64n128k16_n_major(float (&d)[64], const u32 (&a)[4], u64 b, u32 add) {
    pkv_emu::wgmma(d, 128, wgmma_type<T>(), a, 0, b, add != 0, true);
}

#else

PKV_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PKV_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <u32 N> PKV_DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
template <u32 COUNT> PKV_DEVICE void wgmma_hold(float (&d)[COUNT]) {
    PKV_UNROLL
    for (u32 i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define PKV_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PKV_16(i) PKV_4(i), PKV_4(i + 4), PKV_4(i + 8), PKV_4(i + 12)
#define PKV_D32 PKV_16(0), PKV_16(16)
#define PKV_D64 PKV_D32, PKV_16(32), PKV_16(48)
#define PKV_D32_TEXT                                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define PKV_D64_TEXT                                                                                                   \
    PKV_D32_TEXT ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "   \
                 "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// `operands`: A's, B's and the switch's numbers, then the factors 1 and 1, then what is transposed.
#define PKV_WGMMA(shape_types, d_text, operands, add_number, d_list, ...)                                              \
    asm volatile("{\n"                                                                                                 \
                 ".reg .pred add;\n"                                                                                   \
                 "setp.ne.b32 add, %" #add_number ", 0;\n"                                                             \
                 "wgmma.mma_async.sync.aligned." shape_types " {" d_text "}, " operands ";\n"                          \
                 "}"                                                                                                   \
                 : d_list                                                                                              \
                 : __VA_ARGS__, "r"(add))
#define PKV_A_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

PKV_DEVICE void wgmma_m64n128k32_e4m3(float (&d)[64], u64 a, u64 b, u32 add) {
    PKV_WGMMA("m64n128k32.f32.e4m3.e4m3", PKV_D64_TEXT, "%64, %65, add, 1, 1", 66, PKV_D64, "l"(a), "l"(b));
}
template <class T> PKV_DEVICE void wgmma_m64n64k16(float (&d)[32], const u32 (&a)[4], u64 b, u32 add) {
    static_assert(sizeof(T) == 2, "f16 or bf16");
    if constexpr (dtype_of<T>::value == DTYPE_BF16) {
        PKV_WGMMA("m64n64k16.f32.bf16.bf16", PKV_D32_TEXT, "{%32, %33, %34, %35}, %36, add, 1, 1, 0", 37, PKV_D32,
                  PKV_A_REGISTERS, "l"(b));
    } else {
        PKV_WGMMA("m64n64k16.f32.f16.f16", PKV_D32_TEXT, "{%32, %33, %34, %35}, %36, add, 1, 1, 0", 37, PKV_D32,
                  PKV_A_REGISTERS, "l"(b));
    }
}
template <class T> PKV_DEVICE void wgmma_m64n128k16(float (&d)[64], u64 a, u64 b, u32 add) {
    static_assert(sizeof(T) == 2, "f16 or bf16");
    if constexpr (dtype_of<T>::value == DTYPE_BF16) {
        PKV_WGMMA("m64n128k16.f32.bf16.bf16", PKV_D64_TEXT, "%64, %65, add, 1, 1, 0, 0", 66, PKV_D64, "l"(a), "l"(b));
    } else {
        PKV_WGMMA("m64n128k16.f32.f16.f16", PKV_D64_TEXT, "%64, %65, add, 1, 1, 0, 0", 66, PKV_D64, "l"(a), "l"(b));
    }
}
template <class T> PKV_DEVICE void wgmma_m64n128k16_n_major(float (&d)[64], const u32 (&a)[4], u64 b, u32 add) {
    static_assert(sizeof(T) == 2, "f16 or bf16");
    if constexpr (dtype_of<T>::value == DTYPE_BF16) {
        PKV_WGMMA("m64n128k16.f32.bf16.bf16", PKV_D64_TEXT, "{%64, %65, %66, %67}, %68, add, 1, 1, 1", 69, PKV_D64,
                  PKV_A_REGISTERS, "l"(b));
    } else {
        PKV_WGMMA("m64n128k16.f32.f16.f16", PKV_D64_TEXT, "{%64, %65, %66, %67}, %68, add, 1, 1, 1", 69, PKV_D64,
                  PKV_A_REGISTERS, "l"(b));
    }
}

#undef PKV_4
#undef PKV_16
#undef PKV_D32
#undef PKV_D64
#undef PKV_D32_TEXT
#undef PKV_D64_TEXT
#undef PKV_WGMMA
#undef PKV_A_REGISTERS

#endif

// Tensor-core fragments: ldmatrix and mma.sync. Every lane of the warp takes part.
//
// With g = lane / 4 and t = lane % 4, the fragments of D[16][8] += A[16][K] * B[K][8] (A row-major, B column-major) are
//   16-bit, K = 16:  a[0] = A[g][2t, 2t+1]     a[1] = A[g+8][2t, 2t+1]
//                    a[2] = A[g][2t+8, 2t+9]   a[3] = A[g+8][2t+8, 2t+9]
//                    b[0] = B[2t, 2t+1][g]     b[1] = B[2t+8, 2t+9][g]
//   8-bit, K = 32:   a[0] = A[g][4t..4t+3]     a[1] = A[g+8][4t..4t+3]
//                    a[2] = A[g][4t+16..4t+19] a[3] = A[g+8][4t+16..4t+19]
//                    b[0] = B[4t..4t+3][g]     b[1] = B[4t+16..4t+19][g]
//   f32:             d[0] = D[g][2t]           d[1] = D[g][2t+1]
//                    d[2] = D[g+8][2t]         d[3] = D[g+8][2t+1]
// with the lower index in the lower bits.
//
//   ldmatrix_x4(r, row)                four 8x8 matrices of 16-bit elements from shared memory: lane l names 16-byte
//                                      row l % 8 of matrix l / 8; the eight rows must lie in different banks;
//                                      r[i] = matrix i [g][2t, 2t+1]. _trans: matrix i transposed. _x2: lanes 0 .. 15
//                                      name the rows. An 8-bit operand is read by the plain form as 16-bit pairs: r[i]
//                                      = bytes [g][4t .. 4t+3].
//   mma_m16n8k16<T>(d, a, b)           T = f16 or bf16, products exact, sums f32
//   mma_m16n8k32_e4m3(d, a, b)         sm_89+ natively; before, through f16 (exact). NVIDIA does not promise full f32
//                                      sums for fp8 operands, and Hopper's keep about 14 bits: results that must be
//                                      exact take
//   mma_m16n8k32_e4m3_exact(d, a, b)   always through f16: decodes and issues two m16n8k16
#pragma once
#include "device/async.cuh"
#include "device/float.cuh"

#ifdef PKV_EMULATE

PKV_DEVICE void ldmatrix_x4(u32 (&r)[4], const void *row) { pkv_emu::ldmatrix(r, row, 4, false); }
PKV_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void *row) { pkv_emu::ldmatrix(r, row, 4, true); }
PKV_DEVICE void ldmatrix_x2(u32 (&r)[2], const void *row) { pkv_emu::ldmatrix(r, row, 2, false); }
PKV_DEVICE void ldmatrix_x2_trans(u32 (&r)[2], const void *row) { pkv_emu::ldmatrix(r, row, 2, true); }

template <class T> PKV_DEVICE void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    static_assert(sizeof(T) == 2, "f16 or bf16");
    pkv_emu::mma(d, a, b, dtype_of<T>::value == DTYPE_BF16 ? pkv_emu::MMA_BF16 : pkv_emu::MMA_F16);
}

#else

#define PKV_LDMATRIX(name, form, count, outputs, ...)                                                                  \
    PKV_DEVICE void name(u32(&r)[count], const void *row) {                                                            \
        asm volatile("ldmatrix.sync.aligned.m8n8." form ".shared.b16 " outputs ";"                                     \
                     : __VA_ARGS__                                                                                     \
                     : "r"(shared_address(row))                                                                        \
                     : "memory");                                                                                      \
    }
PKV_LDMATRIX(ldmatrix_x4, "x4", 4, "{%0, %1, %2, %3}, [%4]", "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]))
PKV_LDMATRIX(ldmatrix_x4_trans, "x4.trans", 4, "{%0, %1, %2, %3}, [%4]", "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]))
PKV_LDMATRIX(ldmatrix_x2, "x2", 2, "{%0, %1}, [%2]", "=r"(r[0]), "=r"(r[1]))
PKV_LDMATRIX(ldmatrix_x2_trans, "x2.trans", 2, "{%0, %1}, [%2]", "=r"(r[0]), "=r"(r[1]))
#undef PKV_LDMATRIX

#define PKV_MMA(shape_types)                                                                                           \
    asm volatile("mma.sync.aligned." shape_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"    \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

template <class T> PKV_DEVICE void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    static_assert(sizeof(T) == 2, "f16 or bf16");
    if constexpr (dtype_of<T>::value == DTYPE_BF16) {
        PKV_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
    } else {
        PKV_MMA("m16n8k16.row.col.f32.f16.f16.f32");
    }
}

#endif

// The sum over k may run in any order as long as A and B agree: the four codes of a register become the two f16
// registers that hold columns (2t, 2t+1) and (2t+8, 2t+9) of an m16n8k16 fragment, so nothing moves between lanes.
PKV_DEVICE void mma_m16n8k32_e4m3_exact(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    PKV_UNROLL
    for (u32 half = 0; half < 2; half++) {
        const u32 a_lo = a[2 * half], a_hi = a[2 * half + 1], codes = b[half];
        const u32 fa[4] = {e4m3x2_to_f16x2(u16(a_lo)), e4m3x2_to_f16x2(u16(a_hi)), e4m3x2_to_f16x2(u16(a_lo >> 16)),
                           e4m3x2_to_f16x2(u16(a_hi >> 16))};
        const u32 fb[2] = {e4m3x2_to_f16x2(u16(codes)), e4m3x2_to_f16x2(u16(codes >> 16))};
        mma_m16n8k16<f16>(d, fa, fb);
    }
}

PKV_DEVICE void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if PKV_ARCH < 89
    mma_m16n8k32_e4m3_exact(d, a, b);
#elif defined(PKV_EMULATE)
    pkv_emu::mma(d, a, b, pkv_emu::MMA_E4M3);
#else
    PKV_MMA("m16n8k32.row.col.f32.e4m3.e4m3.f32");
#endif
}

#undef PKV_MMA

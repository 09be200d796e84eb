// What wgmma.mma_async does with its operands, from the PTX ISA 9.0, 9.7.15.5 (asynchronous multiply-and-accumulate).
// Nothing here knows how a kernel fills its tiles or makes its descriptors. Section numbers below are of that document.
//
// Modelled: K of 32 bytes in e4m3, f16 and bf16; A from registers or shared memory; operands in shared memory with the
// 128-byte swizzle, K-major (8 and 16 bits) or MN-major (16 bits). Anything else a descriptor may say ends the process.
#pragma once
#include "emu.h"

namespace pkv_emu::wgmma_model {

// 9.7.15.5.1.2.2, matrix descriptor format. Every field of bytes is encoded as (x & 0x3ffff) >> 4.
struct Descriptor {
    u32 start, leading, stride, base_offset, swizzle;
    bool rest_is_zero;
    explicit Descriptor(u64 d)
        : start(u32(d & 0x3fff) << 4), leading(u32(d >> 16 & 0x3fff) << 4), stride(u32(d >> 32 & 0x3fff) << 4),
          base_offset(u32(d >> 49 & 7)), swizzle(u32(d >> 62)),
          rest_is_zero((d & 0x3ff1'c000'c000'c000ull) == 0) {}
};
enum : u32 { SWIZZLE_128 = 1 };

// 9.7.15.5.1.2.1.3, canonical layouts, in elements of 16 bytes / T: with the 128-byte swizzle
//   K-major   ((8,m),(T,2k)):((8T,SBO),(1,T))          row = r % 8 + 8 m, column = c % T + T k
//   MN-major  ((T,8,m),(8,k)):((1,T,LBO),(8T,SBO))     row = r % T + T (r / T % 8) + 8 T m, column = c % 8 + 8 k
// (rows along M or N, columns along K), then Swizzle<3,4,3> on byte addresses of shared memory: bits 4 .. 6 are xored
// with bits 7 .. 9. The pattern repeats at multiples of 1024 bytes (base offset 0).
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }
inline u32 k_major(const Descriptor &d, u32 row, u32 k_byte) {
    return swizzled(d.start + row / 8 * d.stride + row % 8 * 128 + k_byte);
}
inline u32 mn_major(const Descriptor &d, u32 row_byte, u32 k) {
    return swizzled(d.start + row_byte / 128 * d.leading + row_byte % 128 + k / 8 * d.stride + k % 8 * 128);
}

// 9.7.15.5.1.1, register fragments of m64nNk16 and m64nNk32. Warp w of the warpgroup has rows 16 w ..; in them, with
// g = lane / 4 and t = lane % 4, D's register i is row g + 8 (i / 2 % 2), column 8 (i / 4) + 2 t + i % 2; A's register
// i holds row g + 8 (i % 2) and the 4 bytes of k from 16 (i / 2) + 4 t on.
inline u32 d_row(u32 thread, u32 i) { return thread / 32 * 16 + thread % 32 / 4 + 8 * (i / 2 % 2); }
inline u32 d_column(u32 thread, u32 i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }
inline u32 a_row(u32 thread, u32 i) { return thread / 32 * 16 + thread % 32 / 4 + 8 * (i % 2); }
inline u32 a_k_byte(u32 thread, u32 i) { return i / 2 * 16 + thread % 4 * 4; }

// One step of one row of D. Products are exact (a, b of 16 or 8 bits in f32); the ISA leaves precision and order of the
// sum open. 16 bits: f32, in order.
__attribute__((optimize("O3"))) inline void add_products(float *d, const float *a, const float *b, u32 n, u32 k) {
    for (u32 i = 0; i < k; i++)
        for (u32 j = 0; j < n; j++) d[j] += a[i] * b[i * 256 + j];
}
// e4m3: as has been measured of H100: all 32 products and D are cut (toward zero) to 13 bits below the leading bit of
// the largest, added exactly, and the sum is cut to 13 fraction bits. The worst that results have to stand.
__attribute__((optimize("O3"))) inline void add_products_13_bits(float *d, const float *a, const float *b, u32 n) {
    u32 largest[256];
    for (u32 j = 0; j < n; j++) largest[j] = __float_as_uint(d[j]) & 0x7fffffff;
    for (u32 i = 0; i < 32; i++)
        for (u32 j = 0; j < n; j++) {
            const u32 bits = __float_as_uint(a[i] * b[i * 256 + j]) & 0x7fffffff;
            largest[j] = bits > largest[j] ? bits : largest[j];
        }
    float unit[256], inverse[256], sum[256];
    for (u32 j = 0; j < n; j++) {
        const u32 exponent = largest[j] >> 23; // of e4m3 products: far from both ends, or 0 and NaN
        const bool plain = exponent > 13 && exponent < 240;
        unit[j] = __uint_as_float((plain ? exponent - 13 : 127) << 23);
        inverse[j] = 1.0f / unit[j];
        sum[j] = float(i32(plain ? d[j] * inverse[j] : 0.0f));
    }
    for (u32 i = 0; i < 32; i++)
        for (u32 j = 0; j < n; j++) {
            const float x = a[i] * b[i * 256 + j] * inverse[j];
            sum[j] += float(i32(x == x ? x : 0.0f));
        }
    for (u32 j = 0; j < n; j++)
        d[j] = largest[j] > 0x7f800000u ? __uint_as_float(0x7fffffffu)
                                        : __uint_as_float(__float_as_uint(sum[j] * unit[j]) & ~0x3ffu);
}

} // namespace pkv_emu::wgmma_model

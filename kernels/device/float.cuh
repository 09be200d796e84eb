// The small float formats: storage types and conversions.
//
//   f16 bf16 e4m3 e5m2 e8m0            one member, `bits`
//   to_f32(x)                          exact
//   from_f32<T>(x)                     round to nearest even; f16 and bf16 overflow to infinity, e4m3 and e5m2 saturate
//                                      at 448 and 57344 (infinity too); NaN stays NaN
//   round_to<T>(x)                     to_f32(from_f32<T>(x))
//   e8m0_at_least(s)                   smallest power of two >= s within 2^-126 .. 2^127, by the exponent bits
//   to_f32x2 / from_f32x2              two at a time, packed in a u32 (f16, bf16) or u16 (e4m3, e5m2), element 0 in the
//                                      low half
//   e4m3x2_to_f16x2(u16)               exact, for tensor cores without fp8
//   DTYPE_*                            the numbers of the C API; dtype_of<T>::value; fp8_max<T>()
//
// PTX has f16 and bf16 conversions on every architecture we build, the fp8 ones from sm_89 on; before that, and in the
// emulation, plain integer arithmetic gives the same bits (the emulation's tests compare all of them).
#pragma once
#include "device/common.cuh"

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};
struct e4m3 {
    u8 bits;
};
struct e5m2 {
    u8 bits;
};
struct e8m0 {
    u8 bits;
};

enum : i32 {
    DTYPE_NONE = 0,
    DTYPE_F32 = 1,
    DTYPE_F16 = 2,
    DTYPE_BF16 = 3,
    DTYPE_F8_E4M3 = 4,
    DTYPE_F8_E5M2 = 5,
    DTYPE_F8_E8M0 = 6
};

template <class T> struct dtype_of;
template <> struct dtype_of<float> {
    static constexpr i32 value = DTYPE_F32;
};
template <> struct dtype_of<f16> {
    static constexpr i32 value = DTYPE_F16;
};
template <> struct dtype_of<bf16> {
    static constexpr i32 value = DTYPE_BF16;
};
template <> struct dtype_of<e4m3> {
    static constexpr i32 value = DTYPE_F8_E4M3;
};
template <> struct dtype_of<e5m2> {
    static constexpr i32 value = DTYPE_F8_E5M2;
};

template <class T> PKV_DEVICE constexpr float fp8_max() {
    static_assert(sizeof(T) == 1, "an fp8 type");
    return dtype_of<T>::value == DTYPE_F8_E4M3 ? 448.0f : 57344.0f;
}

// ---- portable conversions: integer arithmetic only ----

PKV_DEVICE float portable_f16_to_f32(u16 h) {
    const u32 sign = u32(h & 0x8000u) << 16;
    const u32 magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // The f16 fields moved to f32's place read 2^-112 times the value, for subnormals too.
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 13) * 0x1p112f));
}

PKV_DEVICE u16 portable_f32_to_f16(float x) {
    const u32 bits = __float_as_uint(x);
    const u16 sign = u16(bits >> 16 & 0x8000u);
    u32 a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return sign | 0x7fffu;
    if (a >= 0x47800000u) return sign | 0x7c00u;
    // Below the smallest normal number: adding 0.5, whose last bit is worth 2^-24, makes the adder round to f16's
    // subnormal step.
    if (a < 0x38800000u) return sign | u16(__float_as_uint(__uint_as_float(a) + 0.5f) - 0x3f000000u);
    a += 0xfffu + (a >> 13 & 1u);
    return sign | u16((a >> 13) - (112u << 10));
}

PKV_DEVICE u16 portable_f32_to_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return u16(bits >> 16 & 0x8000u) | 0x7fffu;
    return u16((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

PKV_DEVICE float portable_e4m3_to_f32(u8 code) {
    const u32 sign = u32(code & 0x80u) << 24;
    const u32 magnitude = code & 0x7fu;
    if (magnitude == 0x7fu) return __uint_as_float(sign | 0x7fc00000u);
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 20) * 0x1p120f));
}

PKV_DEVICE u8 portable_f32_to_e4m3(float x) {
    const u32 bits = __float_as_uint(x);
    const u8 sign = u8(bits >> 24 & 0x80u);
    u32 a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return sign | 0x7fu;
    if (a >= 0x43e00000u) return sign | 0x7eu; // >= 448
    if (a < 0x3c800000u)
        return sign | u8(__float_as_uint(__uint_as_float(a) + 0x1p14f) - 0x46800000u); // < 2^-6: steps of 2^-9
    a += 0x7ffffu + (a >> 20 & 1u);
    return sign | u8((a >> 20) - (120u << 3));
}

PKV_DEVICE float portable_e5m2_to_f32(u8 code) { return portable_f16_to_f32(u16(u16(code) << 8)); }

PKV_DEVICE u8 portable_f32_to_e5m2(float x) {
    const u32 bits = __float_as_uint(x);
    const u8 sign = u8(bits >> 24 & 0x80u);
    u32 a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return sign | 0x7fu;
    if (a >= 0x47600000u) return sign | 0x7bu; // >= 57344
    if (a < 0x38800000u)
        return sign | u8(__float_as_uint(__uint_as_float(a) + 0x1p7f) - 0x43000000u); // < 2^-14: steps of 2^-16
    a += 0xfffffu + (a >> 21 & 1u);
    return sign | u8((a >> 21) - (112u << 2));
}

// ---- conversions of the architecture ----

PKV_DEVICE float to_f32(float x) { return x; }
PKV_DEVICE float to_f32(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
PKV_DEVICE float to_f32(e8m0 x) {
    return x.bits == 0 ? 0x1p-127f : x.bits == 255 ? f32_nan() : __uint_as_float(u32(x.bits) << 23);
}

#ifdef PKV_EMULATE

PKV_DEVICE float to_f32(f16 x) { return portable_f16_to_f32(x.bits); }
PKV_DEVICE u16 f32_to_f16_bits(float x) { return portable_f32_to_f16(x); }
PKV_DEVICE u16 f32_to_bf16_bits(float x) { return portable_f32_to_bf16(x); }
PKV_DEVICE u32 f32x2_to_f16x2(float lo, float hi) { return u32(f32_to_f16_bits(hi)) << 16 | f32_to_f16_bits(lo); }
PKV_DEVICE u32 f32x2_to_bf16x2(float lo, float hi) { return u32(f32_to_bf16_bits(hi)) << 16 | f32_to_bf16_bits(lo); }

#else

PKV_DEVICE float to_f32(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
PKV_DEVICE u16 f32_to_f16_bits(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
PKV_DEVICE u16 f32_to_bf16_bits(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
PKV_DEVICE u32 f32x2_to_f16x2(float lo, float hi) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}
PKV_DEVICE u32 f32x2_to_bf16x2(float lo, float hi) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

#endif

#if !defined(PKV_EMULATE) && PKV_ARCH >= 89

PKV_DEVICE u32 e4m3x2_to_f16x2(u16 codes) {
    u32 y;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(codes));
    return y;
}
PKV_DEVICE u32 e5m2x2_to_f16x2(u16 codes) {
    u32 y;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(y) : "h"(codes));
    return y;
}
PKV_DEVICE u16 f32x2_to_e4m3x2(float lo, float hi) {
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
    return y;
}
PKV_DEVICE u16 f32x2_to_e5m2x2(float lo, float hi) {
    u16 y;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
    return y;
}
PKV_DEVICE float to_f32(e4m3 x) { return to_f32(f16{u16(e4m3x2_to_f16x2(x.bits))}); }
PKV_DEVICE float to_f32(e5m2 x) { return to_f32(f16{u16(x.bits << 8)}); }

#else

PKV_DEVICE float to_f32(e4m3 x) { return portable_e4m3_to_f32(x.bits); }
PKV_DEVICE float to_f32(e5m2 x) { return to_f32(f16{u16(x.bits << 8)}); }
PKV_DEVICE u32 e4m3x2_to_f16x2(u16 codes) {
    return f32x2_to_f16x2(portable_e4m3_to_f32(u8(codes)), portable_e4m3_to_f32(u8(codes >> 8)));
}
PKV_DEVICE u32 e5m2x2_to_f16x2(u16 codes) { return u32(codes & 0xff00u) << 16 | u32(codes & 0xffu) << 8; }
PKV_DEVICE u16 f32x2_to_e4m3x2(float lo, float hi) {
    return u16(portable_f32_to_e4m3(hi) << 8 | portable_f32_to_e4m3(lo));
}
PKV_DEVICE u16 f32x2_to_e5m2x2(float lo, float hi) {
    return u16(portable_f32_to_e5m2(hi) << 8 | portable_f32_to_e5m2(lo));
}

#endif

template <class T> PKV_DEVICE T from_f32(float x);
template <> PKV_INLINE float from_f32<float>(float x) { return x; }
template <> PKV_INLINE f16 from_f32<f16>(float x) { return {f32_to_f16_bits(x)}; }
template <> PKV_INLINE bf16 from_f32<bf16>(float x) { return {f32_to_bf16_bits(x)}; }
template <> PKV_INLINE e4m3 from_f32<e4m3>(float x) { return {u8(f32x2_to_e4m3x2(x, 0.0f))}; }
template <> PKV_INLINE e5m2 from_f32<e5m2>(float x) { return {u8(f32x2_to_e5m2x2(x, 0.0f))}; }

template <class T> PKV_DEVICE float round_to(float x) { return to_f32(from_f32<T>(x)); }

template <class T> PKV_DEVICE u32 from_f32x2(float lo, float hi);
template <> PKV_INLINE u32 from_f32x2<f16>(float lo, float hi) { return f32x2_to_f16x2(lo, hi); }
template <> PKV_INLINE u32 from_f32x2<bf16>(float lo, float hi) { return f32x2_to_bf16x2(lo, hi); }
template <> PKV_INLINE u32 from_f32x2<e4m3>(float lo, float hi) { return f32x2_to_e4m3x2(lo, hi); }
template <> PKV_INLINE u32 from_f32x2<e5m2>(float lo, float hi) { return f32x2_to_e5m2x2(lo, hi); }

template <class T> PKV_DEVICE void to_f32x2(u32 packed, float &lo, float &hi) {
    if constexpr (sizeof(T) == 2) {
        lo = to_f32(T{u16(packed)});
        hi = to_f32(T{u16(packed >> 16)});
    } else {
        const u32 halves =
            dtype_of<T>::value == DTYPE_F8_E4M3 ? e4m3x2_to_f16x2(u16(packed)) : e5m2x2_to_f16x2(u16(packed));
        lo = to_f32(f16{u16(halves)});
        hi = to_f32(f16{u16(halves >> 16)});
    }
}

PKV_DEVICE e8m0 e8m0_at_least(float s) {
    const u32 exponent = (__float_as_uint(s) + 0x7fffffu) >> 23;
    return {u8(exponent < 1 ? 1 : exponent > 254 ? 254 : exponent)};
}

// An element whose dtype is known only at run time (tables, gammas, scales): F32, F16, BF16, or an E8M0 scale.
PKV_DEVICE float load_as_f32(const void *base, i32 dtype, i64 index) {
    switch (dtype) {
    case DTYPE_F32: return static_cast<const float *>(base)[index];
    case DTYPE_F16: return to_f32(static_cast<const f16 *>(base)[index]);
    case DTYPE_BF16: return to_f32(static_cast<const bf16 *>(base)[index]);
    case DTYPE_F8_E4M3: return to_f32(static_cast<const e4m3 *>(base)[index]);
    case DTYPE_F8_E5M2: return to_f32(static_cast<const e5m2 *>(base)[index]);
    default: return to_f32(static_cast<const e8m0 *>(base)[index]);
    }
}

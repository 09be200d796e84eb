//! The 8-bit floating-point formats: e4m3fn and e5m2 (OCP OFP8), and the scale format e8m0 (OCP MX).
//!
//! Casts from f32 round to nearest even and saturate: an infinite or too large value becomes the largest finite one.
//! NaN stays NaN. e4m3fn has no infinities; e5m2's are only ever read, never produced.

pub const E4M3_MAX: f32 = 448.0;
pub const E5M2_MAX: f32 = 57344.0;

/// Round to a float of `M` mantissa bits and exponent bias `BIAS`, at most `max`, NaN to `nan`.
#[inline(always)]
fn encode<const M: u32, const BIAS: u32>(x: f32, max: f32, nan: u8) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) as u8 & 0x80;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | nan;
    }
    let magnitude = magnitude.min(max.to_bits());
    let min_normal = (127 + 1 - BIAS) << 23;
    let code = if magnitude < min_normal {
        // Adding a power of two whose last mantissa bit is the subnormal step lets the FPU round to nearest even.
        let step = f32::from_bits((127 + 1 - BIAS - M + 23) << 23);
        (f32::from_bits(magnitude) + step).to_bits() - step.to_bits()
    } else {
        let shift = 23 - M;
        let rounded = magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1);
        (rounded >> shift) - ((127 - BIAS) << M)
    };
    sign | code as u8
}

const fn decode<const M: u32, const BIAS: u32, const INF: bool>(code: u8) -> f32 {
    let sign = ((code & 0x80) as u32) << 24;
    let exponent = ((code & 0x7f) as u32) >> M;
    let mantissa = code as u32 & ((1 << M) - 1);
    let top = 0x7f >> M;
    let magnitude = if INF && exponent == top {
        0x7f80_0000 | mantissa << (23 - M)
    } else if !INF && code & 0x7f == 0x7f {
        0x7fc0_0000
    } else if exponent != 0 {
        (exponent + 127 - BIAS) << 23 | mantissa << (23 - M)
    } else {
        // Subnormal: mantissa times 2^(1 - BIAS - M), exact in f32.
        return f32::from_bits(sign | (mantissa as f32 * f32::from_bits((127 + 1 - BIAS - M) << 23)).to_bits());
    };
    f32::from_bits(sign | magnitude)
}

const fn table<const M: u32, const BIAS: u32, const INF: bool>() -> [f32; 256] {
    let mut t = [0.0; 256];
    let mut i = 0;
    while i < 256 {
        t[i] = decode::<M, BIAS, INF>(i as u8);
        i += 1;
    }
    t
}

pub static E4M3_TO_F32: [f32; 256] = table::<3, 7, false>();
pub static E5M2_TO_F32: [f32; 256] = table::<2, 15, true>();

#[inline(always)]
pub fn f32_to_e4m3(x: f32) -> u8 {
    encode::<3, 7>(x, E4M3_MAX, 0x7f)
}

#[inline(always)]
pub fn f32_to_e5m2(x: f32) -> u8 {
    encode::<2, 15>(x, E5M2_MAX, 0x7f)
}

/// 2^(code - 127); 255 is NaN.
#[inline(always)]
pub fn e8m0_to_f32(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000), // 2^-127, a subnormal
        255 => f32::NAN,
        c => f32::from_bits((c as u32) << 23),
    }
}

/// The smallest power of two that is at least `s`, within 2^-126 ..= 2^127, read off the exponent bits. `s` is finite and positive.
#[inline(always)]
pub fn f32_to_e8m0_ceil(s: f32) -> u8 {
    let bits = s.to_bits();
    let up = u32::from(bits & 0x007f_ffff != 0);
    ((bits >> 23) + up).clamp(1, 254) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nearest code by exhaustive search in f64, ties to the even code.
    fn nearest(x: f32, table: &[f32; 256], max: f32) -> u8 {
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        let a = x.abs().min(max) as f64;
        let mut best = 0u8;
        for c in 0..0x80u8 {
            let v = table[c as usize] as f64;
            if !v.is_finite() {
                continue;
            }
            let (d, b) = ((v - a).abs(), (table[best as usize] as f64 - a).abs());
            if d < b || (d == b && c % 2 == 0) {
                best = c;
            }
        }
        sign | best
    }

    #[test]
    fn codes_round_trip() {
        for c in 0..=255u8 {
            let (a, b) = (E4M3_TO_F32[c as usize], E5M2_TO_F32[c as usize]);
            assert!(if a.is_nan() { c & 0x7f == 0x7f } else { f32_to_e4m3(a) == c });
            if b.is_finite() {
                assert_eq!(f32_to_e5m2(b), c);
            }
        }
        assert_eq!(E4M3_TO_F32[0x7e], 448.0);
        assert_eq!(E4M3_TO_F32[1], 0.001953125);
        assert_eq!(E5M2_TO_F32[0x7b], 57344.0);
        assert_eq!(E5M2_TO_F32[0x7c], f32::INFINITY);
    }

    #[test]
    fn casts_round_to_nearest_even_and_saturate() {
        let mut bits = 0u32;
        while bits < 0x7f80_0000 {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                assert_eq!(f32_to_e4m3(x), nearest(x, &E4M3_TO_F32, E4M3_MAX), "e4m3 of {x:e}");
                assert_eq!(f32_to_e5m2(x), nearest(x, &E5M2_TO_F32, E5M2_MAX), "e5m2 of {x:e}");
            }
            bits += 0x0003_fff1;
        }
        for c in 0..0x7e {
            let mid = (E4M3_TO_F32[c] + E4M3_TO_F32[c + 1]) / 2.0;
            assert_eq!(f32_to_e4m3(mid) as usize, c + (c & 1), "tie above code {c}");
        }
        assert_eq!(f32_to_e4m3(f32::INFINITY), 0x7e);
        assert_eq!(f32_to_e5m2(f32::NEG_INFINITY), 0xfb);
        assert!(E4M3_TO_F32[f32_to_e4m3(f32::NAN) as usize].is_nan());
        assert!(E5M2_TO_F32[f32_to_e5m2(f32::NAN) as usize].is_nan());
    }

    #[test]
    fn e8m0_is_the_next_power_of_two() {
        for (s, want) in [
            (1.0, 1.0),
            (1.0000001, 2.0),
            (0.75, 1.0),
            (448.0, 512.0),
            (1e-45, f32::MIN_POSITIVE),
            (3e38, 1.7014118e38),
        ] {
            assert_eq!(e8m0_to_f32(f32_to_e8m0_ceil(s)), want, "{s}");
        }
    }
}

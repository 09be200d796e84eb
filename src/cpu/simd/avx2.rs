//! Lanes in one 256-bit register, with FMA and F16C.

use super::{Kernel, LANES, Simd};
use crate::cpu::isa::Avx2;
use crate::dtype::{DType, Element};
use std::arch::x86_64::*;

/// Compiled for the features whose proof `s` is.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn run<K: Kernel>(s: Avx2, kernel: K) -> K::Output {
    kernel.run(s)
}

/// Round to an fp8 of `M` mantissa bits and exponent bias `BIAS`, at most `max`; the codes in the low bytes of 32-bit lanes. As `fp8::encode`.
#[target_feature(enable = "avx2")]
#[inline]
fn encode_fp8<const M: i32, const DROP: i32, const BIAS: i32>(x: __m256, max: f32) -> __m256i {
    const { assert!(DROP == 23 - M) };
    let int = _mm256_set1_epi32;
    let bits = _mm256_castps_si256(x);
    let sign = _mm256_and_si256(_mm256_srli_epi32::<24>(bits), int(0x80));
    let magnitude = _mm256_and_si256(bits, int(0x7fff_ffff));
    let is_nan = _mm256_cmpgt_epi32(magnitude, int(0x7f80_0000));
    let magnitude = _mm256_min_epi32(magnitude, int(max.to_bits() as i32));
    // The power of two whose last mantissa bit is the code's: adding it rounds to a multiple of that, and leaves the multiple in the mantissa.
    let power = _mm256_max_epi32(_mm256_and_si256(magnitude, int(0x7f80_0000)), int((127 + 1 - BIAS) << 23));
    let power = _mm256_add_epi32(power, int(DROP << 23));
    let rounded = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(power));
    let multiple = _mm256_sub_epi32(_mm256_castps_si256(rounded), power);
    let exponent = _mm256_sub_epi32(_mm256_srli_epi32::<DROP>(power), int((127 + 1 - BIAS + DROP) << M));
    let code = _mm256_add_epi32(multiple, exponent);
    let code = _mm256_blendv_epi8(code, int(0x7f), is_nan);
    _mm256_or_si256(code, sign)
}

/// Low bytes of 32-bit lanes, each at most 255.
#[target_feature(enable = "avx2")]
#[inline]
fn pack_bytes(x: __m256i) -> [u8; LANES] {
    let words = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
    _mm_cvtsi128_si64(_mm_packus_epi16(words, words)).to_le_bytes()
}

#[target_feature(enable = "avx2")]
#[inline]
fn pack_words(x: __m256i) -> __m128i {
    _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x))
}

/// bf16 bits in the low words of 32-bit lanes: to nearest even, NaN quieted.
#[target_feature(enable = "avx2")]
#[inline]
fn round_bf16(x: __m256) -> __m256i {
    let int = _mm256_set1_epi32;
    let bits = _mm256_castps_si256(x);
    let high = _mm256_srli_epi32::<16>(bits);
    let odd = _mm256_and_si256(high, int(1));
    let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(_mm256_add_epi32(bits, int(0x7fff)), odd));
    let quiet = _mm256_or_si256(high, int(0x40));
    _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x)))
}

/// As [`round_bf16`] of what is not NaN.
#[target_feature(enable = "avx2")]
#[inline]
fn round_ordered_bf16(x: __m256) -> __m256i {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let half = _mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff));
    _mm256_srli_epi32::<16>(_mm256_add_epi32(half, odd))
}

/// Low words of the 32-bit lanes of `a`, then of `b`, each at most 65535.
#[target_feature(enable = "avx2")]
#[inline]
fn pack_word_pairs(a: __m256i, b: __m256i) -> __m256i {
    _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(a, b))
}

/// Low bytes of the 32-bit lanes of `a`, then of `b`, each at most 255.
#[target_feature(enable = "avx2")]
#[inline]
fn pack_byte_pairs(a: __m256i, b: __m256i) -> __m128i {
    let words = pack_word_pairs(a, b);
    _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words))
}

/// e4m3 is half precision's top byte with 8 less in the exponent: widen to f16 bits, convert (no penalty for subnormals there), times 2^8.
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn decode_e4m3(codes: __m128i) -> __m256 {
    let word = _mm_set1_epi16;
    let half = _mm_and_si128(_mm_slli_epi16::<7>(_mm_cvtepi8_epi16(codes)), word(0xbf80_u16 as i16));
    // The one NaN pattern turns into f16's.
    let is_nan = _mm_cmpeq_epi16(_mm_and_si128(half, word(0x3f80)), word(0x3f80));
    let half = _mm_xor_si128(half, _mm_and_si128(is_nan, word(0x4180)));
    _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0))
}

/// Wrap intrinsics whose features the token proves.
macro_rules! lanes {
    ($($body:tt)*) => {
        // SAFETY: an `Avx2` is only made where the CPU has AVX2, FMA and F16C.
        unsafe { $($body)* }
    };
}

impl Simd for Avx2 {
    type F = __m256;
    type D = [__m256d; 2];
    const ROWS: usize = 6;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        lanes!(_mm256_set1_ps(x))
    }

    #[inline(always)]
    fn load<T: Element>(self, x: &[T; LANES]) -> __m256 {
        let p = x.as_ptr();
        // SAFETY: the features as above; each load reads the array's own 8 elements, whose size `Plain` ties to DTYPE.
        unsafe {
            match T::DTYPE {
                DType::F32 => _mm256_loadu_ps(p.cast()),
                DType::F16 => _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                DType::BF16 => {
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))))
                }
                DType::F8E4M3 => decode_e4m3(_mm_loadl_epi64(p.cast())),
                DType::F8E5M2 => {
                    let codes = _mm_loadl_epi64(p.cast());
                    _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), codes))
                }
                _ => {
                    let mut y = [0.0f32; LANES];
                    for (y, x) in y.iter_mut().zip(x) {
                        *y = x.to_f32();
                    }
                    _mm256_loadu_ps(y.as_ptr())
                }
            }
        }
    }

    #[inline(always)]
    fn store<T: Element>(self, y: &mut [T; LANES], x: __m256) {
        let p = y.as_mut_ptr();
        // SAFETY: the features as above; each store writes the array's own 8 elements, whose size `Plain` ties to DTYPE.
        unsafe {
            match T::DTYPE {
                DType::F32 => _mm256_storeu_ps(p.cast(), x),
                DType::F16 => _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)),
                DType::BF16 => _mm_storeu_si128(p.cast(), pack_words(round_bf16(x))),
                DType::F8E4M3 => {
                    p.cast::<[u8; LANES]>().write(pack_bytes(encode_fp8::<3, 20, 7>(x, crate::fp8::E4M3_MAX)))
                }
                DType::F8E5M2 => {
                    p.cast::<[u8; LANES]>().write(pack_bytes(encode_fp8::<2, 21, 15>(x, crate::fp8::E5M2_MAX)))
                }
                _ => {
                    let mut lanes = [0.0f32; LANES];
                    _mm256_storeu_ps(lanes.as_mut_ptr(), x);
                    for (y, x) in y.iter_mut().zip(lanes) {
                        *y = T::from_f32(x);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn store_pair<T: Element>(self, y: &mut [T; 2 * LANES], [a, b]: [__m256; 2]) {
        let p = y.as_mut_ptr();
        // SAFETY: the features as above; each store writes the array's own 16 elements, whose size `Plain` ties to DTYPE.
        unsafe {
            match T::DTYPE {
                DType::BF16 if _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(a, b)) == 0 => {
                    _mm256_storeu_si256(p.cast(), pack_word_pairs(round_ordered_bf16(a), round_ordered_bf16(b)))
                }
                DType::F8E4M3 => {
                    let (a, b) = (
                        encode_fp8::<3, 20, 7>(a, crate::fp8::E4M3_MAX),
                        encode_fp8::<3, 20, 7>(b, crate::fp8::E4M3_MAX),
                    );
                    _mm_storeu_si128(p.cast(), pack_byte_pairs(a, b))
                }
                DType::F8E5M2 => {
                    let (a, b) = (
                        encode_fp8::<2, 21, 15>(a, crate::fp8::E5M2_MAX),
                        encode_fp8::<2, 21, 15>(b, crate::fp8::E5M2_MAX),
                    );
                    _mm_storeu_si128(p.cast(), pack_byte_pairs(a, b))
                }
                _ => {
                    self.store(y.first_chunk_mut().unwrap(), a);
                    self.store(y.last_chunk_mut().unwrap(), b);
                }
            }
        }
    }

    #[inline(always)]
    fn round<T: Element>(self, x: __m256) -> __m256 {
        match T::DTYPE {
            DType::F32 => x,
            DType::F16 => lanes!(_mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x))),
            DType::BF16 => lanes!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(round_bf16(x)))),
            _ => {
                let mut y = [T::from_f32(0.0); LANES];
                self.store(&mut y, x);
                self.load(&y)
            }
        }
    }

    #[inline(always)]
    fn add(self, x: __m256, y: __m256) -> __m256 {
        lanes!(_mm256_add_ps(x, y))
    }

    #[inline(always)]
    fn sub(self, x: __m256, y: __m256) -> __m256 {
        lanes!(_mm256_sub_ps(x, y))
    }

    #[inline(always)]
    fn mul(self, x: __m256, y: __m256) -> __m256 {
        lanes!(_mm256_mul_ps(x, y))
    }

    #[inline(always)]
    fn div(self, x: __m256, y: __m256) -> __m256 {
        lanes!(_mm256_div_ps(x, y))
    }

    #[inline(always)]
    fn mul_add(self, x: __m256, y: __m256, z: __m256) -> __m256 {
        lanes!(_mm256_fmadd_ps(x, y, z))
    }

    #[inline(always)]
    fn max(self, x: __m256, y: __m256) -> __m256 {
        lanes!(_mm256_max_ps(x, y))
    }

    #[inline(always)]
    fn finite_abs(self, x: __m256) -> __m256 {
        lanes!({
            let magnitude = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fff_ffff)));
            let finite = _mm256_cmp_ps::<_CMP_LT_OQ>(magnitude, _mm256_set1_ps(f32::INFINITY));
            _mm256_and_ps(magnitude, finite)
        })
    }

    #[inline(always)]
    fn gt_mask(self, x: __m256, y: __m256) -> u32 {
        lanes!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(x, y)) as u32)
    }

    #[inline(always)]
    fn swap_pairs(self, x: __m256) -> __m256 {
        lanes!(_mm256_permute_ps::<0b10_11_00_01>(x))
    }

    #[inline(always)]
    fn transpose(self, [a, b, c, d, e, f, g, h]: [__m256; LANES]) -> [__m256; LANES] {
        lanes!({
            // Pairs of rows, then quads within 128-bit halves, then the halves.
            let (ab, cd) = (
                [_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)],
                [_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)],
            );
            let (ef, gh) = (
                [_mm256_unpacklo_ps(e, f), _mm256_unpackhi_ps(e, f)],
                [_mm256_unpacklo_ps(g, h), _mm256_unpackhi_ps(g, h)],
            );
            let mut y = [a; LANES];
            for i in 0..2 {
                let top = [_mm256_shuffle_ps::<0x44>(ab[i], cd[i]), _mm256_shuffle_ps::<0xee>(ab[i], cd[i])];
                let low = [_mm256_shuffle_ps::<0x44>(ef[i], gh[i]), _mm256_shuffle_ps::<0xee>(ef[i], gh[i])];
                for j in 0..2 {
                    y[2 * i + j] = _mm256_permute2f128_ps::<0x20>(top[j], low[j]);
                    y[2 * i + j + 4] = _mm256_permute2f128_ps::<0x31>(top[j], low[j]);
                }
            }
            y
        })
    }

    #[inline(always)]
    fn select_lt(self, x: __m256, y: __m256, a: __m256, b: __m256) -> __m256 {
        lanes!(_mm256_blendv_ps(b, a, _mm256_cmp_ps::<_CMP_LT_OQ>(x, y)))
    }

    #[inline(always)]
    fn nearest(self, x: __m256) -> __m256 {
        lanes!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x))
    }

    #[inline(always)]
    fn times_power(self, x: __m256, n: __m256) -> __m256 {
        // NaN as an integer is 0x80000000, of which the shift leaves nothing.
        lanes!({
            let power = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), power))
        })
    }

    #[inline(always)]
    fn load_e4m3_panel(
        self,
        rows: [&[u8; 2 * LANES]; 2 * LANES],
        scale: [__m256; 2],
        to: &mut [[f32; LANES]; 4 * LANES],
    ) {
        // SAFETY: the features as above; loads and stores stay within the arrays.
        unsafe {
            let mut x = [_mm_setzero_si128(); 16];
            for (x, row) in x.iter_mut().zip(rows) {
                *x = _mm_loadu_si128(row.as_ptr().cast());
            }
            // Interleaving rows i and i + 8 four times turns a 16 x 16 square.
            for _ in 0..4 {
                let mut y = x;
                for i in 0..8 {
                    y[2 * i] = _mm_unpacklo_epi8(x[i], x[i + 8]);
                    y[2 * i + 1] = _mm_unpackhi_epi8(x[i], x[i + 8]);
                }
                x = y;
            }
            let word = _mm256_set1_epi16;
            let scale = scale.map(|s| _mm256_mul_ps(s, _mm256_set1_ps(256.0)));
            for (k, x) in x.into_iter().enumerate() {
                // As `decode_e4m3`, with the 2^8 in the scale.
                let half = _mm256_and_si256(_mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(x)), word(0xbf80_u16 as i16));
                let is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, word(0x3f80)), word(0x3f80));
                let half = _mm256_xor_si256(half, _mm256_and_si256(is_nan, word(0x4180)));
                let low = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
                let high = _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half));
                _mm256_storeu_ps(to[2 * k].as_mut_ptr(), _mm256_mul_ps(low, scale[0]));
                _mm256_storeu_ps(to[2 * k + 1].as_mut_ptr(), _mm256_mul_ps(high, scale[1]));
            }
        }
    }

    #[inline(always)]
    fn prefetch(self, p: *const u8, bytes: usize) {
        for at in (0..bytes).step_by(64) {
            // A prefetch never faults.
            lanes!(_mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(at).cast()))
        }
    }

    #[inline(always)]
    fn prefetch_write(self, p: *const u8, bytes: usize) {
        for at in (0..bytes).step_by(64) {
            lanes!(_mm_prefetch::<_MM_HINT_ET0>(p.wrapping_add(at).cast()))
        }
    }

    #[inline(always)]
    fn zero_f64(self) -> [__m256d; 2] {
        lanes!([_mm256_setzero_pd(); 2])
    }

    #[inline(always)]
    fn add_square(self, [low, high]: [__m256d; 2], x: __m256) -> [__m256d; 2] {
        lanes!({
            let (a, b) = (_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(x)));
            [_mm256_fmadd_pd(a, a, low), _mm256_fmadd_pd(b, b, high)]
        })
    }

    #[inline(always)]
    fn to_array_f64(self, [low, high]: [__m256d; 2]) -> [f64; LANES] {
        let mut y = [0.0; LANES];
        // SAFETY: the features as above; two stores of 4 into 8 elements.
        unsafe {
            _mm256_storeu_pd(y.as_mut_ptr(), low);
            _mm256_storeu_pd(y.as_mut_ptr().add(4), high);
        }
        y
    }
}

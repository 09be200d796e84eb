//! AVX2 + FMA + F16C.
//!
//! Naively, for each token and row: `sum += (q_w - offset) * q_a` over a sub-block, then `out += scale * sum`. Here a vector holds 8 rows
//! by 4 columns, so `vpmaddubsw` against one broadcast dword of activations leaves, per row, two 16-bit sums of two products, and
//! nothing ever has to be added across lanes. Two vectors of weights (16 rows) against four tokens make eight accumulators: with
//! the two weight vectors, one broadcast and two products that is 13 of 16 registers, and per 32 products one multiply and one add
//! are issued, which is what the ports can do.
//!
//! The sums stay in 16 bits over a whole sub-block. They start at `-offset * sum(q_a)`, so that what they end with is the sum of the
//! centred products and fits; that the value wraps on the way there does no harm.
//!
//! The steps are inline assembly: written with intrinsics, the compiler regroups the 16-bit additions (they are associative), which
//! lengthens lifetimes until accumulators are spilled inside the loop.

use std::arch::asm;
use std::arch::x86_64::*;

use super::activations::{ByteActs, SuperActs, WordActs};
use super::float::{FloatActs, FloatTile};
use super::formats::{Format, Tile};
use super::lanes::Lanes;
use super::{Isa, TOKENS};
use crate::cpu::isa::Avx2;

/// Eight rows' dwords; made only where [`Avx2`] vouches for the CPU.
#[derive(Clone, Copy)]
pub struct V(__m256i);

macro_rules! intrinsics {
    ($e:expr) => {
        // SAFETY: values of `V` exist only in code entered through `Avx2`, and the pointers come from references to whole planes.
        unsafe { $e }
    };
}

impl Lanes for V {
    type F = __m256;

    #[inline(always)]
    fn load(plane: &[u32; 16], h: usize) -> Self {
        let half = &plane[8 * h..8 * h + 8];
        Self(intrinsics!(_mm256_loadu_si256(half.as_ptr().cast())))
    }
    #[inline(always)]
    fn store(self, plane: &mut [u32; 16], h: usize) {
        let half = &mut plane[8 * h..8 * h + 8];
        intrinsics!(_mm256_storeu_si256(half.as_mut_ptr().cast(), self.0))
    }
    #[inline(always)]
    fn splat(v: u32) -> Self {
        Self(intrinsics!(_mm256_set1_epi32(v as i32)))
    }
    #[inline(always)]
    fn and(self, o: Self) -> Self {
        Self(intrinsics!(_mm256_and_si256(self.0, o.0)))
    }
    #[inline(always)]
    fn or(self, o: Self) -> Self {
        Self(intrinsics!(_mm256_or_si256(self.0, o.0)))
    }
    #[inline(always)]
    fn shl<const N: i32>(self) -> Self {
        Self(intrinsics!(_mm256_slli_epi32::<N>(self.0)))
    }
    #[inline(always)]
    fn shr<const N: i32>(self) -> Self {
        Self(intrinsics!(_mm256_srli_epi32::<N>(self.0)))
    }
    #[inline(always)]
    fn sub_bytes(self, o: Self) -> Self {
        Self(intrinsics!(_mm256_sub_epi8(self.0, o.0)))
    }
    #[inline(always)]
    fn lookup(self, table: &[i8; 16]) -> Self {
        Self(intrinsics!(_mm256_shuffle_epi8(
            _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())),
            self.0
        )))
    }
    #[inline(always)]
    fn even_bytes_i16(self) -> Self {
        Self(intrinsics!(_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(self.0))))
    }
    #[inline(always)]
    fn odd_bytes_i16(self) -> Self {
        Self(intrinsics!(_mm256_srai_epi16::<8>(self.0)))
    }
    #[inline(always)]
    fn byte_pair_i16<const N: i32>(self) -> Self {
        // Byte N to the top of both halves of its lane, then down with its sign.
        let (z, n) = (-128i8 as u8 as u32, N as u32);
        let control = z | n << 8 | z << 16 | n << 24;
        let lane = [0u32, 0x0400_0400, 0x0800_0800, 0x0c00_0c00].map(|o| (control + o) as i32);
        Self(intrinsics!(_mm256_srai_epi16::<8>(_mm256_shuffle_epi8(
            self.0,
            _mm256_setr_epi32(lane[0], lane[1], lane[2], lane[3], lane[0], lane[1], lane[2], lane[3])
        ))))
    }
    #[inline(always)]
    fn load_f16(plane: &[u16; 16], h: usize) -> __m256 {
        let half = &plane[8 * h..8 * h + 8];
        intrinsics!(_mm256_cvtph_ps(_mm_loadu_si128(half.as_ptr().cast())))
    }
    #[inline(always)]
    fn load_e8m0_halved(plane: &[u8; 16], h: usize) -> __m256 {
        let half = &plane[8 * h..8 * h + 8];
        intrinsics!({
            let e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(half.as_ptr().cast()));
            let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
            let subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
            let small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
            _mm256_castsi256_ps(_mm256_blendv_epi8(normal, subnormal, small))
        })
    }
    #[inline(always)]
    fn low_f16(self) -> __m256 {
        intrinsics!(low_f16(_mm256_and_si256(self.0, _mm256_set1_epi32(0xffff))))
    }
    #[inline(always)]
    fn high_f16(self) -> __m256 {
        intrinsics!(low_f16(_mm256_srli_epi32::<16>(self.0)))
    }
    #[inline(always)]
    fn to_f32(self) -> __m256 {
        intrinsics!(_mm256_cvtepi32_ps(self.0))
    }
    #[inline(always)]
    fn low_i16_to_f32(self) -> __m256 {
        intrinsics!(_mm256_cvtepi32_ps(_mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(self.0))))
    }
    #[inline(always)]
    fn high_i16_to_f32(self) -> __m256 {
        intrinsics!(_mm256_cvtepi32_ps(_mm256_srai_epi32::<16>(self.0)))
    }
    #[inline(always)]
    fn load_bf16(plane: &[u16; 16], h: usize) -> __m256 {
        let half = &plane[8 * h..8 * h + 8];
        intrinsics!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(
            half.as_ptr().cast()
        )))))
    }
    #[inline(always)]
    fn load_f32(plane: &[f32; 16], h: usize) -> __m256 {
        let half = &plane[8 * h..8 * h + 8];
        intrinsics!(_mm256_loadu_ps(half.as_ptr()))
    }
    #[inline(always)]
    fn splat_f32(v: f32) -> __m256 {
        intrinsics!(_mm256_set1_ps(v))
    }
    #[inline(always)]
    fn mul(a: __m256, b: __m256) -> __m256 {
        intrinsics!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        intrinsics!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn store_f32(v: __m256, plane: &mut [f32; 16], h: usize) {
        let half = &mut plane[8 * h..8 * h + 8];
        intrinsics!(_mm256_storeu_ps(half.as_mut_ptr(), v))
    }
}

/// f16 in the low half of each dword, the high half zero.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn low_f16(v: __m256i) -> __m256 {
    let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(v, v));
    _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
}

type Acc<const NT: usize> = [[__m256i; 2]; NT];

/// One dword of activations against both weight vectors.
macro_rules! token {
    ($mul:literal, $add:literal, $a:literal, $c0:literal, $c1:literal) => {
        concat!(
            "vpbroadcastd {x}, dword ptr [{a} + ",
            $a,
            "]\n",
            $mul,
            " {t0}, {w0}, {x}\n",
            $mul,
            " {t1}, {w1}, {x}\n",
            $add,
            " {",
            $c0,
            "}, {",
            $c0,
            "}, {t0}\n",
            $add,
            " {",
            $c1,
            "}, {",
            $c1,
            "}, {t1}\n",
        )
    };
}

macro_rules! weights {
    ($w:literal) => {
        concat!("vmovdqa {w0}, ymmword ptr [{w} + ", $w, "]\nvmovdqa {w1}, ymmword ptr [{w} + ", $w, " + 32]\n")
    };
}

/// Four steps: 64 bytes of weights and 16 bytes of activations each.
macro_rules! four_steps {
    ($mul:literal, $add:literal, $nt:tt, $w:ident, $a:ident, $acc:ident) => {
        // SAFETY: reads 256 bytes at `w` and 64 at `a`, which the references cover; the registers are declared.
        unsafe {
            four_steps!(@ $nt, $mul, $add, $w, $a, $acc)
        }
    };
    (@ 1, $mul:literal, $add:literal, $w:ident, $a:ident, $acc:ident) => { asm!(
        weights!("0"), token!($mul, $add, "0", "c00", "c01"),
        weights!("64"), token!($mul, $add, "16", "c00", "c01"),
        weights!("128"), token!($mul, $add, "32", "c00", "c01"),
        weights!("192"), token!($mul, $add, "48", "c00", "c01"),
        w = in(reg) $w.as_ptr(), a = in(reg) $a.as_ptr(), w0 = out(ymm_reg) _, w1 = out(ymm_reg) _, x = out(ymm_reg) _,
        t0 = out(ymm_reg) _, t1 = out(ymm_reg) _, c00 = inout(ymm_reg) $acc[0][0], c01 = inout(ymm_reg) $acc[0][1],
        options(pure, readonly, nostack, preserves_flags)) };
    (@ 2, $mul:literal, $add:literal, $w:ident, $a:ident, $acc:ident) => { asm!(
        weights!("0"), token!($mul, $add, "0", "c00", "c01"), token!($mul, $add, "4", "c10", "c11"),
        weights!("64"), token!($mul, $add, "16", "c00", "c01"), token!($mul, $add, "20", "c10", "c11"),
        weights!("128"), token!($mul, $add, "32", "c00", "c01"), token!($mul, $add, "36", "c10", "c11"),
        weights!("192"), token!($mul, $add, "48", "c00", "c01"), token!($mul, $add, "52", "c10", "c11"),
        w = in(reg) $w.as_ptr(), a = in(reg) $a.as_ptr(), w0 = out(ymm_reg) _, w1 = out(ymm_reg) _, x = out(ymm_reg) _,
        t0 = out(ymm_reg) _, t1 = out(ymm_reg) _, c00 = inout(ymm_reg) $acc[0][0], c01 = inout(ymm_reg) $acc[0][1],
        c10 = inout(ymm_reg) $acc[1][0], c11 = inout(ymm_reg) $acc[1][1],
        options(pure, readonly, nostack, preserves_flags)) };
    (@ 3, $mul:literal, $add:literal, $w:ident, $a:ident, $acc:ident) => { asm!(
        weights!("0"), token!($mul, $add, "0", "c00", "c01"), token!($mul, $add, "4", "c10", "c11"), token!($mul, $add, "8", "c20", "c21"),
        weights!("64"), token!($mul, $add, "16", "c00", "c01"), token!($mul, $add, "20", "c10", "c11"), token!($mul, $add, "24", "c20", "c21"),
        weights!("128"), token!($mul, $add, "32", "c00", "c01"), token!($mul, $add, "36", "c10", "c11"), token!($mul, $add, "40", "c20", "c21"),
        weights!("192"), token!($mul, $add, "48", "c00", "c01"), token!($mul, $add, "52", "c10", "c11"), token!($mul, $add, "56", "c20", "c21"),
        w = in(reg) $w.as_ptr(), a = in(reg) $a.as_ptr(), w0 = out(ymm_reg) _, w1 = out(ymm_reg) _, x = out(ymm_reg) _,
        t0 = out(ymm_reg) _, t1 = out(ymm_reg) _, c00 = inout(ymm_reg) $acc[0][0], c01 = inout(ymm_reg) $acc[0][1],
        c10 = inout(ymm_reg) $acc[1][0], c11 = inout(ymm_reg) $acc[1][1],
        c20 = inout(ymm_reg) $acc[2][0], c21 = inout(ymm_reg) $acc[2][1],
        options(pure, readonly, nostack, preserves_flags)) };
    (@ 4, $mul:literal, $add:literal, $w:ident, $a:ident, $acc:ident) => { asm!(
        weights!("0"), token!($mul, $add, "0", "c00", "c01"), token!($mul, $add, "4", "c10", "c11"),
        token!($mul, $add, "8", "c20", "c21"), token!($mul, $add, "12", "c30", "c31"),
        weights!("64"), token!($mul, $add, "16", "c00", "c01"), token!($mul, $add, "20", "c10", "c11"),
        token!($mul, $add, "24", "c20", "c21"), token!($mul, $add, "28", "c30", "c31"),
        weights!("128"), token!($mul, $add, "32", "c00", "c01"), token!($mul, $add, "36", "c10", "c11"),
        token!($mul, $add, "40", "c20", "c21"), token!($mul, $add, "44", "c30", "c31"),
        weights!("192"), token!($mul, $add, "48", "c00", "c01"), token!($mul, $add, "52", "c10", "c11"),
        token!($mul, $add, "56", "c20", "c21"), token!($mul, $add, "60", "c30", "c31"),
        w = in(reg) $w.as_ptr(), a = in(reg) $a.as_ptr(), w0 = out(ymm_reg) _, w1 = out(ymm_reg) _, x = out(ymm_reg) _,
        t0 = out(ymm_reg) _, t1 = out(ymm_reg) _, c00 = inout(ymm_reg) $acc[0][0], c01 = inout(ymm_reg) $acc[0][1],
        c10 = inout(ymm_reg) $acc[1][0], c11 = inout(ymm_reg) $acc[1][1],
        c20 = inout(ymm_reg) $acc[2][0], c21 = inout(ymm_reg) $acc[2][1],
        c30 = inout(ymm_reg) $acc[3][0], c31 = inout(ymm_reg) $acc[3][1],
        options(pure, readonly, nostack, preserves_flags)) };
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn byte_steps<const NT: usize>(w: &[[u32; 16]; 4], a: &[[u32; TOKENS]; 4], acc: &mut Acc<NT>) {
    match NT {
        1 => four_steps!("vpmaddubsw", "vpaddw", 1, w, a, acc),
        2 => four_steps!("vpmaddubsw", "vpaddw", 2, w, a, acc),
        3 => four_steps!("vpmaddubsw", "vpaddw", 3, w, a, acc),
        _ => four_steps!("vpmaddubsw", "vpaddw", 4, w, a, acc),
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn word_steps<const NT: usize>(w: &[[u32; 16]; 4], a: &[[u32; TOKENS]; 4], acc: &mut Acc<NT>) {
    match NT {
        1 => four_steps!("vpmaddwd", "vpaddd", 1, w, a, acc),
        2 => four_steps!("vpmaddwd", "vpaddd", 2, w, a, acc),
        3 => four_steps!("vpmaddwd", "vpaddd", 3, w, a, acc),
        _ => four_steps!("vpmaddwd", "vpaddd", 4, w, a, acc),
    }
}

/// Steps `4 i ..+4` of a tile or of activations.
#[inline(always)]
fn four<T>(steps: &[T], i: usize) -> &[T; 4] {
    steps[4 * i..4 * i + 4].try_into().expect("four steps")
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn halves(plane: &[f32; 16]) -> [__m256; 2] {
    // SAFETY: both loads lie inside the plane.
    unsafe { [_mm256_loadu_ps(plane.as_ptr()), _mm256_loadu_ps(plane.as_ptr().add(8))] }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn int_halves(plane: &[u32; 16]) -> [__m256i; 2] {
    // SAFETY: both loads lie inside the plane.
    unsafe { [_mm256_loadu_si256(plane.as_ptr().cast()), _mm256_loadu_si256(plane.as_ptr().add(8).cast())] }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_halves(v: [__m256; 2], plane: &mut [f32; 16]) {
    // SAFETY: both stores lie inside the plane.
    unsafe {
        _mm256_storeu_ps(plane.as_mut_ptr(), v[0]);
        _mm256_storeu_ps(plane.as_mut_ptr().add(8), v[1]);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn shifted(minus_sum: u32, shift: u32) -> __m256i {
    let v = _mm256_set1_epi32(minus_sum as i32);
    match shift {
        2 => _mm256_slli_epi16::<2>(v),
        3 => _mm256_slli_epi16::<3>(v),
        4 => _mm256_slli_epi16::<4>(v),
        _ => _mm256_slli_epi16::<5>(v),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn byte_blocks<F: Format, const NT: usize>(tile: &Tile, acts: &ByteActs, blocks: usize, out: &mut [[f32; 16]; NT]) {
    let ones = _mm256_set1_epi16(1);
    for b in 0..blocks {
        let mut acc: Acc<NT> = [[_mm256_setzero_si256(); 2]; NT];
        if F::SHIFT > 0 {
            for t in 0..NT {
                acc[t] = [shifted(acts.minus_sum[b][t], F::SHIFT); 2];
            }
        }
        byte_steps(four(&tile.q, 2 * b), four(&acts.q, 2 * b), &mut acc);
        byte_steps(four(&tile.q, 2 * b + 1), four(&acts.q, 2 * b + 1), &mut acc);
        let (scale, min) = (halves(&tile.scale[b]), halves(&tile.min[b]));
        for t in 0..NT {
            let (d, sum) = (_mm256_set1_ps(acts.d[b][t]), _mm256_set1_ps(acts.sum[b][t]));
            let mut o = halves(&out[t]);
            for h in 0..2 {
                let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(acc[t][h], ones));
                o[h] = _mm256_fmadd_ps(dot, _mm256_mul_ps(scale[h], d), o[h]);
                if F::MIN {
                    o[h] = _mm256_fmadd_ps(min[h], sum, o[h]);
                }
            }
            store_halves(o, &mut out[t]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn byte_super<F: Format, const SUBS: usize, const NT: usize>(tile: &Tile, acts: &SuperActs, out: &mut [[f32; 16]; NT]) {
    let mut dot = [[_mm256_setzero_si256(); 2]; NT];
    for j in 0..SUBS {
        let mut acc: Acc<NT> = [[_mm256_setzero_si256(); 2]; NT];
        if F::SHIFT > 0 {
            for t in 0..NT {
                acc[t] = [if SUBS == 16 {
                    shifted(acts.minus_sum[j][t], F::SHIFT)
                } else {
                    _mm256_add_epi16(
                        shifted(acts.minus_sum[2 * j][t], F::SHIFT),
                        shifted(acts.minus_sum[2 * j + 1][t], F::SHIFT),
                    )
                }; 2];
            }
        }
        if SUBS == 16 {
            byte_steps(four(&tile.q, j), four(&acts.q, j), &mut acc);
        } else {
            byte_steps(four(&tile.q, 2 * j), four(&acts.q, 2 * j), &mut acc);
            byte_steps(four(&tile.q, 2 * j + 1), four(&acts.q, 2 * j + 1), &mut acc);
        }
        let scale = int_halves(&tile.sub_scale[j]);
        for t in 0..NT {
            for h in 0..2 {
                dot[t][h] = _mm256_add_epi32(dot[t][h], _mm256_madd_epi16(acc[t][h], scale[h]));
            }
        }
    }
    let scale = halves(&tile.scale[0]);
    for t in 0..NT {
        let mut o = halves(&out[t]);
        let d = _mm256_set1_ps(acts.d[t]);
        for h in 0..2 {
            o[h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[t][h]), _mm256_mul_ps(scale[h], d), o[h]);
        }
        if F::MIN {
            for j in 0..SUBS {
                let min = halves(&tile.min[j]);
                let sum = _mm256_set1_ps(if SUBS == 16 { acts.sum16[j][t] } else { acts.sum32[j][t] });
                for h in 0..2 {
                    o[h] = _mm256_fmadd_ps(min[h], sum, o[h]);
                }
            }
        }
        store_halves(o, &mut out[t]);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn word_blocks<const NT: usize>(tile: &Tile, acts: &WordActs, blocks: usize, out: &mut [[f32; 16]; NT]) {
    for b in 0..blocks {
        let mut acc: Acc<NT> = [[_mm256_setzero_si256(); 2]; NT];
        for i in 4 * b..4 * b + 4 {
            word_steps(four(&tile.q, i), four(&acts.q, i), &mut acc);
        }
        let scale = halves(&tile.scale[b]);
        for t in 0..NT {
            let d = _mm256_set1_ps(acts.d[b][t]);
            let mut o = halves(&out[t]);
            for h in 0..2 {
                o[h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[t][h]), _mm256_mul_ps(scale[h], d), o[h]);
            }
            store_halves(o, &mut out[t]);
        }
    }
}

/// Sums of a chunk start at zero, so that long rows lose nothing to small addends.
#[target_feature(enable = "avx2,fma,f16c")]
fn float<const NT: usize>(tile: &FloatTile, acts: &FloatActs, cols: usize, out: &mut [[f32; 16]; NT]) {
    let mut acc = [[_mm256_setzero_ps(); 2]; NT];
    for (w, x) in tile.w[..cols].iter().zip(&acts.x) {
        let w = halves(w);
        for t in 0..NT {
            let x = _mm256_set1_ps(x[t]);
            for h in 0..2 {
                acc[t][h] = _mm256_fmadd_ps(w[h], x, acc[t][h]);
            }
        }
    }
    for t in 0..NT {
        let o = halves(&out[t]);
        store_halves([_mm256_add_ps(o[0], acc[t][0]), _mm256_add_ps(o[1], acc[t][1])], &mut out[t]);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn to_f16(x: &[f32; 16], out: &mut [u16; 16]) {
    for (h, v) in halves(x).into_iter().enumerate() {
        // SAFETY: each half of the output holds eight values.
        unsafe {
            _mm_storeu_si128(out.as_mut_ptr().add(8 * h).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v))
        };
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn widen_f16(x: &[u16; 16], out: &mut [f32; 16]) {
    store_halves([V::load_f16(x, 0), V::load_f16(x, 1)], out);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn enter<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// Calls `$f::<.., NT>` with the number of tokens as a constant.
macro_rules! by_tokens {
    ($tokens:expr, $out:expr, |$nt:ident, $o:ident| $call:expr) => {{
        macro_rules! arm {
            ($n:literal) => {{
                const $nt: usize = $n;
                let $o: &mut [[f32; 16]; $nt] = (&mut $out[..$nt]).try_into().expect("as many rows as tokens");
                // SAFETY: an `Avx2` exists only where the CPU has these features.
                unsafe { $call }
            }};
        }
        match $tokens {
            1 => arm!(1),
            2 => arm!(2),
            3 => arm!(3),
            _ => arm!(4),
        }
    }};
}

impl Isa for Avx2 {
    type V = V;

    #[inline(always)]
    fn enter<R>(self, f: impl FnOnce() -> R) -> R {
        // SAFETY: an `Avx2` exists only where the CPU has these features.
        unsafe { enter(f) }
    }
    #[inline(always)]
    fn byte_blocks<F: Format>(self, tile: &Tile, acts: &ByteActs, tokens: usize, blocks: usize, out: &mut [[f32; 16]]) {
        by_tokens!(tokens, out, |NT, o| byte_blocks::<F, NT>(tile, acts, blocks, o));
    }
    #[inline(always)]
    fn byte_super<F: Format, const SUBS: usize>(
        self,
        tile: &Tile,
        acts: &SuperActs,
        tokens: usize,
        out: &mut [[f32; 16]],
    ) {
        by_tokens!(tokens, out, |NT, o| byte_super::<F, SUBS, NT>(tile, acts, o));
    }
    #[inline(always)]
    fn word_blocks(self, tile: &Tile, acts: &WordActs, tokens: usize, blocks: usize, out: &mut [[f32; 16]]) {
        by_tokens!(tokens, out, |NT, o| word_blocks::<NT>(tile, acts, blocks, o));
    }
    #[inline(always)]
    fn float(self, tile: &FloatTile, acts: &FloatActs, tokens: usize, cols: usize, out: &mut [[f32; 16]]) {
        by_tokens!(tokens, out, |NT, o| float::<NT>(tile, acts, cols, o));
    }
    #[inline(always)]
    fn to_f16(self, x: &[f32; 16], out: &mut [u16; 16]) {
        // SAFETY: an `Avx2` exists only where the CPU has these features.
        unsafe { to_f16(x, out) }
    }
    #[inline(always)]
    fn widen_f16(self, x: &[u16; 16], out: &mut [f32; 16]) {
        // SAFETY: an `Avx2` exists only where the CPU has these features.
        unsafe { widen_f16(x, out) }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

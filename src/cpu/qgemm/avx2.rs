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
//! The kernels are assembly (`tile`, `fused`): written with intrinsics, the compiler regroups the 16-bit additions (they are associative), which
//! lengthens lifetimes until accumulators are spilled inside the loop.

#[macro_use]
mod assembly;
mod fused;
mod tile;

use std::arch::asm;
use std::arch::x86_64::*;

use super::activations::{ByteActs, CHUNK, Codes, Family, SuperActs, TINY, WordActs};
use super::float::{FloatActs, FloatFormat, FloatTile};
use super::float_rows::{LANES, RowActs, SixteenRows, Sums, TOGETHER};
use super::formats::{Format, Gguf, Scales, Tile};
use super::lanes::{Bits, Lanes};
use super::pack::RawRows;
use super::{Ahead, Isa, STREAMS, Scratch, Stream, TOKENS, Work, rowwise};
use crate::cpu::isa::Avx2;
use std::ops::Range;

/// Eight rows' dwords; made only where [`Avx2`] vouches for the CPU.
#[derive(Clone, Copy)]
pub struct V(pub(super) __m256i);

macro_rules! intrinsics {
    ($e:expr) => {
        // SAFETY: values of `V` and blocks of a row exist only in code entered through `Avx2`; the pointers come from references to whole planes, or a block's
        // bounds have been checked.
        unsafe { $e }
    };
}

impl V {
    /// The same byte shuffle within each lane; bytes of `control` from 0x80 on make zeros.
    #[inline(always)]
    fn shuffle_lanes(self, control: u32) -> Self {
        let at = |lane: u32| {
            let wanted = !(control >> 7) & 0x0101_0101;
            (control + wanted * (4 * lane)) as i32
        };
        Self(intrinsics!(_mm256_shuffle_epi8(
            self.0,
            _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(0), at(1), at(2), at(3))
        )))
    }
}

impl Bits for V {
    #[inline(always)]
    fn load(plane: &[u32; 16], h: usize) -> Self {
        let half = &plane[8 * h..8 * h + 8];
        Self(intrinsics!(_mm256_loadu_si256(half.as_ptr().cast())))
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
    fn shl(self, n: usize) -> Self {
        Self(intrinsics!(_mm256_sll_epi32(self.0, _mm_cvtsi32_si128(n as i32))))
    }
    #[inline(always)]
    fn shr(self, n: usize) -> Self {
        Self(intrinsics!(_mm256_srl_epi32(self.0, _mm_cvtsi32_si128(n as i32))))
    }
    #[inline(always)]
    fn lookup(self, table: &[i8; 16]) -> Self {
        Self(intrinsics!(_mm256_shuffle_epi8(
            _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())),
            self.0
        )))
    }
}

/// A GGUF block of one row, of so many bytes.
#[derive(Clone, Copy)]
pub struct OneRow(*const u8, usize);

impl OneRow {
    /// # Safety
    /// A block of the encoding lies there.
    #[inline(always)]
    pub unsafe fn new<F: Format>(block: *const u8) -> Self {
        Self(block, F::BLOCK_BYTES)
    }
    #[inline(always)]
    fn at(&self, at: usize, bytes: usize) -> *const u8 {
        // Known when compiled.
        assert!(at + bytes <= self.1);
        self.0.wrapping_add(at)
    }
}

impl Gguf<V> for OneRow {
    #[inline(always)]
    fn bytes(&self, at: usize) -> V {
        V(intrinsics!(_mm256_loadu_si256(self.at(at, 32).cast())))
    }
    #[inline(always)]
    fn nibbles(&self, at: usize) -> V {
        V(intrinsics!({
            let twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(self.at(at, 16).cast()));
            let high_down = _mm256_srlv_epi32(twice, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
            _mm256_and_si256(high_down, _mm256_set1_epi8(15))
        }))
    }
    #[inline(always)]
    fn fifth_bits(&self, at: usize) -> V {
        V(intrinsics!({
            let byte = |i: i64| i * 0x0101_0101_0101_0101;
            let spread = _mm256_shuffle_epi8(
                _mm256_set1_epi32(self.at(at, 4).cast::<i32>().read_unaligned()),
                _mm256_setr_epi64x(byte(0), byte(1), byte(2), byte(3)),
            );
            let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
            _mm256_and_si256(set, _mm256_set1_epi8(16))
        }))
    }
}

impl Lanes for V {
    type F = __m256;
    const HALVES: usize = 2;

    #[inline(always)]
    fn store(self, plane: &mut [u32; 16], h: usize) {
        let half = &mut plane[8 * h..8 * h + 8];
        intrinsics!(_mm256_storeu_si256(half.as_mut_ptr().cast(), self.0))
    }
    #[inline(always)]
    fn sub_bytes(self, o: Self) -> Self {
        Self(intrinsics!(_mm256_sub_epi8(self.0, o.0)))
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
    fn low_bytes_u16(self) -> Self {
        self.shuffle_lanes(0x8001_8000)
    }
    #[inline(always)]
    fn high_bytes_u16(self) -> Self {
        self.shuffle_lanes(0x8003_8002)
    }
    #[inline(always)]
    fn byte_pair_i16<const N: i32>(self) -> Self {
        // Byte N to the top of both halves of its lane, then down with its sign.
        let (z, n) = (-128i8 as u8 as u32, N as u32);
        Self(intrinsics!(_mm256_srai_epi16::<8>(self.shuffle_lanes(z | n << 8 | z << 16 | n << 24).0)))
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

/// Adds one super-block's integer sums and mins to the output.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn finish_super<F: Format, const SUBS: usize, const NT: usize>(
    scales: &Scales,
    acts: &SuperActs,
    dot: Acc<NT>,
    out: &mut [[f32; 16]; NT],
) {
    let scale = halves(&scales.scale[0]);
    for t in 0..NT {
        let mut o = halves(&out[t]);
        let d = _mm256_set1_ps(acts.d[t]);
        for h in 0..2 {
            o[h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[t][h]), _mm256_mul_ps(scale[h], d), o[h]);
        }
        if F::MIN {
            let mut sums = [_mm256_setzero_si256(); 2];
            for i in 0..SUBS / 2 {
                let min = int_halves(&scales.sub_min[i]);
                let sum = _mm256_set1_epi32(acts.sums::<SUBS>()[i][t] as i32);
                for h in 0..2 {
                    sums[h] = _mm256_add_epi32(sums[h], _mm256_madd_epi16(min[h], sum));
                }
            }
            let min = halves(&scales.min[0]);
            for h in 0..2 {
                o[h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[h]), _mm256_mul_ps(min[h], d), o[h]);
            }
        }
        store_halves(o, &mut out[t]);
    }
}

/// The same reference, without the compiler knowing: what is read through it is not hoisted out of the loop around and spilled.
#[inline(always)]
pub fn opaque<T>(x: &T) -> &T {
    let mut p: *const T = x;
    // SAFETY: nothing happens to the pointer.
    unsafe {
        asm!("/* {p} */", p = inout(reg) p, options(readonly, nostack, preserves_flags));
        &*p
    }
}

/// Sums of a chunk start at zero, so that long rows lose nothing to small addends.
#[target_feature(enable = "avx2,fma,f16c")]
fn float<const NT: usize>(
    isa: Avx2,
    tile: &FloatTile,
    acts: &FloatActs,
    cols: usize,
    ahead: Ahead,
    out: &mut [[f32; 16]; NT],
) {
    let mut acc = [[_mm256_setzero_ps(); 2]; NT];
    for (k, (w, x)) in tile.w[..cols].iter().zip(&acts.x).enumerate() {
        ahead.ask(isa, k);
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

/// The products of tokens `first_token ..+NT` of the `fours` groups of four, four rows at a time: twelve sums on their way for three tokens, as an addition
/// waits for the one before it.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn float_rows<F: FloatFormat, const NT: usize>(
    isa: Avx2,
    rows: SixteenRows<'_>,
    cols: usize,
    acts: &[RowActs],
    fours: usize,
    first_token: usize,
    sums: &mut [Sums; NT],
) {
    const STEPS: usize = CHUNK / LANES;
    let size = size_of::<F::Element>();
    assert_eq!(cols.div_ceil(CHUNK), acts.len() / fours);
    let per_line = 64 / (LANES * size);
    for first in (0..16).step_by(4) {
        let row = each!([0, 1, 2, 3] r => rows.row(first + r, cols * size).as_ptr());
        let mut acc: [[__m256; 4]; NT] = std::array::from_fn(|t| std::array::from_fn(|r| load8(&sums[t][first + r])));
        for (chunk, acts) in acts.chunks_exact(fours).enumerate() {
            let x: [&[f32; CHUNK]; NT] = std::array::from_fn(|t| {
                let t = first_token + t;
                &acts[t / TOKENS].x[t % TOKENS]
            });
            let at = chunk * STEPS;
            for i in 0..STEPS.min(cols / LANES - at) {
                let offset = (at + i) * LANES * size;
                if first_token == 0 {
                    // In the steps of a cache line, the four rows' next ones.
                    for r in (i % per_line..4).step_by(per_line) {
                        isa.prefetch(row[r].wrapping_add(offset + rows.ahead));
                    }
                }
                // SAFETY: eight columns of each token.
                let x: [__m256; NT] = std::array::from_fn(|t| unsafe { _mm256_loadu_ps(x[t].as_ptr().add(LANES * i)) });
                for r in 0..4 {
                    // SAFETY: the row has these columns: `at` and `i` count up to `cols`.
                    let w = unsafe { eight::<F>(row[r].add(offset)) };
                    for t in 0..NT {
                        acc[t][r] = _mm256_fmadd_ps(w, x[t], acc[t][r]);
                    }
                }
            }
        }
        for t in 0..NT {
            for r in 0..4 {
                // SAFETY: eight floats.
                unsafe { _mm256_storeu_ps(sums[t][first + r].as_mut_ptr(), acc[t][r]) };
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn add_lanes(sums: &Sums) -> [f32; 16] {
    let mut out = [0.0; 16];
    for (out, v) in out.as_chunks_mut::<4>().0.iter_mut().zip(sums.as_chunks::<4>().0) {
        let [a, b, c, d] = each!([0, 1, 2, 3] i => load8(&v[i]));
        let fours = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        let four = _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps::<1>(fours));
        // SAFETY: four floats.
        unsafe { _mm_storeu_ps(out.as_mut_ptr(), four) };
    }
    out
}

/// Eight columns of a row. Assembly: the compiler would load all rows' first, and spill the sums.
///
/// # Safety
/// They can be read.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn eight<F: FloatFormat>(p: *const u8) -> __m256 {
    let w: __m256;
    macro_rules! load {
        ($($line:literal),*) => {
            asm!($($line,)* w = out(ymm_reg) w, p = in(reg) p, options(readonly, nostack, preserves_flags))
        };
    }
    // SAFETY: reads them, by contract.
    unsafe {
        if size_of::<F::Element>() == 4 {
            load!("vmovups {w}, [{p}]");
        } else if F::HALF {
            load!("vcvtph2ps {w}, [{p}]");
        } else {
            load!("vpmovzxwd {w}, [{p}]", "vpslld {w}, {w}, 16");
        }
    }
    w
}

/// As `activations::quantise`.
#[target_feature(enable = "avx2,fma,f16c")]
fn quantise(x: &[f32; CHUNK], act_block: usize, out: &mut Codes) {
    let magnitude = _mm256_set1_epi32(0x7fff_ffff);
    for b in 0..CHUNK / act_block {
        let block = &x[act_block * b..act_block * (b + 1)];
        let mut most = [_mm256_setzero_si256(); 4];
        for x in block.as_chunks::<32>().0 {
            for (most, x) in most.iter_mut().zip(x.as_chunks::<8>().0) {
                *most = _mm256_max_epi32(*most, _mm256_and_si256(_mm256_castps_si256(load8(x)), magnitude));
            }
        }
        let m = _mm256_max_epi32(_mm256_max_epi32(most[0], most[1]), _mm256_max_epi32(most[2], most[3]));
        let m = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m));
        let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b01_00_11_10>(m));
        let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b10_11_00_01>(m));
        let amax = f32::from_bits(_mm_cvtsi128_si32(m) as u32);
        let (d, inverse) = if amax < TINY { (0.0, 0.0) } else { (amax / 127.0, 127.0 / amax) };
        let inverse = _mm256_set1_ps(inverse);
        for (i, x) in block.as_chunks::<32>().0.iter().enumerate() {
            // Rounds to nearest even; what does not fit (a NaN, of whose block the scale is NaN) becomes some code.
            let [v0, v1, v2, v3] =
                [0, 1, 2, 3].map(|i| _mm256_cvtps_epi32(_mm256_mul_ps(load8(&x.as_chunks::<8>().0[i]), inverse)));
            let bytes = _mm256_packs_epi16(_mm256_packs_epi32(v0, v1), _mm256_packs_epi32(v2, v3));
            let bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
            let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
            let pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32::<0b01_00_11_10>(pairs));
            let pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32::<0b10_11_00_01>(pairs));
            let at = act_block / 32 * b + i;
            V(bytes).store(&mut out.q[at / 2], at % 2);
            for (sums, v) in out.sums[2 * at..2 * at + 2]
                .iter_mut()
                .zip([_mm256_extract_epi32::<0>(pairs), _mm256_extract_epi32::<4>(pairs)])
            {
                *sums = [v as i16, (v >> 16) as i16];
            }
            out.d[at] = d;
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load8(x: &[f32; 8]) -> __m256 {
    // SAFETY: eight floats.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

/// # Safety
/// As [`Isa::transpose`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn transpose(src: *const u8, stride: usize, planes: &mut [[u32; 16]; 4], h: usize) {
    // Rows r and r + 4 share a vector; two rounds of unpacking transpose both 4 x 4 squares.
    let [a, b, c, d] = [0, 1, 2, 3].map(|r| {
        // SAFETY: by contract.
        unsafe {
            let (low, high) = (src.add(r * stride), src.add((r + 4) * stride));
            _mm256_set_m128i(_mm_loadu_si128(high.cast()), _mm_loadu_si128(low.cast()))
        }
    });
    let (ab, ab2) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let (cd, cd2) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    V(_mm256_unpacklo_epi64(ab, cd)).store(&mut planes[0], h);
    V(_mm256_unpackhi_epi64(ab, cd)).store(&mut planes[1], h);
    V(_mm256_unpacklo_epi64(ab2, cd2)).store(&mut planes[2], h);
    V(_mm256_unpackhi_epi64(ab2, cd2)).store(&mut planes[3], h);
}

/// Put together in registers: a vector loaded over sixteen short stores would wait for them all.
///
/// # Safety
/// As [`Isa::gather_u16`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn gather_u16(src: *const u8, stride: usize, out: &mut [u8; 32]) {
    for (h, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        // SAFETY: by contract; the store covers the half.
        unsafe {
            let at = |r: usize| i32::from(src.add((8 * h + r) * stride).cast::<u16>().read_unaligned());
            let mut v = _mm_cvtsi32_si128(at(0));
            v = _mm_insert_epi16::<1>(v, at(1));
            v = _mm_insert_epi16::<2>(v, at(2));
            v = _mm_insert_epi16::<3>(v, at(3));
            v = _mm_insert_epi16::<4>(v, at(4));
            v = _mm_insert_epi16::<5>(v, at(5));
            v = _mm_insert_epi16::<6>(v, at(6));
            v = _mm_insert_epi16::<7>(v, at(7));
            _mm_storeu_si128(out.as_mut_ptr().cast(), v);
        }
    }
}

/// As [`gather_u16`].
///
/// # Safety
/// As [`Isa::gather_u8`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn gather_u8(src: *const u8, stride: usize, out: &mut [u8; 16]) {
    // SAFETY: by contract; the store covers the whole.
    unsafe {
        let at = |r: usize| i32::from(src.add(r * stride).read());
        let mut v = [_mm_cvtsi32_si128(at(0)), _mm_cvtsi32_si128(at(8))];
        macro_rules! insert {
            ($($i:literal)*) => { $(for h in 0..2 { v[h] = _mm_insert_epi8::<$i>(v[h], at(8 * h + $i)); })* };
        }
        insert!(1 2 3 4 5 6 7);
        _mm_storeu_si128(out.as_mut_ptr().cast(), _mm_unpacklo_epi64(v[0], v[1]));
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
fn enter(work: impl Work) {
    work.run()
}

/// Evaluates a call with the number of tokens as a constant.
macro_rules! with_tokens {
    ($n:literal, $out:expr, |$nt:ident, $o:ident| $call:expr) => {{
        const $nt: usize = $n;
        let $o: &mut [_; $nt] = (&mut $out[..$nt]).try_into().expect("as many rows as tokens");
        // SAFETY: an `Avx2` exists only where the CPU has these features.
        unsafe { $call }
    }};
}

macro_rules! by_tokens {
    ($out:ident, |$nt:ident, $o:ident| $call:expr) => {
        match $out.len() {
            1 => with_tokens!(1, $out, |$nt, $o| $call),
            2 => with_tokens!(2, $out, |$nt, $o| $call),
            3 => with_tokens!(3, $out, |$nt, $o| $call),
            _ => with_tokens!(4, $out, |$nt, $o| $call),
        }
    };
}

impl Isa for Avx2 {
    type V = V;
    type Narrow = Self;

    #[inline(always)]
    fn narrow(self) -> Self {
        self
    }

    #[inline(always)]
    fn enter(self, work: impl Work) {
        // SAFETY: an `Avx2` exists only where the CPU has these features.
        unsafe { enter(work) }
    }
    #[inline(always)]
    fn byte_blocks<F: Format>(self, tile: &Tile, acts: &ByteActs, blocks: usize, out: &mut [[f32; 16]]) {
        by_tokens!(out, |NT, o| tile::byte_blocks::<F, NT>(tile, acts, blocks, o));
    }
    #[inline(always)]
    fn byte_super<F: Format, const SUBS: usize>(self, tile: &Tile, acts: &SuperActs, out: &mut [[f32; 16]]) {
        by_tokens!(out, |NT, o| tile::byte_super::<F, SUBS, NT>(tile, acts, o));
    }
    #[inline(always)]
    fn word_blocks(self, tile: &Tile, acts: &WordActs, blocks: usize, out: &mut [[f32; 16]]) {
        by_tokens!(out, |NT, o| tile::word_blocks::<NT>(tile, acts, blocks, o));
    }
    #[inline(always)]
    fn float(self, tile: &FloatTile, acts: &FloatActs, cols: usize, ahead: Ahead, out: &mut [[f32; 16]]) {
        by_tokens!(out, |NT, o| float::<NT>(self, tile, acts, cols, ahead, o));
    }
    const ROWWISE: bool = true;

    #[inline(always)]
    fn rowwise<'s, F: Format>(
        self,
        raw: RawRows<'_>,
        groups: Range<usize>,
        cols: usize,
        acts: &[<F::Family as Family>::Acts],
        tokens: usize,
        scratch: &'s mut Scratch,
    ) -> &'s mut [[f32; 16]] {
        // SAFETY: an `Avx2` exists only where the CPU has these features.
        unsafe { rowwise::avx2::row_groups::<F>(self, raw, groups, cols, acts, tokens, scratch) }
    }
    const FUSED: usize = 16;

    #[inline(always)]
    fn fused_byte_blocks<F: Format>(
        self,
        streams: &[Stream<'_, F::Block>],
        scales: &mut [Scales; STREAMS],
        acts: &ByteActs,
        out: &mut [&mut [[f32; 16]]],
    ) {
        fused!(out, |NT| fused::byte_blocks::<F, NT>(self, streams, scales, acts, out));
    }
    #[inline(always)]
    fn fused_byte_super<F: Format, const SUBS: usize>(
        self,
        streams: &[Stream<'_, F::Block>],
        scales: &mut [Scales; STREAMS],
        acts: &SuperActs,
        out: &mut [&mut [[f32; 16]]],
    ) {
        fused!(out, |NT| fused::byte_super::<F, SUBS, NT>(self, streams, scales, acts, out));
    }
    #[inline(always)]
    fn fused_word_blocks<F: Format>(
        self,
        streams: &[Stream<'_, F::Block>],
        scales: &mut [Scales; STREAMS],
        acts: &WordActs,
        out: &mut [&mut [[f32; 16]]],
    ) {
        fused!(out, |NT| fused::word_blocks::<F, NT>(self, streams, scales, acts, out));
    }
    #[inline(always)]
    fn float_rows<F: FloatFormat>(self, rows: SixteenRows<'_>, cols: usize, acts: &[RowActs], sums: &mut [Sums]) {
        let fours = sums.len().div_ceil(TOKENS);
        let mut t = 0;
        while t < sums.len() {
            // Not one alone: it would wait for its own additions.
            let count = match sums.len() - t {
                4 => 2,
                left => left.min(TOGETHER),
            };
            let sums = &mut sums[t..t + count];
            by_tokens!(sums, |NT, o| float_rows::<F, NT>(self, rows, cols, acts, fours, t, o));
            t += count;
        }
    }
    #[inline(always)]
    fn add_lanes(self, sums: &Sums) -> [f32; 16] {
        // SAFETY: an `Avx2` exists only where the CPU has these features.
        unsafe { add_lanes(sums) }
    }
    #[inline(always)]
    fn quantise(self, x: &[f32; CHUNK], act_block: usize, out: &mut Codes) {
        // SAFETY: an `Avx2` exists only where the CPU has these features.
        unsafe { quantise(x, act_block, out) }
    }
    #[inline(always)]
    unsafe fn transpose(self, src: *const u8, stride: usize, planes: &mut [[u32; 16]; 4], h: usize) {
        // SAFETY: an `Avx2` exists only where the CPU has these features; the rest by contract.
        unsafe { transpose(src, stride, planes, h) }
    }
    #[inline(always)]
    unsafe fn gather_u16(self, src: *const u8, stride: usize, out: &mut [u8; 32]) {
        // SAFETY: an `Avx2` exists only where the CPU has these features; the rest by contract.
        unsafe { gather_u16(src, stride, out) }
    }
    #[inline(always)]
    unsafe fn gather_u8(self, src: *const u8, stride: usize, out: &mut [u8; 16]) {
        // SAFETY: an `Avx2` exists only where the CPU has these features; the rest by contract.
        unsafe { gather_u8(src, stride, out) }
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

//! AVX-512 with VNNI.
//!
//! Naively as in `avx2`. A plane, one dword of sixteen rows, is one vector, and `vpdpbusd` adds to each row's 32-bit sum the four products of
//! its unsigned bytes with a dword of activations, broadcast from memory: one instruction for sixteen rows by four columns. It takes
//! five cycles and two may start in each, so the tile kernels keep four blocks of four tokens, sixteen independent sums, on their way.
//!
//! Offsets go in as the sums' start, as with AVX2. A sub-block's sum has up to 18 bits; one `vpshufb` cuts it into its low byte and
//! the rest, a pair of 16-bit values that one `vpdpwssd` multiplies by (scale, 256 scale) and adds up.
//!
//! Integers are exact and the floats see the operations of the AVX2 kernels in their order: results are the same bits.

use std::arch::x86_64::*;

use super::activations::{ByteActs, CHUNK, Family, SuperActs, WordActs};
use super::avx2::opaque;
use super::float::{FloatActs, FloatFormat, FloatTile};
use super::float_rows::{LANES, RowActs, SixteenRows, Sums};
use super::formats::{Emit, Format, Scales, Tile, WORD_OFFSET};
use super::lanes::{Bits, Lanes};
use super::pack::RawRows;
use super::{Ahead, Isa, STREAMS, Scratch, Stream, TOKENS, Work, prefetch, tokens_of};
use crate::cpu::isa::{Avx2, Avx512};
use std::ops::Range;

/// Sixteen rows' dwords; made only where [`Avx512`] vouches for the CPU.
#[derive(Clone, Copy)]
pub struct W(__m512i);

macro_rules! intrinsics {
    ($e:expr) => {
        // SAFETY: values of `W` exist only in code entered through `Avx512`, and the pointers come from references to whole planes.
        unsafe { $e }
    };
}

impl W {
    /// The same byte shuffle within each lane; bytes of `control` from 0x80 on make zeros.
    #[inline(always)]
    fn shuffle_lanes(self, control: u32) -> Self {
        let at = |lane: u32| {
            let wanted = !(control >> 7) & 0x0101_0101;
            (control + wanted * (4 * lane)) as i32
        };
        Self(intrinsics!(_mm512_shuffle_epi8(self.0, _mm512_set4_epi32(at(3), at(2), at(1), at(0)))))
    }
}

impl Bits for W {
    #[inline(always)]
    fn load(plane: &[u32; 16], _h: usize) -> Self {
        Self(intrinsics!(_mm512_loadu_si512(plane.as_ptr().cast())))
    }
    #[inline(always)]
    fn splat(v: u32) -> Self {
        Self(intrinsics!(_mm512_set1_epi32(v as i32)))
    }
    #[inline(always)]
    fn and(self, o: Self) -> Self {
        Self(intrinsics!(_mm512_and_si512(self.0, o.0)))
    }
    #[inline(always)]
    fn or(self, o: Self) -> Self {
        Self(intrinsics!(_mm512_or_si512(self.0, o.0)))
    }
    #[inline(always)]
    fn shl(self, n: usize) -> Self {
        Self(intrinsics!(_mm512_sll_epi32(self.0, _mm_cvtsi32_si128(n as i32))))
    }
    #[inline(always)]
    fn shr(self, n: usize) -> Self {
        Self(intrinsics!(_mm512_srl_epi32(self.0, _mm_cvtsi32_si128(n as i32))))
    }
    #[inline(always)]
    fn lookup(self, table: &[i8; 16]) -> Self {
        Self(intrinsics!(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), self.0)))
    }
}

impl Lanes for W {
    type F = __m512;
    const HALVES: usize = 1;

    #[inline(always)]
    fn store(self, plane: &mut [u32; 16], _h: usize) {
        intrinsics!(_mm512_storeu_si512(plane.as_mut_ptr().cast(), self.0))
    }
    #[inline(always)]
    fn sub_bytes(self, o: Self) -> Self {
        Self(intrinsics!(_mm512_sub_epi8(self.0, o.0)))
    }
    #[inline(always)]
    fn even_bytes_i16(self) -> Self {
        Self(intrinsics!(_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(self.0))))
    }
    #[inline(always)]
    fn odd_bytes_i16(self) -> Self {
        Self(intrinsics!(_mm512_srai_epi16::<8>(self.0)))
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
        let (z, n) = (0x80u32, N as u32);
        Self(intrinsics!(_mm512_srai_epi16::<8>(self.shuffle_lanes(z | n << 8 | z << 16 | n << 24).0)))
    }
    #[inline(always)]
    fn load_f16(plane: &[u16; 16], _h: usize) -> __m512 {
        intrinsics!(_mm512_cvtph_ps(_mm256_loadu_si256(plane.as_ptr().cast())))
    }
    #[inline(always)]
    fn load_e8m0_halved(plane: &[u8; 16], _h: usize) -> __m512 {
        intrinsics!({
            let e = _mm512_cvtepu8_epi32(_mm_loadu_si128(plane.as_ptr().cast()));
            let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
            let subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
            let small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
            _mm512_castsi512_ps(_mm512_mask_blend_epi32(small, normal, subnormal))
        })
    }
    #[inline(always)]
    fn low_f16(self) -> __m512 {
        intrinsics!(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(self.0)))
    }
    #[inline(always)]
    fn high_f16(self) -> __m512 {
        intrinsics!(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(self.0))))
    }
    #[inline(always)]
    fn to_f32(self) -> __m512 {
        intrinsics!(_mm512_cvtepi32_ps(self.0))
    }
    #[inline(always)]
    fn low_i16_to_f32(self) -> __m512 {
        intrinsics!(_mm512_cvtepi32_ps(_mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(self.0))))
    }
    #[inline(always)]
    fn high_i16_to_f32(self) -> __m512 {
        intrinsics!(_mm512_cvtepi32_ps(_mm512_srai_epi32::<16>(self.0)))
    }
    #[inline(always)]
    fn load_bf16(plane: &[u16; 16], _h: usize) -> __m512 {
        intrinsics!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
            plane.as_ptr().cast()
        )))))
    }
    #[inline(always)]
    fn load_f32(plane: &[f32; 16], _h: usize) -> __m512 {
        intrinsics!(_mm512_loadu_ps(plane.as_ptr()))
    }
    #[inline(always)]
    fn splat_f32(v: f32) -> __m512 {
        intrinsics!(_mm512_set1_ps(v))
    }
    #[inline(always)]
    fn mul(a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        intrinsics!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn store_f32(v: __m512, plane: &mut [f32; 16], _h: usize) {
        intrinsics!(_mm512_storeu_ps(plane.as_mut_ptr(), v))
    }
}

/// A sum for each token.
type Acc<const NT: usize> = [__m512i; NT];

/// Blocks, or sub-blocks, that the tile kernels take side by side; `each!` over them keeps their sums in registers.
const SIDE: usize = 4;

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn load(plane: &[f32; 16]) -> __m512 {
    // SAFETY: sixteen floats.
    unsafe { _mm512_loadu_ps(plane.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn load_int(plane: &[u32; 16]) -> __m512i {
    // SAFETY: sixteen dwords.
    unsafe { _mm512_loadu_si512(plane.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn store(v: __m512, plane: &mut [f32; 16]) {
    // SAFETY: sixteen floats.
    unsafe { _mm512_storeu_ps(plane.as_mut_ptr(), v) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn splat(v: u32) -> __m512i {
    _mm512_set1_epi32(v as i32)
}

/// Where a sum starts: a pair of negated activation sums, both times the offset.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn start(from: __m512i, minus_sum: u32, shift: u32) -> __m512i {
    _mm512_dpwssd_epi32(from, splat(0x1_0001 << shift), splat(minus_sum))
}

/// Where the sum of sub-block `j` starts.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn start_sub<const SUBS: usize>(acts: &SuperActs, j: usize, t: usize, shift: u32) -> __m512i {
    let zero = _mm512_setzero_si512();
    if SUBS == 16 {
        start(zero, acts.minus_sum[j][t], shift)
    } else {
        start(start(zero, acts.minus_sum[2 * j][t], shift), acts.minus_sum[2 * j + 1][t], shift)
    }
}

/// A sub-block's sums as pairs for [`times_scale`]: 256 times the high half and the low half, a byte.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn cut(sums: __m512i) -> __m512i {
    W(sums).shuffle_lanes(0x0201_8000).0
}

/// A sub-block's scale, which comes twice, and 256 times it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn scale_pair(sub_scale: &[u32; 16]) -> __m512i {
    _mm512_sllv_epi16(load_int(sub_scale), splat(8 << 16))
}

/// `EACH` steps of [`SIDE`] blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn steps<const BYTES: bool, const EACH: usize, const NT: usize>(
    w: &[[u32; 16]],
    a: &[[u32; TOKENS]],
    acc: &mut [Acc<NT>; SIDE],
) {
    let (w, a) = (&w[..SIDE * EACH], &a[..SIDE * EACH]);
    // Not unrolled further: sixteen instructions at a time are enough for the ports, and the code of every encoding and number of tokens is an eighth.
    for s in 0..*opaque(&EACH) {
        let s = s % EACH;
        for i in 0..SIDE {
            let v = load_int(&w[EACH * i + s]);
            for t in 0..NT {
                let x = splat(a[EACH * i + s][t]);
                acc[i][t] =
                    if BYTES { _mm512_dpbusd_epi32(acc[i][t], v, x) } else { _mm512_dpwssd_epi32(acc[i][t], v, x) };
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn byte_blocks<F: Format, const NT: usize>(tile: &Tile, acts: &ByteActs, blocks: usize, out: &mut [[f32; 16]; NT]) {
    for b in (0..blocks).step_by(SIDE) {
        // Blocks past the end: what lies there is added up and left.
        let mut acc: [Acc<NT>; SIDE] = [[_mm512_setzero_si512(); NT]; SIDE];
        if F::SHIFT > 0 {
            for i in 0..SIDE {
                for t in 0..NT {
                    acc[i][t] = start(acc[i][t], acts.minus_sum[b + i][t], F::SHIFT);
                }
            }
        }
        steps::<true, 8, NT>(&tile.q[8 * b..], &acts.q[8 * b..], &mut acc);
        each!([0, 1, 2, 3] i => if b + i < blocks {
            finish_block::<F, NT>(&tile.scales, b + i, acts, b + i, acc[i], out);
        });
    }
}

/// Adds one block's sums to the output: block `b` of the activations, `slot` of the scales.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn finish_block<F: Format, const NT: usize>(
    scales: &Scales,
    slot: usize,
    acts: &ByteActs,
    b: usize,
    acc: Acc<NT>,
    out: &mut [[f32; 16]; NT],
) {
    let (scale, min) = (load(&scales.scale[slot]), load(&scales.min[slot]));
    for t in 0..NT {
        let (d, sum) = (_mm512_set1_ps(acts.d[b][t]), _mm512_set1_ps(acts.sum[b][t]));
        let mut o = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[t]), _mm512_mul_ps(scale, d), load(&out[t]));
        if F::MIN {
            o = _mm512_fmadd_ps(min, sum, o);
        }
        store(o, &mut out[t]);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn byte_super<F: Format, const SUBS: usize, const NT: usize>(tile: &Tile, acts: &SuperActs, out: &mut [[f32; 16]; NT]) {
    let mut dot = [_mm512_setzero_si512(); NT];
    for j in (0..*opaque(&SUBS)).step_by(SIDE) {
        let j = j % SUBS;
        let mut acc: [Acc<NT>; SIDE] = [[_mm512_setzero_si512(); NT]; SIDE];
        if F::SHIFT > 0 {
            for i in 0..SIDE {
                for t in 0..NT {
                    acc[i][t] = start_sub::<SUBS>(acts, j + i, t, F::SHIFT);
                }
            }
        }
        if SUBS == 16 {
            steps::<true, 4, NT>(&tile.q[4 * j..], &acts.q[4 * j..], &mut acc);
        } else {
            steps::<true, 8, NT>(&tile.q[8 * j..], &acts.q[8 * j..], &mut acc);
        }
        each!([0, 1, 2, 3] i => {
            let scale = scale_pair(&tile.scales.sub_scale[j + i]);
            for t in 0..NT {
                dot[t] = _mm512_dpwssd_epi32(dot[t], cut(acc[i][t]), scale);
            }
        });
    }
    finish_super::<F, SUBS, NT>(&tile.scales, acts, dot, out);
}

/// Adds one super-block's integer sums and mins to the output.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn finish_super<F: Format, const SUBS: usize, const NT: usize>(
    scales: &Scales,
    acts: &SuperActs,
    dot: Acc<NT>,
    out: &mut [[f32; 16]; NT],
) {
    let (scale, min) = (load(&scales.scale[0]), load(&scales.min[0]));
    for t in 0..NT {
        let d = _mm512_set1_ps(acts.d[t]);
        let mut o = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[t]), _mm512_mul_ps(scale, d), load(&out[t]));
        if F::MIN {
            let mut sums = _mm512_setzero_si512();
            for i in 0..SUBS / 2 {
                sums = _mm512_dpwssd_epi32(sums, load_int(&scales.sub_min[i]), splat(acts.sums::<SUBS>()[i][t]));
            }
            o = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(min, d), o);
        }
        store(o, &mut out[t]);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn word_blocks<const NT: usize>(tile: &Tile, acts: &WordActs, blocks: usize, out: &mut [[f32; 16]; NT]) {
    for b in (0..blocks).step_by(SIDE) {
        let mut acc: [Acc<NT>; SIDE] = [[_mm512_setzero_si512(); NT]; SIDE];
        steps::<false, 16, NT>(&tile.q[16 * b..], &acts.q[16 * b..], &mut acc);
        each!([0, 1, 2, 3] i => if b + i < blocks {
            finish_words(&tile.scales, b + i, acts, b + i, acc[i], out);
        });
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn finish_words<const NT: usize>(
    scales: &Scales,
    slot: usize,
    acts: &WordActs,
    b: usize,
    acc: Acc<NT>,
    out: &mut [[f32; 16]; NT],
) {
    let scale = load(&scales.scale[slot]);
    for t in 0..NT {
        let d = _mm512_set1_ps(acts.d[b][t]);
        store(_mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[t]), _mm512_mul_ps(scale, d), load(&out[t])), &mut out[t]);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn fused_byte_blocks<F: Format, const NT: usize>(
    isa: Avx512,
    streams: &[Stream<'_, F::Block>],
    scales: &mut [Scales; STREAMS],
    acts: &ByteActs,
    out: &mut [&mut [[f32; 16]]],
) {
    for b in 0..streams[0].blocks.len() {
        for (s, stream) in streams.iter().enumerate() {
            let acts = opaque(acts);
            prefetch(isa, stream.next.wrapping_add(b), 0, 1);
            let block = &stream.blocks[b];
            let mut acc: Acc<NT> = [_mm512_setzero_si512(); NT];
            if F::SHIFT > 0 {
                for t in 0..NT {
                    acc[t] = start(acc[t], acts.minus_sum[b][t], F::SHIFT);
                }
            }
            let q = &acts.q[8 * b..8 * b + 8];
            F::unit::<W>(block, 0, 0, &mut AddBytes { acts: q, sub: 8, acc: std::array::from_mut(&mut acc) });
            F::scales::<W>(block, 0, &mut scales[s]);
            finish_block::<F, NT>(&scales[s], 0, acts, b, acc, tokens_of(out[s]));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn fused_byte_super<F: Format, const SUBS: usize, const NT: usize>(
    isa: Avx512,
    streams: &[Stream<'_, F::Block>],
    scales: &mut [Scales; STREAMS],
    acts: &SuperActs,
    out: &mut [&mut [[f32; 16]]],
) {
    for (s, (stream, scales)) in streams.iter().zip(scales).enumerate() {
        F::scales::<W>(&stream.blocks[0], 0, scales);
        let mut dot = [_mm512_setzero_si512(); NT];
        for unit in 0..F::UNITS {
            prefetch(isa, stream.next, unit, F::UNITS);
            fused_unit::<F, SUBS, NT>(&stream.blocks[0], unit, scales, opaque(acts), &mut dot);
        }
        finish_super::<F, SUBS, NT>(scales, acts, dot, tokens_of(out[s]));
    }
}

/// One unit of a super-block: one sub-block or two.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn fused_unit<F: Format, const SUBS: usize, const NT: usize>(
    block: &F::Block,
    unit: usize,
    scales: &Scales,
    acts: &SuperActs,
    dot: &mut Acc<NT>,
) {
    let (steps, subs) = (F::UNIT.steps(), SUBS / F::UNITS);
    let mut acc: [Acc<NT>; 2] = [[_mm512_setzero_si512(); NT]; 2];
    if F::SHIFT > 0 {
        for i in 0..subs {
            for t in 0..NT {
                acc[i][t] = start_sub::<SUBS>(acts, subs * unit + i, t, F::SHIFT);
            }
        }
    }
    let acts = &acts.q[steps * unit..][..steps];
    F::unit::<W>(block, unit, 0, &mut AddBytes { acts, sub: 64 / SUBS, acc: &mut acc });
    for i in 0..subs {
        let scale = scale_pair(&scales.sub_scale[subs * unit + i]);
        for t in 0..NT {
            dot[t] = _mm512_dpwssd_epi32(dot[t], cut(acc[i][t]), scale);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn fused_word_blocks<F: Format, const NT: usize>(
    isa: Avx512,
    streams: &[Stream<'_, F::Block>],
    scales: &mut [Scales; STREAMS],
    acts: &WordActs,
    out: &mut [&mut [[f32; 16]]],
) {
    for b in 0..streams[0].blocks.len() {
        for (stream, scales) in streams.iter().zip(scales.iter_mut()) {
            F::scales::<W>(&stream.blocks[b], 0, scales);
        }
        for unit in 0..F::UNITS {
            fused_word_unit::<F, NT>(isa, streams, b, unit, scales, acts, out);
        }
    }
}

/// One unit of each stream's block `b`: 32 columns with a scale of their own.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn fused_word_unit<F: Format, const NT: usize>(
    isa: Avx512,
    streams: &[Stream<'_, F::Block>],
    b: usize,
    unit: usize,
    scales: &[Scales; STREAMS],
    acts: &WordActs,
    out: &mut [&mut [[f32; 16]]],
) {
    let at = b + unit;
    for (s, stream) in streams.iter().enumerate() {
        prefetch(isa, stream.next.wrapping_add(b), unit, F::UNITS);
        let acts = opaque(acts);
        let mut acc: Acc<NT> = [_mm512_setzero_si512(); NT];
        F::unit::<W>(&stream.blocks[b], unit, 0, &mut AddWords { acts: &acts.q[16 * at..][..16], acc: &mut acc });
        finish_words(&scales[s], unit, acts, at, acc, tokens_of(out[s]));
    }
}

/// Sums of a chunk start at zero. `G` groups of up to four tokens: the sums are a chain of one addition a column, of which it takes eight to fill the ports.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn float<const G: usize, const NT: usize>(
    isa: Avx512,
    tile: &FloatTile,
    acts: &[FloatActs; G],
    cols: usize,
    ahead: Ahead,
    out: &mut [[f32; 16]],
) {
    let mut acc = [[_mm512_setzero_ps(); NT]; G];
    for (k, w) in tile.w[..cols].iter().enumerate() {
        ahead.ask(isa, k);
        let w = load(w);
        for g in 0..G {
            for t in 0..NT {
                acc[g][t] = _mm512_fmadd_ps(w, _mm512_set1_ps(acts[g].x[k][t]), acc[g][t]);
            }
        }
    }
    for (out, acc) in out.iter_mut().zip(acc.as_flattened()) {
        store(_mm512_add_ps(load(out), *acc), out);
    }
}

/// As in `avx2`, two rows a vector, eight rows at a time.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn float_rows<F: FloatFormat, const NT: usize>(
    isa: Avx512,
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
    for first in (0..16).step_by(8) {
        let row = each!([0, 1, 2, 3, 4, 5, 6, 7] r => rows.row(first + r, cols * size).as_ptr());
        let pairs = |sums: &Sums| each!([0, 2, 4, 6] r => load(two_rows(sums, first + r)));
        let mut acc: [[__m512; 4]; NT] = std::array::from_fn(|t| pairs(&sums[t]));
        for (chunk, acts) in acts.chunks_exact(fours).enumerate() {
            let x: [&[f32; CHUNK]; NT] = std::array::from_fn(|t| {
                let t = first_token + t;
                &acts[t / TOKENS].x[t % TOKENS]
            });
            let at = chunk * STEPS;
            for i in 0..STEPS.min(cols / LANES - at) {
                let offset = (at + i) * LANES * size;
                if first_token == 0 {
                    for r in (i % per_line..8).step_by(per_line) {
                        isa.prefetch(row[r].wrapping_add(offset + rows.ahead));
                    }
                }
                // SAFETY: eight columns of each token.
                let x: [__m512; NT] = std::array::from_fn(|t| unsafe {
                    _mm512_broadcast_f32x8(_mm256_loadu_ps(x[t].as_ptr().add(LANES * i)))
                });
                for p in 0..4 {
                    // SAFETY: the rows have these columns: `at` and `i` count up to `cols`.
                    let w = unsafe { eight_of_two::<F>(row[2 * p].add(offset), row[2 * p + 1].add(offset)) };
                    for t in 0..NT {
                        acc[t][p] = _mm512_fmadd_ps(w, x[t], acc[t][p]);
                    }
                }
            }
        }
        for (sums, acc) in sums.iter_mut().zip(acc) {
            for (sums, acc) in sums[first..first + 8].as_chunks_mut::<2>().0.iter_mut().zip(acc) {
                // SAFETY: sixteen floats.
                unsafe { _mm512_storeu_ps(sums.as_mut_ptr().cast(), acc) };
            }
        }
    }
}

/// The lanes of row `r` and of the next.
#[inline(always)]
fn two_rows(sums: &Sums, r: usize) -> &[f32; 16] {
    sums[r..r + 2].as_flattened().try_into().expect("two rows")
}

/// Eight columns of two rows.
///
/// # Safety
/// They can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn eight_of_two<F: FloatFormat>(a: *const u8, b: *const u8) -> __m512 {
    // SAFETY: by contract.
    unsafe {
        if size_of::<F::Element>() == 4 {
            return _mm512_insertf32x8::<1>(
                _mm512_castps256_ps512(_mm256_loadu_ps(a.cast())),
                _mm256_loadu_ps(b.cast()),
            );
        }
        let both = _mm256_set_m128i(_mm_loadu_si128(b.cast()), _mm_loadu_si128(a.cast()));
        if F::HALF {
            _mm512_cvtph_ps(both)
        } else {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(both)))
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn enter(work: impl Work) {
    work.run()
}

/// `acc[sub-block of the unit][token] += codes * activations`
struct AddBytes<'a, const NT: usize, const SUBS: usize> {
    acts: &'a [[u32; TOKENS]],
    /// Steps of a sub-block.
    sub: usize,
    acc: &'a mut [Acc<NT>; SUBS],
}

impl<const NT: usize, const SUBS: usize> Emit<W> for AddBytes<'_, NT, SUBS> {
    #[inline(always)]
    fn emit(&mut self, step: usize, v: W) {
        for t in 0..NT {
            let acc = &mut self.acc[step / self.sub][t];
            *acc = intrinsics!(_mm512_dpbusd_epi32(*acc, v.0, splat(self.acts[step][t])));
        }
    }
}

/// `acc[token] += codes * activations`
struct AddWords<'a, const NT: usize> {
    acts: &'a [[u32; TOKENS]],
    acc: &'a mut Acc<NT>,
}

impl<const NT: usize> Emit<W> for AddWords<'_, NT> {
    #[inline(always)]
    fn emit(&mut self, step: usize, v: W) {
        let v = v.sub_bytes(W::splat(WORD_OFFSET));
        let (even, odd) = (v.even_bytes_i16(), v.odd_bytes_i16());
        for t in 0..NT {
            let acc = &mut self.acc[t];
            *acc = intrinsics!(_mm512_dpwssd_epi32(*acc, even.0, splat(self.acts[2 * step][t])));
            *acc = intrinsics!(_mm512_dpwssd_epi32(*acc, odd.0, splat(self.acts[2 * step + 1][t])));
        }
    }
}

/// Evaluates a call with the number of tokens as a constant.
macro_rules! by_tokens {
    ($out:ident, |$nt:ident, $o:ident| $call:expr) => {
        match $out.len() {
            1 => by_tokens!(@ 1, $out, |$nt, $o| $call),
            2 => by_tokens!(@ 2, $out, |$nt, $o| $call),
            3 => by_tokens!(@ 3, $out, |$nt, $o| $call),
            _ => by_tokens!(@ 4, $out, |$nt, $o| $call),
        }
    };
    (@ $n:literal, $out:expr, |$nt:ident, $o:ident| $call:expr) => {{
        const $nt: usize = $n;
        let $o: &mut [_; $nt] = (&mut $out[..$nt]).try_into().expect("as many rows as tokens");
        // SAFETY: an `Avx512` exists only where the CPU has these features.
        unsafe { $call }
    }};
}

impl Isa for Avx512 {
    type V = W;
    type Narrow = Avx2;

    #[inline(always)]
    fn narrow(self) -> Avx2 {
        self.avx2()
    }
    #[inline(always)]
    fn enter(self, work: impl Work) {
        // SAFETY: an `Avx512` exists only where the CPU has these features.
        unsafe { enter(work) }
    }
    #[inline(always)]
    fn byte_blocks<F: Format>(self, tile: &Tile, acts: &ByteActs, blocks: usize, out: &mut [[f32; 16]]) {
        by_tokens!(out, |NT, o| byte_blocks::<F, NT>(tile, acts, blocks, o));
    }
    #[inline(always)]
    fn byte_super<F: Format, const SUBS: usize>(self, tile: &Tile, acts: &SuperActs, out: &mut [[f32; 16]]) {
        by_tokens!(out, |NT, o| byte_super::<F, SUBS, NT>(tile, acts, o));
    }
    #[inline(always)]
    fn word_blocks(self, tile: &Tile, acts: &WordActs, blocks: usize, out: &mut [[f32; 16]]) {
        by_tokens!(out, |NT, o| word_blocks::<NT>(tile, acts, blocks, o));
    }
    #[inline(always)]
    fn float(self, tile: &FloatTile, acts: &FloatActs, cols: usize, ahead: Ahead, out: &mut [[f32; 16]]) {
        by_tokens!(out, |NT, o| float::<1, NT>(self, tile, std::array::from_ref(acts), cols, ahead, o));
    }
    #[inline(always)]
    fn float_rows<F: FloatFormat>(self, rows: SixteenRows<'_>, cols: usize, acts: &[RowActs], sums: &mut [Sums]) {
        let fours = sums.len().div_ceil(TOKENS);
        for (i, sums) in sums.chunks_mut(TOKENS).enumerate() {
            by_tokens!(sums, |NT, o| float_rows::<F, NT>(self, rows, cols, acts, fours, TOKENS * i, o));
        }
    }
    #[inline(always)]
    fn add_lanes(self, sums: &Sums) -> [f32; 16] {
        self.avx2().add_lanes(sums)
    }
    #[inline(always)]
    fn floats(self, tile: &FloatTile, acts: &[FloatActs], cols: usize, ahead: Ahead, out: &mut [[f32; 16]]) {
        let parts = acts.len().div_ceil(2);
        for (i, (acts, out)) in acts.chunks(2).zip(out.chunks_mut(2 * TOKENS)).enumerate() {
            let ahead = ahead.part(i, parts, cols);
            if let (Ok(acts), true) = (acts.try_into(), out.len() == 2 * TOKENS) {
                // SAFETY: an `Avx512` exists only where the CPU has these features.
                unsafe { float::<2, TOKENS>(self, tile, acts, cols, ahead, out) }
                continue;
            }
            for (acts, out) in acts.iter().zip(out.chunks_mut(TOKENS)) {
                self.float(tile, acts, cols, ahead, out);
            }
        }
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
        self.avx2().rowwise::<F>(raw, groups, cols, acts, tokens, scratch)
    }
    const FUSED: usize = 2;

    #[inline(always)]
    fn fused_byte_blocks<F: Format>(
        self,
        streams: &[Stream<'_, F::Block>],
        scales: &mut [Scales; STREAMS],
        acts: &ByteActs,
        out: &mut [&mut [[f32; 16]]],
    ) {
        fused!(out, |NT| fused_byte_blocks::<F, NT>(self, streams, scales, acts, out));
    }
    #[inline(always)]
    fn fused_byte_super<F: Format, const SUBS: usize>(
        self,
        streams: &[Stream<'_, F::Block>],
        scales: &mut [Scales; STREAMS],
        acts: &SuperActs,
        out: &mut [&mut [[f32; 16]]],
    ) {
        fused!(out, |NT| fused_byte_super::<F, SUBS, NT>(self, streams, scales, acts, out));
    }
    #[inline(always)]
    fn fused_word_blocks<F: Format>(
        self,
        streams: &[Stream<'_, F::Block>],
        scales: &mut [Scales; STREAMS],
        acts: &WordActs,
        out: &mut [&mut [[f32; 16]]],
    ) {
        fused!(out, |NT| fused_word_blocks::<F, NT>(self, streams, scales, acts, out));
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        self.avx2().prefetch(p);
    }
}

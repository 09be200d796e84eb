//! The kernels of `rowwise` with AVX2, FMA and F16C.

use std::arch::asm;
use std::arch::x86_64::*;

use super::{Room, Terms};
use crate::cpu::isa::Avx2;
use crate::cpu::qgemm::activations::{CHUNK, Family, Layout, Linear, SEGMENT};
use crate::cpu::qgemm::avx2::{OneRow, V};
use crate::cpu::qgemm::formats::{Format, Scales};
use crate::cpu::qgemm::pack::{RawRows, blocks_per_row, gather_narrow, planes_of};
use crate::cpu::qgemm::{Isa, ROWS, Scratch};
use std::ops::Range;

/// Bytes beyond the sixteen blocks whose scales are read first.
const AHEAD: usize = 3072;

/// Asks for as many blocks as `count` that will be wanted soon.
#[inline(always)]
fn ask_ahead<F: Format>(isa: Avx2, blocks: *const u8, count: usize) {
    let ahead = blocks.wrapping_add(16 * F::BLOCK_BYTES + AHEAD);
    for line in 0..(count * F::BLOCK_BYTES).div_ceil(64) {
        isa.prefetch(ahead.wrapping_add(64 * line));
    }
}

/// As [`Isa::rowwise`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::cpu::qgemm) fn row_groups<'s, F: Format>(
    isa: Avx2,
    raw: RawRows<'_>,
    groups: Range<usize>,
    cols: usize,
    acts: &[<F::Family as Family>::Acts],
    tokens: usize,
    scratch: &'s mut Scratch,
) -> &'s mut [[f32; ROWS]] {
    let Scratch { rowwise: room, scales: [scales, ..], packed: [packed, ..], out, .. } = scratch;
    let heads = &mut packed.of::<F::Block>(1)[0];
    let out = &mut out[..groups.len() * tokens];
    out.fill([0.0; ROWS]);
    let (nb, per_chunk) = (blocks_per_row::<F>(cols), CHUNK / <F::Family as Family>::ELEMENTS);
    for (segment, acts) in acts.chunks(SEGMENT).enumerate() {
        for (chunk, acts) in acts.iter().enumerate() {
            for (t, linear) in room.linear[..tokens].iter_mut().enumerate() {
                <F::Family as Family>::linear(acts, t, chunk, linear);
            }
        }
        let first = segment * SEGMENT * per_chunk;
        let count = (SEGMENT * per_chunk).min(nb - first);
        for (group, out) in groups.clone().zip(out.chunks_exact_mut(tokens)) {
            for r in 0..ROWS.min(raw.rows - ROWS * group) {
                let row = raw.row(ROWS * group + r, nb * F::BLOCK_BYTES);
                let row = &row[first * F::BLOCK_BYTES..][..count * F::BLOCK_BYTES];
                row_terms::<F>(isa, row, r, tokens, room, scales, heads);
            }
            for (t, out) in out.iter_mut().enumerate() {
                finish::<F>(&room.linear[t], &room.terms[t], count, out);
            }
        }
    }
    out
}

/// The terms of one row's segment.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn row_terms<F: Format>(
    isa: Avx2,
    row: &[u8],
    r: usize,
    tokens: usize,
    room: &mut Room,
    scales: &mut Scales,
    heads: &mut F::Block,
) {
    let Room { linear, terms, tail } = room;
    for (i, strip) in row.chunks(16 * F::BLOCK_BYTES).enumerate() {
        let count = strip.len() / F::BLOCK_BYTES;
        let whole = if count == 16 {
            strip
        } else {
            tail[..strip.len()].copy_from_slice(strip);
            &tail[..16 * F::BLOCK_BYTES]
        };
        // SAFETY: sixteen blocks are there.
        unsafe { take_heads::<F>(isa, whole.as_ptr(), heads) };
        F::scales::<V>(heads, 0, scales);
        for eight in 0..count.div_ceil(8) {
            // SAFETY: the same.
            let blocks = unsafe { whole.as_ptr().add(8 * eight * F::BLOCK_BYTES) };
            let (at, h) = (16 * i + 8 * eight, eight);
            for (linear, terms) in linear.iter().zip(&mut *terms).take(tokens) {
                // SAFETY: eight blocks are there.
                unsafe {
                    match <F::Family as Family>::LAYOUT {
                        Layout::ByteSuper if <F::Family as Family>::SUB_STEPS == 4 => {
                            super_terms::<F, 16>(isa, blocks, linear, scales, h, r, terms)
                        }
                        Layout::ByteSuper => super_terms::<F, 8>(isa, blocks, linear, scales, h, r, terms),
                        Layout::WordSuper => word_super_terms::<F>(isa, blocks, linear, scales, h, r, terms),
                        _ => block_terms::<F>(isa, blocks, linear, scales, at, h, r, terms),
                    }
                }
            }
        }
    }
}

/// Puts the dwords and the narrow field that hold scales into their planes, a lane a block.
///
/// # Safety
/// Sixteen blocks lie at `blocks`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn take_heads<F: Format>(isa: Avx2, blocks: *const u8, heads: &mut F::Block) {
    let (planes, narrow, narrow_at) = planes_of::<F>(heads);
    for &first in F::HEAD_DWORDS {
        let planes = planes[first..].first_chunk_mut().expect("four planes");
        for h in 0..2 {
            // SAFETY: by contract; four dwords of a block.
            unsafe { isa.transpose(blocks.add(8 * h * F::BLOCK_BYTES + 4 * first), F::BLOCK_BYTES, planes, h) };
        }
    }
    // SAFETY: by contract.
    unsafe { gather_narrow(isa, blocks.add(narrow_at), F::BLOCK_BYTES, narrow) };
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn ints(x: &[u32; 8]) -> __m256i {
    // SAFETY: eight dwords.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn floats(x: &[f32]) -> __m256 {
    // SAFETY: eight floats, as the slice's check says.
    unsafe { _mm256_loadu_ps(x[..8].as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn put(v: __m256, x: &mut [f32]) {
    // SAFETY: eight floats, as the slice's check says.
    unsafe { _mm256_storeu_ps(x[..8].as_mut_ptr(), v) }
}

/// Sums of two products each, in 16 bits: codes of weights against codes of activations.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn products<F: Format>(w: V, a: &[u32; 8]) -> __m256i {
    let a = ints(a);
    if <F::Family as Family>::WORDS {
        // Signed codes: the sign goes over to the activations.
        _mm256_maddubs_epi16(_mm256_abs_epi8(w.0), _mm256_sign_epi8(a, w.0))
    } else {
        _mm256_maddubs_epi16(w.0, a)
    }
}

/// Lane `i` of the result: the sum of the lanes of `v[i]`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_across(v: [__m256i; 8]) -> __m256i {
    let dwords = |a, b| _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let qwords = |a, b| _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    let low = qwords(dwords(v[0], v[1]), dwords(v[2], v[3]));
    let high = qwords(dwords(v[4], v[5]), dwords(v[6], v[7]));
    _mm256_add_epi32(_mm256_permute2x128_si256::<0x20>(low, high), _mm256_permute2x128_si256::<0x31>(low, high))
}

/// Lane `i` of vector `j`: lane `j` of vector `i`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn transposed(v: [__m256; 8]) -> [__m256; 8] {
    let low = |i: usize, j: usize| _mm256_unpacklo_ps(v[i], v[j]);
    let high = |i: usize, j: usize| _mm256_unpackhi_ps(v[i], v[j]);
    let pairs = [low(0, 1), low(2, 3), low(4, 5), low(6, 7), high(0, 1), high(2, 3), high(4, 5), high(6, 7)];
    let low = |i: usize, j: usize| _mm256_shuffle_ps::<0b01_00_01_00>(pairs[i], pairs[j]);
    let high = |i: usize, j: usize| _mm256_shuffle_ps::<0b11_10_11_10>(pairs[i], pairs[j]);
    let fours = [low(0, 1), high(0, 1), low(4, 5), high(4, 5), low(2, 3), high(2, 3), low(6, 7), high(6, 7)];
    let low = |i: usize| _mm256_permute2f128_ps::<0x20>(fours[i], fours[i + 4]);
    let high = |i: usize| _mm256_permute2f128_ps::<0x31>(fours[i], fours[i + 4]);
    [low(0), low(1), low(2), low(3), high(0), high(1), high(2), high(3)]
}

/// Eight blocks of 32, at place `at` of the segment; half `h` of the scales is theirs.
///
/// # Safety
/// Eight blocks lie at `blocks`.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn block_terms<F: Format>(
    isa: Avx2,
    blocks: *const u8,
    linear: &Linear,
    scales: &Scales,
    at: usize,
    h: usize,
    r: usize,
    terms: &mut Terms,
) {
    let ones = _mm256_set1_epi16(1);
    ask_ahead::<F>(isa, blocks, 8);
    let codes = linear.codes.as_flattened()[at..].first_chunk::<8>().expect("eight blocks");
    let sums = each!([0, 1, 2, 3, 4, 5, 6, 7] b => {
        // SAFETY: by contract.
        let w = F::gguf::<V, 0>(&unsafe { OneRow::new::<F>(blocks.add(b * F::BLOCK_BYTES)) });
        _mm256_madd_epi16(products::<F>(w, &codes[b]), ones)
    });
    let mut dot = add_across(sums);
    if F::SHIFT > 0 {
        let minus = linear.minus[at..].first_chunk().expect("eight blocks");
        dot = _mm256_add_epi32(dot, _mm256_sll_epi32(ints(minus), _mm_cvtsi32_si128(F::SHIFT as i32)));
    }
    put(_mm256_cvtepi32_ps(dot), &mut terms.dot[r][at..]);
    put(_mm256_mul_ps(floats(&scales.scale[0][8 * h..]), floats(&linear.d[at..])), &mut terms.factor[r][at..]);
    if F::MIN {
        put(floats(&scales.min[0][8 * h..]), &mut terms.min[r][at..]);
    }
}

/// Eight super-blocks of eight times 32 columns with float scales.
///
/// # Safety
/// Eight blocks lie at `blocks`.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn word_super_terms<F: Format>(
    isa: Avx2,
    blocks: *const u8,
    linear: &Linear,
    scales: &Scales,
    h: usize,
    r: usize,
    terms: &mut Terms,
) {
    let ones = _mm256_set1_epi16(1);
    let by_block = transposed(each!([0, 1, 2, 3, 4, 5, 6, 7] j => floats(&scales.scale[j][8 * h..])));
    for b in 0..8 {
        // SAFETY: by contract.
        let block = unsafe { blocks.add(b * F::BLOCK_BYTES) };
        ask_ahead::<F>(isa, block, 1);
        let codes = &linear.codes[8 * h + b];
        macro_rules! sum {
            ($i:literal) => {{
                // SAFETY: by contract.
                let w = F::gguf::<V, $i>(&unsafe { OneRow::new::<F>(block) });
                _mm256_madd_epi16(products::<F>(w, &codes[$i]), ones)
            }};
        }
        let dot = add_across([sum!(0), sum!(1), sum!(2), sum!(3), sum!(4), sum!(5), sum!(6), sum!(7)]);
        let at = 8 * (8 * h + b);
        put(_mm256_cvtepi32_ps(dot), &mut terms.dot[r][at..]);
        put(_mm256_mul_ps(by_block[b], floats(&linear.d[at..])), &mut terms.factor[r][at..]);
    }
}

/// One in each lane of 128 bits. Assembly: the compiler would make two shuffles of it, which are dearer than two loads.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn two_scales(low: &u32, high: &u32) -> __m256i {
    let x: __m256i;
    // SAFETY: reads the two references.
    unsafe {
        asm!(
            "vpbroadcastd {x}, dword ptr [{low}]",
            "vpbroadcastd {y}, dword ptr [{high}]",
            "vpblendd {x}, {x}, {y}, 0xf0",
            low = in(reg) low, high = in(reg) high, x = out(ymm_reg) x, y = out(ymm_reg) _,
            options(pure, readonly, nostack, preserves_flags)
        )
    }
    x
}

/// Eight super-blocks of `SUBS` sub-blocks with integer scales.
///
/// # Safety
/// Eight blocks lie at `blocks`.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn super_terms<F: Format, const SUBS: usize>(
    isa: Avx2,
    blocks: *const u8,
    linear: &Linear,
    scales: &Scales,
    h: usize,
    r: usize,
    terms: &mut Terms,
) {
    let at = 8 * h;
    let mut sums = [_mm256_setzero_si256(); 8];
    for (b, sum) in sums.iter_mut().enumerate() {
        // SAFETY: by contract.
        let block = unsafe { blocks.add(b * F::BLOCK_BYTES) };
        ask_ahead::<F>(isa, block, 1);
        let codes = &linear.codes[at + b];
        let scale = |j: usize| &scales.sub_scale[j][at + b];
        macro_rules! add {
            ($i:literal) => {
                let scale = if SUBS == 16 {
                    two_scales(scale(2 * $i), scale(2 * $i + 1))
                } else {
                    _mm256_set1_epi32(*scale($i) as i32)
                };
                // SAFETY: by contract.
                let products = products::<F>(F::gguf::<V, $i>(&unsafe { OneRow::new::<F>(block) }), &codes[$i]);
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(products, scale));
            };
        }
        add!(0);
        add!(1);
        add!(2);
        add!(3);
        add!(4);
        add!(5);
        add!(6);
        add!(7);
    }
    let mut dot = add_across(sums);
    let plane = |plane: &[u32; 16]| ints(plane[at..].first_chunk().expect("half a plane"));
    if F::SHIFT > 0 {
        let mut offset = _mm256_setzero_si256();
        for j in 0..SUBS {
            // The pair's halves are those of one sub-block, and the scale stands in both.
            let minus = &linear.minus_sum[j];
            offset = _mm256_add_epi32(offset, _mm256_madd_epi16(plane(&scales.sub_scale[j]), plane(minus)));
        }
        dot = _mm256_add_epi32(dot, _mm256_sll_epi32(offset, _mm_cvtsi32_si128(F::SHIFT as i32)));
    }
    let d = floats(&linear.d[at..]);
    put(_mm256_cvtepi32_ps(dot), &mut terms.dot[r][at..]);
    put(_mm256_mul_ps(floats(&scales.scale[0][at..]), d), &mut terms.factor[r][at..]);
    if F::MIN {
        let mut mins = _mm256_setzero_si256();
        for i in 0..SUBS / 2 {
            mins = _mm256_add_epi32(mins, _mm256_madd_epi16(plane(&scales.sub_min[i]), plane(&linear.sums[i])));
        }
        put(_mm256_cvtepi32_ps(mins), &mut terms.min[r][at..]);
        put(_mm256_mul_ps(floats(&scales.min[0][at..]), d), &mut terms.min_factor[r][at..]);
    }
}

/// Adds the terms of sixteen rows, `count` blocks each, to the output, in ascending order of blocks.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn finish<F: Format>(linear: &Linear, terms: &Terms, count: usize, out: &mut [f32; ROWS]) {
    let supers = <F::Family as Family>::LAYOUT == Layout::ByteSuper;
    let count = if <F::Family as Family>::LAYOUT == Layout::WordSuper { 8 * count } else { count };
    for h in 0..2 {
        let mut o = floats(&out[8 * h..]);
        for at in (0..count).step_by(8) {
            macro_rules! eight_rows {
                ($of:expr) => { transposed(each!([0, 1, 2, 3, 4, 5, 6, 7] r => floats(&$of[8 * h + r][at..]))) };
            }
            let (dot, factor) = (eight_rows!(terms.dot), eight_rows!(terms.factor));
            let mut min = [_mm256_setzero_ps(); 8];
            let mut min_factor = [_mm256_setzero_ps(); 8];
            if F::MIN {
                min = eight_rows!(terms.min);
                if supers {
                    min_factor = eight_rows!(terms.min_factor);
                }
            }
            for i in 0..8.min(count - at) {
                o = _mm256_fmadd_ps(dot[i], factor[i], o);
                if F::MIN {
                    let factor = if supers { min_factor[i] } else { _mm256_set1_ps(linear.sum[at + i]) };
                    o = _mm256_fmadd_ps(min[i], factor, o);
                }
            }
        }
        put(o, &mut out[8 * h..]);
    }
}

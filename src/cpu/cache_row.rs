//! Rows of the cache from and to f32: the one place where values are cast, quantised and dequantised.

use super::simd::{self, Kernel, Simd, convert};
use crate::collection::Cache;
use crate::dtype::{DType, Element, Plain};
use crate::with_cache_dtype;

/// Write a token's row of all heads, `x [num_heads * head_size]`, as the cache's dtype wants; with scales, quantise each group:
/// `s = amax / FP8_MAX` over the finite elements, 1 where that is below 2^-126; `code = cast(x / s)` with the scale as stored.
///
/// # Safety
/// Host storage; nobody else uses the slot meanwhile.
pub unsafe fn write_row(cache: &Cache, block: usize, slot: usize, x: &[f32]) {
    simd::run(cache.isa, Write { cache, block, slot, heads: 0..cache.num_heads, x });
}

/// Read a token's row of all heads to f32, dequantised.
///
/// # Safety
/// Host storage; nobody writes the slot meanwhile.
pub unsafe fn read_row(cache: &Cache, block: usize, slot: usize, out: &mut [f32]) {
    simd::run(cache.isa, Read { cache, block, slot, heads: 0..cache.num_heads, out });
}

struct Write<'a> {
    cache: &'a Cache,
    block: usize,
    slot: usize,
    heads: std::ops::Range<usize>,
    x: &'a [f32],
}

impl Kernel for Write<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: the contract of the functions that make one.
        unsafe { write_heads(s, self.cache, self.block, self.slot, self.heads, self.x) }
    }
}

struct Read<'a> {
    cache: &'a Cache,
    block: usize,
    slot: usize,
    heads: std::ops::Range<usize>,
    out: &'a mut [f32],
}

impl Kernel for Read<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: the contract of the functions that make one.
        unsafe { read_heads(s, self.cache, self.block, self.slot, self.heads, self.out) }
    }
}

/// The same inside a kernel: rows of some heads, one after the other in `x`, of any element type.
///
/// # Safety
/// As [`write_row`].
#[inline(always)]
pub unsafe fn write_heads<S: Simd, A: Element>(
    s: S,
    cache: &Cache,
    block: usize,
    slot: usize,
    heads: std::ops::Range<usize>,
    x: &[A],
) {
    debug_assert_eq!(x.len(), heads.len() * cache.head_size);
    with_cache_dtype!(cache.dtype, T => {
        // SAFETY: by contract.
        let rows = unsafe { cache.row_mut::<T>(block, slot) };
        let rows = &mut rows[heads.start * cache.head_size..][..x.len()];
        if !T::DTYPE.is_fp8() || cache.groups == 0 {
            convert(s, x, rows);
            return;
        }
        for (head, (row, x)) in heads.zip(rows.chunks_exact_mut(cache.head_size).zip(x.chunks_exact(cache.head_size))) {
            for (g, (row, x)) in row.chunks_mut(cache.granularity).zip(x.chunks(cache.granularity)).enumerate() {
                let scale = group_scale(s, x, cache.dtype);
                // SAFETY: by contract.
                let scale = unsafe { cache.set_scale(block, slot, head, g, scale) };
                quantize(s, x, scale, row);
            }
        }
    })
}

/// As [`write_heads`], the other way.
///
/// # Safety
/// As [`read_row`].
#[inline(always)]
pub unsafe fn read_heads<S: Simd, A: Element>(
    s: S,
    cache: &Cache,
    block: usize,
    slot: usize,
    heads: std::ops::Range<usize>,
    out: &mut [A],
) {
    debug_assert_eq!(out.len(), heads.len() * cache.head_size);
    with_cache_dtype!(cache.dtype, T => {
        // SAFETY: by contract.
        let rows = unsafe { &cache.row::<T>(block, slot)[heads.start * cache.head_size..][..out.len()] };
        if !T::DTYPE.is_fp8() || cache.groups == 0 {
            convert(s, rows, out);
            return;
        }
        for (head, (row, out)) in heads.zip(rows.chunks_exact(cache.head_size).zip(out.chunks_exact_mut(cache.head_size))) {
            for (g, (row, out)) in row.chunks(cache.granularity).zip(out.chunks_mut(cache.granularity)).enumerate() {
                // SAFETY: by contract.
                let scale = unsafe { cache.scale(block, slot, head, g) };
                dequantize(s, row, scale, out);
            }
        }
    })
}

/// `amax / FP8_MAX` over the finite elements, 1 where that is below 2^-126.
#[inline(always)]
fn group_scale<S: Simd, A: Element>(s: S, x: &[A], dtype: DType) -> f32 {
    let (chunks, rest) = x.as_chunks();
    let mut amax = s.splat(0.0);
    for x in chunks {
        amax = s.max(amax, s.finite_abs(s.load(x)));
    }
    let mut top = 0.0f32;
    for lane in s.to_array(amax) {
        top = if lane > top { lane } else { top };
    }
    for x in rest {
        let x = x.to_f32().abs();
        top = if x.is_finite() && x > top { x } else { top };
    }
    let scale = top / dtype.fp8_max();
    if scale < f32::MIN_POSITIVE { 1.0 } else { scale }
}

/// `cast(x / scale)`
#[inline(always)]
fn quantize<S: Simd, A: Element, T: Element>(s: S, x: &[A], scale: f32, y: &mut [T]) {
    let divisor = s.splat(scale);
    let ((pairs, x), (y_pairs, y)) = (x.as_chunks(), y.as_chunks_mut());
    for (x, y) in pairs.iter().zip(y_pairs) {
        let [a, b] = s.load_pair(x);
        s.store_pair(y, [s.div(a, divisor), s.div(b, divisor)]);
    }
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks(), y.as_chunks_mut());
    for (x, y) in x.iter().zip(y) {
        s.store(y, s.div(s.load(x), divisor));
    }
    for (x, y) in x_rest.iter().zip(y_rest) {
        *y = T::from_f32(x.to_f32() / scale);
    }
}

/// `cast(x * scale)`
#[inline(always)]
fn dequantize<S: Simd, T: Element, A: Element>(s: S, x: &[T], scale: f32, y: &mut [A]) {
    let factor = s.splat(scale);
    let ((pairs, x), (y_pairs, y)) = (x.as_chunks(), y.as_chunks_mut());
    for (x, y) in pairs.iter().zip(y_pairs) {
        let [a, b] = s.load_pair(x);
        s.store_pair(y, [s.mul(a, factor), s.mul(b, factor)]);
    }
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks(), y.as_chunks_mut());
    for (x, y) in x.iter().zip(y) {
        s.store(y, s.mul(s.load(x), factor));
    }
    for (x, y) in x_rest.iter().zip(y_rest) {
        *y = A::from_f32(x.to_f32() * scale);
    }
}

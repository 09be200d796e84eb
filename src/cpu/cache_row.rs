//! Rows of the cache from and to f32: the one place where values are cast, quantised and dequantised.

use crate::collection::Cache;
use crate::dtype::{DType, Element};
use crate::with_cache_dtype;

/// Write one head's row `x [head_size]` as the cache's dtype wants; with scales, quantise each group:
/// `s = amax / FP8_MAX` over the finite elements, 1 where that is below 2^-126; `code = cast(x / s)` with the scale as stored.
///
/// # Safety
/// Host storage; nobody else uses the slot meanwhile.
pub unsafe fn write_head(cache: &Cache, block: usize, slot: usize, head: usize, x: &[f32]) {
    debug_assert_eq!(x.len(), cache.head_size);
    with_cache_dtype!(cache.dtype, T => {
        // SAFETY: by contract.
        let row = unsafe { &mut cache.row_mut::<T>(block, slot)[head * cache.head_size..][..cache.head_size] };
        if cache.groups == 0 {
            row.iter_mut().zip(x).for_each(|(y, &x)| *y = T::from_f32(x));
            return;
        }
        for (g, (row, x)) in row.chunks_mut(cache.granularity).zip(x.chunks(cache.granularity)).enumerate() {
            let s = group_scale(x, cache.dtype);
            // SAFETY: by contract.
            let s = unsafe { cache.set_scale(block, slot, head, g, s) };
            row.iter_mut().zip(x).for_each(|(y, &x)| *y = T::from_f32(x / s));
        }
    })
}

fn group_scale(x: &[f32], dtype: DType) -> f32 {
    let amax = x.iter().map(|x| x.abs()).filter(|x| x.is_finite()).fold(0.0, f32::max);
    let s = amax / dtype.fp8_max();
    if s < f32::MIN_POSITIVE { 1.0 } else { s }
}

/// Write a token's row of all heads, `x [num_heads * head_size]`.
///
/// # Safety
/// Host storage; nobody else uses the slot meanwhile.
pub unsafe fn write_row(cache: &Cache, block: usize, slot: usize, x: &[f32]) {
    for (head, x) in x.chunks_exact(cache.head_size).enumerate() {
        // SAFETY: by contract.
        unsafe { write_head(cache, block, slot, head, x) };
    }
}

/// Read one head's row to f32, dequantised.
///
/// # Safety
/// Host storage; nobody writes the slot meanwhile.
pub unsafe fn read_head(cache: &Cache, block: usize, slot: usize, head: usize, out: &mut [f32]) {
    debug_assert_eq!(out.len(), cache.head_size);
    with_cache_dtype!(cache.dtype, T => {
        // SAFETY: by contract.
        let row = unsafe { &cache.row::<T>(block, slot)[head * cache.head_size..][..cache.head_size] };
        out.iter_mut().zip(row).for_each(|(y, x)| *y = x.to_f32());
    });
    if cache.groups > 0 {
        for (g, out) in out.chunks_mut(cache.granularity).enumerate() {
            // SAFETY: by contract.
            let s = unsafe { cache.scale(block, slot, head, g) };
            out.iter_mut().for_each(|y| *y *= s);
        }
    }
}

/// Read a token's row of all heads.
///
/// # Safety
/// Host storage; nobody writes the slot meanwhile.
pub unsafe fn read_row(cache: &Cache, block: usize, slot: usize, out: &mut [f32]) {
    for (head, out) in out.chunks_exact_mut(cache.head_size).enumerate() {
        // SAFETY: by contract.
        unsafe { read_head(cache, block, slot, head, out) };
    }
}

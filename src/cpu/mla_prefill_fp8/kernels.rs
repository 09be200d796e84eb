//! Inner loops of MLA prefill: each is written once over [`Simd`] and compiled for every instruction set.

#[cfg(target_arch = "x86_64")]
use crate::cpu::isa::Avx2;
use crate::cpu::isa::Isa;
use crate::cpu::simd::{LANES, Scalar, Simd};
use crate::dtype::{DType, E4m3, Element};
use crate::with_float;
use std::ops::Range;

/// Columns of a panel, and of a register tile.
pub const NR: usize = 2 * LANES;
/// Rows that a register tile is given at most.
pub const MR: usize = 6;

/// A stretch of a matrix product's inner dimension: `A[i, k] = a[i * lda + k]`, `B[k, j] = b[k * NR + j]`.
#[derive(Clone, Copy)]
pub struct Stretch<'a> {
    pub a: &'a [f32],
    pub lda: usize,
    pub b: &'a [f32],
    pub k: usize,
}

/// One query row's view of a tile of keys: positions within the tile.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Scores that the row's register tile computed, in whole panels.
    pub computed: (usize, usize),
    /// Keys that the row sees.
    pub visible: (usize, usize),
}

/// Score modification, all in units of the base-2 logarithm.
#[derive(Clone, Copy, Debug)]
pub struct ScoreScale {
    pub scale: f32,
    pub slope: f32,
    /// Position of the tile's first key less the query's.
    pub distance: f32,
}

/// What a row of an online softmax carries from tile to tile.
#[derive(Clone, Copy, Debug)]
pub struct RowState {
    /// Largest score so far, base 2.
    pub top: f32,
    /// Sum of 2^(score - top).
    pub sum: f32,
}

macro_rules! kernels {
    ($( $(#[$doc:meta])* fn $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) $(-> $ret:ty)? ; )*) => { $(
        $(#[$doc])*
        pub fn $name(isa: Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            if let Some(proof) = isa.avx2() {
                #[target_feature(enable = "avx2,fma,f16c")]
                fn compiled(s: Avx2, $($arg: $ty),*) $(-> $ret)? { generic::$name(s, $($arg),*) }
                // SAFETY: `proof` is only made where the CPU has the features.
                return unsafe { compiled(proof, $($arg),*) };
            }
            let _ = isa;
            generic::$name(Scalar, $($arg),*)
        }
    )* };
}

kernels! {
    /// `C[i, j] (+)= sum over the stretches of A[i, k] B[k, j]` for `rows <= MR` rows and `NR` columns. Each sum runs in k order by itself: a row's bits do
    /// not depend on the rows beside it.
    fn tile(rows: usize, stretches: &[Stretch<'_>], c: &mut [f32], ldc: usize, add: bool);
    /// `out = codes * scale`; a multiple of 16 codes.
    fn decode_row(codes: &[u8], scale: f32, out: &mut [f32]);
    /// `NR` rows of codes to a panel: `out[k * NR + i] = rows[i][k] * scales[i]`; rows of equal length, a multiple of 16.
    fn decode_panel(rows: &[&[u8]; NR], scales: &[f32; NR], out: &mut [f32]);
    /// Codes of one group: `s = min(amax, 1200) / 448`, `code = saturate(x * (1 / s))`; zero where s is 0 or 1/s not finite. Gives s.
    fn quantize(x: &[f32], codes: &mut [u8]) -> f32;
    /// Round to a dtype and back.
    fn round_floats(dtype: DType, x: &mut [f32]);
    /// `Kt[f, key] = c[key, f]` for `NR` keys and `features` features; `c` has room for whole vectors of features
    fn turn(c: &[f32], ldc: usize, features: usize, out: &mut [f32]);
    /// Copy `NR` columns of the rows of `c` into a panel; whether all is finite.
    fn copy_panel(c: &[f32], ldc: usize, out: &mut [f32]) -> bool;
    /// A row of an online softmax over one tile of keys: scores become 2^(score - top), 0 where the row does not see the key. Gives the factor by which
    /// what was summed before shrinks.
    fn softmax(scores: &mut [f32], seen: Seen, scale: ScoreScale, state: &mut RowState) -> f32;
    /// `x *= factor`
    fn scale(x: &mut [f32], factor: f32);
}

// SAFETY of the blocks below: the asserts at the top of each function bound every pointer.
mod generic {
    use super::*;

    #[inline(always)]
    unsafe fn read<S: Simd>(s: S, p: *const f32) -> S::F {
        // SAFETY: the caller's pointer is good for LANES floats.
        s.load(unsafe { &*p.cast::<[f32; LANES]>() })
    }

    #[inline(always)]
    unsafe fn write<S: Simd>(s: S, p: *mut f32, x: S::F) {
        // SAFETY: the caller's pointer is good for LANES floats.
        s.store(unsafe { &mut *p.cast::<[f32; LANES]>() }, x);
    }

    #[inline(always)]
    fn iota<S: Simd>(s: S) -> S::F {
        s.load(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    }

    #[inline(always)]
    pub fn tile<S: Simd>(s: S, rows: usize, stretches: &[Stretch<'_>], c: &mut [f32], ldc: usize, add: bool) {
        if S::ROWS < MR {
            for i in (0..rows).step_by(2) {
                if i + 1 < rows {
                    tile_of::<S, 2>(s, i, stretches, c, ldc, add);
                } else {
                    tile_of::<S, 1>(s, i, stretches, c, ldc, add);
                }
            }
            return;
        }
        match rows {
            1 => tile_of::<S, 1>(s, 0, stretches, c, ldc, add),
            2 => tile_of::<S, 2>(s, 0, stretches, c, ldc, add),
            3 => tile_of::<S, 3>(s, 0, stretches, c, ldc, add),
            4 => tile_of::<S, 4>(s, 0, stretches, c, ldc, add),
            5 => tile_of::<S, 5>(s, 0, stretches, c, ldc, add),
            _ => tile_of::<S, MR>(s, 0, stretches, c, ldc, add),
        }
    }

    /// `ROWS` rows from row `first` on.
    #[inline(always)]
    fn tile_of<S: Simd, const ROWS: usize>(
        s: S,
        first: usize,
        stretches: &[Stretch<'_>],
        c: &mut [f32],
        ldc: usize,
        add: bool,
    ) {
        let c = &mut c[first * ldc..];
        assert!(c.len() >= (ROWS - 1) * ldc + NR);
        let c = c.as_mut_ptr();
        let mut sums = [[s.splat(0.0); 2]; ROWS];
        if add {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: see above.
                *sum = unsafe { [read(s, c.add(i * ldc)), read(s, c.add(i * ldc + LANES))] };
            }
        }
        for stretch in stretches {
            let &Stretch { a, lda, b, k } = stretch;
            if k == 0 {
                continue;
            }
            let a = &a[first * lda..];
            assert!(a.len() >= (ROWS - 1) * lda + k && b.len() >= k * NR);
            let (a, mut b) = (a.as_ptr(), b.as_ptr());
            for k in 0..k {
                // SAFETY: see above.
                unsafe {
                    let (b0, b1) = (read(s, b), read(s, b.add(LANES)));
                    for (i, sum) in sums.iter_mut().enumerate() {
                        let x = s.splat(*a.add(i * lda + k));
                        sum[0] = s.mul_add(x, b0, sum[0]);
                        sum[1] = s.mul_add(x, b1, sum[1]);
                    }
                    b = b.add(NR);
                }
            }
        }
        for (i, sum) in sums.iter().enumerate() {
            // SAFETY: see above.
            unsafe {
                write(s, c.add(i * ldc), sum[0]);
                write(s, c.add(i * ldc + LANES), sum[1]);
            }
        }
    }

    #[inline(always)]
    pub fn decode_row<S: Simd>(s: S, codes: &[u8], scale: f32, out: &mut [f32]) {
        assert!(codes.len().is_multiple_of(LANES) && out.len() == codes.len());
        let scale = s.splat(scale);
        for (codes, out) in codes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
            s.store(out, s.mul(s.load(&codes.map(E4m3)), scale));
        }
    }

    #[inline(always)]
    pub fn decode_panel<S: Simd>(s: S, rows: &[&[u8]; NR], scales: &[f32; NR], out: &mut [f32]) {
        let blocks = rows.map(|row| row.as_chunks::<NR>().0);
        let scales = scales.as_chunks().0;
        let scales = [s.load(&scales[0]), s.load(&scales[1])];
        let (out, _) = out.as_chunks_mut().0.as_chunks_mut();
        assert!(blocks.iter().all(|row| row.len() == out.len()));
        for (k, out) in out.iter_mut().enumerate() {
            let mut square = [&[0; NR]; NR];
            for (to, row) in square.iter_mut().zip(&blocks) {
                *to = &row[k];
            }
            s.load_e4m3_panel(square, scales, out);
        }
    }

    #[inline(always)]
    pub fn quantize<S: Simd>(s: S, x: &[f32], codes: &mut [u8]) -> f32 {
        assert!(x.len() == codes.len() && x.len().is_multiple_of(LANES));
        let x = x.as_chunks::<LANES>().0;
        // Infinite elements count: amax is cut at 1200 anyway. NaN do not.
        let (mut high, mut low) = (s.splat(0.0), s.splat(0.0));
        for x in x {
            let x = s.load(x);
            high = s.max(x, high);
            low = s.max(s.sub(s.splat(0.0), x), low);
        }
        let scale = s.reduce_max(s.max(high, low)).min(1200.0) / 448.0;
        let inverse = 1.0 / scale;
        if scale == 0.0 || !inverse.is_finite() {
            codes.fill(0);
            return scale;
        }
        for (codes, x) in codes.as_chunks_mut::<LANES>().0.iter_mut().zip(x) {
            let mut to = [E4m3(0); LANES];
            s.store(&mut to, s.mul(s.load(x), s.splat(inverse)));
            *codes = to.map(|code| code.0);
        }
        scale
    }

    #[inline(always)]
    pub fn round_floats<S: Simd>(s: S, dtype: DType, x: &mut [f32]) {
        with_float!(dtype, T => {
            let (x, rest) = x.as_chunks_mut();
            for x in x {
                s.store(x, s.round::<T>(s.load(x)));
            }
            rest.iter_mut().for_each(|x| *x = T::from_f32(*x).to_f32());
        })
    }

    #[inline(always)]
    pub fn turn<S: Simd>(s: S, c: &[f32], ldc: usize, features: usize, out: &mut [f32]) {
        assert!(c.len() >= (NR - 1) * ldc + features.next_multiple_of(LANES) && out.len() == features * NR);
        for f in (0..features).step_by(LANES) {
            for half in [0, LANES] {
                let mut square = [s.splat(0.0); LANES];
                for (i, row) in square.iter_mut().enumerate() {
                    // SAFETY: see above.
                    *row = unsafe { read(s, c.as_ptr().add((half + i) * ldc + f)) };
                }
                for (i, row) in s.transpose(square).into_iter().enumerate().take(features - f) {
                    // SAFETY: see above.
                    unsafe { write(s, out.as_mut_ptr().add((f + i) * NR + half), row) };
                }
            }
        }
    }

    #[inline(always)]
    pub fn copy_panel<S: Simd>(s: S, c: &[f32], ldc: usize, out: &mut [f32]) -> bool {
        let rows = out.len() / NR;
        assert!(rows == 0 || c.len() >= (rows - 1) * ldc + NR);
        // x - x is 0, or NaN where x is not finite.
        let mut rest = s.splat(0.0);
        for r in 0..rows {
            for half in [0, LANES] {
                // SAFETY: see above.
                unsafe {
                    let x = read(s, c.as_ptr().add(r * ldc + half));
                    rest = s.add(rest, s.sub(x, x));
                    write(s, out.as_mut_ptr().add(r * NR + half), x);
                }
            }
        }
        s.reduce_add(rest) == 0.0
    }

    #[inline(always)]
    pub fn softmax<S: Simd>(s: S, scores: &mut [f32], seen: Seen, by: ScoreScale, state: &mut RowState) -> f32 {
        let Seen { computed: (from, to), visible: (lo, hi) } = seen;
        let scores = &mut scores[from..to];
        if lo >= hi {
            scores.fill(0.0);
            return 1.0;
        }
        let none = s.splat(f32::NEG_INFINITY);
        let (low, high) = (s.splat(lo as f32), s.splat(hi as f32));
        let mut top = none;
        for (i, x) in scores.as_chunks_mut().0.iter_mut().enumerate() {
            let j = from + i * LANES;
            let key = s.add(s.splat(j as f32), iota(s));
            let bias = s.mul(s.splat(by.slope), s.add(s.splat(by.distance), key));
            let mut y = s.mul_add(s.load(x), s.splat(by.scale), bias);
            if j < lo || j + LANES > hi {
                y = s.select_lt(key, low, none, s.select_lt(key, high, y, none));
            }
            top = s.max(y, top);
            s.store(x, y);
        }
        let before = state.top;
        state.top = before.max(s.reduce_max(top));
        // Where all scores so far are -inf, -inf - -inf must not make a NaN of them: they weigh nothing.
        let origin = if state.top == f32::NEG_INFINITY { 0.0 } else { state.top };
        let shrink = if before == state.top { 1.0 } else { s.to_array(s.exp2(s.splat(before - origin)))[0] };
        let mut sum = s.splat(0.0);
        for x in scores.as_chunks_mut().0 {
            let y = s.exp2(s.sub(s.load(x), s.splat(origin)));
            sum = s.add(sum, y);
            s.store(x, y);
        }
        state.sum = state.sum * shrink + s.reduce_add(sum);
        shrink
    }

    #[inline(always)]
    pub fn scale<S: Simd>(s: S, x: &mut [f32], factor: f32) {
        for x in x.as_chunks_mut().0 {
            s.store(x, s.mul(s.load(x), s.splat(factor)));
        }
    }
}

/// Rows of a block, `MR` at a time.
pub fn register_tiles(rows: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    (0..rows).step_by(MR).map(move |r| r..rows.min(r + MR))
}

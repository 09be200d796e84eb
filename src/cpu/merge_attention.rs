//! Joining partial attention results, split over tokens.

use super::reference;
use super::rows;
use super::simd::{self, Kernel, LANES, Simd};
use crate::context::Context;
use crate::dtype::Element;
use crate::error::Result;
use crate::op::merge_attention::{Args, MergeAttention};
use crate::plan::{Impl, Stream};
use crate::view::View;
use crate::with_float;
use crate::workspace::Arena;
use std::ops::Range;

pub static IMPLS: &[Impl<MergeAttention>] = &[
    Impl { name: "lanes", refuse: |ctx, _| ctx.isa.not_reference(), layout: |_, _, _| {}, run },
    reference::MERGE_ATTENTION,
];

fn run(ctx: &Context, a: &Args, _: &mut Arena, _: Stream) -> Result<()> {
    let [total, heads, width] = a.output.shape;
    let per_task = rows::per_task(3 * heads * width * a.output.dtype.size());
    ctx.threads.run(total.div_ceil(per_task), |i| simd::run(ctx.isa, Merge(a, rows::of_task(i, per_task, total))))
}

/// Weights of two sides and their common lse. Without any key both weigh nothing.
fn weigh(a: f64, b: f64) -> (f64, f64, f64) {
    let top = a.max(b);
    if a == f64::NEG_INFINITY && b == f64::NEG_INFINITY {
        return (0.0, 0.0, top);
    }
    // The smaller side's weight relative to the larger one's: no power overflows, and an infinite lse takes all.
    let e = (-(a - b).abs()).exp();
    let (large, small) = (1.0 / (1.0 + e), e / (1.0 + e));
    let (wa, wb) = if a >= b { (large, small) } else { (small, large) };
    (wa, wb, top + e.ln_1p())
}

struct Merge<'a>(&'a Args, Range<usize>);

impl Kernel for Merge<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Merge(m, rows) = self;
        let [_, heads, width] = m.output.shape;
        with_float!(m.output.dtype, T => {
            for t in rows {
                for h in 0..heads {
                    // The output may be the memory of a side: everything goes through raw pointers, and each element is read before it is written.
                    let row = |view: &View<3>| view.as_ptr().cast::<T>().wrapping_add(t * view.stride[0] + h * view.stride[1]);
                    let lse = |view: &View<2>| view.as_ptr().cast::<f32>().wrapping_add(t * view.stride[0] + h * view.stride[1]);
                    // SAFETY: rows inside checked views; a token's rows are this task's.
                    unsafe {
                        let (wa, wb, joined) = weigh(*lse(&m.lse_a) as f64, *lse(&m.lse_b) as f64);
                        let (a, b, y) = (row(&m.output_a), row(&m.output_b), row(&m.output));
                        merge_row(s, [(wa, a), (wb, b)], y, width);
                        if let Some(view) = &m.lse {
                            *lse(view) = joined as f32;
                        }
                    }
                }
            }
        })
    }
}

/// `y = sum of weight * x` over the sides that weigh anything: one without keys may hold whatever it likes.
///
/// # Safety
/// Each `x` is readable and `y` writable for `width` elements; `y` is disjoint from an `x` or the same memory.
#[inline(always)]
unsafe fn merge_row<S: Simd, T: Element>(s: S, sides: [(f64, *const T); 2], y: *mut T, width: usize) {
    const STEP: usize = 2 * LANES;
    let whole = width / STEP * STEP;
    let weights = sides.map(|(w, _)| w as f32);
    let counts = sides.map(|(w, _)| w != 0.0);
    for i in (0..whole).step_by(STEP) {
        let mut sums = [s.splat(0.0); 2];
        for side in 0..2 {
            if counts[side] {
                // SAFETY: `i + STEP <= width`.
                let x = s.load_pair(&unsafe { sides[side].1.add(i).cast::<[T; STEP]>().read() });
                for j in 0..2 {
                    let part = s.mul(s.splat(weights[side]), x[j]);
                    sums[j] = if side == 1 && counts[0] { s.add(sums[j], part) } else { part };
                }
            }
        }
        // SAFETY: as above.
        s.store_pair(unsafe { &mut *y.add(i).cast::<[T; STEP]>() }, sums);
    }
    for i in whole..width {
        let mut sum = 0.0;
        for side in 0..2 {
            if counts[side] {
                // SAFETY: `i < width`.
                let part = weights[side] * unsafe { sides[side].1.add(i).read() }.to_f32();
                sum = if side == 1 && counts[0] { sum + part } else { part };
            }
        }
        // SAFETY: as above.
        unsafe { y.add(i).write(T::from_f32(sum)) };
    }
}

//! RoPE, norm and quantisation, split over tokens: each input is read once and each output written once, a token's row stays in the first-level cache between.

use super::cache_row::write_row;
use super::mla_row::{FinishRow, Rotation};
use super::reference;
use super::rows::{self, Places};
use super::simd::{self, Kernel, Simd, convert};
use crate::context::Context;
use crate::error::Result;
use crate::op::mla_rope_rmsnorm_quantize::{Args, MlaRopeRmsnormQuantize};
use crate::plan::{Impl, Stream};
use crate::with_float;
use crate::workspace::{Arena, Span};
use std::ops::Range;

pub static IMPLS: &[Impl<MlaRopeRmsnormQuantize>] = &[
    Impl {
        name: "lanes",
        refuse: |ctx, _| ctx.isa.not_reference(),
        layout: |ctx, args, arena| _ = Scratch::take(ctx, args, arena),
        run,
    },
    reference::MLA_ROPE_RMSNORM_QUANTIZE,
];

struct Scratch {
    /// `[C]`
    gamma: Span<f32>,
    /// Per lane `[2 R + C + R]`: a rotation and a cache row.
    lanes: Span<f32>,
    lane_width: usize,
}

impl Scratch {
    fn take(ctx: &Context, a: &Args<'_>, arena: &mut Arena) -> Self {
        let lane_width = 2 * a.rope_dim + a.cache.head_size;
        let gamma = arena.take(a.kv_lora_rank);
        Scratch { gamma, lanes: arena.take(lane_width.saturating_mul(ctx.num_threads())), lane_width }
    }
}

fn run(ctx: &Context, a: &Args<'_>, arena: &mut Arena, _: Stream) -> Result<()> {
    let total = a.batch.tokens();
    if total == 0 {
        return Ok(());
    }
    let scratch = Scratch::take(ctx, a, arena);
    // SAFETY: this call's scratch, before any task runs; gamma is host memory nobody writes.
    let gamma = unsafe {
        let gamma = scratch.gamma.slice_mut(0, a.kv_lora_rank);
        with_float!(a.gamma.dtype, T => gamma.iter_mut().zip(a.gamma.row::<T, 0>([])).for_each(|(y, x)| *y = crate::dtype::Element::to_f32(*x)));
        &*gamma
    };
    let heads = a.q_rope.shape[1];
    let per_task = rows::per_task((2 * heads * a.rope_dim + 2 * a.cache.head_size) * a.kv.dtype.size());
    ctx.threads.run_with_lane(total.div_ceil(per_task), |lane, i| {
        // SAFETY: a lane's scratch is used by one task at a time.
        let scratch = unsafe { scratch.lanes.slice_mut(lane * scratch.lane_width, scratch.lane_width) };
        simd::run(ctx.isa, Finish { a, gamma, scratch, rows: rows::of_task(i, per_task, total) });
    })
}

struct Finish<'a> {
    a: &'a Args<'a>,
    gamma: &'a [f32],
    scratch: &'a mut [f32],
    rows: Range<usize>,
}

impl Kernel for Finish<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Finish { a, gamma, scratch, rows } = self;
        let (table, row) = scratch.split_at_mut(2 * a.rope_dim);
        let heads = a.q_rope.shape[1];
        with_float!(a.kv.dtype, T => {
            let (x, y) = (a.q_rope.as_ptr().cast::<T>(), a.q_rope_output.as_ptr().cast::<T>());
            let ([x_token, x_head, _], [y_token, y_head, _]) = (a.q_rope.stride, a.q_rope_output.stride);
            let rope_bytes = a.rope_dim * size_of::<T>();
            // A token touches several places in memory, none for long: the hardware does not foresee the next ones, so each head asks for the next token's.
            let mut later = Places::new(&a.batch, &a.batch, rows.clone()).skip(1);
            for place in Places::new(&a.batch, &a.batch, rows) {
                let (t, next) = (place.row, later.next());
                // SAFETY: host memory nobody writes.
                let rotation = with_float!(a.freqs_cis.dtype, F => unsafe {
                    Rotation::new(a.freqs_cis.row::<F, 1>([place.position]), a.rope, table)
                });
                for h in 0..heads {
                    let (x, y) = (x.wrapping_add(t * x_token + h * x_head), y.wrapping_add(t * y_token + h * y_head));
                    if next.is_some() {
                        s.prefetch_write(y.wrapping_add(y_token).cast(), rope_bytes);
                        if x != y {
                            s.prefetch(x.wrapping_add(x_token).cast(), rope_bytes);
                        }
                    }
                    // SAFETY: heads inside checked views, the same memory or disjoint, a token's rows this task's.
                    unsafe { rotation.apply(s, x, y) };
                }
                if let Some(next) = next {
                    let kv = a.kv.as_ptr().wrapping_add(next.row * a.kv.stride[0] * size_of::<T>());
                    s.prefetch(kv, a.kv.row_len() * size_of::<T>());
                    let offset = a.cache.row_offset(next.block, next.slot) * a.cache.dtype.size();
                    s.prefetch_write(a.cache.blocks_ptr().wrapping_add(offset), row.len() * a.cache.dtype.size());
                }
                // SAFETY: host memory nobody writes.
                convert(s, unsafe { a.kv.row::<T, 1>([t]) }, row);
                let (epsilon, rotation, dtype) = (a.epsilon, &rotation, a.kv.dtype);
                simd::run(a.cache.isa, FinishRow { row, gamma, epsilon, rotation, dtype });
                // SAFETY: a token's slot is its task's alone.
                unsafe { write_row(&a.cache, place.block, place.slot, row) };
            }
        })
    }
}

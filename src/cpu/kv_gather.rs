//! Copying cached rows out, split over rows of the buffer.

use super::cache_row::read_heads;
use super::reference;
use super::rows::{self, Places};
use super::simd::{self, Kernel, Simd};
use crate::context::Context;
use crate::error::Result;
use crate::op::kv_gather::{Args, KvGather};
use crate::plan::{Impl, Stream};
use crate::with_float;
use crate::workspace::Arena;
use std::ops::Range;

pub static IMPLS: &[Impl<KvGather>] = &[
    Impl { name: "lanes", refuse: |ctx, _| ctx.isa.not_reference(), layout: |_, _, _| {}, run },
    reference::KV_GATHER,
];

fn run(ctx: &Context, a: &Args<'_>, _: &mut Arena, _: Stream) -> Result<()> {
    let total = a.rows.total();
    let per_task = rows::per_task(a.cache.row_elements() * (a.out.dtype.size() + a.cache.dtype.size()));
    ctx.threads.run(total.div_ceil(per_task), |i| simd::run(ctx.isa, Gather(a, rows::of_task(i, per_task, total))))
}

struct Gather<'a>(&'a Args<'a>, Range<usize>);

impl Kernel for Gather<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Gather(a, rows) = self;
        with_float!(a.out.dtype, T => {
            for place in Places::new(&a.rows, &a.batch, rows) {
                for h in 0..a.cache.num_heads {
                    // SAFETY: host memory; the cache is only read, and a row of the buffer is written by its task alone.
                    unsafe {
                        let out = a.out.row_mut::<T, 2>([place.row, h]);
                        read_heads(s, &a.cache, place.block, place.slot, h..h + 1, out);
                    }
                }
            }
        })
    }
}

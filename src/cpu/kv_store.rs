//! Appending rows, split over tokens. A head's row is read where it lies and written to its slot; with scales it is read twice, once for the scale.

use super::cache_row::write_heads;
use super::reference;
use super::rows::{self, Places};
use super::simd::{self, Kernel, Simd};
use crate::context::Context;
use crate::error::Result;
use crate::op::kv_store::{Args, KvStore};
use crate::plan::{Impl, Stream};
use crate::with_float;
use crate::workspace::Arena;
use std::ops::Range;

pub static IMPLS: &[Impl<KvStore>] =
    &[Impl { name: "lanes", refuse: |ctx, _| ctx.isa.not_reference(), layout: |_, _, _| {}, run }, reference::KV_STORE];

fn run(ctx: &Context, a: &Args<'_>, _: &mut Arena, _: Stream) -> Result<()> {
    let total = a.batch.tokens();
    let per_task = rows::per_task(a.cache.row_elements() * (a.values.dtype.size() + a.cache.dtype.size()));
    ctx.threads.run(total.div_ceil(per_task), |i| simd::run(ctx.isa, Store(a, rows::of_task(i, per_task, total))))
}

struct Store<'a>(&'a Args<'a>, Range<usize>);

impl Kernel for Store<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Store(a, rows) = self;
        with_float!(a.values.dtype, T => {
            for place in Places::new(&a.batch, &a.batch, rows) {
                for h in 0..a.cache.num_heads {
                    // SAFETY: host memory; the values are only read, and a token's slot is written by its task alone.
                    unsafe {
                        let x = a.values.row::<T, 2>([place.row, h]);
                        write_heads(s, &a.cache, place.block, place.slot, h..h + 1, x);
                    }
                }
            }
        })
    }
}

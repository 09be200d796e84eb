//! `kernels/kv_gather.cu`: a warp a row (buffer row, head).

use super::params::{BatchParams, CacheParams, KvGatherParams};
use super::{Kernel, Shape, THREADS, WARPS, by_dtype, entries, launch, refuse_without_kernels, rows_aligned};
use crate::context::Context;
use crate::error::Result;
use crate::op::kv_gather::{Args, KvGather};
use crate::plan::{Impl, Stream};
use crate::workspace::Arena;

static KERNELS: [Kernel; 3] = entries!("kv_gather");

pub const IMPLS: &[Impl<KvGather>] =
    &[Impl { name: "cuda", refuse: |ctx, _| refuse_without_kernels(ctx), layout: |_, _, _| {}, run }];

/// Cached rows to `out [rows, num_heads, head_size]`, dequantised and rounded to its dtype.
fn run(ctx: &Context, a: &Args<'_>, _: &mut Arena, stream: Stream) -> Result<()> {
    let Args { cache, batch, rows, out, .. } = a;
    if out.shape[0] == 0 || batch.batch_size == 0 {
        return Ok(());
    }
    let params = KvGatherParams {
        batch: BatchParams::new(batch),
        cache: CacheParams::new(cache),
        out: out.as_ptr().cast(),
        row_stride: out.stride[0] as i64,
        head_stride: out.stride[1] as i64,
        rows: out.shape[0] as u64,
        buffer_row_offsets: rows.raw_row_offsets,
        cache_offsets: rows.raw_cache_offsets,
        vector: u32::from(rows_aligned(out) && CacheParams::new(cache).vector(16 / out.dtype.size())),
        reserved: 0,
    };
    let shape = Shape::strided(params.rows * cache.num_heads as u64, WARPS, THREADS, 0);
    // SAFETY: the struct describes the checked arguments.
    unsafe { launch(ctx, by_dtype(&KERNELS, out.dtype), shape, &params, stream) }
}

//! `kernels/kv_store.cu`: a warp a row (token, head).

use super::params::{BatchParams, CacheParams, KvStoreParams};
use super::{Kernel, Shape, THREADS, WARPS, by_dtype, entries, launch, refuse_without_kernels, rows_aligned};
use crate::context::Context;
use crate::error::Result;
use crate::op::kv_store::{Args, KvStore};
use crate::plan::{Impl, Stream};
use crate::workspace::Arena;

static KERNELS: [Kernel; 3] = entries!("kv_store");

pub const IMPLS: &[Impl<KvStore>] =
    &[Impl { name: "cuda", refuse: |ctx, _| refuse_without_kernels(ctx), layout: |_, _, _| {}, run }];

fn run(ctx: &Context, a: &Args<'_>, _: &mut Arena, stream: Stream) -> Result<()> {
    let v = &a.values;
    if v.shape[0] == 0 || a.batch.batch_size == 0 {
        return Ok(());
    }
    let cache = CacheParams::new(&a.cache);
    let params = KvStoreParams {
        batch: BatchParams::new(&a.batch),
        cache,
        values: v.as_ptr().cast(),
        token_stride: v.stride[0] as i64,
        head_stride: v.stride[1] as i64,
        tokens: v.shape[0] as u64,
        vector: u32::from(rows_aligned(v) && cache.vector(16 / v.dtype.size())),
        reserved: 0,
    };
    let shape = Shape::strided(params.tokens * a.cache.num_heads as u64, WARPS, THREADS, 0);
    // SAFETY: the struct describes the checked arguments.
    unsafe { launch(ctx, by_dtype(&KERNELS, v.dtype), shape, &params, stream) }
}

//! `kernels/merge_attention.cu`: a warp a row (token, head).

use super::params::MergeAttentionParams;
use super::{Kernel, Shape, THREADS, WARPS, by_dtype, entries, launch, refuse_without_kernels, rows_aligned};
use crate::context::Context;
use crate::error::Result;
use crate::op::merge_attention::{Args, MergeAttention};
use crate::plan::{Impl, Stream};
use crate::workspace::Arena;
use std::ptr::null_mut;

static KERNELS: [Kernel; 3] = entries!("merge_attention");

pub const IMPLS: &[Impl<MergeAttention>] =
    &[Impl { name: "cuda", refuse: |ctx, _| refuse_without_kernels(ctx), layout: |_, _, _| {}, run }];

fn run(ctx: &Context, m: &Args, _: &mut Arena, stream: Stream) -> Result<()> {
    let [tokens, heads, width] = m.output.shape;
    if tokens == 0 {
        return Ok(());
    }
    let aligned = [&m.output_a, &m.output_b, &m.output].into_iter().all(rows_aligned);
    let params = MergeAttentionParams {
        output_a: m.output_a.as_ptr().cast(),
        output_b: m.output_b.as_ptr().cast(),
        output: m.output.as_ptr().cast(),
        lse_a: m.lse_a.as_ptr().cast(),
        lse_b: m.lse_b.as_ptr().cast(),
        lse: m.lse.as_ref().map_or(null_mut(), |v| v.as_ptr().cast()),
        a_token_stride: m.output_a.stride[0] as i64,
        a_head_stride: m.output_a.stride[1] as i64,
        b_token_stride: m.output_b.stride[0] as i64,
        b_head_stride: m.output_b.stride[1] as i64,
        output_token_stride: m.output.stride[0] as i64,
        output_head_stride: m.output.stride[1] as i64,
        lse_a_stride: m.lse_a.stride[0] as i64,
        lse_b_stride: m.lse_b.stride[0] as i64,
        lse_stride: m.lse.as_ref().map_or(0, |v| v.stride[0] as i64),
        tokens: tokens as u64,
        num_heads: heads as u32,
        width: width as u32,
        vector: u32::from(aligned && width.is_multiple_of(16 / m.output.dtype.size())),
        reserved: 0,
    };
    let shape = Shape::strided(tokens as u64 * heads as u64, WARPS, THREADS, 0);
    // SAFETY: the struct describes the checked arguments.
    unsafe { launch(ctx, by_dtype(&KERNELS, m.output.dtype), shape, &params, stream) }
}

//! `kernels/mla_rope_rmsnorm_quantize.cu`: a warp for a token's row, more for its query heads. The prefill's first step is the same kernel.

use super::params::{BatchParams, CacheParams, MlaRopeRmsnormQuantizeParams};
use super::{Kernel, Shape, THREADS, by_dtype, entries, launch, refuse_without_kernels, rows_aligned};
use crate::batch::Batch;
use crate::collection::Cache;
use crate::context::{Backend, Context};
use crate::error::Result;
use crate::op::Rope;
use crate::op::mla_rope_rmsnorm_quantize::MlaRopeRmsnormQuantize;
use crate::plan::{Impl, Stream};
use crate::view::View;
use std::ptr::null;

static KERNELS: [Kernel; 3] = entries!("mla_rope_rmsnorm_quantize");

pub const IMPLS: &[Impl<MlaRopeRmsnormQuantize>] = &[Impl {
    name: "cuda",
    refuse: |ctx, a| refuse(ctx, &a.cache),
    layout: |_, _, _| {},
    run: |ctx, a, _, stream| {
        let rows = NewRows {
            cache: &a.cache,
            batch: &a.batch,
            rope: a.rope,
            q_rope: &a.q_rope,
            q_rope_output: &a.q_rope_output,
            kv: Some(&a.kv),
            freqs_cis: &a.freqs_cis,
            gamma: &a.gamma,
            epsilon: a.epsilon,
        };
        finish(ctx, &rows, stream)
    },
}];

/// What finishing new rows takes. `kv` absent: they lie in the cache and are finished in place.
pub struct NewRows<'a> {
    pub cache: &'a Cache,
    pub batch: &'a Batch<'a>,
    pub rope: Rope,
    /// `[T, num_heads, R]`, of the activations' dtype like `q_rope_output` and `kv`.
    pub q_rope: &'a View<3>,
    pub q_rope_output: &'a View<3>,
    /// `[T, C + R]`
    pub kv: Option<&'a View<2>>,
    pub freqs_cis: &'a View<2>,
    pub gamma: &'a View<1>,
    pub epsilon: f32,
}

/// A row is finished in shared memory, as f32; warps a block are halved until the rows fit.
fn warps(ctx: &Context, cache: &Cache) -> Option<(u32, u32)> {
    let Backend::Cuda(device) = ctx.backend() else { return None };
    let row = cache.head_size.checked_next_multiple_of(4)?.checked_mul(4)?;
    [4u32, 2, 1].into_iter().find_map(|warps| {
        let shared = row.checked_mul(warps as usize)?;
        let limit = if warps == 1 { device.max_shared() } else { 48 << 10 };
        (shared <= limit as usize).then_some((warps, shared as u32))
    })
}

pub fn refuse(ctx: &Context, cache: &Cache) -> Result<(), String> {
    refuse_without_kernels(ctx)?;
    match warps(ctx, cache) {
        Some(_) => Ok(()),
        None => Err(format!("a row of head_size {} does not fit shared memory", cache.head_size)),
    }
}

pub fn finish(ctx: &Context, r: &NewRows<'_>, stream: Stream) -> Result<()> {
    let [tokens, heads, rope_width] = r.q_rope.shape;
    let tokens = r.kv.map_or(tokens, |kv| tokens.min(kv.shape[0]));
    if tokens == 0 || r.batch.batch_size == 0 {
        return Ok(());
    }
    let dtype = r.q_rope.dtype;
    let n = 16 / dtype.size();
    let cache = CacheParams::new(r.cache);
    let latent = r.cache.head_size - rope_width;
    // What a lane rotates at once: n neighbours, or (half-split) n of each half; with as many frequencies beside them.
    let unit = if r.rope == Rope::HalfSplit { 2 * n } else { n };
    let vector = rows_aligned(r.q_rope)
        && rows_aligned(r.q_rope_output)
        && r.kv.is_none_or(rows_aligned)
        && rows_aligned(r.freqs_cis)
        && rows_aligned(r.gamma)
        && rope_width.is_multiple_of(unit)
        && latent.is_multiple_of(n)
        && cache.vector(n);
    let units = if vector { rope_width / unit } else { rope_width / 2 } * heads;
    // Four units a lane: enough loads in flight, and enough warps for a small batch.
    let q_warps = units.div_ceil(4 * 32).max(1) as u32;
    let (warps, shared) = warps(ctx, r.cache).expect("refuse has looked");
    let params = MlaRopeRmsnormQuantizeParams {
        batch: BatchParams::new(r.batch),
        cache,
        q_rope: r.q_rope.as_ptr().cast(),
        q_rope_output: r.q_rope_output.as_ptr().cast(),
        kv: r.kv.map_or(null(), |kv| kv.as_ptr().cast_const().cast()),
        freqs: r.freqs_cis.as_ptr().cast(),
        gamma: r.gamma.as_ptr().cast(),
        q_token_stride: r.q_rope.stride[0] as i64,
        q_head_stride: r.q_rope.stride[1] as i64,
        output_token_stride: r.q_rope_output.stride[0] as i64,
        output_head_stride: r.q_rope_output.stride[1] as i64,
        kv_stride: r.kv.map_or(0, |kv| kv.stride[0] as i64),
        freqs_stride: r.freqs_cis.stride[0] as i64,
        tokens: tokens as u64,
        max_positions: r.freqs_cis.shape[0] as u64,
        num_heads: heads as u32,
        rope_width: rope_width as u32,
        latent: latent as u32,
        half_split: u32::from(r.rope == Rope::HalfSplit),
        freqs_dtype: r.freqs_cis.dtype as i32,
        gamma_dtype: r.gamma.dtype as i32,
        epsilon: r.epsilon,
        vector: u32::from(vector),
        q_warps,
        reserved: 0,
    };
    let items = tokens as u64 * (1 + u64::from(q_warps));
    let threads = THREADS / 4 * warps;
    // SAFETY: the struct describes the checked arguments; the shared memory has a row a warp.
    unsafe {
        launch(ctx, by_dtype(&KERNELS, dtype), Shape::strided(items, warps.into(), threads, shared), &params, stream)
    }
}

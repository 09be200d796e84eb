//! RoPE + RMSNorm + quantise into the MLA cache.

use super::{Rope, check_epsilon, check_freqs, check_mla, check_reserved, check_same_dtype, f32_or};
use crate::abi::rope::pkv_mla_rope_rmsnorm_quantize_params;
use crate::batch::{Batch, CacheUse};
use crate::collection::{Cache, Collection};
use crate::context::Context;
use crate::dtype::FLOATS;
use crate::error::{Error, Result};
use crate::plan::{Impl, Op};
use crate::view::{Access, Dim, Mode, TensorArg, View, check_rows};

pub struct MlaRopeRmsnormQuantize;

pub struct Args<'a> {
    pub cache: Cache,
    pub batch: Batch<'a>,
    pub rope: Rope,
    /// `[T, num_heads, R]`
    pub q_rope: View<3>,
    /// `[T, num_heads, R]`, the same memory as `q_rope` or disjoint from it.
    pub q_rope_output: View<3>,
    /// `[T, C + R]`
    pub kv: View<2>,
    /// `[max_positions, R]`, F32 or the activations' dtype.
    pub freqs_cis: View<2>,
    /// `[C]`, F32 or the activations' dtype.
    pub gamma: View<1>,
    pub epsilon: f32,
    /// C
    pub kv_lora_rank: usize,
    /// R
    pub rope_dim: usize,
}

impl Op for MlaRopeRmsnormQuantize {
    const NAME: &'static str = "mla_rope_rmsnorm_quantize";
    type Params = pkv_mla_rope_rmsnorm_quantize_params;
    type Args<'a> = Args<'a>;

    unsafe fn validate<'a>(ctx: &Context, p: &'a Self::Params, mode: Mode) -> Result<Args<'a>> {
        // SAFETY: by contract.
        let collection = unsafe { Collection::of(p.collection, ctx)? };
        check_mla(collection)?;
        let cache = collection.cache(0, p.layer_idx, ["params.kv_idx", "params.layer_idx"])?;
        let rope = Rope::check(p.rope, "params.rope")?;
        check_epsilon(p.epsilon)?;
        check_reserved(p.reserved)?;
        let arg = |tensor, name| TensorArg { tensor, name, mode };
        let q_rope = arg(&p.q_rope, "params.q_rope").check(FLOATS, [Dim::Any, Dim::Some, Dim::Some], Access::Read)?;
        let [_, heads, rope_dim] = q_rope.shape;
        if rope_dim % 2 != 0 || rope_dim >= cache.head_size {
            let message =
                format!("is {rope_dim}, the rope width must be even and below head_size = {}", cache.head_size);
            return Err(Error::shape("params.q_rope.shape[2]", message));
        }
        let kv_lora_rank = cache.head_size - rope_dim;
        let q_rope_output = arg(&p.q_rope_output, "params.q_rope_output").check(
            FLOATS,
            [Dim::Any, Dim::Is(heads, "num_heads, as in q_rope"), Dim::Is(rope_dim, "rope width, as in q_rope")],
            Access::Write,
        )?;
        check_same_dtype("params.q_rope_output", q_rope_output.dtype, "params.q_rope", q_rope.dtype)?;
        let kv =
            arg(&p.kv, "params.kv").check(FLOATS, [Dim::Any, Dim::Is(cache.head_size, "head_size")], Access::Read)?;
        check_same_dtype("params.kv", kv.dtype, "params.q_rope", q_rope.dtype)?;
        // SAFETY: by contract.
        let batch = unsafe { Batch::check(p.batch, collection, CacheUse::WriteNew, mode)? };
        let tokens = batch.tokens();
        let freqs_cis =
            check_freqs(arg(&p.freqs_cis, "params.freqs_cis"), kv.dtype, rope_dim, batch.rope_positions(mode))?;
        let gamma = arg(&p.gamma, "params.gamma").check(
            &f32_or(kv.dtype),
            [Dim::Is(kv_lora_rank, "kv_lora_rank = head_size - rope width")],
            Access::Read,
        )?;
        check_rows(&q_rope, tokens, "params.q_rope")?;
        check_rows(&q_rope_output, tokens, "params.q_rope_output")?;
        check_rows(&kv, tokens, "params.kv")?;
        Ok(Args {
            cache,
            batch,
            rope,
            q_rope,
            q_rope_output,
            kv,
            freqs_cis,
            gamma,
            epsilon: p.epsilon,
            kv_lora_rank,
            rope_dim,
        })
    }

    fn cpu() -> &'static [Impl<Self>] {
        crate::cpu::mla_rope_rmsnorm_quantize::IMPLS
    }

    #[cfg(feature = "cuda")]
    fn cuda() -> &'static [Impl<Self>] {
        crate::cuda::mla_rope_rmsnorm_quantize::IMPLS
    }
}

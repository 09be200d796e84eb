//! DeepSeek V3.2's lightning indexer: exact top-k over relu-weighted fp8 scores.

use super::{check_one_head, check_reserved};
use crate::abi::indexer::pkv_mla_indexer_fp8_params;
use crate::abi::prefill::{PKV_MASK_CAUSAL, PKV_MASK_NULL};
use crate::batch::{Batch, CacheUse};
use crate::collection::{Cache, Collection};
use crate::context::Context;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::{Impl, Op};
use crate::view::{Access, Dim, Mode, TensorArg, View, check_rows};

pub struct MlaIndexerFp8;

pub struct Args<'a> {
    /// Keys F8_E4M3, one head, one F32 scale a row.
    pub cache: Cache,
    pub batch: Batch<'a>,
    /// CAUSAL, else every key of the sequence.
    pub causal: bool,
    pub top_k: usize,
    /// `[T, H, D]` F8_E4M3
    pub q: View<3>,
    /// `[T, H]` F32
    pub q_s: View<2>,
    /// `[T, top_k]` I32
    pub output_indices: View<2>,
    /// `[T, top_k]` F32
    pub output_scores: Option<View<2>>,
}

impl Op for MlaIndexerFp8 {
    const NAME: &'static str = "mla_indexer_fp8";
    type Params = pkv_mla_indexer_fp8_params;
    type Args<'a> = Args<'a>;

    unsafe fn validate<'a>(ctx: &Context, p: &'a Self::Params, mode: Mode) -> Result<Args<'a>> {
        // SAFETY: by contract.
        let collection = unsafe { Collection::of(p.collection, ctx)? };
        check_one_head(collection)?;
        if collection.dtype != DType::F8E4M3 {
            return Err(Error::dtype(
                "params.collection",
                format!("has {} keys, must be F8_E4M3", collection.dtype.name()),
            ));
        }
        if collection.scale_dtype != Some(DType::F32) {
            return Err(Error::dtype("params.collection", "must have F32 scales"));
        }
        if collection.groups != 1 {
            let message = format!("has {} scales a row, must have one (granularity >= head_size)", collection.groups);
            return Err(Error::shape("params.collection", message));
        }
        let cache = collection.cache(0, p.layer_idx, ["params.kv_idx", "params.layer_idx"])?;
        let causal = match p.mask {
            PKV_MASK_CAUSAL => true,
            PKV_MASK_NULL => false,
            n => return Err(Error::value("params.mask", format!("is {n}, must be 0 (causal) or 1 (null)"))),
        };
        let top_k = match p.top_k {
            0 => return Err(Error::value("params.top_k", "is 0, must be at least 1")),
            n => n as usize,
        };
        check_reserved(p.reserved)?;
        let arg = |tensor, name| TensorArg { tensor, name, mode };
        let q = arg(&p.q, "params.q").check(
            &[DType::F8E4M3],
            [Dim::Any, Dim::Some, Dim::Is(cache.head_size, "head_size")],
            Access::Read,
        )?;
        let heads = Dim::Is(q.shape[1], "num_heads, as in q");
        let q_s = arg(&p.q_s, "params.q_s").check(&[DType::F32], [Dim::Any, heads], Access::Read)?;
        let dims = [Dim::Any, Dim::Is(top_k, "top_k")];
        let output_indices =
            arg(&p.output_indices, "params.output_indices").check(&[DType::I32], dims, Access::Write)?;
        let output_scores =
            arg(&p.output_scores, "params.output_scores").check_optional(&[DType::F32], dims, Access::Write)?;
        // SAFETY: by contract.
        let batch = unsafe { Batch::check(p.batch, collection, CacheUse::Read, mode)? };
        if let Some(b) = batch.first_longer_than(i32::MAX as usize) {
            let (cached, new) = (batch.cache_length(b), batch.new_tokens(b));
            let message = format!("is {cached}, with {new} new tokens: a sequence has up to 2^31 - 1 positions");
            return Err(Error::value(format!("params.batch.cache_lengths[{b}]"), message));
        }
        let tokens = batch.tokens();
        check_rows(&q, tokens, "params.q")?;
        check_rows(&q_s, tokens, "params.q_s")?;
        check_rows(&output_indices, tokens, "params.output_indices")?;
        if let Some(scores) = &output_scores {
            check_rows(scores, tokens, "params.output_scores")?;
        }
        Ok(Args { cache, batch, causal, top_k, q, q_s, output_indices, output_scores })
    }

    fn cpu() -> &'static [Impl<Self>] {
        crate::cpu::mla_indexer_fp8::IMPLS
    }

    #[cfg(feature = "cuda")]
    fn cuda() -> &'static [Impl<Self>] {
        crate::cuda::mla_indexer_fp8::IMPLS
    }
}

//! Three GGUF-quantised matmuls: Q to an output, K and V into the pages.

use crate::abi::qkv::{PKV_COMPUTE_DEFAULT, PKV_COMPUTE_F32, pkv_qkv_matmul_gguf_params};
use crate::abi::weight::pkv_gguf_weight;
use crate::batch::{Batch, CacheUse};
use crate::collection::{Cache, Collection};
use crate::context::Context;
use crate::dtype::{DType, FLOATS};
use crate::error::{Error, Result};
use crate::plan::{Impl, Op};
use crate::view::{Access, Dim, Mode, TensorArg, View, check_rows};
use crate::weight::Weight;

pub struct QkvMatmulGguf;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compute {
    /// 8-bit activations.
    Default,
    /// Exact f32 products of dequantised weights.
    F32,
}

/// One of the three matmuls.
#[derive(Clone, Copy)]
pub struct Projection<'a> {
    pub weight: &'a Weight,
    /// `[rows]` F32
    pub bias: Option<View<1>>,
}

pub struct Args<'a> {
    pub batch: Batch<'a>,
    pub compute: Compute,
    pub q: Projection<'a>,
    pub k: Projection<'a>,
    pub v: Projection<'a>,
    pub k_cache: Cache,
    pub v_cache: Cache,
    /// `[T, K]`
    pub hidden_state: View<2>,
    /// `[T, rows of q]`
    pub q_output: View<2>,
}

impl Op for QkvMatmulGguf {
    const NAME: &'static str = "qkv_matmul_gguf";
    type Params = pkv_qkv_matmul_gguf_params;
    type Args<'a> = Args<'a>;

    unsafe fn validate<'a>(ctx: &Context, p: &'a Self::Params, mode: Mode) -> Result<Args<'a>> {
        if ctx.call_mode() == Mode::Device {
            return Err(Error::unsupported("ctx", "GGUF matmuls have no CUDA kernels yet"));
        }
        // SAFETY: by contract.
        let collection = unsafe { Collection::of(p.collection, ctx)? };
        if collection.is_mla {
            return Err(Error::value("params.collection", "has is_mla 1, this kernel needs keys and values"));
        }
        let k_cache = collection.cache(0, p.layer_idx, ["params.kv_idx", "params.layer_idx"])?;
        let v_cache = collection.cache(1, p.layer_idx, ["params.kv_idx", "params.layer_idx"])?;
        let compute = match p.compute {
            PKV_COMPUTE_DEFAULT => Compute::Default,
            PKV_COMPUTE_F32 => Compute::F32,
            n => return Err(Error::value("params.compute", format!("is {n}, must be 0 (default) or 1 (F32)"))),
        };
        // SAFETY: by contract.
        let [q_weight, k_weight, v_weight] = unsafe {
            [
                weight(p.q_weight, ctx, "params.q_weight")?,
                weight(p.k_weight, ctx, "params.k_weight")?,
                weight(p.v_weight, ctx, "params.v_weight")?,
            ]
        };
        let kv_rows = collection.row_elements();
        for (weight, name) in [(k_weight, "params.k_weight"), (v_weight, "params.v_weight")] {
            if weight.rows != kv_rows {
                let message = format!("has {} rows, must have {kv_rows} (num_kv_heads * head_size)", weight.rows);
                return Err(Error::shape(name, message));
            }
            if weight.cols != q_weight.cols {
                let message = format!("has {} columns, q_weight has {}", weight.cols, q_weight.cols);
                return Err(Error::shape(name, message));
            }
        }
        if q_weight.rows % collection.head_size != 0 {
            let message =
                format!("has {} rows, must be a multiple of head_size = {}", q_weight.rows, collection.head_size);
            return Err(Error::shape("params.q_weight", message));
        }
        let arg = |tensor, name| TensorArg { tensor, name, mode };
        let hidden_state = arg(&p.hidden_state, "params.hidden_state").check(
            FLOATS,
            [Dim::Any, Dim::Is(q_weight.cols, "K, the weights' columns")],
            Access::Read,
        )?;
        let q_output = arg(&p.q_output, "params.q_output").check(
            FLOATS,
            [Dim::Any, Dim::Is(q_weight.rows, "num_heads * head_size, q_weight's rows")],
            Access::Write,
        )?;
        let bias = |tensor, name, weight: &'a Weight| -> Result<Projection<'a>> {
            let bias = arg(tensor, name).check_optional(
                &[DType::F32],
                [Dim::Is(weight.rows, "the weight's rows")],
                Access::Read,
            )?;
            Ok(Projection { weight, bias })
        };
        let q = bias(&p.q_bias, "params.q_bias", q_weight)?;
        let k = bias(&p.k_bias, "params.k_bias", k_weight)?;
        let v = bias(&p.v_bias, "params.v_bias", v_weight)?;
        // SAFETY: by contract.
        let batch = unsafe { Batch::check(p.batch, collection, CacheUse::WriteNew, mode)? };
        check_rows(&hidden_state, batch.tokens(), "params.hidden_state")?;
        check_rows(&q_output, batch.tokens(), "params.q_output")?;
        Ok(Args { batch, compute, q, k, v, k_cache, v_cache, hidden_state, q_output })
    }

    fn cpu() -> &'static [Impl<Self>] {
        crate::cpu::qkv_matmul_gguf::IMPLS
    }

    #[cfg(feature = "cuda")]
    fn cuda() -> &'static [Impl<Self>] {
        &[]
    }
}

/// # Safety
/// `ptr` is NULL or a live handle.
unsafe fn weight<'a>(ptr: *const pkv_gguf_weight, ctx: &Context, name: &str) -> Result<&'a Weight> {
    // SAFETY: by contract.
    let weight = unsafe { &crate::abi::handle(ptr, name)?.0 };
    ctx.check_owns(weight.context_id(), name)?;
    Ok(weight)
}

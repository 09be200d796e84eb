//! Join two partial attention results by their lse.

use super::check_same_dtype;
use crate::abi::merge::pkv_merge_attention_params;
use crate::context::Context;
use crate::dtype::{DType, FLOATS};
use crate::error::Result;
use crate::plan::{Impl, Op};
use crate::view::{Access, Dim, Mode, TensorArg, View};

pub struct MergeAttention;

pub struct Args {
    /// `[T, H, D]`, all three of one dtype; `output` may be the memory of a or b.
    pub output_a: View<3>,
    pub output_b: View<3>,
    pub output: View<3>,
    /// `[T, H]` F32
    pub lse_a: View<2>,
    pub lse_b: View<2>,
    pub lse: Option<View<2>>,
}

impl Op for MergeAttention {
    const NAME: &'static str = "merge_attention";
    type Params = pkv_merge_attention_params;
    type Args<'a> = Args;

    unsafe fn validate(_: &Context, p: &Self::Params, mode: Mode) -> Result<Args> {
        let arg = |tensor, name| TensorArg { tensor, name, mode };
        let output_a =
            arg(&p.output_a, "params.output_a").check(FLOATS, [Dim::Any, Dim::Some, Dim::Some], Access::Read)?;
        let [t, h, d] = output_a.shape;
        let rows = [Dim::Is(t, "T, as in output_a"), Dim::Is(h, "H, as in output_a")];
        let dims = [rows[0], rows[1], Dim::Is(d, "D, as in output_a")];
        let lse_a = arg(&p.lse_a, "params.lse_a").check(&[DType::F32], rows, Access::Read)?;
        let output_b = arg(&p.output_b, "params.output_b").check(FLOATS, dims, Access::Read)?;
        check_same_dtype("params.output_b", output_b.dtype, "params.output_a", output_a.dtype)?;
        let lse_b = arg(&p.lse_b, "params.lse_b").check(&[DType::F32], rows, Access::Read)?;
        let output = arg(&p.output, "params.output").check(FLOATS, dims, Access::Write)?;
        check_same_dtype("params.output", output.dtype, "params.output_a", output_a.dtype)?;
        let lse = arg(&p.lse, "params.lse").check_optional(&[DType::F32], rows, Access::Write)?;
        Ok(Args { output_a, output_b, output, lse_a, lse_b, lse })
    }

    fn cpu() -> &'static [Impl<Self>] {
        crate::cpu::merge_attention::IMPLS
    }

    #[cfg(feature = "cuda")]
    fn cuda() -> &'static [Impl<Self>] {
        crate::cuda::merge_attention::IMPLS
    }
}

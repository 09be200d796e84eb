//! What each kernel means: C params to checked arguments, and its ordered list of implementations.

pub mod kv_gather;
pub mod kv_store;
pub mod merge_attention;
pub mod mla_indexer_fp8;
pub mod mla_prefill_fp8;
pub mod mla_rope_rmsnorm_quantize;
pub mod qkv_matmul_gguf;

use crate::collection::Collection;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::view::{Access, Dim, TensorArg, View};

/// How RoPE pairs the columns of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Rope {
    /// (2i, 2i + 1)
    Interleaved = 0,
    /// (i, i + R/2)
    HalfSplit = 1,
}

impl Rope {
    pub fn check(number: i32, name: &str) -> Result<Self> {
        match number {
            0 => Ok(Rope::Interleaved),
            1 => Ok(Rope::HalfSplit),
            n => Err(Error::value(name, format!("is {n}, must be 0 (interleaved) or 1 (half-split)"))),
        }
    }

    /// Columns of pair `i` of `width`.
    #[inline(always)]
    pub fn pair(self, i: usize, width: usize) -> (usize, usize) {
        match self {
            Rope::Interleaved => (2 * i, 2 * i + 1),
            Rope::HalfSplit => (i, i + width / 2),
        }
    }
}

/// Rope and prefill work on latent rows: one cache head, no values.
fn check_mla(collection: &Collection) -> Result<()> {
    if !collection.is_mla {
        return Err(Error::value("params.collection", "has is_mla 0, this kernel needs an MLA collection"));
    }
    check_one_head(collection)
}

fn check_one_head(collection: &Collection) -> Result<()> {
    if collection.num_heads != 1 {
        return Err(Error::shape(
            "params.collection",
            format!("has {} heads, this kernel needs one", collection.num_heads),
        ));
    }
    Ok(())
}

/// `freqs_cis [max_positions, R]`: F32 or the activations' dtype. Positions the batch reaches must be in the table.
fn check_freqs(arg: TensorArg<'_>, activations: DType, rope_dim: usize, positions: usize) -> Result<View<2>> {
    let view = arg.check(&f32_or(activations), [Dim::Any, Dim::Is(rope_dim, "rope width")], Access::Read)?;
    if view.shape[0] < positions {
        let message = format!("is {}, the batch reaches position {}", view.shape[0], positions - 1);
        return Err(Error::value(format!("{}.shape[0]", arg.name), message));
    }
    Ok(view)
}

fn f32_or(activations: DType) -> Vec<DType> {
    if activations == DType::F32 { vec![DType::F32] } else { vec![DType::F32, activations] }
}

fn check_epsilon(epsilon: f32) -> Result<()> {
    if !(epsilon >= 0.0 && epsilon.is_finite()) {
        return Err(Error::value("params.epsilon", format!("is {epsilon}, must be finite and at least 0")));
    }
    Ok(())
}

fn check_reserved(reserved: u32) -> Result<()> {
    if reserved != 0 {
        return Err(Error::value("params.reserved", format!("is {reserved}, must be 0")));
    }
    Ok(())
}

/// Two tensors of one call must be of one dtype.
fn check_same_dtype(name: &str, dtype: DType, other: &str, other_dtype: DType) -> Result<()> {
    if dtype != other_dtype {
        let message = format!("is {}, {other} is {}, must be the same", dtype.name(), other_dtype.name());
        return Err(Error::dtype(format!("{name}.dtype"), message));
    }
    Ok(())
}

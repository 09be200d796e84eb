//! The prefill branch of multi-head latent attention with fp8 weights.

use super::{Rope, check_epsilon, check_freqs, check_mla, check_same_dtype, f32_or};
use crate::abi::prefill::{PKV_PREFILL_FINISHED, pkv_mla_prefill_fp8_params};
use crate::batch::{Batch, BufferRows, CacheUse};
use crate::collection::{Cache, Collection};
use crate::context::Context;
use crate::dtype::{DType, FLOATS};
use crate::error::{Error, Result};
use crate::plan::{Impl, Op};
use crate::view::{Access, Dim, Mode, TensorArg, View, check_rows};

pub struct MlaPrefillFp8;

/// Columns of a latent row, and output features by columns of kv_b_proj, that share a scale.
pub const SCALE_BLOCK: usize = 128;

/// Which keys a query sees, by absolute positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    Causal,
    Null,
    SlidingWindowCausal(usize),
    ChunkedCausal(usize),
}

impl Mask {
    pub fn check(mask: i32, window: u32, chunk: u32) -> Result<Self> {
        match (mask, window as usize, chunk as usize) {
            (0, ..) => Ok(Mask::Causal),
            (1, ..) => Ok(Mask::Null),
            (2, 0, _) => Err(Error::value("params.window", "is 0, must be at least 1 for a sliding window")),
            (2, window, _) => Ok(Mask::SlidingWindowCausal(window)),
            (3, _, 0) => Err(Error::value("params.chunk", "is 0, must be at least 1 for a chunked mask")),
            (3, _, chunk) => Ok(Mask::ChunkedCausal(chunk)),
            (n, ..) => Err(Error::value("params.mask", format!("is {n}, must be 0 (causal) to 3 (chunked causal)"))),
        }
    }

    /// Key positions that query position `p` sees: one range, for every mask; `end` is one past the sequence's last key.
    #[inline]
    pub fn visible(self, p: usize, end: usize) -> std::ops::Range<usize> {
        match self {
            Mask::Null => 0..end,
            Mask::Causal => 0..end.min(p + 1),
            Mask::SlidingWindowCausal(window) => (p + 1).saturating_sub(window)..end.min(p + 1),
            Mask::ChunkedCausal(chunk) => p / chunk * chunk..end.min(p + 1),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreMod {
    None,
    Alibi,
}

/// Slope of head `h` of `heads` (ALiBi, arXiv 2108.12409).
pub fn alibi_slope(h: usize, heads: usize) -> f32 {
    let p = 1usize << heads.ilog2();
    let exponent = if h < p { (h + 1) as f64 / p as f64 } else { (2 * (h - p) + 1) as f64 / (2 * p) as f64 };
    (-8.0 * exponent).exp2() as f32
}

/// What finishing q's rope part and the new cache rows needs.
pub struct Finish {
    pub rope: Rope,
    pub epsilon: f32,
    /// `[T, C + R]`; `None`: the new rows lie in the cache and are finished in place.
    pub kv: Option<View<2>>,
    /// `[max_positions, R]`, F32 or q's dtype.
    pub freqs_cis: View<2>,
    /// `[C]`, F32 or q's dtype.
    pub gamma: View<1>,
}

pub struct Args<'a> {
    pub cache: Cache,
    pub batch: Batch<'a>,
    /// Rows of the latent buffer, by sequence.
    pub rows: BufferRows<'a>,
    /// Rows of the latent buffer to size scratch for.
    pub buffer_length: usize,
    pub mask: Mask,
    pub score_mod: ScoreMod,
    pub scale: f32,
    /// `None`: q and the new rows are roped and normed already.
    pub finish: Option<Finish>,
    /// `[T, H, nope + R]`; its rope part is roped in place.
    pub q: View<3>,
    /// `[H * (nope + v_head_dim), C]` F8_E4M3
    pub kv_b_proj: View<2>,
    /// `[ceil(H * (nope + v_head_dim) / 128), C / 128]` F32
    pub kv_b_proj_scale: View<2>,
    /// `[T, H, v_head_dim]`
    pub output: View<3>,
    /// `[T, H]` F32
    pub lse: Option<View<2>>,
    pub num_heads: usize,
    /// C
    pub kv_lora_rank: usize,
    /// R
    pub rope_dim: usize,
    /// Columns of a head's q and K before the rope part.
    pub nope_dim: usize,
    pub v_head_dim: usize,
}

impl Op for MlaPrefillFp8 {
    const NAME: &'static str = "mla_prefill_fp8";
    type Params = pkv_mla_prefill_fp8_params;
    type Args<'a> = Args<'a>;

    unsafe fn validate<'a>(ctx: &Context, p: &'a Self::Params, mode: Mode) -> Result<Args<'a>> {
        // SAFETY: by contract.
        let collection = unsafe { Collection::of(p.collection, ctx)? };
        check_mla(collection)?;
        if collection.dtype == DType::F8E5M2 {
            return Err(Error::dtype("params.collection", "has F8_E5M2 rows, must be F32, F16, BF16 or F8_E4M3"));
        }
        let cache = collection.cache(0, p.layer_idx, ["params.kv_idx", "params.layer_idx"])?;
        let rope = Rope::check(p.rope, "params.rope")?;
        let mask = Mask::check(p.mask, p.window, p.chunk)?;
        let score_mod = match p.score_mod {
            0 => ScoreMod::None,
            1 => ScoreMod::Alibi,
            n => return Err(Error::value("params.score_mod", format!("is {n}, must be 0 (none) or 1 (ALiBi)"))),
        };
        for (given, want, name) in [
            (p.m_scale_granularity, 1, "params.m_scale_granularity"),
            (p.n_scale_granularity, SCALE_BLOCK as u32, "params.n_scale_granularity"),
            (p.k_scale_granularity, SCALE_BLOCK as u32, "params.k_scale_granularity"),
        ] {
            if given != 0 && given != want {
                return Err(Error::unsupported(name, format!("is {given}, only {want} is built (0 means the same)")));
            }
        }
        if !p.scale.is_finite() {
            return Err(Error::value("params.scale", format!("is {}, must be finite", p.scale)));
        }
        check_epsilon(p.epsilon)?;
        if p.flags & !PKV_PREFILL_FINISHED != 0 {
            return Err(Error::value("params.flags", format!("is {:#x}, only PKV_PREFILL_FINISHED exists", p.flags)));
        }
        let finished = p.flags & PKV_PREFILL_FINISHED != 0;
        let buffer_length = usize::try_from(p.buffer_length)
            .map_err(|_| Error::shape("params.buffer_length", format!("is {}, must be at least 0", p.buffer_length)))?;

        let arg = |tensor, name| TensorArg { tensor, name, mode };
        // FINISHED leaves q as it is, but a tensor that may be written must not overlap itself either way.
        let q = arg(&p.q, "params.q").check(FLOATS, [Dim::Any, Dim::Some, Dim::Some], Access::Write)?;
        let [_, num_heads, q_head_dim] = q.shape;
        let kv_lora_rank = latent_width(p, cache.head_size);
        if kv_lora_rank == 0 || !kv_lora_rank.is_multiple_of(SCALE_BLOCK) {
            let message =
                format!("gives a latent width of {kv_lora_rank}, must be a multiple of {SCALE_BLOCK} above 0");
            return Err(Error::shape("params.kv_b_proj.shape[1]", message));
        }
        let rope_dim = cache.head_size.saturating_sub(kv_lora_rank);
        if rope_dim == 0 || rope_dim % 2 != 0 || rope_dim >= q_head_dim {
            let message = format!(
                "is {kv_lora_rank}: head_size {} leaves a rope width of {rope_dim}, must be even, above 0 and below q's {q_head_dim}",
                cache.head_size
            );
            return Err(Error::shape("params.kv_b_proj.shape[1]", message));
        }
        let nope_dim = q_head_dim - rope_dim;
        let cache_use = if finished { CacheUse::Read } else { CacheUse::WriteNew };
        // SAFETY: by contract.
        let batch = unsafe { Batch::check(p.batch, collection, cache_use, mode)? };
        let kv = arg(&p.kv, "params.kv").check_optional(
            FLOATS,
            [Dim::Any, Dim::Is(cache.head_size, "head_size")],
            Access::Read,
        )?;
        let finish = if finished {
            if kv.is_some() {
                return Err(Error::value("params.kv", "must be absent with PKV_PREFILL_FINISHED"));
            }
            None
        } else {
            if let Some(kv) = &kv {
                check_same_dtype("params.kv", kv.dtype, "params.q", q.dtype)?;
                check_rows(kv, batch.tokens(), "params.kv")?;
            }
            let freqs_cis =
                check_freqs(arg(&p.freqs_cis, "params.freqs_cis"), q.dtype, rope_dim, batch.rope_positions(mode))?;
            let gamma = arg(&p.kv_norm_gamma, "params.kv_norm_gamma").check(
                &f32_or(q.dtype),
                [Dim::Is(kv_lora_rank, "kv_lora_rank = head_size - rope width")],
                Access::Read,
            )?;
            Some(Finish { rope, epsilon: p.epsilon, kv, freqs_cis, gamma })
        };
        let output = arg(&p.output, "params.output").check(
            FLOATS,
            [Dim::Any, Dim::Is(num_heads, "num_heads, as in q"), Dim::Some],
            Access::Write,
        )?;
        check_same_dtype("params.output", output.dtype, "params.q", q.dtype)?;
        let v_head_dim = output.shape[2];
        let features = num_heads
            .checked_mul(nope_dim.saturating_add(v_head_dim))
            .ok_or_else(|| Error::shape("params.output.shape[2]", "num_heads * (nope + v_head_dim) overflows"))?;
        let kv_b_proj = arg(&p.kv_b_proj, "params.kv_b_proj").check(
            &[DType::F8E4M3],
            [Dim::Is(features, "num_heads * (nope + v_head_dim)"), Dim::Is(kv_lora_rank, "kv_lora_rank")],
            Access::Read,
        )?;
        let kv_b_proj_scale = arg(&p.kv_b_proj_scale, "params.kv_b_proj_scale").check(
            &[DType::F32],
            [
                Dim::Is(features.div_ceil(SCALE_BLOCK), "ceil(num_heads * (nope + v_head_dim) / 128)"),
                Dim::Is(kv_lora_rank / SCALE_BLOCK, "kv_lora_rank / 128"),
            ],
            Access::Read,
        )?;
        let lse = arg(&p.lse, "params.lse").check_optional(
            &[DType::F32],
            [Dim::Any, Dim::Is(num_heads, "num_heads, as in q")],
            Access::Write,
        )?;
        // SAFETY: by contract.
        let rows = unsafe { BufferRows::check(p.buffer_row_offsets, p.cache_offsets, &batch, mode)? };
        if mode.reads() && buffer_length != rows.total() {
            let message = format!("is {buffer_length}, the last of buffer_row_offsets is {}", rows.total());
            return Err(Error::value("params.buffer_length", message));
        }
        let tokens = batch.tokens();
        check_rows(&q, tokens, "params.q")?;
        check_rows(&output, tokens, "params.output")?;
        if let Some(lse) = &lse {
            check_rows(lse, tokens, "params.lse")?;
        }
        Ok(Args {
            cache,
            batch,
            rows,
            buffer_length,
            mask,
            score_mod,
            scale: p.scale,
            finish,
            q,
            kv_b_proj,
            kv_b_proj_scale,
            output,
            lse,
            num_heads,
            kv_lora_rank,
            rope_dim,
            nope_dim,
            v_head_dim,
        })
    }

    fn cpu() -> &'static [Impl<Self>] {
        crate::cpu::mla_prefill_fp8::IMPLS
    }

    #[cfg(feature = "cuda")]
    fn cuda() -> &'static [Impl<Self>] {
        crate::cuda::mla_prefill_fp8::IMPLS
    }
}

/// kv_lora_rank is told three times: by kv_b_proj, by the norm's gamma, and by what freqs_cis leaves of a cache row. Where two agree the third is the
/// one at fault, and the check of its own shape will name it.
fn latent_width(p: &pkv_mla_prefill_fp8_params, head_size: usize) -> usize {
    let rest = (head_size as i64).saturating_sub(p.freqs_cis.shape[1]);
    let width =
        if p.kv_norm_gamma.dtype != 0 && p.kv_norm_gamma.shape[0] == rest { rest } else { p.kv_b_proj.shape[1] };
    usize::try_from(width).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alibi_slopes_of_a_head_count_that_is_no_power_of_two() {
        let want = [-4.0f32, -8.0, -2.0].map(f32::exp2);
        assert_eq!([0, 1, 2].map(|h| alibi_slope(h, 3)), want);
        assert_eq!(alibi_slope(7, 8), (-8.0f32).exp2());
    }

    #[test]
    fn masks_are_ranges() {
        assert_eq!(Mask::SlidingWindowCausal(5).visible(3, 10), 0..4);
        assert_eq!(Mask::SlidingWindowCausal(5).visible(9, 10), 5..10);
        assert_eq!(Mask::ChunkedCausal(8).visible(17, 30), 16..18);
        assert_eq!(Mask::Null.visible(2, 30), 0..30);
    }
}

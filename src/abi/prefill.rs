//! FP8 MLA prefill attention.

use super::batch::pkv_batch;
use super::collection::pkv_collection;
use super::context::pkv_context;
use super::status::{pkv_error, pkv_status};
use super::types::{pkv_buffer, pkv_stream, pkv_tensor};
use super::{call, workspace_size};
use crate::op::mla_prefill_fp8::MlaPrefillFp8;

/// q and the new cache rows are already roped and normed (an earlier call did it): skip that step; kv must be absent.
pub const PKV_PREFILL_FINISHED: u32 = 1;

/// Key position k is visible to query position p where k <= p.
pub const PKV_MASK_CAUSAL: i32 = 0;
/// All keys of the sequence.
pub const PKV_MASK_NULL: i32 = 1;
/// p - window < k <= p
pub const PKV_MASK_SLIDING_WINDOW_CAUSAL: i32 = 2;
/// k <= p and k / chunk == p / chunk
pub const PKV_MASK_CHUNKED_CAUSAL: i32 = 3;

pub const PKV_SCORE_MOD_NONE: i32 = 0;
/// Adds slope_h * (k - p). With P the largest power of two <= H: slope_h = 2^(-8 (h + 1) / P) for h < P, else 2^(-8 (2 (h - P) + 1) / (2 P))
/// (ALiBi, arXiv 2108.12409).
pub const PKV_SCORE_MOD_ALIBI: i32 = 1;

/// The prefill branch of DeepSeek's multi-head latent attention with fp8 weights (MAX: mla_prefill_branch_fp8; DeepSeek-V2, arXiv 2405.04434;
/// DeepSeek-V3, arXiv 2412.19437).
///
/// 1. Unless FINISHED: rope q[..., nope:] in place and finish the new cache rows as pkv_mla_rope_rmsnorm_quantize does, from kv or in place in the cache.
/// 2. Gather the cached rows that buffer_row_offsets and cache_offsets name into a contiguous buffer. Keys outside are invisible, under every mask.
/// 3. Quantise their latent part per row per 128 columns: s = min(amax, 1200) / 448, code = saturate(x * (1 / s)); zero codes where s is 0 or 1/s not finite.
/// 4. Up-project with kv_b_proj: KV[r, n] = sum over groups g of (sum of code[r, k] * W[n, k]) * s[r, g] * Ws[n / 128, g], rounded to dtype.
/// 5. Attention: score = scale * (q_nope . K_nope + q_rope . k_rope), k_rope the cached rope part, one for all heads; score mod, mask on absolute positions,
///    f32 softmax, times V, rounded to dtype.
///
/// dtype, of q, kv and output, is F32, F16 or BF16; the cache is F32, F16, BF16, or F8_E4M3 with or without scales. The collection has is_mla 1 and one head.
/// The scale is the caller's: DeepSeek with YaRN multiplies 1 / sqrt(nope + R) by mscale^2.
///
/// Chunked prefill: the first call finishes q and the rows, later calls carry FINISHED; each covers a part of the keys; pkv_merge_attention joins the parts.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_mla_prefill_fp8_params {
    /// sizeof(pkv_mla_prefill_fp8_params)
    pub struct_size: usize,
    pub collection: *const pkv_collection,
    pub batch: *const pkv_batch,
    pub layer_idx: u32,
    /// PKV_ROPE_*; DeepSeek's own is interleaved.
    pub rope: i32,
    /// PKV_MASK_*
    pub mask: i32,
    /// PKV_SCORE_MOD_*
    pub score_mod: i32,
    /// For PKV_MASK_SLIDING_WINDOW_CAUSAL, at least 1.
    pub window: u32,
    /// For PKV_MASK_CHUNKED_CAUSAL, at least 1.
    pub chunk: u32,
    /// Rows, output features and columns that share a scale; 0 = 1, 128, 128, the one combination.
    pub m_scale_granularity: u32,
    pub n_scale_granularity: u32,
    pub k_scale_granularity: u32,
    /// Of the scores; finite.
    pub scale: f32,
    /// Of the norm; >= 0.
    pub epsilon: f32,
    /// 0 or PKV_PREFILL_FINISHED.
    pub flags: u32,
    /// Rows of the contiguous latent buffer; >= last of buffer_row_offsets (equal on CPU).
    pub buffer_length: i64,
    /// [batch_size + 1], first 0, never falling.
    pub buffer_row_offsets: *const u32,
    /// [batch_size]: first cache position copied for each sequence; NULL = all 0.
    pub cache_offsets: *const u32,
    /// [T, num_heads, nope + R]; its rope part is roped in place.
    pub q: pkv_tensor,
    /// [T, kv_lora_rank + R] new rows; absent: they already lie un-normed, un-roped in the cache and are finished in place.
    pub kv: pkv_tensor,
    /// [max_positions, R]: cos0, sin0, cos1, sin1, ...; F32 or the activations' dtype. max_positions covers every position that the batch reaches; on CUDA,
    /// which cannot look, max_seq_length + max_cache_length. May be absent with FINISHED.
    pub freqs_cis: pkv_tensor,
    /// [kv_lora_rank]; F32 or the activations' dtype. May be absent with FINISHED.
    pub kv_norm_gamma: pkv_tensor,
    /// [num_heads * (nope + v_head_dim), kv_lora_rank] F8_E4M3: per head, nope K rows, then v_head_dim V rows (DeepSeek's own order).
    pub kv_b_proj: pkv_tensor,
    /// [ceil(num_heads * (nope + v_head_dim) / 128), kv_lora_rank / 128] F32
    pub kv_b_proj_scale: pkv_tensor,
    /// [T, num_heads, v_head_dim]
    pub output: pkv_tensor,
    /// Optional [T, num_heads] F32, natural log, of the scaled, modified, masked scores; a row with no visible key: -inf, output 0.
    pub lse: pkv_tensor,
}

super::versioned!(pkv_mla_prefill_fp8_params: 736);

/// Bytes of scratch that such a call needs; data and batch array pointers may still be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_mla_prefill_fp8_workspace_size(
    ctx: *const pkv_context,
    params: *const pkv_mla_prefill_fp8_params,
    bytes: *mut usize,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { workspace_size::<MlaPrefillFp8>(ctx, params, bytes, err) }
}

/// Attention of the new tokens over cached latent rows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_mla_prefill_fp8(
    ctx: *const pkv_context,
    stream: pkv_stream,
    params: *const pkv_mla_prefill_fp8_params,
    workspace: pkv_buffer,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { call::<MlaPrefillFp8>(ctx, stream, params, workspace, err) }
}

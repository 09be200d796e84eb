//! FP8 MLA indexer: top-k keys for sparse attention.

use super::batch::pkv_batch;
use super::collection::pkv_collection;
use super::context::pkv_context;
use super::status::{pkv_error, pkv_status};
use super::types::{pkv_buffer, pkv_stream, pkv_tensor};
use super::{call, workspace_size};
use crate::op::mla_indexer_fp8::MlaIndexerFp8;

/// DeepSeek V3.2's lightning indexer (MAX: mla_indexer_ragged_float8_paged; DeepSeek-V3.2-Exp report, DeepSeek Sparse Attention).
///
/// score[t, s] = k_scale[s] * sum over h of q_s[t, h] * max(0, q[t, h] . k[s]): relu before the weight, weights may be negative, relu(NaN) = NaN. Visible keys:
/// PKV_MASK_CAUSAL s <= position(t), PKV_MASK_NULL s < cache_length + new tokens. Keys and queries come roped (V3.2's indexer rotates half-split pairs), the
/// head weights folded into q_s. Rows are scored in windows: scratch does not grow with the number of rows beyond one. The result is the same bits in
/// every run and for every batch composition. A sequence has up to 2^31 - 1 positions.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_mla_indexer_fp8_params {
    /// sizeof(pkv_mla_indexer_fp8_params)
    pub struct_size: usize,
    /// Keys F8_E4M3, one head, F32 scales, granularity >= head_size; is_mla 0 or 1.
    pub collection: *const pkv_collection,
    pub batch: *const pkv_batch,
    pub layer_idx: u32,
    /// PKV_MASK_CAUSAL or PKV_MASK_NULL.
    pub mask: i32,
    /// At least 1.
    pub top_k: u32,
    pub reserved: u32,
    /// [T, num_heads, head_size] F8_E4M3
    pub q: pkv_tensor,
    /// [T, num_heads] F32: query scale times head weight.
    pub q_s: pkv_tensor,
    /// [T, top_k] I32: key positions, best first, equal scores (-0 equals +0) lower position first, NaN scores after all others, lower position first;
    /// the rest -1. Every column is written.
    pub output_indices: pkv_tensor,
    /// Optional [T, top_k] F32, -inf where the index is -1.
    pub output_scores: pkv_tensor,
}

super::versioned!(pkv_mla_indexer_fp8_params: 360);

/// Bytes of scratch that such a call needs; data and batch array pointers may still be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_mla_indexer_fp8_workspace_size(
    ctx: *const pkv_context,
    params: *const pkv_mla_indexer_fp8_params,
    bytes: *mut usize,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { workspace_size::<MlaIndexerFp8>(ctx, params, bytes, err) }
}

/// The min(top_k, visible) best keys of every new token.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_mla_indexer_fp8(
    ctx: *const pkv_context,
    stream: pkv_stream,
    params: *const pkv_mla_indexer_fp8_params,
    workspace: pkv_buffer,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { call::<MlaIndexerFp8>(ctx, stream, params, workspace, err) }
}

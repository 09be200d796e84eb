//! GGUF-quantised QKV projection.

use super::batch::pkv_batch;
use super::collection::pkv_collection;
use super::context::pkv_context;
use super::status::{pkv_error, pkv_status};
use super::types::{pkv_buffer, pkv_stream, pkv_tensor};
use super::weight::pkv_gguf_weight;
use super::{call, workspace_size};
use crate::op::qkv_matmul_gguf::QkvMatmulGguf;

/// Activations are quantised to 8 bits a block, as GGUF engines do: blocks of 32, of 256 for the K-quants and IQ4_XS; none for float weights.
pub const PKV_COMPUTE_DEFAULT: i32 = 0;
/// Exact f32 products of dequantised weights.
pub const PKV_COMPUTE_F32: i32 = 1;

/// Three matmuls, each weight in its own GGUF encoding (MAX: unfused_qkv_matmul_ragged_paged_gguf_quantized).
///
/// y = x W^T (+ bias). Q goes to q_output, K and V straight into the pages, feature f to head f / head_size, column f % head_size. The collection has
/// is_mla 0, and its num_heads is the number of KV heads (GQA). K and V are converted or quantised as pkv_kv_store does. No row of the result depends on the
/// other rows of the batch. On a CUDA context: PKV_ERR_UNSUPPORTED.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_qkv_matmul_gguf_params {
    /// sizeof(pkv_qkv_matmul_gguf_params)
    pub struct_size: usize,
    pub collection: *const pkv_collection,
    pub batch: *const pkv_batch,
    /// [num_heads * head_size, K]
    pub q_weight: *const pkv_gguf_weight,
    /// [num_kv_heads * head_size, K]
    pub k_weight: *const pkv_gguf_weight,
    /// [num_kv_heads * head_size, K]
    pub v_weight: *const pkv_gguf_weight,
    pub layer_idx: u32,
    /// PKV_COMPUTE_*
    pub compute: i32,
    /// [T, K], F32, F16 or BF16.
    pub hidden_state: pkv_tensor,
    /// [T, num_heads * head_size], F32, F16 or BF16.
    pub q_output: pkv_tensor,
    /// [rows] F32; each may be absent.
    pub q_bias: pkv_tensor,
    pub k_bias: pkv_tensor,
    pub v_bias: pkv_tensor,
}

super::versioned!(pkv_qkv_matmul_gguf_params: 456);

/// Bytes of scratch that such a call needs; data and batch array pointers may still be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_qkv_matmul_gguf_workspace_size(
    ctx: *const pkv_context,
    params: *const pkv_qkv_matmul_gguf_params,
    bytes: *mut usize,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { workspace_size::<QkvMatmulGguf>(ctx, params, bytes, err) }
}

/// Project the new tokens' hidden states to Q, K and V.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_qkv_matmul_gguf(
    ctx: *const pkv_context,
    stream: pkv_stream,
    params: *const pkv_qkv_matmul_gguf_params,
    workspace: pkv_buffer,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { call::<QkvMatmulGguf>(ctx, stream, params, workspace, err) }
}

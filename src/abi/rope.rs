//! RoPE + RMSNorm + quantise into the MLA cache.

use super::batch::pkv_batch;
use super::collection::pkv_collection;
use super::context::pkv_context;
use super::status::{pkv_error, pkv_status};
use super::types::{pkv_buffer, pkv_stream, pkv_tensor};
use super::{call, workspace_size};
use crate::op::mla_rope_rmsnorm_quantize::MlaRopeRmsnormQuantize;

/// RoPE rotates the pairs (2i, 2i + 1), as DeepSeek's attention does.
pub const PKV_ROPE_INTERLEAVED: i32 = 0;
/// RoPE rotates the pairs (i, i + R/2), as Llama's checkpoints and DeepSeek V3.2's indexer do.
pub const PKV_ROPE_HALF_SPLIT: i32 = 1;

/// Finish the MLA rows of the new tokens (MAX: fused_rope_rmsnorm_quantization_kernel; DeepSeek-V2, arXiv 2405.04434).
///
/// For token t at position p: q_rope_output[t, h] = rope(q_rope[t, h]); the cache row is [gamma * rmsnorm(kv[t, :C]), rope(kv[t, C:])] with
/// C = kv_lora_rank, R the rope width, C + R = head_size, cast to the cache dtype or quantised per group as pkv_kv_store does. Arithmetic is f32; the norm is
/// rounded to the activations' dtype before gamma is multiplied, and again after. The collection has is_mla 1 and one head. All activations have one dtype:
/// F32, F16 or BF16.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_mla_rope_rmsnorm_quantize_params {
    /// sizeof(pkv_mla_rope_rmsnorm_quantize_params)
    pub struct_size: usize,
    pub collection: *const pkv_collection,
    pub batch: *const pkv_batch,
    pub layer_idx: u32,
    /// PKV_ROPE_*
    pub rope: i32,
    /// [T, num_heads, R], any row and head stride (usually the tail of a wider q).
    pub q_rope: pkv_tensor,
    /// [T, num_heads, R]; may be the same memory as q_rope (in place).
    pub q_rope_output: pkv_tensor,
    /// [T, kv_lora_rank + R]
    pub kv: pkv_tensor,
    /// [max_positions, R]: cos0, sin0, cos1, sin1, ...; F32 or the activations' dtype. YaRN's frequencies go in here, its softmax scale into the
    /// attention's scale. max_positions covers every position that the batch reaches; on CUDA, which cannot look, max_seq_length + max_cache_length.
    pub freqs_cis: pkv_tensor,
    /// [kv_lora_rank]; F32 or the activations' dtype.
    pub gamma: pkv_tensor,
    /// >= 0
    pub epsilon: f32,
    pub reserved: u32,
}

super::versioned!(pkv_mla_rope_rmsnorm_quantize_params: 440);

/// Bytes of scratch that such a call needs; data and batch array pointers may still be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_mla_rope_rmsnorm_quantize_workspace_size(
    ctx: *const pkv_context,
    params: *const pkv_mla_rope_rmsnorm_quantize_params,
    bytes: *mut usize,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { workspace_size::<MlaRopeRmsnormQuantize>(ctx, params, bytes, err) }
}

/// Rope the queries and write the finished cache rows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_mla_rope_rmsnorm_quantize(
    ctx: *const pkv_context,
    stream: pkv_stream,
    params: *const pkv_mla_rope_rmsnorm_quantize_params,
    workspace: pkv_buffer,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { call::<MlaRopeRmsnormQuantize>(ctx, stream, params, workspace, err) }
}

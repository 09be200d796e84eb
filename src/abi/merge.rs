//! Join partial attention results.

use super::context::pkv_context;
use super::status::{pkv_error, pkv_status};
use super::types::{pkv_buffer, pkv_stream, pkv_tensor};
use super::{call, workspace_size};
use crate::op::merge_attention::MergeAttention;

/// Join two partial results of chunked prefill by their lse: lse = log(exp(a) + exp(b)), out = out_a * exp(a - lse) + out_b * exp(b - lse); where both are
/// -inf: 0 and -inf.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_merge_attention_params {
    /// sizeof(pkv_merge_attention_params)
    pub struct_size: usize,
    /// [T, H, D], F32, F16 or BF16, one dtype for a, b and output. There is no batch: T is shape[0], the same for all, and every row is joined.
    pub output_a: pkv_tensor,
    /// [T, H] F32
    pub lse_a: pkv_tensor,
    pub output_b: pkv_tensor,
    pub lse_b: pkv_tensor,
    /// May be the memory of a or of b; so may lse.
    pub output: pkv_tensor,
    /// May be absent.
    pub lse: pkv_tensor,
}

super::versioned!(pkv_merge_attention_params: 488);

/// Bytes of scratch that such a call needs; data and batch array pointers may still be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_merge_attention_workspace_size(
    ctx: *const pkv_context,
    params: *const pkv_merge_attention_params,
    bytes: *mut usize,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { workspace_size::<MergeAttention>(ctx, params, bytes, err) }
}

/// Merge a and b into output.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_merge_attention(
    ctx: *const pkv_context,
    stream: pkv_stream,
    params: *const pkv_merge_attention_params,
    workspace: pkv_buffer,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { call::<MergeAttention>(ctx, stream, params, workspace, err) }
}

//! Plain reads and writes of the cache.

use super::batch::pkv_batch;
use super::collection::pkv_collection;
use super::context::pkv_context;
use super::status::{pkv_error, pkv_status};
use super::types::{pkv_buffer, pkv_stream, pkv_tensor};
use super::{call, workspace_size};
use crate::op::kv_gather::KvGather;
use crate::op::kv_store::KvStore;

/// Append rows to a key or value cache, converting or quantising.
///
/// With scales, a row's group g of a head covers columns [g * granularity, min((g + 1) * granularity, head_size)):
/// s = amax / FP8_MAX over its finite elements, 1 where that falls below 2^-126 or no element is finite; rounded to the scale dtype
/// (F8_E8M0: the smallest power of two >= s); code = cast(x / s). Casts to fp8 round to nearest even and saturate; NaN stays NaN and an infinity saturates,
/// neither changes its neighbours.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_kv_store_params {
    /// sizeof(pkv_kv_store_params)
    pub struct_size: usize,
    pub collection: *const pkv_collection,
    pub batch: *const pkv_batch,
    pub layer_idx: u32,
    /// 0: keys, 1: values.
    pub kv_idx: u32,
    /// [T, num_heads, head_size], F32, F16 or BF16.
    pub values: pkv_tensor,
}

super::versioned!(pkv_kv_store_params: 112);

/// Bytes of scratch that such a call needs; data and batch array pointers may still be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_kv_store_workspace_size(
    ctx: *const pkv_context,
    params: *const pkv_kv_store_params,
    bytes: *mut usize,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { workspace_size::<KvStore>(ctx, params, bytes, err) }
}

/// Write the new tokens' rows of one layer's keys or values; nothing else changes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_kv_store(
    ctx: *const pkv_context,
    stream: pkv_stream,
    params: *const pkv_kv_store_params,
    workspace: pkv_buffer,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { call::<KvStore>(ctx, stream, params, workspace, err) }
}

/// Copy cached rows to a contiguous buffer, dequantising: out[r] = code * scale.
///
/// Buffer row r of sequence b (buffer_row_offsets[b] <= r < buffer_row_offsets[b + 1]) holds position cache_offsets[b] + r - buffer_row_offsets[b],
/// which lies below cache_length + new tokens; a sequence may ask for 0 rows at that end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_kv_gather_params {
    /// sizeof(pkv_kv_gather_params)
    pub struct_size: usize,
    pub collection: *const pkv_collection,
    pub batch: *const pkv_batch,
    pub layer_idx: u32,
    /// 0: keys, 1: values.
    pub kv_idx: u32,
    /// [batch_size + 1], first 0, never falling.
    pub buffer_row_offsets: *const u32,
    /// [batch_size]: first cache position copied for each sequence; NULL = all 0.
    pub cache_offsets: *const u32,
    /// [buffer_length, num_heads, head_size], F32, F16 or BF16.
    pub out: pkv_tensor,
}

super::versioned!(pkv_kv_gather_params: 128);

/// Bytes of scratch that such a call needs; data and batch array pointers may still be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_kv_gather_workspace_size(
    ctx: *const pkv_context,
    params: *const pkv_kv_gather_params,
    bytes: *mut usize,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { workspace_size::<KvGather>(ctx, params, bytes, err) }
}

/// Read rows of one layer's keys or values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_kv_gather(
    ctx: *const pkv_context,
    stream: pkv_stream,
    params: *const pkv_kv_gather_params,
    workspace: pkv_buffer,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { call::<KvGather>(ctx, stream, params, workspace, err) }
}

//! GGUF weights.

use super::context::pkv_context;
use super::guard;
use super::status::{pkv_error, pkv_status};
use crate::error::Error;
use crate::gguf;
use crate::weight::Weight;
use std::ffi::{c_char, c_void};

/// Encodings carry GGUF's own type ids (ggml_type in ggml.h).
pub const PKV_GGUF_F32: i32 = 0;
pub const PKV_GGUF_F16: i32 = 1;
pub const PKV_GGUF_Q4_0: i32 = 2;
pub const PKV_GGUF_Q4_1: i32 = 3;
pub const PKV_GGUF_Q5_0: i32 = 6;
pub const PKV_GGUF_Q5_1: i32 = 7;
pub const PKV_GGUF_Q8_0: i32 = 8;
pub const PKV_GGUF_Q2_K: i32 = 10;
pub const PKV_GGUF_Q3_K: i32 = 11;
pub const PKV_GGUF_Q4_K: i32 = 12;
pub const PKV_GGUF_Q5_K: i32 = 13;
pub const PKV_GGUF_Q6_K: i32 = 14;
pub const PKV_GGUF_IQ4_NL: i32 = 20;
pub const PKV_GGUF_IQ4_XS: i32 = 23;
pub const PKV_GGUF_BF16: i32 = 30;
pub const PKV_GGUF_MXFP4: i32 = 39;

/// Repack a copy for this machine's kernels: faster, and data may go afterwards. Without it data is borrowed as it lies (mmap), no copy.
pub const PKV_WEIGHT_PACK: u32 = 1;

/// A weight matrix of rows output features by cols inputs, in one GGUF encoding. Freed by pkv_gguf_weight_destroy; a borrowed one must not outlive its
/// data. Any number of threads may use it at once.
pub struct pkv_gguf_weight(pub(crate) Weight);

/// Where a weight lies and what it is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_gguf_weight_options {
    /// sizeof(pkv_gguf_weight_options)
    pub struct_size: usize,
    /// The raw blocks, as in the file; any alignment.
    pub data: *const c_void,
    /// Bytes at data: at least what rows and row_bytes span.
    pub data_size: usize,
    pub rows: i64,
    /// A multiple of the encoding's block.
    pub cols: i64,
    /// Bytes from one row to the next; 0: tight.
    pub row_bytes: i64,
    /// PKV_GGUF_*; any other number is PKV_ERR_UNSUPPORTED: GGUF's list is open.
    pub encoding: i32,
    /// 0 or PKV_WEIGHT_PACK.
    pub flags: u32,
}

super::versioned!(pkv_gguf_weight_options: 56);

/// Borrow or pack a weight matrix. CUDA contexts have no such kernels: PKV_ERR_UNSUPPORTED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_gguf_weight_create(
    ctx: *const pkv_context,
    options: *const pkv_gguf_weight_options,
    out: *mut *mut pkv_gguf_weight,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { super::create(ctx, options, out, err, |ctx, options| Ok(pkv_gguf_weight(Weight::new(ctx, options)?))) }
}

/// Free a weight; borrowed data stays. No call may still use it. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_gguf_weight_destroy(weight: *mut pkv_gguf_weight) {
    // SAFETY: the caller's contract is the header's.
    unsafe { super::destroy(weight) }
}

/// Name ("Q4_K"; never freed), elements and bytes of an encoding's block; any output may be NULL. PKV_ERR_UNSUPPORTED for an encoding that is not built.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_gguf_encoding_info(
    encoding: i32,
    name: *mut *const c_char,
    block_elements: *mut u32,
    block_bytes: *mut u32,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe {
        guard(std::ptr::null_mut(), || {
            let format = gguf::format(encoding).ok_or_else(|| Error::unsupported("encoding", "is not built"))?;
            if let Some(n) = name.as_mut() {
                *n = format.c_name.as_ptr();
            }
            if let Some(n) = block_elements.as_mut() {
                *n = format.block_elements as u32;
            }
            if let Some(n) = block_bytes.as_mut() {
                *n = format.block_bytes as u32;
            }
            Ok(())
        })
    }
}

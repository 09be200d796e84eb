//! Buffers, streams and tensors: the plain values that calls are made of. They have no struct_size: they never change.

use std::ffi::c_void;

/// No dtype: the tensor or the scales are absent.
pub const PKV_DTYPE_NONE: i32 = 0;
pub const PKV_F32: i32 = 1;
/// IEEE half precision.
pub const PKV_F16: i32 = 2;
pub const PKV_BF16: i32 = 3;
/// e4m3fn of OCP OFP8: finite up to 448, no infinities.
pub const PKV_F8_E4M3: i32 = 4;
/// e5m2 of OCP OFP8: finite up to 57344.
pub const PKV_F8_E5M2: i32 = 5;
/// Powers of two of OCP MX; scales only.
pub const PKV_F8_E8M0: i32 = 6;
pub const PKV_U8: i32 = 7;
pub const PKV_I8: i32 = 8;
pub const PKV_U32: i32 = 9;
pub const PKV_I32: i32 = 10;
pub const PKV_I64: i32 = 11;

/// Memory by address and size in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_buffer {
    pub data: *mut c_void,
    pub size: usize,
}

/// A CUstream (= cudaStream_t); {NULL} on a CPU context, or for the default stream.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_stream {
    pub native: *mut c_void,
}

/// A borrowed view of memory on the context's device. Strides count elements; all zero means contiguous row-major, otherwise the
/// last one is 1 and the others are >= 0. Absent: data NULL and dtype PKV_DTYPE_NONE.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_tensor {
    pub data: *mut c_void,
    pub dtype: i32,
    pub ndim: i32,
    pub shape: [i64; 4],
    pub stride: [i64; 4],
}

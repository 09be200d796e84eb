//! Status codes and the error struct.

use std::ffi::c_char;

/// What became of a call. 0 is success; 1xx: fix the call; 2xx: change machine or options; 3xx: report it to us.
pub type pkv_status = i32;

pub const PKV_OK: i32 = 0;
/// A needed pointer or handle is NULL.
pub const PKV_ERR_NULL: i32 = 100;
/// A number that does not exist or is out of range; a handle of another context.
pub const PKV_ERR_VALUE: i32 = 101;
/// Rank, extents, strides, sizes, or products that overflow.
pub const PKV_ERR_SHAPE: i32 = 102;
/// A dtype that is not allowed there.
pub const PKV_ERR_DTYPE: i32 = 103;
/// A pointer that is not aligned as stated.
pub const PKV_ERR_ALIGNMENT: i32 = 104;
/// A workspace that was given but is too small.
pub const PKV_ERR_WORKSPACE: i32 = 105;
/// A block id that does not exist, too few columns, or two new tokens in one slot.
pub const PKV_ERR_PAGE_TABLE: i32 = 106;
/// struct_size, abi_version, or unknown fields that are set.
pub const PKV_ERR_ABI: i32 = 107;
/// Known, but not built or not possible on this device.
pub const PKV_ERR_UNSUPPORTED: i32 = 200;
/// No driver or no such device.
pub const PKV_ERR_NO_DEVICE: i32 = 201;
pub const PKV_ERR_NO_MEMORY: i32 = 202;
/// The driver reported an error; pkv_error.native_code has its number. It may stem from earlier asynchronous work.
pub const PKV_ERR_DEVICE: i32 = 203;
/// A fault of this library.
pub const PKV_ERR_INTERNAL: i32 = 300;

/// What went wrong, for people. The caller's memory; NULL is allowed wherever one is taken. Filled on failure, cleared on PKV_OK,
/// not touched where struct_size is 0 or too small. Texts end with a NUL and are cut to fit.
#[repr(C)]
pub struct pkv_error {
    /// sizeof(pkv_error)
    pub struct_size: usize,
    pub status: pkv_status,
    /// The driver's own code (CUresult) where there is one, else 0.
    pub native_code: i32,
    /// The argument at fault, as the caller wrote it: "params.q.shape[1]".
    pub argument: [c_char; 48],
    /// What was wrong and what was expected; for PKV_ERR_UNSUPPORTED why each implementation refused.
    pub message: [c_char; 448],
}

/// The name of a status, "PKV_ERR_SHAPE"; "PKV_ERR_UNKNOWN" for a number that is none. Never NULL, never freed.
#[unsafe(no_mangle)]
pub extern "C" fn pkv_status_name(status: pkv_status) -> *const c_char {
    let name = match status {
        PKV_OK => c"PKV_OK",
        PKV_ERR_NULL => c"PKV_ERR_NULL",
        PKV_ERR_VALUE => c"PKV_ERR_VALUE",
        PKV_ERR_SHAPE => c"PKV_ERR_SHAPE",
        PKV_ERR_DTYPE => c"PKV_ERR_DTYPE",
        PKV_ERR_ALIGNMENT => c"PKV_ERR_ALIGNMENT",
        PKV_ERR_WORKSPACE => c"PKV_ERR_WORKSPACE",
        PKV_ERR_PAGE_TABLE => c"PKV_ERR_PAGE_TABLE",
        PKV_ERR_ABI => c"PKV_ERR_ABI",
        PKV_ERR_UNSUPPORTED => c"PKV_ERR_UNSUPPORTED",
        PKV_ERR_NO_DEVICE => c"PKV_ERR_NO_DEVICE",
        PKV_ERR_NO_MEMORY => c"PKV_ERR_NO_MEMORY",
        PKV_ERR_DEVICE => c"PKV_ERR_DEVICE",
        PKV_ERR_INTERNAL => c"PKV_ERR_INTERNAL",
        _ => c"PKV_ERR_UNKNOWN",
    };
    name.as_ptr()
}

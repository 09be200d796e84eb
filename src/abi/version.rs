//! Versions.

use std::ffi::c_char;

pub const PKV_VERSION_MAJOR: u32 = 0;
pub const PKV_VERSION_MINOR: u32 = 1;
pub const PKV_VERSION_PATCH: u32 = 0;
/// Goes into pkv_context_options.abi_version; changes only when old callers would break.
pub const PKV_ABI_VERSION: u32 = 1;

/// PKV_ABI_VERSION of the library that was loaded.
#[unsafe(no_mangle)]
pub extern "C" fn pkv_abi_version() -> u32 {
    PKV_ABI_VERSION
}

/// Version of the library that was loaded, "0.1.0". Never NULL, never freed.
#[unsafe(no_mangle)]
pub extern "C" fn pkv_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// One line for bug reports: version, git commit, CPU kernels chosen, CUDA archs built. Never NULL, never freed.
#[unsafe(no_mangle)]
pub extern "C" fn pkv_build_info() -> *const c_char {
    crate::build_info().as_ptr()
}

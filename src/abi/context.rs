//! The context: device, threads, log.

use super::status::{pkv_error, pkv_status};
use super::{guard, read};
use crate::context::Context;
use std::ffi::{c_char, c_void};

pub const PKV_BACKEND_CPU: i32 = 0;
pub const PKV_BACKEND_CUDA: i32 = 1;

pub const PKV_LOG_OFF: i32 = 0;
pub const PKV_LOG_ERROR: i32 = 1;
pub const PKV_LOG_WARN: i32 = 2;
pub const PKV_LOG_INFO: i32 = 3;
pub const PKV_LOG_DEBUG: i32 = 4;

/// A device and the threads that work for it. Freed by pkv_context_destroy; outlives everything made with it. Any number of threads may use it at once.
pub struct pkv_context(pub(crate) Context);

/// Where log lines go: `target` is the module, both texts end with a NUL and live only during the call. May be called from any thread, also several at
/// once; must not call back into the library.
pub type pkv_log_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, level: i32, target: *const c_char, message: *const c_char)>;

/// A piece of work, made by the library for pkv_parallel_for_fn.
pub type pkv_task_fn = Option<unsafe extern "C" fn(task: *mut c_void, index: u32)>;

/// The engine's own threads: call run(task, i) for each i < count exactly once, on any threads, and return when all are done. It may be called from
/// several threads at once, never from inside a task; it may run serially.
pub type pkv_parallel_for_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, count: u32, run: pkv_task_fn, task: *mut c_void)>;

/// How a context works; all zero but struct_size and abi_version: CPU, own threads, no log.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_context_options {
    /// sizeof(pkv_context_options)
    pub struct_size: usize,
    /// PKV_ABI_VERSION; 0 is refused.
    pub abi_version: u32,
    /// PKV_BACKEND_CPU or PKV_BACKEND_CUDA.
    pub backend: i32,
    /// CUDA device ordinal; 0 on CPU.
    pub device: i32,
    /// PKV_LOG_OFF .. PKV_LOG_DEBUG: lines above this level are not made.
    pub log_level: i32,
    /// NULL: nothing is logged.
    pub log: pkv_log_fn,
    pub log_user: *mut c_void,
    /// NULL: the library's own pool, which sleeps when idle. Called only with num_threads above 1.
    pub parallel_for: pkv_parallel_for_fn,
    pub parallel_user: *mut c_void,
    /// At most 1024. 0: the cores this process may use (affinity, cgroup quota). With parallel_for: how many threads the engine gives, 1 if 0.
    pub num_threads: u32,
    pub reserved: u32,
}

super::versioned!(pkv_context_options: 64);

/// Make a context. options NULL: all defaults.
///
/// The environment variable PAGEDKV_CPU_ISA (reference, scalar, avx2, avx512) holds the CPU kernels to a lower instruction set than the machine has, for tests.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_context_create(
    options: *const pkv_context_options,
    out: *mut *mut pkv_context,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe {
        guard(err, || {
            let options = if options.is_null() { None } else { Some(read(options, "options")?) };
            let to = super::out(out, "out")?;
            let made = Context::new(options.as_ref())?;
            to.write(Box::into_raw(Box::new(pkv_context(made))));
            Ok(())
        })
    }
}

/// Free a context, after everything made with it. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_context_destroy(ctx: *mut pkv_context) {
    // SAFETY: the caller's contract is the header's.
    unsafe { super::destroy(ctx) }
}

/// Threads that a call on this context uses at most, the caller's included; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_context_num_threads(ctx: *const pkv_context) -> u32 {
    // SAFETY: the caller's contract is the header's.
    unsafe { ctx.as_ref() }.map_or(0, |c| c.0.num_threads() as u32)
}

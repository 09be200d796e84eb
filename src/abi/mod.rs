//! The only `extern "C"` of the crate. An export translates and calls; it decides nothing.
//!
//! Each file is one section of the header, in the order a reader of the header meets them.

#![allow(rustdoc::broken_intra_doc_links, reason = "the comments are the C header's, where brackets are extents")]
#![allow(non_camel_case_types, reason = "these are the C names")]
#![allow(
    clippy::missing_safety_doc,
    reason = "the conventions at the top of the header are the contract of every export"
)]

pub mod batch;
pub mod collection;
pub mod context;
pub mod indexer;
pub mod kv;
pub mod merge;
pub mod prefill;
pub mod qkv;
pub mod rope;
pub mod status;
pub mod types;
pub mod version;
pub mod weight;

use crate::context::{Context, Level, Log};
use crate::error::{Error, Result, Status};
use crate::panics;
use crate::plan::Stream;
use crate::plan::{self, Op};
use crate::view::Mode;
use context::pkv_context;
use status::{PKV_OK, pkv_error, pkv_status};
use std::ffi::c_char;
use std::mem::{MaybeUninit, offset_of};
use std::panic::{AssertUnwindSafe, catch_unwind};
use types::{pkv_buffer, pkv_stream};

/// Nothing bigger is a struct of ours, now or later; a larger struct_size is garbage.
const MAX_STRUCT_SIZE: usize = 64 * 1024;

/// A C struct that starts with `struct_size`.
///
/// # Safety
/// `repr(C)`, no padding, all-zero bits are a value, the first field is `struct_size: usize`.
pub unsafe trait Versioned: Copy {
    /// Size of the first version ever published: the least a caller can have.
    const FIRST_SIZE: usize;
}

/// Declare `Versioned` structs, with the first published size.
macro_rules! versioned {
    ($($t:ty: $first:expr),* $(,)?) => { $(
        // SAFETY: repr(C) of integers, floats and pointers, whose zero bits are values; sizes and the first field are asserted.
        unsafe impl $crate::abi::Versioned for $t { const FIRST_SIZE: usize = $first; }
        const _: () = {
            assert!(size_of::<$t>() % 8 == 0 && size_of::<$t>() >= $first);
            assert!(std::mem::offset_of!($t, struct_size) == 0);
        };
    )* };
}
pub(crate) use versioned;

/// The caller's struct_size, between the first version's and 64 KiB.
///
/// # Safety
/// `ptr` is not NULL and points to at least a `usize`.
unsafe fn struct_size<T: Versioned>(ptr: *const T, name: &str) -> Result<usize> {
    // SAFETY: struct_size comes first in every Versioned; unaligned reads tolerate packed callers.
    let size = unsafe { ptr.cast::<usize>().read_unaligned() };
    if size < T::FIRST_SIZE || size > MAX_STRUCT_SIZE {
        let message = format!("is {size}, must be the caller's sizeof, at least {}", T::FIRST_SIZE);
        return Err(Error::new(Status::Abi, format!("{name}.struct_size"), message));
    }
    Ok(size)
}

/// Copy `min(struct_size, ours)` bytes into a zeroed struct; a longer caller struct must be zero where we know nothing.
///
/// # Safety
/// `ptr` is NULL or points to `struct_size` bytes.
pub unsafe fn read<T: Versioned>(ptr: *const T, name: &str) -> Result<T> {
    if ptr.is_null() {
        return Err(Error::null(name));
    }
    // SAFETY: not NULL, and the caller promises a struct.
    let size = unsafe { struct_size(ptr, name)? };
    let ours = size_of::<T>();
    if size > ours {
        // SAFETY: the caller's struct has `size` bytes.
        let tail = unsafe { std::slice::from_raw_parts(ptr.cast::<u8>().add(ours), size - ours) };
        if tail.iter().any(|&b| b != 0) {
            let message = format!("is {size}, this library knows {ours} bytes, and a field past them is set");
            return Err(Error::new(Status::Abi, format!("{name}.struct_size"), message));
        }
    }
    let mut out = MaybeUninit::<T>::zeroed();
    // SAFETY: both sides have `min` bytes and do not overlap; zero bits are a value of T.
    unsafe {
        std::ptr::copy_nonoverlapping(ptr.cast::<u8>(), out.as_mut_ptr().cast::<u8>(), size.min(ours));
        Ok(out.assume_init())
    }
}

/// Fill a caller's out struct up to its struct_size, which stays; what a longer caller has past ours is zeroed.
///
/// # Safety
/// `out` is NULL or points to `struct_size` writable bytes.
pub unsafe fn write<T: Versioned>(out: *mut T, name: &str, value: &T) -> Result<()> {
    if out.is_null() {
        return Err(Error::null(name));
    }
    // SAFETY: not NULL, and the caller promises a struct.
    let size = unsafe { struct_size(out.cast_const(), name)? };
    let skip = size_of::<usize>();
    let n = size.min(size_of::<T>());
    // SAFETY: `n` bytes exist on both sides, `size` in the caller's struct.
    unsafe {
        std::ptr::copy_nonoverlapping((value as *const T).cast::<u8>().add(skip), out.cast::<u8>().add(skip), n - skip);
        out.cast::<u8>().add(n).write_bytes(0, size - n);
    }
    Ok(())
}

/// Every export that can fail goes through here: a panic becomes PKV_ERR_INTERNAL, an error fills the caller's struct.
///
/// # Safety
/// `err` is NULL or points to a pkv_error.
pub unsafe fn guard(err: *mut pkv_error, body: impl FnOnce() -> Result<()>) -> pkv_status {
    // SAFETY: by contract.
    unsafe { guard_logged(None, err, body) }
}

/// [`guard`] with a log to tell of faults of our own.
///
/// # Safety
/// `err` is NULL or points to a pkv_error.
unsafe fn guard_logged(log: Option<&Log>, err: *mut pkv_error, body: impl FnOnce() -> Result<()>) -> pkv_status {
    let outcome = panics::quiet(|| catch_unwind(AssertUnwindSafe(body)))
        .unwrap_or_else(|payload| Err(Error::internal(format!("panic: {}", panics::text(&*payload)))));
    if let (Err(e), Some(log)) = (&outcome, log)
        && e.status == Status::Internal
    {
        // The log is the engine's code: it must not unwind through us either.
        let _ = panics::quiet(|| catch_unwind(AssertUnwindSafe(|| log.write(Level::Error, "abi", &e.message))));
    }
    // SAFETY: by contract.
    unsafe { report(err, outcome.as_ref().err()) };
    outcome.map_or_else(|e| e.status as pkv_status, |()| PKV_OK)
}

/// Of ABI version 1: callers of all later ones have at least this.
const FIRST_ERROR_SIZE: usize = 512;
const _: () = assert!(size_of::<pkv_error>() >= FIRST_ERROR_SIZE);

/// # Safety
/// `err` is NULL or points to `struct_size` writable bytes.
unsafe fn report(err: *mut pkv_error, error: Option<&Error>) {
    if err.is_null() {
        return;
    }
    // SAFETY: struct_size comes first.
    let size = unsafe { err.cast::<usize>().read_unaligned() };
    if !(FIRST_ERROR_SIZE..=MAX_STRUCT_SIZE).contains(&size) {
        return;
    }
    let mut filled =
        pkv_error { struct_size: size, status: PKV_OK, native_code: 0, argument: [0; 48], message: [0; 448] };
    if let Some(e) = error {
        filled.status = e.status as i32;
        filled.native_code = e.native_code;
        copy_text(&mut filled.argument, &e.argument);
        copy_text(&mut filled.message, &e.message);
    }
    // SAFETY: no more than the caller's struct, nor than ours; an unknown tail of his is left alone.
    unsafe {
        let from = (&raw const filled).cast::<u8>();
        let skip = offset_of!(pkv_error, status);
        std::ptr::copy_nonoverlapping(
            from.add(skip),
            err.cast::<u8>().add(skip),
            size.min(size_of::<pkv_error>()) - skip,
        );
    }
}

/// As much of the text as fits before the closing NUL, cut between characters.
fn copy_text(to: &mut [c_char], text: &str) {
    let end = text.floor_char_boundary(to.len() - 1);
    for (t, &b) in to.iter_mut().zip(&text.as_bytes()[..end]) {
        *t = b as c_char;
    }
    to[end] = 0;
}

/// # Safety
/// `ptr` is NULL or a live handle of type `T` made by this library.
pub unsafe fn handle<'a, T>(ptr: *const T, name: &str) -> Result<&'a T> {
    // SAFETY: by contract.
    unsafe { ptr.as_ref() }.ok_or_else(|| Error::null(name))
}

/// # Safety
/// `ptr` is NULL or points to a writable `T`.
pub unsafe fn out<'a, T>(ptr: *mut T, name: &str) -> Result<&'a mut MaybeUninit<T>> {
    // SAFETY: by contract; MaybeUninit has the same layout.
    unsafe { ptr.cast::<MaybeUninit<T>>().as_mut() }.ok_or_else(|| Error::null(name))
}

/// The whole of `pkv_X_create` for what belongs to a context.
///
/// # Safety
/// The pointers are NULL or what the header says.
pub unsafe fn create<O: Versioned, T>(
    ctx: *const pkv_context,
    options: *const O,
    to: *mut *mut T,
    err: *mut pkv_error,
    make: impl FnOnce(&Context, &O) -> Result<T>,
) -> pkv_status {
    // SAFETY: by contract.
    unsafe {
        guard_logged(ctx.as_ref().map(|c| &c.0.log), err, || {
            let ctx = &handle(ctx, "ctx")?.0;
            let options = read(options, "options")?;
            let to = out(to, "out")?;
            to.write(Box::into_raw(Box::new(make(ctx, &options)?)));
            Ok(())
        })
    }
}

/// The whole of `pkv_X_destroy`.
///
/// # Safety
/// `ptr` is NULL or a handle made by a create of this library, used by no call any more.
pub unsafe fn destroy<T>(ptr: *mut T) {
    // SAFETY: by contract; every create gives away a Box.
    unsafe {
        guard(std::ptr::null_mut(), || {
            if !ptr.is_null() {
                drop(Box::from_raw(ptr));
            }
            Ok(())
        });
    }
}

/// The whole of `pkv_X_workspace_size`.
///
/// # Safety
/// The pointers are NULL or what the header says.
pub unsafe fn workspace_size<O: Op>(
    ctx: *const pkv_context,
    params: *const O::Params,
    bytes: *mut usize,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: by contract; `O::validate` trusts the pointers inside params as the header promises them.
    unsafe {
        guard_logged(ctx.as_ref().map(|c| &c.0.log), err, || {
            let ctx = &handle(ctx, "ctx")?.0;
            let params = read(params, "params")?;
            let bytes = out(bytes, "bytes")?;
            let args = O::validate(ctx, &params, Mode::Query)?;
            bytes.write(plan::workspace_size::<O>(ctx, &args)?);
            Ok(())
        })
    }
}

/// The whole of `pkv_X`.
///
/// # Safety
/// The pointers are NULL or what the header says.
pub unsafe fn call<O: Op>(
    ctx: *const pkv_context,
    stream: pkv_stream,
    params: *const O::Params,
    workspace: pkv_buffer,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: by contract; `O::validate` trusts the pointers inside params as the header promises them.
    unsafe {
        guard_logged(ctx.as_ref().map(|c| &c.0.log), err, || {
            let ctx = &handle(ctx, "ctx")?.0;
            let params = read(params, "params")?;
            ctx.check_stream(stream)?;
            let args = O::validate(ctx, &params, ctx.call_mode())?;
            plan::run::<O>(ctx, &args, Stream(stream.native), workspace)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::context as abi;
    use std::ffi::{CStr, c_void};

    unsafe extern "C" fn keep(user: *mut c_void, level: i32, _target: *const c_char, message: *const c_char) {
        // SAFETY: `user` is the Vec below, `message` a C string.
        unsafe {
            (*user.cast::<Vec<(i32, String)>>()).push((level, CStr::from_ptr(message).to_str().unwrap().to_string()))
        };
    }

    #[test]
    fn a_panic_becomes_a_status_and_a_log_line() {
        let mut lines: Vec<(i32, String)> = Vec::new();
        // SAFETY: all-zero options but the fields that must be set.
        let mut options = unsafe { std::mem::zeroed::<abi::pkv_context_options>() };
        options.struct_size = size_of_val(&options);
        options.abi_version = version::PKV_ABI_VERSION;
        options.log_level = abi::PKV_LOG_ERROR;
        options.log = Some(keep);
        options.log_user = (&raw mut lines).cast();
        let ctx = crate::context::Context::new(Some(&options)).unwrap();
        let mut err = pkv_error {
            struct_size: size_of::<pkv_error>(),
            status: 0,
            native_code: 0,
            argument: [0; 48],
            message: [0; 448],
        };
        // SAFETY: a live pkv_error.
        let status = unsafe { guard_logged(Some(&ctx.log), &mut err, || panic!("number {}", 7)) };
        assert_eq!((status, err.status), (status::PKV_ERR_INTERNAL, status::PKV_ERR_INTERNAL));
        // SAFETY: report ends its texts with a NUL.
        assert_eq!(unsafe { CStr::from_ptr(err.message.as_ptr()) }.to_str().unwrap(), "panic: number 7");
        assert_eq!(lines, [(abi::PKV_LOG_ERROR, "panic: number 7".to_string())]);
    }

    #[test]
    fn texts_are_cut_between_characters() {
        let mut to = [1 as c_char; 4];
        copy_text(&mut to, "abé");
        assert_eq!(to.map(|c| c as u8), [b'a', b'b', 0, 1]);
    }
}

//! The few driver calls that are made, found at run time, their results read as plain integers.
//!
//! cudarc knows where libcuda may lie and opens it; its wrappers are not used: they panic on a missing symbol, and their result is an
//! exhaustive enum that a newer driver's code would make undefined.

use crate::error::{Error, Status};
use crate::panics;
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::panic::catch_unwind;
use std::sync::OnceLock;

pub type CuResult = c_int;
pub type CuDevice = c_int;
/// CUcontext, CUstream, CUlibrary, CUkernel, CUfunction.
pub type Handle = *mut c_void;
pub type DevicePtr = u64;

pub const SUCCESS: CuResult = 0;
pub const OUT_OF_MEMORY: CuResult = 2;

macro_rules! driver {
    ($($name:ident($($argument:ty),*);)*) => {
        #[derive(Debug)]
        #[allow(non_snake_case, reason = "the driver's own names")]
        pub struct Driver {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> CuResult,)*
        }

        impl Driver {
            /// # Safety
            /// `library` is CUDA's driver.
            unsafe fn resolve(library: &Library) -> Result<Self, String> {
                Ok(Driver { $(
                    // SAFETY: the driver's functions have these signatures since CUDA 12.
                    $name: unsafe { library.symbol(concat!(stringify!($name), "\0"))? },
                )* })
            }
        }
    };
}

driver! {
    cuInit(c_uint);
    cuGetErrorName(CuResult, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CuDevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CuDevice);
    cuDeviceGetAttribute(*mut c_int, c_int, CuDevice);
    cuDevicePrimaryCtxRetain(*mut Handle, CuDevice);
    cuDevicePrimaryCtxRelease_v2(CuDevice);
    cuCtxPushCurrent_v2(Handle);
    cuCtxPopCurrent_v2(*mut Handle);
    cuLibraryLoadData(*mut Handle, *const c_void, *const c_void, *const c_void, c_uint, *const c_void, *const c_void, c_uint);
    cuLibraryUnload(Handle);
    cuLibraryGetKernel(*mut Handle, Handle, *const c_char);
    cuKernelGetFunction(*mut Handle, Handle);
    cuFuncSetAttribute(Handle, c_int, c_int);
    cuLaunchKernel(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *const *mut c_void, *const *mut c_void);
    cuMemAlloc_v2(*mut DevicePtr, usize);
    cuMemFree_v2(DevicePtr);
    cuMemAllocAsync(*mut DevicePtr, usize, Handle);
    cuMemFreeAsync(DevicePtr, Handle);
    cuMemsetD8Async(DevicePtr, u8, usize, Handle);
    cuStreamCreate(*mut Handle, c_uint);
    cuStreamDestroy_v2(Handle);
    cuStreamSynchronize(Handle);
    cuThreadExchangeStreamCaptureMode(*mut c_int);
}

/// A shared library that cudarc has opened.
pub struct Library(pub Symbols);

/// What a symbol lookup needs of it. (cudarc does not export its libloading, so the lookup comes as a closure.)
pub type Symbols = Box<dyn Fn(&CStr) -> Option<*mut c_void>>;

impl Library {
    /// # Safety
    /// `F` is the type of the function of that name (which ends in a NUL).
    pub unsafe fn symbol<F: Copy>(&self, name: &'static str) -> Result<F, String> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let name = CStr::from_bytes_with_nul(name.as_bytes()).expect("the macro ends it");
        let address = (self.0)(name).ok_or_else(|| format!("has no function {}", name.to_string_lossy()))?;
        // SAFETY: a function pointer and an address have one size; the type by contract.
        Ok(unsafe { std::mem::transmute_copy(&address) })
    }
}

impl Driver {
    /// The driver of this process, or why there is none.
    pub fn get() -> Result<&'static Driver, &'static str> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        DRIVER.get_or_init(Self::open).as_ref().map_err(String::as_str)
    }

    fn open() -> Result<Self, String> {
        // SAFETY: opening libcuda runs its initialisers, which is what every CUDA program does.
        let opened =
            panics::quiet(|| catch_unwind(|| unsafe { sys::is_culib_present() }.then(|| unsafe { sys::culib() })));
        let Ok(Some(culib)) = opened else { return Err("no CUDA driver (libcuda) was found".into()) };
        let library = Library(Box::new(|name| {
            // SAFETY: only the address is taken; whoever uses it knows the type.
            unsafe { culib.get::<*mut c_void>(name.to_bytes_with_nul()) }.ok().map(|symbol| *symbol)
        }));
        // SAFETY: the library is CUDA's driver.
        unsafe { Self::resolve(&library) }.map_err(|e| format!("the CUDA driver {e}: it is too old"))
    }

    /// An error for a call that did not succeed.
    pub fn check(&self, code: CuResult, call: &str) -> Result<(), Error> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: `name` is writable; the driver sets it to a constant of its own or leaves it NULL.
        let known = unsafe { (self.cuGetErrorName)(code, &mut name) } == SUCCESS && !name.is_null();
        let name = match known {
            // SAFETY: a C string of the driver's.
            true => unsafe { CStr::from_ptr(name) }.to_string_lossy(),
            false => "unknown to this driver".into(),
        };
        let status = if code == OUT_OF_MEMORY { Status::NoMemory } else { Status::Device };
        let note = if code >= 700 { " (it may stem from earlier work on this device)" } else { "" };
        let mut error = Error::new(status, "", format!("{call}: {name} ({code}){note}"));
        error.native_code = code;
        Err(error)
    }
}

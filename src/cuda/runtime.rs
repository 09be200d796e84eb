//! A device: its primary context, its memory, its kernels loaded on first use, launches on the engine's stream.
//!
//! Every entry pushes the primary context (the one the CUDA runtime uses) and pops it again, so the caller's current context is what it
//! was. Nothing here synchronises but the zeroing of a new collection.

use super::driver::{CuDevice, DevicePtr, Driver, Handle, SUCCESS};
use super::{Siblings, image};
use crate::context::{Backend, Context, Level, Log};
use crate::error::{Error, Result, Status};
use crate::plan::Stream;
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// An entry point of a file in `kernels/`.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    pub file: &'static str,
    pub name: &'static str,
}

/// Launch structs: `#[repr(C)]`, as the kernel's own.
///
/// # Safety
/// The layout is that of the kernel's params struct, and the addresses in it are what that struct says of them until the work is done.
pub unsafe trait LaunchParams: Copy {}

/// How many blocks of how many threads, with how many bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub grid: [u32; 3],
    pub threads: u32,
    pub shared: u32,
}

impl Shape {
    /// Blocks for `items`, each block doing `per_block` a round and walking on by the grid's size: no count is too large.
    pub fn strided(items: u64, per_block: u64, threads: u32, shared: u32) -> Self {
        let blocks = items.div_ceil(per_block).clamp(1, i32::MAX as u64) as u32;
        Shape { grid: [blocks, 1, 1], threads, shared }
    }
}

/// A CUDA device, its primary context retained.
#[derive(Clone, Debug)]
pub struct Device(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    driver: &'static Driver,
    device: CuDevice,
    context: Handle,
    capability: (i32, i32),
    multiprocessors: u32,
    max_shared: u32,
    siblings: Siblings,
    functions: RwLock<HashMap<&'static str, Arc<Function>>>,
    /// One lock a file: threads that meet on a cold cache compile it once.
    libraries: Mutex<HashMap<&'static str, Arc<Mutex<Option<Library>>>>>,
}

#[derive(Debug)]
struct Library(Handle);

#[derive(Debug)]
struct Function {
    handle: Handle,
    /// Dynamic shared memory that the driver has been told of; 48 KiB need no telling.
    shared: AtomicU32,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above; what changes is behind locks.
unsafe impl Sync for Inner {}
// SAFETY: as above.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

const DEFAULT_SHARED: u32 = 48 << 10;

mod attribute {
    pub const MULTIPROCESSORS: i32 = 16;
    pub const CAPABILITY_MAJOR: i32 = 75;
    pub const CAPABILITY_MINOR: i32 = 76;
    pub const MAX_SHARED_OPTIN: i32 = 97;
    /// Of a function.
    pub const MAX_DYNAMIC_SHARED: i32 = 8;
}

fn no_device(message: impl Into<String>, code: i32) -> Error {
    let mut error = Error::new(Status::NoDevice, "options.backend", message);
    error.native_code = code;
    error
}

/// The primary context, current while this lives.
struct Current<'a>(&'a Inner);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = null_mut();
        // SAFETY: what `enter` pushed is on top: everything in between is ours and balanced.
        unsafe { (self.0.driver.cuCtxPopCurrent_v2)(&mut popped) };
    }
}

/// Stream captures of other threads stay valid while this lives, though a module is loaded: that does not touch their streams.
struct Relaxed<'a>(&'a Driver, c_int);

impl<'a> Relaxed<'a> {
    fn new(driver: &'a Driver) -> Self {
        const CAPTURE_MODE_RELAXED: c_int = 2;
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: a writable integer, which takes the thread's mode so far.
        unsafe { (driver.cuThreadExchangeStreamCaptureMode)(&mut mode) };
        Relaxed(driver, mode)
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        // SAFETY: a writable integer.
        unsafe { (self.0.cuThreadExchangeStreamCaptureMode)(&mut self.1) };
    }
}

impl Inner {
    fn enter(&self) -> Result<Current<'_>> {
        // SAFETY: the primary context is retained.
        self.driver.check(unsafe { (self.driver.cuCtxPushCurrent_v2)(self.context) }, "cuCtxPushCurrent")?;
        Ok(Current(self))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A driver that is shutting down answers with an error, which has no receiver.
        // SAFETY: nobody uses the libraries or the context any more.
        unsafe {
            for library in self.libraries.get_mut().unwrap_or_else(PoisonError::into_inner).values() {
                if let Some(Library(handle)) = library.lock().unwrap_or_else(PoisonError::into_inner).take() {
                    (self.driver.cuLibraryUnload)(handle);
                }
            }
            (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device);
        }
    }
}

impl Device {
    pub fn open(ordinal: i32, log: &Log) -> Result<Self> {
        let siblings = Siblings::chosen()?;
        let driver = Driver::get().map_err(|e| no_device(e, 0))?;
        // SAFETY: flags must be 0.
        let code = unsafe { (driver.cuInit)(0) };
        driver.check(code, "cuInit").map_err(|e| no_device(e.message, code))?;
        let mut count = 0;
        // SAFETY: a writable integer.
        driver.check(unsafe { (driver.cuDeviceGetCount)(&mut count) }, "cuDeviceGetCount")?;
        if ordinal < 0 || ordinal >= count {
            let message = format!("is {ordinal}, this machine has {count} CUDA devices");
            return Err(Error::new(Status::NoDevice, "options.device", message));
        }
        let mut device = 0;
        // SAFETY: a writable integer; the ordinal exists.
        driver.check(unsafe { (driver.cuDeviceGet)(&mut device, ordinal) }, "cuDeviceGet")?;
        let get = |attribute| {
            let mut value = 0;
            // SAFETY: a writable integer, a device of the driver's.
            let code = unsafe { (driver.cuDeviceGetAttribute)(&mut value, attribute, device) };
            driver.check(code, "cuDeviceGetAttribute").map(|()| value)
        };
        let capability = (get(attribute::CAPABILITY_MAJOR)?, get(attribute::CAPABILITY_MINOR)?);
        let multiprocessors = get(attribute::MULTIPROCESSORS)? as u32;
        let max_shared = get(attribute::MAX_SHARED_OPTIN)? as u32;
        if capability < (8, 0) {
            let message = format!("compute capability {}.{} is below 8.0", capability.0, capability.1);
            return Err(Error::unsupported("options.device", message));
        }
        if log.enabled(Level::Info) {
            let mut name = [0u8; 256];
            // SAFETY: the buffer has the size said; one byte stays for the NUL.
            unsafe { (driver.cuDeviceGetName)(name.as_mut_ptr().cast(), name.len() as c_int - 1, device) };
            let name = String::from_utf8_lossy(name.split(|&b| b == 0).next().unwrap_or_default()).into_owned();
            let arch = image::arch_name(capability);
            log.write(
                Level::Info,
                "cuda",
                &format!("device {ordinal}: {name}, {arch}, {multiprocessors} multiprocessors"),
            );
        }
        let mut context = null_mut();
        // SAFETY: a writable handle; released when the device is dropped.
        let code = unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut context, device) };
        driver.check(code, "cuDevicePrimaryCtxRetain")?;
        Ok(Device(Arc::new(Inner {
            driver,
            device,
            context,
            capability,
            multiprocessors,
            max_shared,
            siblings,
            functions: RwLock::default(),
            libraries: Mutex::default(),
        })))
    }

    /// Major and minor.
    pub fn capability(&self) -> (i32, i32) {
        self.0.capability
    }

    pub fn multiprocessors(&self) -> u32 {
        self.0.multiprocessors
    }

    /// Dynamic shared memory that a block may ask for.
    pub fn max_shared(&self) -> u32 {
        self.0.max_shared
    }

    /// Device memory filled with zeroes, which it is when this returns.
    pub fn zeroed(&self, bytes: usize, argument: &str) -> Result<DeviceBuffer> {
        if bytes == 0 {
            return Ok(DeviceBuffer::empty());
        }
        let inner = &*self.0;
        let _current = inner.enter()?;
        let driver = inner.driver;
        let mut ptr: DevicePtr = 0;
        // SAFETY: a writable address.
        let code = unsafe { (driver.cuMemAlloc_v2)(&mut ptr, bytes) };
        driver.check(code, "cuMemAlloc").map_err(|e| named(e, argument))?;
        let buffer = DeviceBuffer { ptr, freeing: Some((self.clone(), None)) };
        // A stream of its own: the default stream would wait for, and hold up, the engine's.
        const NON_BLOCKING: u32 = 1;
        let mut stream = null_mut();
        // SAFETY: a writable handle; the memory just allocated; the stream is destroyed once it is idle.
        unsafe {
            driver.check((driver.cuStreamCreate)(&mut stream, NON_BLOCKING), "cuStreamCreate")?;
            let filled = match (driver.cuMemsetD8Async)(ptr, 0, bytes, stream) {
                SUCCESS => driver.check((driver.cuStreamSynchronize)(stream), "cuStreamSynchronize"),
                code => driver.check(code, "cuMemsetD8Async"),
            };
            (driver.cuStreamDestroy_v2)(stream);
            filled?;
        }
        Ok(buffer)
    }

    /// Uninitialised memory in the order of the stream: allocated before what is launched next, freed after what was launched by then.
    pub fn stream_ordered(&self, bytes: usize, stream: Stream, argument: &str) -> Result<DeviceBuffer> {
        if bytes == 0 {
            return Ok(DeviceBuffer::empty());
        }
        let inner = &*self.0;
        let _current = inner.enter()?;
        let mut ptr: DevicePtr = 0;
        // SAFETY: a writable address; the stream is the caller's.
        let code = unsafe { (inner.driver.cuMemAllocAsync)(&mut ptr, bytes, stream.0) };
        inner.driver.check(code, "cuMemAllocAsync").map_err(|e| named(e, argument))?;
        Ok(DeviceBuffer { ptr, freeing: Some((self.clone(), Some(stream.0))) })
    }

    /// Whether kernels can be had for this device at all; the reason why not is for `Impl::refuse`.
    pub fn has_kernels(&self) -> Result<(), String> {
        image::obtainable()
    }

    /// Whether kernels of a file `*_sm90.cu` run here in place of their siblings.
    pub fn runs_hopper(&self, file: &str) -> Result<(), String> {
        image::obtainable_for(file, self.0.capability)?;
        match self.0.siblings.runs(file) {
            true => Ok(()),
            false => Err("is not proven on a card".into()),
        }
    }

    fn function(&self, kernel: &'static Kernel, log: &Log) -> Result<Arc<Function>> {
        let inner = &*self.0;
        if let Some(f) = inner.functions.read().unwrap_or_else(PoisonError::into_inner).get(kernel.name) {
            return Ok(f.clone());
        }
        let library = {
            let mut libraries = inner.libraries.lock().unwrap_or_else(PoisonError::into_inner);
            libraries.entry(kernel.file).or_default().clone()
        };
        let mut library = library.lock().unwrap_or_else(PoisonError::into_inner);
        let _relaxed = Relaxed::new(inner.driver);
        let handle = match &*library {
            Some(Library(handle)) => *handle,
            None => library.insert(self.load(kernel.file, log)?).0,
        };
        let name = CString::new(kernel.name).expect("names hold no NUL");
        let (mut entry, mut function) = (null_mut(), null_mut());
        // SAFETY: a loaded library, a C string, writable handles; the primary context is current. Asking for the function of this context
        // loads it now, so that the launch itself needs nothing that a stream capture forbids.
        unsafe {
            let code = (inner.driver.cuLibraryGetKernel)(&mut entry, handle, name.as_ptr());
            inner.driver.check(code, &format!("cuLibraryGetKernel({})", kernel.name))?;
            let code = (inner.driver.cuKernelGetFunction)(&mut function, entry);
            inner.driver.check(code, &format!("cuKernelGetFunction({})", kernel.name))?;
        }
        let function = Arc::new(Function { handle: function, shared: AtomicU32::new(DEFAULT_SHARED) });
        let mut functions = inner.functions.write().unwrap_or_else(PoisonError::into_inner);
        Ok(functions.entry(kernel.name).or_insert(function).clone())
    }

    /// The first image that the driver takes.
    fn load(&self, file: &'static str, log: &Log) -> Result<Library> {
        let inner = &*self.0;
        let arch = image::arch_name(inner.capability);
        let mut reasons = Vec::new();
        let mut native_code = 0;
        for image in image::roads(image::source(file), inner.capability, log) {
            let refused = match image {
                Err(reason) => reason,
                Ok(bytes) => {
                    let mut library = null_mut();
                    // SAFETY: an image that lives through the call, which copies it; no options.
                    let code = unsafe {
                        (inner.driver.cuLibraryLoadData)(
                            &mut library,
                            bytes.as_ptr().cast(),
                            null(),
                            null(),
                            0,
                            null(),
                            null(),
                            0,
                        )
                    };
                    match inner.driver.check(code, "cuLibraryLoadData") {
                        Ok(()) => return Ok(Library(library)),
                        Err(e) => {
                            native_code = code;
                            e.message
                        }
                    }
                }
            };
            log.write(Level::Debug, "cuda", &format!("{file} for {arch}: {refused}"));
            reasons.push(refused);
        }
        let status = if native_code == 0 { Status::Unsupported } else { Status::Device };
        let mut error =
            Error::new(status, "ctx", format!("no machine code of {file} for {arch}: {}", reasons.join("; ")));
        error.native_code = native_code;
        Err(error)
    }
}

fn named(mut error: Error, argument: &str) -> Error {
    error.argument = argument.into();
    error
}

/// A loaded kernel that may have so much shared memory. The device's context is current.
fn ready(ctx: &Context, device: &Device, kernel: &'static Kernel, shared: u32) -> Result<Arc<Function>> {
    let driver = device.0.driver;
    let function = device.function(kernel, &ctx.log)?;
    if shared > function.shared.load(Ordering::Acquire) {
        // SAFETY: a loaded function.
        let code =
            unsafe { (driver.cuFuncSetAttribute)(function.handle, attribute::MAX_DYNAMIC_SHARED, shared as c_int) };
        driver.check(code, &format!("cuFuncSetAttribute({}, {shared} bytes of shared memory)", kernel.name))?;
        function.shared.fetch_max(shared, Ordering::AcqRel);
    }
    Ok(function)
}

/// Loads kernels with so much shared memory that will be launched later: where a call changes its input in place, nothing that can be known before may
/// fail after.
pub fn prepare(ctx: &Context, kernels: &[(&'static Kernel, u32)]) -> Result<()> {
    let Backend::Cuda(device) = ctx.backend() else {
        return Err(Error::internal("a CUDA kernel was asked for on a CPU context"));
    };
    let _current = device.0.enter()?;
    kernels.iter().try_for_each(|&(kernel, shared)| ready(ctx, device, kernel, shared).map(|_| ()))
}

/// Put a kernel on the engine's stream.
///
/// # Safety
/// `params` describe memory as the kernel expects it, and `shape` is one the kernel is written for.
pub unsafe fn launch<P: LaunchParams>(
    ctx: &Context,
    kernel: &'static Kernel,
    shape: Shape,
    params: &P,
    stream: Stream,
) -> Result<()> {
    let Backend::Cuda(device) = ctx.backend() else {
        return Err(Error::internal("a CUDA kernel was launched on a CPU context"));
    };
    let inner = &*device.0;
    let driver = inner.driver;
    let _current = inner.enter()?;
    let function = ready(ctx, device, kernel, shape.shared)?;
    let arguments = [(params as *const P).cast_mut().cast::<c_void>()];
    let [x, y, z] = shape.grid;
    // SAFETY: a loaded function with the one argument that `P` is by contract; the driver copies it during the call.
    let code = unsafe {
        (driver.cuLaunchKernel)(
            function.handle,
            x,
            y,
            z,
            shape.threads,
            1,
            1,
            shape.shared,
            stream.0,
            arguments.as_ptr(),
            null(),
        )
    };
    driver.check(code, &format!("cuLaunchKernel({})", kernel.name))
}

/// Device memory, freed on drop.
#[derive(Debug)]
pub struct DeviceBuffer {
    ptr: DevicePtr,
    /// By which device, and in the order of which stream if any.
    freeing: Option<(Device, Option<Handle>)>,
}

// SAFETY: owned device memory with no thread affinity.
unsafe impl Send for DeviceBuffer {}
// SAFETY: an address; nothing is read through it here.
unsafe impl Sync for DeviceBuffer {}

impl DeviceBuffer {
    fn empty() -> Self {
        DeviceBuffer { ptr: 0, freeing: None }
    }

    pub fn as_ptr(&self) -> *mut u8 {
        std::ptr::without_provenance_mut(self.ptr as usize)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let Some((device, stream)) = &self.freeing else { return };
        // Without a context there is nothing to free in: the process or the driver is going away.
        let Ok(_current) = device.0.enter() else { return };
        // SAFETY: allocated by this device, in stream order exactly where it says so; nobody uses it any more.
        unsafe {
            match stream {
                Some(stream) => (device.0.driver.cuMemFreeAsync)(self.ptr, *stream),
                None => (device.0.driver.cuMemFree_v2)(self.ptr),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row a warp, four warps a block: grids of more than 2^16, 2^31 and 2^32 rows. What does not fit a grid, its blocks walk.
    #[test]
    fn grids_of_many_rows() {
        let grid = |items| Shape::strided(items, 4, 128, 0).grid;
        for (items, blocks) in [
            (0, 1),
            (1, 1),
            (4, 1),
            (5, 2),
            (65535 * 4 + 1, 65536),
            (1 << 32, 1 << 30),
            ((1 << 33) - 4, i32::MAX as u32),
            ((1 << 33) - 3, i32::MAX as u32),
            (1 << 40, i32::MAX as u32),
            (u64::MAX, i32::MAX as u32),
        ] {
            assert_eq!(grid(items), [blocks, 1, 1], "{items}");
        }
    }
}

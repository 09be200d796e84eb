//! The emulation as a test uses it: built once, a process a test, the fake driver's memory, streams and graphs, and a stream of random numbers.

#![allow(dead_code, reason = "each test uses its part")]

use std::ffi::{CString, c_int, c_long, c_void};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::ptr::null_mut;
use std::sync::OnceLock;

const CHILD: &str = "PAGEDKV_EMULATED_TEST";

fn build() -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_emu_plain");
    let mut command = Command::new("python3");
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/ctests/cuda_emu/build.py")).arg(&out);
    let output = command.output().expect("the emulation needs python3");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // A driver without NVRTC beside it.
    let only = out.join("driver-only");
    std::fs::create_dir_all(&only).unwrap();
    for name in ["libcuda.so.1", "libcuda.so"] {
        let _ = std::os::unix::fs::symlink(out.join("libcuda.so.1"), only.join(name));
    }
    out
}

/// The folder of the fake libraries.
pub fn emulation() -> &'static Path {
    if std::env::var_os(CHILD).is_some() { Path::new("") } else { plain() }
}

fn plain() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(build)
}

/// An empty folder of this test's own.
pub fn temporary(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}_{}", std::process::id()));
    if std::env::var_os(CHILD).is_none() {
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
    }
    path
}

pub fn in_child(test: &str) -> bool {
    std::env::var_os(CHILD).is_some_and(|name| name == test)
}

/// In the child process: runs `body`, gives `None`. Else starts the child (this test in a process of its own, the fake driver found first) and gives its output.
/// A relative LD_LIBRARY_PATH in `env` is a folder of the emulation's, an empty one leads past it.
pub fn child(test: &str, env: &[(&str, &str)], body: impl FnOnce()) -> Option<Output> {
    if in_child(test) {
        body();
        return None;
    }
    Some(start(test, plain(), env))
}

fn start(test: &str, libraries: &Path, env: &[(&str, &str)]) -> Output {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cache_{test}_{}", std::process::id()));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command.env(CHILD, test).env("LD_LIBRARY_PATH", libraries).env("PAGEDKV_CACHE_DIR", &cache);
    for &(name, value) in env {
        match name {
            "LD_LIBRARY_PATH" if !value.is_empty() => command.env(name, libraries.join(value)),
            _ => command.env(name, value),
        };
    }
    let output = command.output().unwrap();
    let _ = std::fs::remove_dir_all(cache);
    output
}

fn must_succeed(output: Output) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && stdout.contains("1 passed"), "{}\n{stdout}\n{stderr}", output.status);
}

/// `body` in a process of its own, on the emulation; it must succeed.
pub fn emulated(test: &str, env: &[(&str, &str)], body: impl FnOnce()) {
    if let Some(output) = child(test, env, body) {
        must_succeed(output);
    }
}

// ---- the fake driver ----

macro_rules! driver {
    ($library:literal: $($name:ident($($arg:ident: $ty:ty),*) -> $out:ty;)*) => { $(
        #[allow(non_snake_case, reason = "the driver's own names")]
        unsafe fn $name($($arg: $ty),*) -> $out {
            static ADDRESS: OnceLock<usize> = OnceLock::new();
            let address = *ADDRESS.get_or_init(|| symbol($library, stringify!($name)));
            // SAFETY: the function of that name has this signature.
            unsafe { std::mem::transmute::<usize, unsafe extern "C" fn($($ty),*) -> $out>(address)($($arg),*) }
        }
    )* };
}

fn symbol(library: &str, name: &str) -> usize {
    let (library, c_name) = (CString::new(library).unwrap(), CString::new(name).unwrap());
    // SAFETY: C strings; the library stays open.
    let address = unsafe { libc::dlsym(libc::dlopen(library.as_ptr(), libc::RTLD_NOW), c_name.as_ptr()) };
    assert!(!address.is_null(), "{name}");
    address.addr()
}

driver! { "libcuda.so.1":
    cuInit(flags: u32) -> c_int;
    cuDevicePrimaryCtxRetain(out: *mut *mut c_void, device: c_int) -> c_int;
    cuCtxPushCurrent_v2(context: *mut c_void) -> c_int;
    cuCtxPopCurrent_v2(out: *mut *mut c_void) -> c_int;
    cuCtxGetCurrent(out: *mut *mut c_void) -> c_int;
    cuMemAlloc_v2(out: *mut u64, size: usize) -> c_int;
    cuMemFree_v2(p: u64) -> c_int;
    cuMemcpyHtoD_v2(to: u64, from: *const c_void, size: usize) -> c_int;
    cuMemcpyDtoH_v2(to: *mut c_void, from: u64, size: usize) -> c_int;
    cuStreamCreate(out: *mut *mut c_void, flags: u32) -> c_int;
    cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_int) -> c_int;
    cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) -> c_int;
    cuGraphGetNodes(graph: *mut c_void, nodes: *mut *mut c_void, count: *mut usize) -> c_int;
    cuGraphInstantiateWithFlags(out: *mut *mut c_void, graph: *mut c_void, flags: u64) -> c_int;
    cuGraphLaunch(graph: *mut c_void, stream: *mut c_void) -> c_int;
    pkv_emu_count(name: *const i8) -> c_long;
    pkv_emu_inject(spec: *const i8) -> ();
}
driver! { "libnvrtc.so.13":
    pkv_emu_nvrtc_count() -> c_long;
}

/// Calls of a driver function so far, or one of the fake driver's own counts.
pub fn count(name: &str) -> i64 {
    let name = CString::new(name).unwrap();
    // SAFETY: a C string.
    unsafe { pkv_emu_count(name.as_ptr()) }
}

pub fn compilations() -> i64 {
    // SAFETY: no arguments.
    unsafe { pkv_emu_nvrtc_count() }
}

/// `name=n:code`: the n-th call from now on fails.
pub fn inject(spec: &str) {
    let spec = CString::new(spec).unwrap();
    // SAFETY: a C string.
    unsafe { pkv_emu_inject(spec.as_ptr()) }
}

fn context() -> *mut c_void {
    static CONTEXT: OnceLock<usize> = OnceLock::new();
    let address = *CONTEXT.get_or_init(|| {
        let mut out = null_mut();
        // SAFETY: a writable handle.
        unsafe {
            assert_eq!(cuInit(0), 0);
            assert_eq!(cuDevicePrimaryCtxRetain(&mut out, 0), 0);
        }
        out.expose_provenance()
    });
    std::ptr::with_exposed_provenance_mut(address)
}

/// With the device's context current, as an engine has it.
fn within<T>(f: impl FnOnce() -> T) -> T {
    // SAFETY: a retained context; popped again.
    unsafe {
        assert_eq!(cuCtxPushCurrent_v2(context()), 0);
        let out = f();
        assert_eq!(cuCtxPopCurrent_v2(&mut null_mut()), 0);
        out
    }
}

pub fn get_current() -> *mut c_void {
    let mut out = null_mut();
    // SAFETY: a writable handle.
    assert_eq!(unsafe { cuCtxGetCurrent(&mut out) }, 0);
    out
}

/// Makes the device's context current for this thread, or leaves none; gives what is current then.
pub fn set_current(on: bool) -> *mut c_void {
    if on {
        // SAFETY: a retained context.
        assert_eq!(unsafe { cuCtxPushCurrent_v2(context()) }, 0);
    }
    get_current()
}

thread_local! {
    static MEMORY: std::cell::RefCell<Vec<u64>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Frees all `DeviceMemory` of this thread, which is not used after it.
pub fn release_memory() {
    // SAFETY: allocated by `DeviceMemory::of`, freed once.
    within(|| MEMORY.take().into_iter().for_each(|p| assert_eq!(unsafe { cuMemFree_v2(p) }, 0)));
}

#[derive(Clone, Copy)]
pub struct DeviceMemory {
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    pub fn of(bytes: &[u8]) -> Self {
        let mut address = 0;
        // SAFETY: a writable address.
        within(|| assert_eq!(unsafe { cuMemAlloc_v2(&mut address, bytes.len()) }, 0));
        MEMORY.with_borrow_mut(|m| m.push(address));
        let memory = DeviceMemory { address, bytes: bytes.len() };
        memory.upload(bytes);
        memory
    }

    pub fn of_u32(values: &[u32]) -> Self {
        Self::of(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn upload(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        // SAFETY: both sides have this many bytes.
        within(|| assert_eq!(unsafe { cuMemcpyHtoD_v2(self.address, bytes.as_ptr().cast(), bytes.len()) }, 0));
    }

    pub fn upload_u32(&self, values: &[u32]) {
        self.upload(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>());
    }

    pub fn ptr(&self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.address as usize)
    }
}

pub fn download(from: *mut c_void, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    // SAFETY: both sides have this many bytes.
    within(|| assert_eq!(unsafe { cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), from.addr() as u64, bytes) }, 0));
    out
}

#[derive(Clone, Copy)]
pub struct Stream(pub *mut c_void);

impl Stream {
    pub const NULL: Stream = Stream(null_mut());

    pub fn new() -> Self {
        let mut out = null_mut();
        // SAFETY: a writable handle.
        within(|| assert_eq!(unsafe { cuStreamCreate(&mut out, 1) }, 0));
        Stream(out)
    }

    /// In global mode: no thread may make a call that synchronises or allocates.
    pub fn begin_capture(&self) {
        // SAFETY: a live stream.
        assert_eq!(unsafe { cuStreamBeginCapture_v2(self.0, 0) }, 0);
    }

    pub fn end_capture(&self) -> Graph {
        let (mut graph, mut ready) = (null_mut(), null_mut());
        // SAFETY: a live stream, writable handles.
        unsafe {
            assert_eq!(cuStreamEndCapture(self.0, &mut graph), 0, "the capture was invalidated");
            assert_eq!(cuGraphInstantiateWithFlags(&mut ready, graph, 0), 0);
        }
        Graph { graph, ready }
    }
}

pub struct Graph {
    graph: *mut c_void,
    ready: *mut c_void,
}

impl Graph {
    pub fn nodes(&self) -> usize {
        let mut count = 0;
        // SAFETY: a live graph, a writable count.
        assert_eq!(unsafe { cuGraphGetNodes(self.graph, null_mut(), &mut count) }, 0);
        count
    }

    pub fn launch(&self) {
        // SAFETY: a live graph.
        assert_eq!(unsafe { cuGraphLaunch(self.ready, null_mut()) }, 0);
    }
}

/// xorshift64*: the same numbers on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e3779b97f4a7c15);
        let mut x = self.0;
        x ^= x >> 30;
        x = x.wrapping_mul(0xbf58476d1ce4e5b9);
        x ^= x >> 27;
        x = x.wrapping_mul(0x94d049bb133111eb);
        x ^ x >> 31
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// Mostly around 1, now and then tiny, huge, zero.
    pub fn value(&mut self) -> f32 {
        let unit = (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        match self.below(40) {
            0 => unit * 1e-4,
            1 => unit * 300.0,
            2 => 0.0,
            _ => unit * 2.0,
        }
    }
}

//! The context: which device, which threads, which instruction set, and where the log goes.

use crate::abi::context as abi;
use crate::abi::types::pkv_stream;
use crate::cpu::isa::Isa;
use crate::cpu::parallel::Threads;
use crate::error::{Error, Result, Status};
use crate::view::Mode;
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub enum Backend {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda(crate::cuda::Device),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(i32)]
pub enum Level {
    Error = 1,
    Warn = 2,
    Info = 3,
    Debug = 4,
}

/// The engine's log callback.
#[derive(Debug)]
pub struct Log {
    level: i32,
    sink: abi::pkv_log_fn,
    user: *mut c_void,
}

// SAFETY: the header demands a callback that any thread may call, also several at once.
unsafe impl Send for Log {}
// SAFETY: as above.
unsafe impl Sync for Log {}

impl Log {
    pub fn enabled(&self, level: Level) -> bool {
        self.sink.is_some() && level as i32 <= self.level
    }

    pub fn write(&self, level: Level, target: &str, message: &str) {
        let Some(sink) = self.sink.filter(|_| self.enabled(level)) else { return };
        let text = |s: &str| CString::new(s.replace('\0', " ")).unwrap_or_default();
        let (target, message) = (text(target), text(message));
        // SAFETY: the engine's callback, by the header's contract; both texts live through the call.
        unsafe { sink(self.user, level as i32, target.as_ptr(), message.as_ptr()) };
    }
}

#[derive(Debug)]
pub struct Context {
    id: u64,
    pub log: Log,
    pub isa: Isa,
    pub threads: Threads,
    backend: Backend,
}

impl Context {
    pub fn new(options: Option<&abi::pkv_context_options>) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let defaults = abi::pkv_context_options {
            struct_size: size_of::<abi::pkv_context_options>(),
            abi_version: crate::abi::version::PKV_ABI_VERSION,
            backend: abi::PKV_BACKEND_CPU,
            device: 0,
            log_level: abi::PKV_LOG_OFF,
            log: None,
            log_user: std::ptr::null_mut(),
            parallel_for: None,
            parallel_user: std::ptr::null_mut(),
            num_threads: 0,
            reserved: 0,
        };
        let o = options.unwrap_or(&defaults);
        if o.abi_version != crate::abi::version::PKV_ABI_VERSION {
            let message = format!("is {}, this library speaks {}", o.abi_version, crate::abi::version::PKV_ABI_VERSION);
            return Err(Error::new(Status::Abi, "options.abi_version", message));
        }
        if !(abi::PKV_LOG_OFF..=abi::PKV_LOG_DEBUG).contains(&o.log_level) {
            return Err(Error::value("options.log_level", format!("is {}, must be 0 (off) to 4 (debug)", o.log_level)));
        }
        if o.reserved != 0 {
            return Err(Error::value("options.reserved", "must be 0"));
        }
        let log = Log { level: o.log_level, sink: o.log, user: o.log_user };
        let isa = Isa::detect()?;
        let backend = match o.backend {
            abi::PKV_BACKEND_CPU if o.device != 0 => {
                return Err(Error::value("options.device", format!("is {}, must be 0 on CPU", o.device)));
            }
            abi::PKV_BACKEND_CPU => Backend::Cpu,
            #[cfg(feature = "cuda")]
            abi::PKV_BACKEND_CUDA => Backend::Cuda(crate::cuda::Device::open(o.device, &log)?),
            #[cfg(not(feature = "cuda"))]
            abi::PKV_BACKEND_CUDA => {
                return Err(Error::unsupported("options.backend", "this build has no CUDA backend (feature `cuda`)"));
            }
            other => return Err(Error::value("options.backend", format!("is {other}, must be 0 (CPU) or 1 (CUDA)"))),
        };
        let threads = match (o.parallel_for, &backend) {
            (Some(f), _) => Threads::engine(f, o.parallel_user, o.num_threads)?,
            (None, Backend::Cpu) => Threads::own(o.num_threads)?,
            #[cfg(feature = "cuda")]
            (None, Backend::Cuda(_)) => Threads::own(1)?,
        };
        let ctx = Context { id: NEXT.fetch_add(1, Ordering::Relaxed), log, isa, threads, backend };
        if ctx.log.enabled(Level::Info) {
            let message = format!("{}; {} threads", crate::build_info().to_string_lossy(), ctx.num_threads());
            ctx.log.write(Level::Info, "context", &message);
        }
        Ok(ctx)
    }

    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    pub fn num_threads(&self) -> usize {
        self.threads.count()
    }

    /// How a call on this context sees its pointers.
    pub fn call_mode(&self) -> Mode {
        match self.backend {
            Backend::Cpu => Mode::Host,
            #[cfg(feature = "cuda")]
            Backend::Cuda(_) => Mode::Device,
        }
    }

    pub fn check_stream(&self, stream: pkv_stream) -> Result<()> {
        if matches!(self.backend, Backend::Cpu) && !stream.native.is_null() {
            return Err(Error::value("stream", "is not {NULL}, a CPU context has no streams"));
        }
        Ok(())
    }

    pub fn check_owns(&self, context_id: u64, name: &str) -> Result<()> {
        if context_id != self.id {
            return Err(Error::value(name, "was made with another context"));
        }
        Ok(())
    }
}

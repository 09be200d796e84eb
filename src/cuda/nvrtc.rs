//! NVRTC, found at run time: CUDA C++ to machine code for one architecture.

use super::driver::Library;
use crate::panics;
use cudarc::nvrtc::sys;
use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::catch_unwind;
use std::sync::OnceLock;

type Program = *mut c_void;

macro_rules! nvrtc {
    ($($name:ident($($argument:ty),*);)*) => {
        #[derive(Debug)]
        #[allow(non_snake_case, reason = "NVRTC's own names")]
        pub struct Nvrtc {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
            /// Major and minor.
            pub version: (i32, i32),
        }

        impl Nvrtc {
            /// # Safety
            /// `library` is NVRTC.
            unsafe fn resolve(library: &Library) -> Result<Self, String> {
                Ok(Nvrtc {
                    $(
                        // SAFETY: NVRTC's functions have these signatures since CUDA 11.1.
                        $name: unsafe { library.symbol(concat!(stringify!($name), "\0"))? },
                    )*
                    version: (0, 0),
                })
            }
        }
    };
}

nvrtc! {
    nvrtcVersion(*mut c_int, *mut c_int);
    nvrtcCreateProgram(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    nvrtcCompileProgram(Program, c_int, *const *const c_char);
    nvrtcGetCUBINSize(Program, *mut usize);
    nvrtcGetCUBIN(Program, *mut c_char);
    nvrtcGetProgramLogSize(Program, *mut usize);
    nvrtcGetProgramLog(Program, *mut c_char);
    nvrtcDestroyProgram(*mut Program);
}

fn c_strings<'a>(texts: impl IntoIterator<Item = &'a str>) -> Vec<CString> {
    texts.into_iter().map(|t| CString::new(t).expect("sources and options hold no NUL")).collect()
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|t| t.as_ptr()).collect()
}

impl Nvrtc {
    /// The NVRTC of this process, or why there is none.
    pub fn get() -> Result<&'static Nvrtc, &'static str> {
        static NVRTC: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
        NVRTC.get_or_init(Self::open).as_ref().map_err(String::as_str)
    }

    fn open() -> Result<Self, String> {
        // SAFETY: opening NVRTC runs its initialisers, nothing more.
        let opened =
            panics::quiet(|| catch_unwind(|| unsafe { sys::is_culib_present() }.then(|| unsafe { sys::culib() })));
        let Ok(Some(culib)) = opened else { return Err("no NVRTC (libnvrtc) was found".into()) };
        let library = Library(Box::new(|name| {
            // SAFETY: only the address is taken; whoever uses it knows the type.
            unsafe { culib.get::<*mut c_void>(name.to_bytes_with_nul()) }.ok().map(|symbol| *symbol)
        }));
        // SAFETY: the library is NVRTC.
        let mut nvrtc = unsafe { Self::resolve(&library) }.map_err(|e| format!("NVRTC {e}: it is too old"))?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two writable integers.
        unsafe { (nvrtc.nvrtcVersion)(&mut major, &mut minor) };
        nvrtc.version = (major, minor);
        Ok(nvrtc)
    }

    /// `headers` by the names used in `#include`. The error is the compiler's log.
    pub fn compile(
        &self,
        file: &str,
        text: &str,
        headers: &[(&str, &str)],
        options: &[&str],
    ) -> Result<Vec<u8>, String> {
        let own = c_strings([text, file]);
        let names = c_strings(headers.iter().map(|(name, _)| *name));
        let texts = c_strings(headers.iter().map(|(_, text)| *text));
        let options = c_strings(options.iter().copied());
        let (names, texts, options) = (pointers(&names), pointers(&texts), pointers(&options));
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: C strings and arrays of them that outlive the program, with their true counts.
        let created = unsafe {
            (self.nvrtcCreateProgram)(
                &mut program,
                own[0].as_ptr(),
                own[1].as_ptr(),
                names.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        if created != 0 {
            return Err(format!("nvrtcCreateProgram failed ({created})"));
        }
        // SAFETY: a live program, with as many options as said.
        let compiled = unsafe { (self.nvrtcCompileProgram)(program, options.len() as c_int, options.as_ptr()) };
        let result = if compiled == 0 {
            // SAFETY: a live program.
            unsafe { self.fetch(program, self.nvrtcGetCUBINSize, self.nvrtcGetCUBIN) }
        } else {
            // SAFETY: a live program.
            let log = unsafe { self.fetch(program, self.nvrtcGetProgramLogSize, self.nvrtcGetProgramLog) };
            let log = log.unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            Err(format!("NVRTC cannot compile {file} ({compiled}): {}", log.trim_end_matches(['\0', '\n'])))
        };
        // SAFETY: a live program, not used any more.
        unsafe { (self.nvrtcDestroyProgram)(&mut program) };
        result
    }

    /// # Safety
    /// A live program.
    unsafe fn fetch(
        &self,
        program: Program,
        size_of: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, String> {
        let mut size = 0;
        // SAFETY: a live program by contract; the buffer has the size that NVRTC asked for.
        unsafe {
            let code = size_of(program, &mut size);
            if code != 0 || size == 0 {
                return Err(format!("NVRTC gave no result ({code})"));
            }
            let mut bytes = vec![0u8; size];
            match get(program, bytes.as_mut_ptr().cast()) {
                0 => Ok(bytes),
                code => Err(format!("NVRTC gave no result ({code})")),
            }
        }
    }
}

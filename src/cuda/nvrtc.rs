//! NVRTC, found at run time: CUDA C++ to machine code for one architecture.
//!
//! It is looked for where `PAGEDKV_NVRTC` says (the library or its folder), and nowhere else if that is set; else by the names that the loader
//! knows, which include a copy that the process has open already; else in `lib64` and `lib` of `$CUDA_HOME`, `$CUDA_PATH` and `/usr/local/cuda`.

use super::driver::Library;
use crate::panics;
use cudarc::nvrtc::sys;
use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
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
            /// Architectures it compiles for, as major * 10 + minor.
            archs: Vec<c_int>,
        }

        impl Nvrtc {
            /// # Safety
            /// `library` is NVRTC.
            unsafe fn resolve(library: &Library) -> Result<Self, String> {
                Ok(Nvrtc {
                    $(
                        // SAFETY: NVRTC's functions have these signatures since CUDA 11.2.
                        $name: unsafe { library.symbol(concat!(stringify!($name), "\0"))? },
                    )*
                    version: (0, 0),
                    archs: Vec::new(),
                })
            }
        }
    };
}

nvrtc! {
    nvrtcVersion(*mut c_int, *mut c_int);
    nvrtcCreateProgram(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    nvrtcCompileProgram(Program, c_int, *const *const c_char);
    nvrtcGetNumSupportedArchs(*mut c_int);
    nvrtcGetSupportedArchs(*mut c_int);
    nvrtcGetPTXSize(Program, *mut usize);
    nvrtcGetPTX(Program, *mut c_char);
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
        let library = Self::find()?;
        // SAFETY: the library is NVRTC.
        let mut nvrtc = unsafe { Self::resolve(&library) }.map_err(|e| format!("NVRTC {e}: it is too old"))?;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: writable integers, then an array of as many as NVRTC said.
        unsafe {
            (nvrtc.nvrtcVersion)(&mut major, &mut minor);
            (nvrtc.nvrtcGetNumSupportedArchs)(&mut count);
            nvrtc.archs = vec![0; count.max(0) as usize];
            (nvrtc.nvrtcGetSupportedArchs)(nvrtc.archs.as_mut_ptr());
        }
        nvrtc.version = (major, minor);
        Ok(nvrtc)
    }

    fn find() -> Result<Library, String> {
        let set = |name| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        if let Some(path) = set("PAGEDKV_NVRTC") {
            return open_at(&path).map_err(|e| format!("no NVRTC at PAGEDKV_NVRTC={}: {e}", path.display()));
        }
        // SAFETY: opening NVRTC runs its initialisers, nothing more.
        let opened =
            panics::quiet(|| catch_unwind(|| unsafe { sys::is_culib_present() }.then(|| unsafe { sys::culib() })));
        if let Ok(Some(culib)) = opened {
            return Ok(Library(Box::new(|name| {
                // SAFETY: only the address is taken; whoever uses it knows the type.
                unsafe { culib.get::<*mut c_void>(name.to_bytes_with_nul()) }.ok().map(|symbol| *symbol)
            })));
        }
        let homes = [set("CUDA_HOME"), set("CUDA_PATH"), Some("/usr/local/cuda".into())];
        let folders = homes.into_iter().flatten().flat_map(|home| ["lib64", "lib"].map(|lib| home.join(lib)));
        folders
            .filter_map(|folder| open_at(&folder).ok())
            .next()
            .ok_or_else(|| "no NVRTC (libnvrtc) was found; PAGEDKV_NVRTC may name it or its folder".into())
    }

    /// Whether it compiles for a compute capability; one newer than itself it does not.
    pub fn knows(&self, (major, minor): (i32, i32)) -> bool {
        self.archs.contains(&(major * 10 + minor))
    }

    /// `headers` by the names used in `#include`; `arch` is `sm_*` for machine code, `compute_*` for PTX. With the compiler's remarks, which are
    /// the error where it fails.
    pub fn compile(
        &self,
        file: &str,
        text: &str,
        headers: &[(&str, &str)],
        arch: &str,
        options: &[&str],
    ) -> Result<(Vec<u8>, String), String> {
        let own = c_strings([text, file]);
        let gpu = format!("--gpu-architecture={arch}");
        let names = c_strings(headers.iter().map(|(name, _)| *name));
        let texts = c_strings(headers.iter().map(|(_, text)| *text));
        let options = c_strings(std::iter::once(gpu.as_str()).chain(options.iter().copied()));
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
        // SAFETY: a live program.
        let log = unsafe { self.fetch(program, self.nvrtcGetProgramLogSize, self.nvrtcGetProgramLog) };
        let log = String::from_utf8_lossy(&log.unwrap_or_default()).trim_end_matches(['\0', '\n']).to_owned();
        let result = match compiled {
            // SAFETY: a live program.
            0 if arch.starts_with("sm_") => unsafe { self.fetch(program, self.nvrtcGetCUBINSize, self.nvrtcGetCUBIN) },
            // SAFETY: a live program.
            0 => unsafe { self.fetch(program, self.nvrtcGetPTXSize, self.nvrtcGetPTX) },
            code => Err(format!("NVRTC cannot compile {file} ({code}): {log}")),
        }
        .map(|image| (image, log));
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

/// NVRTC as a file, or as one of its usual names in a folder. It opens its library of builtins by name when it compiles; in the folder of a
/// package nobody would find that, so it is opened before.
fn open_at(path: &Path) -> Result<Library, String> {
    let named = |stem: &str, folder: &Path| {
        let mut files: Vec<PathBuf> = folder
            .read_dir()
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|file| {
                let name = file.file_name().unwrap_or_default().as_bytes();
                let versions = name.strip_prefix(stem.as_bytes()).and_then(|rest| rest.strip_prefix(b".so"));
                versions.is_some_and(|v| v.iter().all(|c| matches!(c, b'.' | b'0'..=b'9')))
            })
            .collect();
        files.sort();
        files
    };
    let (file, folder) = match path.is_dir() {
        true => (named("libnvrtc", path).pop().ok_or("the folder has no libnvrtc.so")?, path),
        false => (path.to_owned(), path.parent().unwrap_or(Path::new("."))),
    };
    for builtins in named("libnvrtc-builtins", folder) {
        let _ = dlopen(&builtins);
    }
    let handle = dlopen(&file)?.as_ptr().expose_provenance();
    Ok(Library(Box::new(move |name| {
        // SAFETY: a handle that stays open, a C string.
        let address = unsafe { libc::dlsym(std::ptr::with_exposed_provenance_mut(handle), name.as_ptr()) };
        (!address.is_null()).then_some(address)
    })))
}

fn dlopen(path: &Path) -> Result<NonNull<c_void>, String> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
    // SAFETY: a C string; opening NVRTC runs its initialisers, nothing more; the error is a C string of this thread's.
    unsafe {
        NonNull::new(libc::dlopen(name.as_ptr(), libc::RTLD_NOW)).ok_or_else(|| {
            let error = libc::dlerror();
            if error.is_null() { "not opened".into() } else { CStr::from_ptr(error).to_string_lossy().into_owned() }
        })
    }
}

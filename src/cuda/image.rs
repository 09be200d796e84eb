//! Machine code of a kernel file for one architecture, from the first road that leads there: a fatbin inside the library, what an earlier
//! process left on disk, NVRTC on the source inside the library. For a card that NVRTC is too old to know, PTX of the lowest architecture,
//! which the driver translates (a fatbin carries the same).

use super::nvrtc::Nvrtc;
use crate::context::{Level, Log};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

pub struct Source {
    pub file: &'static str,
    pub text: &'static str,
    pub fatbin: Option<&'static [u8]>,
    /// The one architecture that the file is for, if it is not for all.
    pub only: Option<&'static str>,
}

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

pub fn source(file: &str) -> &'static Source {
    SOURCES.iter().find(|s| s.file == file).expect("kernels/ holds the file")
}

/// The file of that name, if it is not for every architecture.
pub fn file_for_one_architecture(name: &str) -> Option<&'static str> {
    SOURCES.iter().find(|s| s.file == name && s.only.is_some()).map(|s| s.file)
}

/// Whether the library can come by machine code of the files for every architecture at all.
pub fn obtainable() -> Result<(), String> {
    obtainable_all(SOURCES.iter().filter(|s| s.only.is_none()))
}

/// The same for one file, which may be for another architecture.
pub fn obtainable_for(file: &str, capability: (i32, i32)) -> Result<(), String> {
    let source = source(file);
    match source.only {
        Some(only) if only != arch_name(capability) => Err(format!("is for {only} alone")),
        _ => obtainable_all(std::iter::once(source)),
    }
}

fn obtainable_all<'a>(mut sources: impl Iterator<Item = &'a Source>) -> Result<(), String> {
    if sources.all(|s| s.fatbin.is_some()) {
        return Ok(());
    }
    Nvrtc::get().map(|_| ()).map_err(|e| format!("this build carries no machine code (feature cuda-fatbin), and {e}"))
}

/// As NVRTC and nvcc call it; from Hopper on with the features of that one architecture.
pub fn arch_name((major, minor): (i32, i32)) -> String {
    let suffix = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{suffix}")
}

/// What NVRTC is asked for: the card's own machine code, else the PTX that every card runs.
fn target(nvrtc: &Nvrtc, capability: (i32, i32)) -> String {
    if nvrtc.knows(capability) { arch_name(capability) } else { LOWEST_PTX.to_owned() }
}
const LOWEST_PTX: &str = "compute_80";

/// The images to try, in order. Loading one may fail (a fatbin without this architecture, a damaged file), so the caller goes on until
/// the driver takes one.
pub fn roads(source: &Source, capability: (i32, i32), log: &Log) -> impl Iterator<Item = Result<Vec<u8>, String>> {
    let mut step = 0;
    std::iter::from_fn(move || {
        loop {
            step += 1;
            let image = match step {
                1 => source.fatbin.map(|bytes| Ok(bytes.to_vec())),
                2 => cached(source, capability).map(Ok),
                3 => Some(compiled(source, capability, log)),
                _ => return None,
            };
            if image.is_some() {
                return image;
            }
        }
    })
}

fn cached(source: &Source, capability: (i32, i32)) -> Option<Vec<u8>> {
    let nvrtc = Nvrtc::get().ok()?;
    let path = cache_directory()?.join(cache_name(source, &target(nvrtc, capability), nvrtc.version));
    fs::read(path).ok().filter(|bytes| !bytes.is_empty())
}

fn compiled(source: &Source, capability: (i32, i32), log: &Log) -> Result<Vec<u8>, String> {
    let nvrtc = Nvrtc::get()?;
    let arch = &target(nvrtc, capability);
    let (image, remarks) = nvrtc.compile(source.file, source.text, HEADERS, arch, &OPTIONS)?;
    if !remarks.is_empty() {
        log.write(Level::Debug, "cuda", &format!("NVRTC on {} for {arch}: {remarks}", source.file));
    }
    if let Some(directory) = cache_directory() {
        let path = directory.join(cache_name(source, arch, nvrtc.version));
        if let Err(e) = write_whole(&path, &image) {
            log.write(Level::Debug, "cuda", &format!("{} is not cached: {e}", path.display()));
        }
    }
    Ok(image)
}

/// What a kernel's rounding depends on: see `kernels/device/common.cuh`.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

fn cache_directory() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("PAGEDKV_CACHE_DIR")
        .or_else(|| Some(set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?.join("pagedkv")))
}

/// Everything that the machine code depends on, hashed.
fn cache_name(source: &Source, arch: &str, (major, minor): (i32, i32)) -> String {
    // FNV-1a in 128 bits: stable between processes and builds, which the standard library's hasher is not.
    let mut hash: u128 = 0x6c62272e07bb014262b821756295c58d;
    let mut add = |text: &str| {
        for byte in text.bytes().chain([0]) {
            hash = (hash ^ u128::from(byte)).wrapping_mul(0x0000000001000000000000000000013b);
        }
    };
    add(source.text);
    HEADERS.iter().for_each(|(name, text)| [name, text].into_iter().for_each(|t| add(t)));
    OPTIONS.into_iter().for_each(&mut add);
    let stem = source.file.trim_end_matches(".cu");
    let kind = if arch.starts_with("sm_") { "cubin" } else { "ptx" };
    format!("{stem}-{arch}-nvrtc{major}.{minor}-{hash:032x}.{kind}")
}

/// Readers see the whole file or none, whatever other processes do: written beside, then renamed.
fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let directory = path.parent().expect("a file in the cache directory");
    fs::create_dir_all(directory)?;
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let partial = path.with_extension(format!("{}.{serial}.partial", std::process::id()));
    let written = fs::File::create_new(&partial).and_then(|mut f| f.write_all(bytes));
    let done = written.and_then(|()| fs::rename(&partial, path));
    if done.is_err() {
        let _ = fs::remove_file(&partial);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_include_is_carried() {
        let texts = SOURCES.iter().map(|s| s.text).chain(HEADERS.iter().map(|(_, text)| *text));
        for line in texts.flat_map(str::lines).filter_map(|l| l.trim().strip_prefix("#include \"")) {
            let name = line.split('"').next().unwrap();
            assert!(name == "cuda_emu.h" || HEADERS.iter().any(|(n, _)| *n == name), "{name}");
        }
    }

    #[test]
    fn the_key_depends_on_everything() {
        let base = Source { file: "a.cu", text: "x", fatbin: None, only: None };
        let other = Source { file: "a.cu", text: "y", fatbin: None, only: None };
        let names = [
            cache_name(&base, "sm_80", (13, 0)),
            cache_name(&other, "sm_80", (13, 0)),
            cache_name(&base, "sm_89", (13, 0)),
            cache_name(&base, "sm_80", (12, 8)),
        ];
        assert!((0..4).all(|i| (0..i).all(|j| names[i] != names[j])), "{names:?}");
    }

    /// What NVRTC says against a source: that it does not compile, that a kernel spills or has a stack frame, that its wgmma wait for each other,
    /// a warning.
    fn fault(nvrtc: &Nvrtc, file: &str, text: &str, arch: &str) -> Option<String> {
        let options = [&OPTIONS[..], &["--ptxas-options=-v"]].concat();
        match nvrtc.compile(file, text, HEADERS, arch, &options) {
            Err(e) => Some(e),
            Ok((_, log)) => {
                let entries = log.matches("Compiling entry function").count();
                let clean = log.matches(" 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads").count();
                let kernels = entries > 0 || arch.starts_with("compute_");
                let slow = log.contains("Potential Performance Loss"); // wgmma one by one
                (!kernels || clean != entries || slow || log.contains("warning")).then_some(log)
            }
        }
    }

    /// Every kernel through the real NVRTC that `PAGEDKV_NVRTC` names, as `compiled` calls it, for the architectures in `ARCHS` (and the PTX);
    /// spills, stack frames and warnings fail.
    #[test]
    #[ignore = "needs NVRTC, and minutes; `run.py check` runs it"]
    fn nvrtc_takes_every_kernel() {
        let archs = std::env::var("ARCHS").unwrap_or("sm_80 sm_89 sm_90a sm_100a sm_120a".into());
        let nvrtc = Nvrtc::get().unwrap();
        // That each kind would be seen: a frame for an array with run-time indices; sums that no 32 registers hold; a warning.
        for (planted, seen) in [
            (
                "(int *x) { int a[64]; for (int i = 0; i < 64; i++) a[x[i] & 63] = i; x[0] = a[x[1] & 63]; }",
                "bytes stack frame",
            ),
            (
                "(float *x) { float a[80]; \
                 _Pragma(\"unroll\") for (int i = 0; i < 80; i++) a[i] = x[i * 64 + threadIdx.x]; __syncthreads(); \
                 _Pragma(\"unroll\") for (int i = 0; i < 80; i++) x[i + threadIdx.x] = a[79 - i] * a[i]; }",
                "bytes spill stores",
            ),
            ("(int *x) { int never_used; }", "warning"),
        ] {
            let text = format!("extern \"C\" __global__ void __launch_bounds__(1024, 2) planted{planted}");
            let fault = fault(nvrtc, "planted.cu", &text, "sm_80").unwrap_or_default();
            assert!(fault.contains(seen), "{text}: {fault}");
        }
        let of_arch = |arch| SOURCES.iter().filter(move |s| s.only.is_none_or(|only| only == arch));
        let pairs: Vec<_> = archs.split(' ').flat_map(|arch| of_arch(arch).map(move |source| (source, arch))).collect();
        let next = AtomicU64::new(0);
        let faults = std::sync::Mutex::new(Vec::new());
        let work = || {
            while let Some((source, arch)) = pairs.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                let fault = fault(nvrtc, source.file, source.text, arch);
                faults.lock().unwrap().extend(fault.map(|text| format!("{} for {arch}: {text}", source.file)));
            }
        };
        std::thread::scope(|s| {
            for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
                s.spawn(work);
            }
        });
        let faults = faults.into_inner().unwrap();
        assert!(faults.is_empty(), "{}", faults.join("\n"));
        assert!(nvrtc.knows((9, 0)) && !nvrtc.knows((99, 0)));
        let (ptx, _) = nvrtc.compile(SOURCES[0].file, SOURCES[0].text, HEADERS, LOWEST_PTX, &OPTIONS).unwrap();
        assert!(String::from_utf8_lossy(&ptx).contains(".target sm_80"));
    }

    #[test]
    fn arch_names() {
        assert_eq!([(8, 0), (8, 9), (9, 0), (12, 0)].map(arch_name), ["sm_80", "sm_89", "sm_90a", "sm_120a"]);
    }
}

//! The CUDA kernels as the library carries them: their sources for NVRTC, and with the feature `cuda-fatbin` machine code for every
//! architecture, by nvcc (`$CUDA_HOME/bin/nvcc`, else `nvcc`). `PAGEDKV_CUDA_ARCHS="80 90a"` builds for those alone.

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Beside the machine code, PTX of the lowest for cards that are not listed. A file `*_sm90.cu` is for 90a alone.
const ARCHS: [&str; 5] = ["80", "89", "90a", "100a", "120a"];

/// Says in a few words how the library comes by its kernels.
pub fn embed_kernels() -> String {
    println!("cargo::rerun-if-changed=cmake/cuda.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return "no CUDA".to_owned();
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("kernels");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    println!("cargo::rerun-if-changed={}", root.display());
    let fatbin = env::var_os("CARGO_FEATURE_CUDA_FATBIN").is_some();

    let (mut headers, mut sources) = (String::new(), String::new());
    for path in files_of(&root) {
        println!("cargo::rerun-if-changed={}", path.display());
        let name = path.strip_prefix(&root).expect("below the root").to_str().expect("our own names").to_owned();
        match path.extension().and_then(|e| e.to_str()) {
            Some("cuh") => writeln!(headers, "    ({name:?}, include_str!({path:?})),").expect("to a string"),
            Some("cu") => {
                let only = name.ends_with("_sm90.cu").then_some("90a");
                let image = match fatbin.then(|| compile(&root, &path, &out, only)).flatten() {
                    Some(image) => format!("Some(include_bytes!({image:?}))"),
                    None => "None".to_owned(),
                };
                let only = only.map(|arch| format!("sm_{arch}"));
                let text = format!("include_str!({path:?})");
                writeln!(sources, "    Source {{ file: {name:?}, text: {text}, fatbin: {image}, only: {only:?} }},")
                    .expect("to a string");
            }
            _ => {}
        }
    }
    let text = format!(
        "pub static HEADERS: &[(&str, &str)] = &[\n{headers}];\npub static SOURCES: &[Source] = &[\n{sources}];\n"
    );
    fs::write(out.join("kernels.rs"), text).expect("OUT_DIR is writable");
    if fatbin { format!("CUDA sm_{}", chosen_archs().join(" sm_")) } else { "CUDA compiled at run time".to_owned() }
}

fn chosen_archs() -> Vec<String> {
    println!("cargo::rerun-if-env-changed=PAGEDKV_CUDA_ARCHS");
    let chosen = env::var("PAGEDKV_CUDA_ARCHS").unwrap_or_default();
    let archs: Vec<&str> = if chosen.is_empty() { ARCHS.to_vec() } else { chosen.split_whitespace().collect() };
    archs.into_iter().map(str::to_owned).collect()
}

fn files_of(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).expect("kernels/ is there") {
        let path = entry.expect("kernels/ is readable").path();
        if path.is_dir() { files.extend(files_of(&path)) } else { files.push(path) }
    }
    files.sort();
    files
}

/// Nothing where the file is for an architecture that is not built for.
fn compile(root: &Path, source: &Path, out: &Path, only: Option<&str>) -> Option<PathBuf> {
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    let mut archs = chosen_archs();
    archs.retain(|arch| only.is_none_or(|only| only == arch));
    if archs.is_empty() {
        return None;
    }
    let nvcc = env::var_os("CUDA_HOME").map_or_else(|| PathBuf::from("nvcc"), |home| Path::new(&home).join("bin/nvcc"));
    let image = out.join(source.with_extension("fatbin").file_name().expect("a file"));
    let mut command = Command::new(&nvcc);
    command.args(["-std=c++17", "--fmad=false", "--compress-mode=size", "--threads=0", "-fatbin", "-o"]).arg(&image);
    command.arg("-I").arg(root);
    if only.is_none() {
        command.arg(format!("-gencode=arch=compute_{0},code=compute_{0}", ARCHS[0]));
    }
    command.args(archs.iter().map(|arch| format!("-gencode=arch=compute_{arch},code=sm_{arch}"))).arg(source);
    let status = command.status().unwrap_or_else(|e| panic!("feature cuda-fatbin: cannot run {}: {e}", nvcc.display()));
    assert!(status.success(), "feature cuda-fatbin: {command:?} failed");
    Some(image)
}

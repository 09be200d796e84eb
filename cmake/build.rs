//! What Cargo.toml cannot state about the artefact: its SONAME, the commit it was built from, and the CUDA kernels inside it.
//!
//! rustc already hands the linker a version script that keeps everything but the `#[no_mangle]` functions local, and GNU ld takes only
//! one anonymous script, so there is no symbol map of our own. That nothing but `pkv_*` leaves the library is a test
//! (`cmake/exports.txt`), not a belief.

use std::env;
use std::process::Command;

mod cuda;

fn main() {
    let cuda = cuda::embed_kernels();
    println!("cargo::rerun-if-changed=cmake/build.rs");

    // The SONAME carries the major version: what breaks the ABI changes the name that programs ask the loader for.
    if env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        let major = env::var("CARGO_PKG_VERSION_MAJOR").expect("cargo sets it");
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpagedkv.so.{major}");
    }

    // Part of `pkv_build_info`; a source archive has no git directory.
    let commit = git(&["describe", "--always", "--dirty", "--match=v*"]).unwrap_or("no git".to_owned());
    let arch = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    println!("cargo::rustc-env=PAGEDKV_BUILD=({commit}), {arch}, {cuda}");
    for file in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--git-path", file]).filter(|path| std::path::Path::new(path).exists()) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

//! pagedkv: a paged KV-cache collection and the attention-side kernels that read and write it, behind a C ABI, on CPU and CUDA.
//!
//! # The way of one call
//!
//! ```text
//! include/pagedkv.h -> src/abi -----> src/op/X ------------> src/plan -----------> src/cpu/X  -> src/cpu/simd/*
//!    C caller          guard: panic   validate once:         first implementation  src/cuda/X -> kernels/X.cu
//!                      to status;     C params -> Args       that does not refuse;
//!                      read:                                 its workspace counted,
//!                      struct_size                           then carved
//! ```
//!
//! * [`abi`] is the only `extern "C"`. An export translates and calls. Its files are the sections of the header.
//! * [`error`] is the one error type, [`panics`] keeps panics inside, [`context`] is the device, its threads and the log.
//! * [`view`] is the one road from a caller's pointer to a slice, [`batch`] and [`collection`] know where a row of a sequence lies.
//! * [`op`] says what a kernel means: everything that can be wrong with a call is found there, before anything is written.
//! * [`plan`] takes the first implementation of an op that does not refuse; the plain reference comes last and never does.
//! * [`workspace`] counts and carves scratch with the same code, so that the query and the call cannot disagree.
//! * [`gguf`] is the table of weight encodings, [`weight`] a matrix of one, [`fp8`] and [`dtype`] the element types.
//! * [`cpu`] and [`cuda`] hold a file a kernel.
//!
//! # Where the next thing goes
//!
//! A GGUF format: one file and one row in [`gguf`], golden vectors. A kernel: `abi/x.rs`, `op/x.rs`, `cpu/x.rs`, a function in `cpu/reference.rs`, a C test.
//! An instruction set: a file in `cpu/simd`, its detection in `cpu/isa.rs`, a row in each kernel's list.

#![deny(unsafe_op_in_unsafe_fn)]

#[cfg(panic = "abort")]
compile_error!("pagedkv turns panics into PKV_ERR_INTERNAL: build it with panic = \"unwind\"");
#[cfg(not(target_pointer_width = "64"))]
compile_error!("the C ABI of pagedkv is laid out for 64-bit targets");

pub mod abi;
pub mod batch;
pub mod collection;
pub mod context;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod dtype;
pub mod error;
pub mod fp8;
pub mod gguf;
pub mod op;
pub mod panics;
pub mod plan;
pub mod view;
pub mod weight;
pub mod workspace;

use std::ffi::CStr;

use cpu::isa::{Isa, Level};

/// One line for bug reports. A constant for each instruction set: threads that ask first at the same time share nothing.
fn build_info() -> &'static CStr {
    macro_rules! line {
        ($isa:literal) => {
            const {
                let line = concat!(
                    concat!("pagedkv ", env!("CARGO_PKG_VERSION"), " ", env!("PAGEDKV_BUILD")),
                    concat!(", CPU kernels: ", $isa, "\0")
                );
                match CStr::from_bytes_with_nul(line.as_bytes()) {
                    Ok(line) => line,
                    Err(_) => panic!("the build's description holds a NUL"),
                }
            }
        };
    }
    match Isa::detect().map(Isa::level) {
        Ok(Level::Reference) => line!("reference"),
        Ok(Level::Scalar) => line!("scalar"),
        Ok(Level::Avx2) => line!("avx2"),
        Ok(Level::Avx512) => line!("avx512"),
        Err(_) => line!("unknown"),
    }
}

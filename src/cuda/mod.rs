//! The CUDA backend: the driver, loaded at run time, and a file a kernel.
//!
//! [`runtime`] is a device, its memory and its launches; [`image`] comes by a kernel's machine code; [`params`] are the launch structs. A
//! kernel's file says what it refuses, what scratch it takes, and fills the launch struct: which grid, which entry point, nothing of the arithmetic.

mod driver;
mod image;
pub mod kv_gather;
pub mod kv_store;
pub mod merge_attention;
pub mod mla_indexer_fp8;
pub mod mla_prefill_fp8;
pub mod mla_rope_rmsnorm_quantize;
mod nvrtc;
pub mod params;
mod runtime;

pub use runtime::{Device, DeviceBuffer, Kernel, LaunchParams, Shape, launch, prepare};

use crate::context::{Backend, Context};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::view::View;

/// Threads of a block, of the kernels that give a warp a row.
const THREADS: u32 = 128;
const WARPS: u64 = THREADS as u64 / 32;

/// Why nothing can run here, for `Impl::refuse`.
pub fn refuse_without_kernels(ctx: &Context) -> Result<(), String> {
    match ctx.backend() {
        Backend::Cuda(device) => device.has_kernels(),
        Backend::Cpu => Err("needs a CUDA context".into()),
    }
}

/// Environment variable that says which siblings of a kernel run where there are several, for tests and benchmarks: `mma`, which every
/// architecture has, `hopper`, those in the files `*_sm90.cu` wherever they can run, or the name of one such file, for that alone. Read when a
/// context is made.
const VARIABLE: &str = "PAGEDKV_CUDA_KERNELS";

/// Files of kernels for sm_90a that run without being asked for: those that a record of a card (`ctests/bench/record`) shows to be right, and
/// faster than their siblings.
const PROVEN: &[&str] = &[];

/// What [`VARIABLE`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Siblings {
    Proven,
    Mma,
    Hopper,
    HopperFile(&'static str),
}

impl Siblings {
    fn chosen() -> Result<Self> {
        match std::env::var(VARIABLE).as_deref() {
            Err(_) => Ok(Siblings::Proven),
            Ok("mma") => Ok(Siblings::Mma),
            Ok("hopper") => Ok(Siblings::Hopper),
            Ok(other) => image::file_for_one_architecture(other).map(Siblings::HopperFile).ok_or_else(|| {
                Error::value(VARIABLE, format!("is \"{other}\", must be mma, hopper or a file *_sm90.cu"))
            }),
        }
    }

    fn runs(self, file: &str) -> bool {
        match self {
            Siblings::Proven => PROVEN.contains(&file),
            Siblings::Mma => false,
            Siblings::Hopper => true,
            Siblings::HopperFile(chosen) => chosen == file,
        }
    }
}

/// Why a kernel of `*_sm90.cu` does not run in its sibling's place.
fn refuse_hopper(ctx: &Context, kernel: &Kernel) -> Result<(), String> {
    match ctx.backend() {
        Backend::Cuda(device) => device.runs_hopper(kernel.file),
        Backend::Cpu => Err("needs a CUDA context".into()),
    }
}

/// The entry point for an activation dtype: F32, F16, BF16 in this order.
fn by_dtype(kernels: &'static [Kernel; 3], dtype: DType) -> &'static Kernel {
    match dtype {
        DType::F32 => &kernels[0],
        DType::F16 => &kernels[1],
        _ => &kernels[2],
    }
}

macro_rules! entries {
    ($stem:literal) => {
        [
            $crate::cuda::Kernel { file: concat!($stem, ".cu"), name: concat!($stem, "_f32") },
            $crate::cuda::Kernel { file: concat!($stem, ".cu"), name: concat!($stem, "_f16") },
            $crate::cuda::Kernel { file: concat!($stem, ".cu"), name: concat!($stem, "_bf16") },
        ]
    };
}
use entries;

/// Elements that 16 bytes hold, if every row of the view starts on 16 bytes; its last dimension is the caller's to check.
fn rows_aligned<const N: usize>(view: &View<N>) -> bool {
    let n = 16 / view.dtype.size();
    view.as_ptr().addr().is_multiple_of(16) && view.stride[..N - 1].iter().all(|s| s.is_multiple_of(n))
}

//! From checked arguments to the implementation that runs: one ordered list an op, best first, the reference last.

use crate::abi::types::pkv_buffer;
use crate::context::{Backend, Context};
use crate::error::{Error, Result};
use crate::view::Mode;
use crate::workspace::{Arena, HostBuffer, check_given};
use std::ffi::c_void;

/// The engine's stream, passed on as it came.
#[derive(Clone, Copy, Debug)]
pub struct Stream(pub *mut c_void);

/// What a kernel means: its C params, the checked arguments, and who can run it.
pub trait Op: Sized + 'static {
    const NAME: &'static str;
    type Params: crate::abi::Versioned;
    type Args<'a>;

    /// Everything that can be wrong with a call is found here, before anything is written. After it nobody checks again.
    ///
    /// # Safety
    /// The pointers inside `params` are NULL or what the header says of them, while `'a` lasts.
    unsafe fn validate<'a>(ctx: &Context, params: &'a Self::Params, mode: Mode) -> Result<Self::Args<'a>>;

    /// Best first; the last one never refuses.
    fn cpu() -> &'static [Impl<Self>];

    /// Best first; empty where the op has no kernel for the device.
    #[cfg(feature = "cuda")]
    fn cuda() -> &'static [Impl<Self>];
}

/// One way to compute an op.
pub struct Impl<O: Op> {
    pub name: &'static str,
    /// Why not: "needs AVX2".
    pub refuse: for<'a> fn(&Context, &O::Args<'a>) -> Result<(), String>,
    /// Takes from the arena what `run` will take, in the same order.
    pub layout: for<'a> fn(&Context, &O::Args<'a>, &mut Arena),
    pub run: for<'a> fn(&Context, &O::Args<'a>, &mut Arena, Stream) -> Result<()>,
}

/// The first implementation that does not refuse; else why each did.
fn choose<'i, O: Op>(ctx: &Context, args: &O::Args<'_>) -> Result<&'i Impl<O>> {
    let list = match ctx.backend() {
        Backend::Cpu => O::cpu(),
        #[cfg(feature = "cuda")]
        Backend::Cuda(_) => O::cuda(),
    };
    let mut reasons = Vec::new();
    for implementation in list {
        match (implementation.refuse)(ctx, args) {
            Ok(()) => return Ok(implementation),
            Err(reason) => reasons.push(format!("{}: {reason}", implementation.name)),
        }
    }
    let message = match reasons.is_empty() {
        true => format!("{} has no kernel for this device", O::NAME),
        false => reasons.join("; "),
    };
    Err(Error::unsupported("params", message))
}

pub fn workspace_size<O: Op>(ctx: &Context, args: &O::Args<'_>) -> Result<usize> {
    size_of_layout(ctx, choose::<O>(ctx, args)?, args)
}

fn size_of_layout<O: Op>(ctx: &Context, implementation: &Impl<O>, args: &O::Args<'_>) -> Result<usize> {
    let mut arena = Arena::counting();
    (implementation.layout)(ctx, args, &mut arena);
    match arena.used() {
        usize::MAX => Err(Error::shape("params", "the workspace for these shapes is more than memory can hold")),
        bytes => Ok(bytes),
    }
}

pub fn run<O: Op>(ctx: &Context, args: &O::Args<'_>, stream: Stream, workspace: pkv_buffer) -> Result<()> {
    let implementation = choose::<O>(ctx, args)?;
    let needed = size_of_layout(ctx, implementation, args)?;
    let given = !workspace.data.is_null() || workspace.size != 0;
    if given {
        check_given(workspace.data.cast(), workspace.size, needed)?;
        // SAFETY: aligned and large enough, as just checked.
        let mut arena = unsafe { Arena::carving(workspace.data.cast()) };
        return (implementation.run)(ctx, args, &mut arena, stream);
    }
    match ctx.backend() {
        Backend::Cpu => {
            let scratch = HostBuffer::new(needed.max(1), "workspace")?;
            // SAFETY: a HostBuffer is aligned, and this one is as large as the layout needs.
            let mut arena = unsafe { Arena::carving(scratch.as_ptr()) };
            (implementation.run)(ctx, args, &mut arena, stream)
        }
        #[cfg(feature = "cuda")]
        Backend::Cuda(device) => {
            let scratch = device.stream_ordered(needed, stream, "workspace")?;
            // SAFETY: device allocations are 256-byte aligned, and this one is as large as the layout needs.
            let mut arena = unsafe { Arena::carving(scratch.as_ptr()) };
            (implementation.run)(ctx, args, &mut arena, stream)
        }
    }
}

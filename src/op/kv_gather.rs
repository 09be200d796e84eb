//! Copy cached rows to a contiguous buffer, dequantising.

use crate::abi::kv::pkv_kv_gather_params;
use crate::batch::{Batch, BufferRows, CacheUse};
use crate::collection::{Cache, Collection};
use crate::context::Context;
use crate::dtype::FLOATS;
use crate::error::Result;
use crate::plan::{Impl, Op};
use crate::view::{Access, Dim, Mode, TensorArg, View};

pub struct KvGather;

pub struct Args<'a> {
    pub cache: Cache,
    pub batch: Batch<'a>,
    pub rows: BufferRows<'a>,
    /// `[buffer_length, num_heads, head_size]`; rows past `rows.total()` are not written.
    pub out: View<3>,
}

impl Op for KvGather {
    const NAME: &'static str = "kv_gather";
    type Params = pkv_kv_gather_params;
    type Args<'a> = Args<'a>;

    unsafe fn validate<'a>(ctx: &Context, p: &'a Self::Params, mode: Mode) -> Result<Args<'a>> {
        // SAFETY: by contract.
        let collection = unsafe { Collection::of(p.collection, ctx)? };
        let cache = collection.cache(p.kv_idx, p.layer_idx, ["params.kv_idx", "params.layer_idx"])?;
        let out = TensorArg { tensor: &p.out, name: "params.out", mode }.check(
            FLOATS,
            [Dim::Any, Dim::Is(cache.num_heads, "num_heads"), Dim::Is(cache.head_size, "head_size")],
            Access::Write,
        )?;
        // SAFETY: by contract.
        let batch = unsafe { Batch::check(p.batch, collection, CacheUse::Read, mode)? };
        // SAFETY: by contract.
        let rows = unsafe { BufferRows::check(p.buffer_row_offsets, p.cache_offsets, &batch, mode)? };
        if out.shape[0] < rows.total() {
            let message = format!("is {}, buffer_row_offsets ask for {} rows", out.shape[0], rows.total());
            return Err(crate::error::Error::shape("params.out.shape[0]", message));
        }
        Ok(Args { cache, batch, rows, out })
    }

    fn cpu() -> &'static [Impl<Self>] {
        crate::cpu::kv_gather::IMPLS
    }

    #[cfg(feature = "cuda")]
    fn cuda() -> &'static [Impl<Self>] {
        crate::cuda::kv_gather::IMPLS
    }
}

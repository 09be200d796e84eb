//! Append rows to a key or value cache, converting or quantising.

use crate::abi::kv::pkv_kv_store_params;
use crate::batch::{Batch, CacheUse};
use crate::collection::{Cache, Collection};
use crate::context::Context;
use crate::dtype::FLOATS;
use crate::error::Result;
use crate::plan::{Impl, Op};
use crate::view::{Access, Dim, Mode, TensorArg, View, check_rows};

pub struct KvStore;

pub struct Args<'a> {
    pub cache: Cache,
    pub batch: Batch<'a>,
    /// `[T, num_heads, head_size]`
    pub values: View<3>,
}

impl Op for KvStore {
    const NAME: &'static str = "kv_store";
    type Params = pkv_kv_store_params;
    type Args<'a> = Args<'a>;

    unsafe fn validate<'a>(ctx: &Context, p: &'a Self::Params, mode: Mode) -> Result<Args<'a>> {
        // SAFETY: by contract.
        let collection = unsafe { Collection::of(p.collection, ctx)? };
        let cache = collection.cache(p.kv_idx, p.layer_idx, ["params.kv_idx", "params.layer_idx"])?;
        let values = TensorArg { tensor: &p.values, name: "params.values", mode }.check(
            FLOATS,
            [Dim::Any, Dim::Is(cache.num_heads, "num_heads"), Dim::Is(cache.head_size, "head_size")],
            Access::Read,
        )?;
        // SAFETY: by contract.
        let batch = unsafe { Batch::check(p.batch, collection, CacheUse::WriteNew, mode)? };
        check_rows(&values, batch.tokens(), "params.values")?;
        Ok(Args { cache, batch, values })
    }

    fn cpu() -> &'static [Impl<Self>] {
        crate::cpu::kv_store::IMPLS
    }

    #[cfg(feature = "cuda")]
    fn cuda() -> &'static [Impl<Self>] {
        crate::cuda::kv_store::IMPLS
    }
}

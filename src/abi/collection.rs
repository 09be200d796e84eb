//! The paged KV collection (MAX: PagedKVCacheCollection).

use super::context::pkv_context;
use super::status::{pkv_error, pkv_status};
use super::types::{pkv_buffer, pkv_tensor};
use super::{guard, handle, read};
use crate::collection::{Collection, Shape};

/// Keys and values of all layers in pages. The handle is the storage; what changes with every step is the plain struct pkv_batch.
///
/// Blocks are [num_blocks, is_mla ? 1 : 2, num_layers, page_size, num_heads, head_size] row-major, scales the same with
/// ceil(head_size / quantization_granularity) in the last place. The key cache of a layer is index 0 of the second dimension, the value cache index 1.
///
/// Freed by pkv_collection_destroy. Must not outlive borrowed storage. Any number of threads may use it at once, as long as no slot that
/// one call writes is read or written by another at the same time.
pub struct pkv_collection(pub(crate) Collection);

/// What a collection looks like.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_collection_options {
    /// sizeof(pkv_collection_options)
    pub struct_size: usize,
    /// PKV_F32, PKV_F16, PKV_BF16, PKV_F8_E4M3 or PKV_F8_E5M2.
    pub dtype: i32,
    /// PKV_DTYPE_NONE for no scales (a plain cast), or PKV_F32, PKV_BF16, PKV_F8_E8M0; only with an fp8 dtype.
    pub scale_dtype: i32,
    pub num_blocks: u32,
    pub num_layers: u32,
    /// Tokens in a page: any number from 1 up.
    pub page_size: u32,
    /// KV heads; 1 for MLA.
    pub num_heads: u32,
    pub head_size: u32,
    /// 0: keys and values; 1: one latent row a token (multi-head latent attention).
    pub is_mla: u32,
    /// Columns that share a scale; 0 = head_size; only with a scale_dtype.
    pub quantization_granularity: u32,
    pub reserved: u32,
    /// Borrowed storage of at least the bytes pkv_collection_storage_size tells; {NULL, 0}: the library allocates, zeroed, on the context's device. With
    /// scales, both buffers are given or neither.
    pub blocks: pkv_buffer,
    pub scales: pkv_buffer,
}

super::versioned!(pkv_collection_options: 80);

/// One layer's keys or values: blocks [num_blocks, page_size, num_heads, head_size] and scales [.., groups] (absent without scales), strided over the
/// collection's storage.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pkv_cache_view {
    pub blocks: pkv_tensor,
    pub scales: pkv_tensor,
}

/// Bytes of blocks and scales that such a collection needs; the buffers in options are not looked at. Either output may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_collection_storage_size(
    options: *const pkv_collection_options,
    blocks_bytes: *mut usize,
    scales_bytes: *mut usize,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe {
        guard(err, || {
            let shape = Shape::check(&read(options, "options")?)?;
            if let Some(bytes) = blocks_bytes.as_mut() {
                *bytes = shape.blocks_bytes();
            }
            if let Some(bytes) = scales_bytes.as_mut() {
                *bytes = shape.scales_bytes();
            }
            Ok(())
        })
    }
}

/// Make a collection over borrowed or library-allocated storage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_collection_create(
    ctx: *const pkv_context,
    options: *const pkv_collection_options,
    out: *mut *mut pkv_collection,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { super::create(ctx, options, out, err, |ctx, options| Ok(pkv_collection(Collection::new(ctx, options)?))) }
}

/// Free a collection, and its storage where the library allocated it. No call may still use it. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_collection_destroy(collection: *mut pkv_collection) {
    // SAFETY: the caller's contract is the header's.
    unsafe { super::destroy(collection) }
}

/// The options the collection was made with, buffers filled in. out->struct_size is read first, as in every call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_collection_info(
    collection: *const pkv_collection,
    out: *mut pkv_collection_options,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { guard(err, || super::write(out, "out", &handle(collection, "collection")?.0.options())) }
}

/// The keys of a layer (for MLA: its latent rows).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_collection_key_cache(
    collection: *const pkv_collection,
    layer_idx: u32,
    out: *mut pkv_cache_view,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { cache_view(collection, layer_idx, 0, out, err) }
}

/// The values of a layer; PKV_ERR_VALUE for MLA, which has none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkv_collection_value_cache(
    collection: *const pkv_collection,
    layer_idx: u32,
    out: *mut pkv_cache_view,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe { cache_view(collection, layer_idx, 1, out, err) }
}

unsafe fn cache_view(
    collection: *const pkv_collection,
    layer_idx: u32,
    kv_idx: u32,
    out: *mut pkv_cache_view,
    err: *mut pkv_error,
) -> pkv_status {
    // SAFETY: the caller's contract is the header's.
    unsafe {
        guard(err, || {
            let collection = &handle(collection, "collection")?.0;
            let to = super::out(out, "out")?;
            to.write(collection.cache(kv_idx, layer_idx, ["collection", "layer_idx"])?.to_abi());
            Ok(())
        })
    }
}

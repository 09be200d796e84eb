//! Launch structs, as in `kernels/device/batch.cuh` and `kernels/params.cuh`: field for field, sizes asserted on both sides. What is common
//! to all kernels is filled here.

use super::runtime::LaunchParams;
use crate::batch::Batch;
use crate::collection::Cache;
use std::ffi::c_void;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BatchParams {
    pub row_offsets: *const u32,
    pub cache_lengths: *const u32,
    pub lookup_table: *const u32,
    pub table_stride: i64,
    pub batch_size: u32,
    pub max_pages: u32,
}
const _: () = assert!(size_of::<BatchParams>() == 40);

impl BatchParams {
    pub fn new(batch: &Batch<'_>) -> Self {
        BatchParams {
            row_offsets: batch.raw.input_row_offsets,
            cache_lengths: batch.raw.cache_lengths,
            lookup_table: batch.raw.lookup_table,
            table_stride: batch.table_stride as i64,
            batch_size: batch.batch_size as u32,
            max_pages: batch.max_pages as u32,
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CacheParams {
    pub blocks: *mut u8,
    pub scales: *mut u8,
    pub block_stride: i64,
    pub slot_stride: i64,
    pub scale_block_stride: i64,
    pub scale_slot_stride: i64,
    pub num_blocks: u32,
    pub page_size: u32,
    pub num_heads: u32,
    pub head_size: u32,
    pub granularity: u32,
    pub groups: u32,
    pub dtype: i32,
    pub scale_dtype: i32,
}
const _: () = assert!(size_of::<CacheParams>() == 80);

impl CacheParams {
    pub fn new(cache: &Cache) -> Self {
        CacheParams {
            blocks: cache.blocks_ptr(),
            scales: cache.scales_ptr(),
            block_stride: cache.block_stride as i64,
            slot_stride: cache.row_elements() as i64,
            scale_block_stride: cache.scale_block_stride as i64,
            scale_slot_stride: (cache.num_heads * cache.groups) as i64,
            num_blocks: cache.num_blocks as u32,
            page_size: cache.page_size as u32,
            num_heads: cache.num_heads as u32,
            head_size: cache.head_size as u32,
            granularity: cache.granularity as u32,
            groups: cache.groups as u32,
            dtype: cache.dtype as i32,
            scale_dtype: cache.scale_dtype.map_or(0, |d| d as i32),
        }
    }

    /// Whether `n` neighbours of a row, taken at once, are aligned in it and share a scale.
    pub fn vector(&self, n: usize) -> bool {
        let n = n as u32;
        self.head_size.is_multiple_of(n) && (self.groups <= 1 || self.granularity.is_multiple_of(n))
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KvStoreParams {
    pub batch: BatchParams,
    pub cache: CacheParams,
    pub values: *const c_void,
    pub token_stride: i64,
    pub head_stride: i64,
    pub tokens: u64,
    pub vector: u32,
    pub reserved: u32,
}
const _: () = assert!(size_of::<KvStoreParams>() == 160);
// SAFETY: the layout of the kernel's struct; filled from checked arguments.
unsafe impl LaunchParams for KvStoreParams {}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KvGatherParams {
    pub batch: BatchParams,
    pub cache: CacheParams,
    pub out: *mut c_void,
    pub row_stride: i64,
    pub head_stride: i64,
    pub rows: u64,
    pub buffer_row_offsets: *const u32,
    pub cache_offsets: *const u32,
    pub vector: u32,
    pub reserved: u32,
}
const _: () = assert!(size_of::<KvGatherParams>() == 176);
// SAFETY: as above.
unsafe impl LaunchParams for KvGatherParams {}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MlaRopeRmsnormQuantizeParams {
    pub batch: BatchParams,
    pub cache: CacheParams,
    pub q_rope: *const c_void,
    pub q_rope_output: *mut c_void,
    pub kv: *const c_void,
    pub freqs: *const c_void,
    pub gamma: *const c_void,
    pub q_token_stride: i64,
    pub q_head_stride: i64,
    pub output_token_stride: i64,
    pub output_head_stride: i64,
    pub kv_stride: i64,
    pub freqs_stride: i64,
    pub tokens: u64,
    pub max_positions: u64,
    pub num_heads: u32,
    pub rope_width: u32,
    pub latent: u32,
    pub half_split: u32,
    pub freqs_dtype: i32,
    pub gamma_dtype: i32,
    pub epsilon: f32,
    pub vector: u32,
    pub q_warps: u32,
    pub reserved: u32,
}
const _: () = assert!(size_of::<MlaRopeRmsnormQuantizeParams>() == 264);
// SAFETY: as above.
unsafe impl LaunchParams for MlaRopeRmsnormQuantizeParams {}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MergeAttentionParams {
    pub output_a: *const c_void,
    pub output_b: *const c_void,
    pub output: *mut c_void,
    pub lse_a: *const f32,
    pub lse_b: *const f32,
    pub lse: *mut f32,
    pub a_token_stride: i64,
    pub a_head_stride: i64,
    pub b_token_stride: i64,
    pub b_head_stride: i64,
    pub output_token_stride: i64,
    pub output_head_stride: i64,
    pub lse_a_stride: i64,
    pub lse_b_stride: i64,
    pub lse_stride: i64,
    pub tokens: u64,
    pub num_heads: u32,
    pub width: u32,
    pub vector: u32,
    pub reserved: u32,
}
const _: () = assert!(size_of::<MergeAttentionParams>() == 144);
// SAFETY: as above.
unsafe impl LaunchParams for MergeAttentionParams {}

//! The CPU backend: a file a kernel (tiling and splitting), `simd/` the inner loops by instruction set, `reference` the plain
//! versions that define what is right.

pub mod cache_row;
pub mod isa;
pub mod kv_gather;
pub mod kv_store;
pub mod merge_attention;
pub mod mla_indexer_fp8;
pub mod mla_prefill_fp8;
pub mod mla_rope_rmsnorm_quantize;
pub mod mla_row;
pub mod parallel;
pub mod qgemm;
pub mod qkv_matmul_gguf;
pub mod reference;
pub mod rows;
pub mod simd;

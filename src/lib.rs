//! pagedkv.

pub mod gguf;

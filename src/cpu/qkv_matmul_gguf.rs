use super::reference;
use crate::op::qkv_matmul_gguf::QkvMatmulGguf;
use crate::plan::Impl;

pub static IMPLS: &[Impl<QkvMatmulGguf>] = &[reference::QKV_MATMUL_GGUF];

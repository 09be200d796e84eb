use super::reference;
use crate::op::mla_indexer_fp8::MlaIndexerFp8;
use crate::plan::Impl;

pub static IMPLS: &[Impl<MlaIndexerFp8>] = &[reference::MLA_INDEXER_FP8];

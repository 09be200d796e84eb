use super::reference;
use crate::op::merge_attention::MergeAttention;
use crate::plan::Impl;

pub static IMPLS: &[Impl<MergeAttention>] = &[reference::MERGE_ATTENTION];

use super::reference;
use crate::op::kv_gather::KvGather;
use crate::plan::Impl;

pub static IMPLS: &[Impl<KvGather>] = &[reference::KV_GATHER];

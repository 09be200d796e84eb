use super::reference;
use crate::op::kv_store::KvStore;
use crate::plan::Impl;

pub static IMPLS: &[Impl<KvStore>] = &[reference::KV_STORE];

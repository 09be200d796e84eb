use super::reference;
use crate::op::mla_rope_rmsnorm_quantize::MlaRopeRmsnormQuantize;
use crate::plan::Impl;

pub static IMPLS: &[Impl<MlaRopeRmsnormQuantize>] = &[reference::MLA_ROPE_RMSNORM_QUANTIZE];

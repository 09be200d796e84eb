use super::reference;
use crate::op::mla_prefill_fp8::MlaPrefillFp8;
use crate::plan::Impl;

pub static IMPLS: &[Impl<MlaPrefillFp8>] = &[reference::MLA_PREFILL_FP8];

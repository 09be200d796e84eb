//! Every export with any params: good calls succeed and write what they may; spoilt ones never crash, and where they are refused they say why and change
//! nothing. Memory is always as large as the arguments claim, or NULL where they claim too much: that is the one thing the library cannot check.

#![no_main]

#[path = "abi_params/call.rs"]
mod call;
#[path = "../../rust/support/gguf_random.rs"]
mod gguf_random;
#[path = "abi_params/kernels.rs"]
mod kernels;
#[path = "abi_params/memory.rs"]
mod memory;
#[path = "abi_params/plain.rs"]
mod plain;
#[path = "abi_params/source.rs"]
mod source;
#[path = "abi_params/world.rs"]
mod world;

use libfuzzer_sys::fuzz_target;

const TARGETS: [fn(&mut source::Source<'_>); 11] = [
    kernels::kv_store,
    kernels::kv_gather,
    kernels::merge_attention,
    kernels::qkv_matmul_gguf,
    kernels::mla_rope_rmsnorm_quantize,
    kernels::mla_prefill_fp8,
    kernels::mla_indexer_fp8,
    plain::contexts,
    plain::collections,
    plain::weights,
    plain::names,
];

fuzz_target!(|input: &[u8]| {
    let mut source = source::Source::new(input);
    let target = source.below(TARGETS.len());
    TARGETS[target](&mut source);
});

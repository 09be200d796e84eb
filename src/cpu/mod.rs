//! The CPU backend: a file a kernel (tiling and splitting), `simd/` the inner loops by instruction set, `reference` the plain
//! versions that define what is right.

pub mod isa;
pub mod parallel;
pub mod reference;

//! One or two tokens against rows as GGUF has them.
//!
//! Naively: `y[n] = sum_blocks d_block * d_x * dot(codes, codes of x)`, a row after the other. That is the order in which memory is read here, from end to
//! end, which the hardware's prefetchers follow without help; sixteen rows side by side, as for packed weights, would have to be transposed on
//! the way, which takes about as long as the product. What naive code would lose:
//! * the sum over a vector's lanes: eight blocks' vectors are added up together, each stage halving their number;
//! * taking scales apart: sixteen blocks of a row stand in for the sixteen rows of a packed group, so `Format::scales` does it for all of them at once;
//! * the order of additions, which must be that of the other kernels, block after block in floats: the factors of sixteen rows are kept (as exact integers,
//!   in floats) and added when all sixteen are there, a lane a row.

#[cfg(target_arch = "x86_64")]
pub mod avx2;

use super::ROWS;
use super::activations::{CHUNK, Linear, SEGMENT};

/// Most tokens that rows meet so.
pub const MOST: usize = 2;

/// Blocks of 32 columns in a segment.
const BLOCKS: usize = SEGMENT * CHUNK / 32;

/// What a segment of sixteen rows adds to the output: `dot * factor + min * min_factor` for each block, super-blocks in the first places alone.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Terms {
    pub dot: [[f32; BLOCKS]; ROWS],
    pub factor: [[f32; BLOCKS]; ROWS],
    pub min: [[f32; BLOCKS]; ROWS],
    /// Super-blocks' alone: for blocks it is the activations' `sum`, the same for every row.
    pub min_factor: [[f32; SEGMENT]; ROWS],
}

/// A thread's room.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Room {
    pub linear: [Linear; MOST],
    pub terms: [Terms; MOST],
    /// The last blocks of a row where they are fewer than sixteen. No encoding has more bytes.
    pub tail: [u8; 16 * 256],
}

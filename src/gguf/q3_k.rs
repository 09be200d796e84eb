//! Q3_K: 3-bit codes around 4; 16 sub-blocks of 16 elements, each with a 6-bit scale around 32.
//!
//! Defined by GGUF (type 11), 110 bytes a block:
//!
//! ```text
//!  0..32   bit 2      bit p of byte j: element 32 p + j
//! 32..96   bits 0..2  each 32 bytes hold 128 elements: bits 0..2 the first 32, bits 2..4 the next, and so on
//! 96..108  sub-scales 8 bytes of nibbles: bits 0..4 of sub-blocks 0..8 low, 8..16 high;
//!                     4 bytes of bit pairs: bits 4, 5 of sub-blocks 0..4 lowest, then 4..8, 8..12, 12..16
//! 108..110 scale      f16
//!  y = scale * (sub_scale - 32) * (code - 4)
//! ```

use super::bits::{f16_at, fields, join};
use super::{BlockFormat, Float, Format, Unpacked};
use std::ffi::CStr;

struct Q3K;

pub(super) const FORMAT: Format = Format::blocks::<Q3K, 110>();

impl BlockFormat<110> for Q3K {
    const ID: i32 = 11;
    const NAME: &'static CStr = c"Q3_K";
    const ELEMENTS: usize = 256;
    const SUB_BLOCK: usize = 16;
    const FLOATS: &'static [Float] = &[Float::F16(108)];

    fn unpack(block: &[u8; 110], into: &mut Unpacked) {
        into.scale = f16_at(block, 108);
        join(&mut into.sub_scales, &fields::<16>(&block[96..104], 4, 8), &fields::<16>(&block[104..108], 2, 4), 4, -32);
        join(&mut into.codes, &fields::<256>(&block[32..96], 2, 32), &fields::<256>(&block[..32], 1, 32), 2, -4);
    }
}

//! Q5_1: 5-bit codes with a scale and a minimum for 32 elements.
//!
//! Defined by GGUF (type 7), 24 bytes a block:
//!
//! ```text
//!  0..2    scale      f16
//!  2..4    minimum    f16
//!  4..8    bit 4      of element i: bit i of a little-endian u32
//!  8..24   bits 0..4  low nibbles: elements 0..16, high nibbles: 16..32
//!  y = scale * code + minimum
//! ```

use super::bits::{f16_at, fields, join};
use super::{BlockFormat, Float, Format, Unpacked};
use std::ffi::CStr;

struct Q51;

pub(super) const FORMAT: Format = Format::blocks::<Q51, 24>();

impl BlockFormat<24> for Q51 {
    const ID: i32 = 7;
    const NAME: &'static CStr = c"Q5_1";
    const ELEMENTS: usize = 32;
    const SUB_BLOCK: usize = 32;
    const HAS_MIN: bool = true;
    const FLOATS: &'static [Float] = &[Float::F16(0), Float::F16(2)];

    fn unpack(block: &[u8; 24], into: &mut Unpacked) {
        into.scale = f16_at(block, 0);
        // This format adds its minimum.
        into.min = -f16_at(block, 2);
        into.sub_mins[0] = 1;
        join(&mut into.codes, &fields::<32>(&block[8..], 4, 16), &fields::<32>(&block[4..8], 1, 1), 4, 0);
    }
}

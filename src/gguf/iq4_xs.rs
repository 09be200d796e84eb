//! IQ4_XS: 4-bit codes into a non-uniform code book; 8 sub-blocks of 32 elements, each with a 6-bit scale around 32.
//!
//! Defined by GGUF (type 23), 136 bytes a block:
//!
//! ```text
//!  0..2    scale      f16
//!  2..4    sub-scales bits 4, 5 of sub-block g: bits 2 g, 2 g + 1 of a little-endian u16
//!  4..8    sub-scales bits 0..4 of sub-blocks 2 j (low nibble) and 2 j + 1 (high nibble) of byte j
//!  8..136  codes      16 bytes a sub-block: low nibbles its first 16 elements, high nibbles the others
//!  y = scale * (sub_scale - 32) * IQ4_VALUES[code]
//! ```

use super::bits::{IQ4_VALUES, f16_at, fields, join, looked_up};
use super::{BlockFormat, Float, Format, Unpacked};
use std::ffi::CStr;

struct IQ4XS;

pub(super) const FORMAT: Format = Format::blocks::<IQ4XS, 136>();

impl BlockFormat<136> for IQ4XS {
    const ID: i32 = 23;
    const NAME: &'static CStr = c"IQ4_XS";
    const ELEMENTS: usize = 256;
    const SUB_BLOCK: usize = 32;
    const FLOATS: &'static [Float] = &[Float::F16(0)];

    fn unpack(block: &[u8; 136], into: &mut Unpacked) {
        into.scale = f16_at(block, 0);
        join(&mut into.sub_scales, &fields::<8>(&block[4..8], 4, 1), &fields::<8>(&block[2..4], 2, 1), 4, -32);
        looked_up(&mut into.codes, &fields::<256>(&block[8..], 4, 16), &IQ4_VALUES);
    }
}

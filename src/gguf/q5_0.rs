//! Q5_0: 5-bit codes around 16, one scale for 32 elements.
//!
//! Defined by GGUF (type 6), 22 bytes a block:
//!
//! ```text
//!  0..2    scale      f16
//!  2..6    bit 4      of element i: bit i of a little-endian u32
//!  6..22   bits 0..4  low nibbles: elements 0..16, high nibbles: 16..32
//!  y = scale * (code - 16)
//! ```

use super::bits::{f16_at, fields, join};
use super::{BlockFormat, Float, Format, Unpacked};
use std::ffi::CStr;

struct Q50;

pub(super) const FORMAT: Format = Format::blocks::<Q50, 22>();

impl BlockFormat<22> for Q50 {
    const ID: i32 = 6;
    const NAME: &'static CStr = c"Q5_0";
    const ELEMENTS: usize = 32;
    const SUB_BLOCK: usize = 32;
    const FLOATS: &'static [Float] = &[Float::F16(0)];

    fn unpack(block: &[u8; 22], into: &mut Unpacked) {
        into.scale = f16_at(block, 0);
        join(&mut into.codes, &fields::<32>(&block[6..], 4, 16), &fields::<32>(&block[2..6], 1, 1), 4, -16);
    }
}

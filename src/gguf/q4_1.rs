//! Q4_1: 4-bit codes with a scale and a minimum for 32 elements.
//!
//! Defined by GGUF (type 3), 20 bytes a block:
//!
//! ```text
//!  0..2    scale      f16
//!  2..4    minimum    f16
//!  4..20   codes      low nibbles: elements 0..16, high nibbles: 16..32
//!  y = scale * code + minimum
//! ```

use super::bits::{f16_at, fields, shifted};
use super::{BlockFormat, Float, Format, Unpacked};
use std::ffi::CStr;

struct Q41;

pub(super) const FORMAT: Format = Format::blocks::<Q41, 20>();

impl BlockFormat<20> for Q41 {
    const ID: i32 = 3;
    const NAME: &'static CStr = c"Q4_1";
    const ELEMENTS: usize = 32;
    const SUB_BLOCK: usize = 32;
    const HAS_MIN: bool = true;
    const FLOATS: &'static [Float] = &[Float::F16(0), Float::F16(2)];

    fn unpack(block: &[u8; 20], into: &mut Unpacked) {
        into.scale = f16_at(block, 0);
        // This format adds its minimum.
        into.min = -f16_at(block, 2);
        into.sub_mins[0] = 1;
        shifted(&mut into.codes, &fields::<32>(&block[4..], 4, 16), 0);
    }
}

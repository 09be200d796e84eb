//! Q4_0: 4-bit codes around 8, one scale for 32 elements.
//!
//! Defined by GGUF (type 2), 18 bytes a block:
//!
//! ```text
//!  0..2    scale      f16
//!  2..18   codes      low nibbles: elements 0..16, high nibbles: 16..32
//!  y = scale * (code - 8)
//! ```

use super::bits::{f16_at, fields, shifted};
use super::{BlockFormat, Float, Format, Unpacked};
use std::ffi::CStr;

struct Q40;

pub(super) const FORMAT: Format = Format::blocks::<Q40, 18>();

impl BlockFormat<18> for Q40 {
    const ID: i32 = 2;
    const NAME: &'static CStr = c"Q4_0";
    const ELEMENTS: usize = 32;
    const SUB_BLOCK: usize = 32;
    const FLOATS: &'static [Float] = &[Float::F16(0)];

    fn unpack(block: &[u8; 18], into: &mut Unpacked) {
        into.scale = f16_at(block, 0);
        shifted(&mut into.codes, &fields::<32>(&block[2..], 4, 16), -8);
    }
}

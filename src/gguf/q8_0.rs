//! Q8_0: 8-bit codes, one scale for 32 elements.
//!
//! Defined by GGUF (type 8), 34 bytes a block:
//!
//! ```text
//!  0..2    scale      f16
//!  2..34   codes      i8
//!  y = scale * code
//! ```

use super::bits::{f16_at, shifted};
use super::{BlockFormat, Float, Format, Unpacked};
use std::ffi::CStr;

struct Q80;

pub(super) const FORMAT: Format = Format::blocks::<Q80, 34>();

impl BlockFormat<34> for Q80 {
    const ID: i32 = 8;
    const NAME: &'static CStr = c"Q8_0";
    const ELEMENTS: usize = 32;
    const SUB_BLOCK: usize = 32;
    const FLOATS: &'static [Float] = &[Float::F16(0)];

    fn unpack(block: &[u8; 34], into: &mut Unpacked) {
        into.scale = f16_at(block, 0);
        shifted(&mut into.codes, &block[2..], 0);
    }
}

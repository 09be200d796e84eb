//! IQ4_NL: 4-bit codes into a non-uniform code book, one scale for 32 elements.
//!
//! Defined by GGUF (type 20), 18 bytes a block:
//!
//! ```text
//!  0..2    scale      f16
//!  2..18   codes      low nibbles: elements 0..16, high nibbles: 16..32
//!  y = scale * IQ4_VALUES[code]
//! ```

use super::bits::{IQ4_VALUES, f16_at, fields, looked_up};
use super::{BlockFormat, Float, Format, Unpacked};
use std::ffi::CStr;

struct IQ4NL;

pub(super) const FORMAT: Format = Format::blocks::<IQ4NL, 18>();

impl BlockFormat<18> for IQ4NL {
    const ID: i32 = 20;
    const NAME: &'static CStr = c"IQ4_NL";
    const ELEMENTS: usize = 32;
    const SUB_BLOCK: usize = 32;
    const FLOATS: &'static [Float] = &[Float::F16(0)];

    fn unpack(block: &[u8; 18], into: &mut Unpacked) {
        into.scale = f16_at(block, 0);
        looked_up(&mut into.codes, &fields::<32>(&block[2..], 4, 16), &IQ4_VALUES);
    }
}

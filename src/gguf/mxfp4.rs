//! MXFP4: 4-bit floats (e2m1) with a power of two for 32 elements, after the OCP Microscaling formats.
//!
//! Defined by GGUF (type 39), 17 bytes a block:
//!
//! ```text
//!  0       exponent   e8m0, bias 127
//!  1..17   codes      low nibbles: elements 0..16, high nibbles: 16..32
//!  y = 2^(exponent - 127) * e2m1(code) = 2^(exponent - 128) * VALUES[code]
//! ```

use super::bits::{fields, looked_up};
use super::{BlockFormat, Float, Format, Unpacked};
use std::ffi::CStr;

struct MXFP4;

pub(super) const FORMAT: Format = Format::blocks::<MXFP4, 17>();

impl BlockFormat<17> for MXFP4 {
    const ID: i32 = 39;
    const NAME: &'static CStr = c"MXFP4";
    const ELEMENTS: usize = 32;
    const SUB_BLOCK: usize = 32;
    const FLOATS: &'static [Float] = &[Float::E8M0(0)];

    fn unpack(block: &[u8; 17], into: &mut Unpacked) {
        into.scale = half_power(block[0]);
        looked_up(&mut into.codes, &fields::<32>(&block[1..], 4, 16), &VALUES);
    }
}

/// Twice the e2m1 values, so that they are integers; negative zero becomes zero.
const VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `2^(exponent - 128)`, subnormal for exponents 0 and 1. GGUF knows no NaN here: 255 is 2^127.
fn half_power(exponent: u8) -> f32 {
    f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { u32::from(exponent - 1) << 23 })
}

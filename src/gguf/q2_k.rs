//! Q2_K: 2-bit codes; 16 sub-blocks of 16 elements, each with a 4-bit scale and a 4-bit minimum.
//!
//! Defined by GGUF (type 10), 84 bytes a block:
//!
//! ```text
//!  0..16   sub-blocks low nibble: sub-scale, high nibble: sub-minimum
//! 16..80   codes      each 32 bytes hold 128 elements: bits 0..2 the first 32, bits 2..4 the next, and so on
//! 80..82   scale      f16
//! 82..84   minimum    f16
//!  y = scale * sub_scale * code - minimum * sub_minimum
//! ```

use super::bits::{f16_at, fields, shifted};
use super::{BlockFormat, Float, Format, Unpacked};
use std::ffi::CStr;

struct Q2K;

pub(super) const FORMAT: Format = Format::blocks::<Q2K, 84>();

impl BlockFormat<84> for Q2K {
    const ID: i32 = 10;
    const NAME: &'static CStr = c"Q2_K";
    const ELEMENTS: usize = 256;
    const SUB_BLOCK: usize = 16;
    const HAS_MIN: bool = true;
    const FLOATS: &'static [Float] = &[Float::F16(80), Float::F16(82)];

    fn unpack(block: &[u8; 84], into: &mut Unpacked) {
        into.scale = f16_at(block, 80);
        into.min = f16_at(block, 82);
        for (g, byte) in block[..16].iter().enumerate() {
            into.sub_scales[g] = (byte & 15) as i8;
            into.sub_mins[g] = (byte >> 4) as i8;
        }
        shifted(&mut into.codes, &fields::<256>(&block[16..80], 2, 32), 0);
    }
}

//! Q6_K: 6-bit codes around 32; 16 sub-blocks of 16 elements, each with an 8-bit scale.
//!
//! Defined by GGUF (type 14), 210 bytes a block:
//!
//! ```text
//!  0..128  bits 0..4  each 64 bytes hold 128 elements: low nibbles the first 64, high nibbles the second
//! 128..192 bits 4, 5  each 32 bytes hold 128 elements: bits 0..2 the first 32, bits 2..4 the next, and so on
//! 192..208 sub-scales i8
//! 208..210 scale      f16
//!  y = scale * sub_scale * (code - 32)
//! ```

use super::bits::{f16_at, fields, join, shifted};
use super::{BlockFormat, Float, Format, Unpacked};
use std::ffi::CStr;

struct Q6K;

pub(super) const FORMAT: Format = Format::blocks::<Q6K, 210>();

impl BlockFormat<210> for Q6K {
    const ID: i32 = 14;
    const NAME: &'static CStr = c"Q6_K";
    const ELEMENTS: usize = 256;
    const SUB_BLOCK: usize = 16;
    const FLOATS: &'static [Float] = &[Float::F16(208)];

    fn unpack(block: &[u8; 210], into: &mut Unpacked) {
        into.scale = f16_at(block, 208);
        shifted(&mut into.sub_scales, &block[192..208], 0);
        join(&mut into.codes, &fields::<256>(&block[..128], 4, 64), &fields::<256>(&block[128..192], 2, 32), 4, -32);
    }
}

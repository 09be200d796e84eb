//! Q4_K: 4-bit codes; 8 sub-blocks of 32 elements, each with a 6-bit scale and a 6-bit minimum.
//!
//! Defined by GGUF (type 12), 144 bytes a block:
//!
//! ```text
//!  0..2    scale      f16
//!  2..4    minimum    f16
//!  4..16   sub-blocks 6-bit scales and minima, see `k_scales`
//! 16..144  codes      each 32 bytes hold two sub-blocks: low nibbles the first, high nibbles the second
//!  y = scale * sub_scale * code - minimum * sub_minimum
//! ```

use super::bits::{f16_at, fields, k_scales, shifted};
use super::{BlockFormat, Float, Format, Unpacked};
use std::ffi::CStr;

struct Q4K;

pub(super) const FORMAT: Format = Format::blocks::<Q4K, 144>();

impl BlockFormat<144> for Q4K {
    const ID: i32 = 12;
    const NAME: &'static CStr = c"Q4_K";
    const ELEMENTS: usize = 256;
    const SUB_BLOCK: usize = 32;
    const HAS_MIN: bool = true;
    const FLOATS: &'static [Float] = &[Float::F16(0), Float::F16(2)];

    fn unpack(block: &[u8; 144], into: &mut Unpacked) {
        into.scale = f16_at(block, 0);
        into.min = f16_at(block, 2);
        k_scales(&block[4..16], &mut into.sub_scales, &mut into.sub_mins);
        shifted(&mut into.codes, &fields::<256>(&block[16..], 4, 32), 0);
    }
}

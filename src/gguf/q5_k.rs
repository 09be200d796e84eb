//! Q5_K: 5-bit codes; 8 sub-blocks of 32 elements, each with a 6-bit scale and a 6-bit minimum.
//!
//! Defined by GGUF (type 13), 176 bytes a block:
//!
//! ```text
//!  0..2    scale      f16
//!  2..4    minimum    f16
//!  4..16   sub-blocks 6-bit scales and minima, see `k_scales`
//! 16..48   bit 4      bit g of byte j: element 32 g + j
//! 48..176  bits 0..4  each 32 bytes hold two sub-blocks: low nibbles the first, high nibbles the second
//!  y = scale * sub_scale * code - minimum * sub_minimum
//! ```

use super::bits::{f16_at, fields, join, k_scales};
use super::{BlockFormat, Float, Format, Unpacked};
use std::ffi::CStr;

struct Q5K;

pub(super) const FORMAT: Format = Format::blocks::<Q5K, 176>();

impl BlockFormat<176> for Q5K {
    const ID: i32 = 13;
    const NAME: &'static CStr = c"Q5_K";
    const ELEMENTS: usize = 256;
    const SUB_BLOCK: usize = 32;
    const HAS_MIN: bool = true;
    const FLOATS: &'static [Float] = &[Float::F16(0), Float::F16(2)];

    fn unpack(block: &[u8; 176], into: &mut Unpacked) {
        into.scale = f16_at(block, 0);
        into.min = f16_at(block, 2);
        k_scales(&block[4..16], &mut into.sub_scales, &mut into.sub_mins);
        join(&mut into.codes, &fields::<256>(&block[48..], 4, 32), &fields::<256>(&block[16..48], 1, 32), 4, 0);
    }
}

//! GGUF weight encodings: one table, a row a format, and the plain decode that everything else is compared with.
//!
//! A GGUF row is a sequence of equal blocks. Every block format here has the same arithmetic behind a different packing:
//! element `i` of a block, in sub-block `g = i / sub_block`, is
//!
//! ```text
//! (scale * sub_scales[g]) * codes[i] - min * sub_mins[g]          each product and the difference rounded to f32
//! ```
//!
//! with small integers for codes and sub-scales ([`Unpacked`]). A format's file says how to take a block apart; decoding,
//! packing for the kernels, random test weights and fuzzing are written once, over the table.
//!
//! A new format is one file with its `FORMAT`, one row in [`FORMATS`], and golden vectors (`ctests/golden/make_gguf_golden.py`).

mod bits;

mod bf16;
mod f16;
mod f32;
mod iq4_nl;
mod iq4_xs;
mod mxfp4;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;

use std::ffi::CStr;

/// Elements in a block of the K-quants and IQ4_XS, the largest block there is.
pub const MAX_BLOCK_ELEMENTS: usize = 256;
/// The most sub-blocks a block has.
pub const MAX_SUB_BLOCKS: usize = 16;

/// Every format the library reads, by rising GGUF id.
pub static FORMATS: &[Format] = &[
    f32::FORMAT,
    f16::FORMAT,
    q4_0::FORMAT,
    q4_1::FORMAT,
    q5_0::FORMAT,
    q5_1::FORMAT,
    q8_0::FORMAT,
    q2_k::FORMAT,
    q3_k::FORMAT,
    q4_k::FORMAT,
    q5_k::FORMAT,
    q6_k::FORMAT,
    iq4_nl::FORMAT,
    iq4_xs::FORMAT,
    bf16::FORMAT,
    mxfp4::FORMAT,
];

/// The format with GGUF type id `id`, if the library reads it.
pub fn format(id: i32) -> Option<&'static Format> {
    FORMATS.iter().find(|format| format.id == id)
}

/// A row of the table: what is true of a format without looking at data.
#[derive(Debug)]
pub struct Format {
    /// GGUF's own type id.
    pub id: i32,
    /// GGUF's own name, such as `Q4_K`.
    pub name: &'static str,
    /// The same with C's closing zero.
    pub c_name: &'static CStr,
    /// Elements in a block; 1 for float weights.
    pub block_elements: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Elements that share a sub-scale; `block_elements` where the block has one scale.
    pub sub_block: usize,
    /// Elements of an activation row that share a scale in 8-bit arithmetic; 0: this format takes no 8-bit activations.
    pub activation_block: usize,
    /// Elements have a subtracted minimum; without it [`Unpacked::min`] and [`Unpacked::sub_mins`] are 0.
    pub has_min: bool,
    /// Where in a block floating-point numbers lie; all its other bytes are integer fields, of which any value is valid.
    pub floats: &'static [Float],
    /// Decodes whole blocks: as many as both `blocks` and `out` hold. Any bytes are valid, and so are any lengths.
    pub decode: fn(blocks: &[u8], out: &mut [f32]),
    /// Takes one block of `block_bytes` bytes apart; a slice shorter than that leaves the target as it is. `None` for float weights.
    pub unpack: Option<fn(block: &[u8], into: &mut Unpacked)>,
}

impl Format {
    /// Bytes of a row of `elements`; `None` where a block would be cut or the product overflows.
    pub const fn row_bytes(&self, elements: usize) -> Option<usize> {
        if elements.is_multiple_of(self.block_elements) {
            (elements / self.block_elements).checked_mul(self.block_bytes)
        } else {
            None
        }
    }

    /// Sub-blocks of a block.
    pub const fn sub_blocks(&self) -> usize {
        self.block_elements / self.sub_block
    }

    /// The row of a block format.
    const fn blocks<B: BlockFormat<BYTES>, const BYTES: usize>() -> Format {
        assert!(B::ELEMENTS <= MAX_BLOCK_ELEMENTS && B::ELEMENTS.is_multiple_of(B::SUB_BLOCK));
        assert!(B::ELEMENTS / B::SUB_BLOCK <= MAX_SUB_BLOCKS);
        Format {
            id: B::ID,
            name: text(B::NAME),
            c_name: B::NAME,
            block_elements: B::ELEMENTS,
            block_bytes: BYTES,
            sub_block: B::SUB_BLOCK,
            activation_block: B::ELEMENTS,
            has_min: B::HAS_MIN,
            floats: B::FLOATS,
            decode: decode_blocks::<B, BYTES>,
            unpack: Some(unpack_block::<B, BYTES>),
        }
    }

    /// The row of a plain floating-point type.
    const fn plain(
        id: i32,
        name: &'static CStr,
        bytes: usize,
        floats: &'static [Float],
        decode: fn(&[u8], &mut [f32]),
    ) -> Format {
        Format {
            id,
            name: text(name),
            c_name: name,
            block_elements: 1,
            block_bytes: bytes,
            sub_block: 1,
            activation_block: 0,
            has_min: false,
            floats,
            decode,
            unpack: None,
        }
    }
}

const fn text(name: &'static CStr) -> &'static str {
    match name.to_str() {
        Ok(text) => text,
        Err(_) => panic!("a format's name is ASCII"),
    }
}

/// A floating-point field at a byte offset in a block, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float {
    F32(usize),
    F16(usize),
    BF16(usize),
    /// An exponent alone.
    E8M0(usize),
}

/// A block taken apart. Only the first `block_elements` codes and the first `sub_blocks` sub-scales and sub-minima have meaning.
#[derive(Clone, Debug)]
pub struct Unpacked {
    pub scale: f32,
    pub min: f32,
    pub sub_scales: [i8; MAX_SUB_BLOCKS],
    pub sub_mins: [i8; MAX_SUB_BLOCKS],
    pub codes: [i8; MAX_BLOCK_ELEMENTS],
}

impl Unpacked {
    /// Value of element `i` of the block; `sub_block` is the format's.
    #[inline]
    pub fn value(&self, sub_block: usize, i: usize) -> f32 {
        let (scale, min) = self.sub_block(i / sub_block);
        scale * f32::from(self.codes[i]) - min
    }

    /// Scale and minimum of sub-block `g`, rounded as the format defines them.
    #[inline]
    pub fn sub_block(&self, g: usize) -> (f32, f32) {
        (self.scale * f32::from(self.sub_scales[g]), self.min * f32::from(self.sub_mins[g]))
    }
}

impl Default for Unpacked {
    /// Zeros, with sub-scales of 1: what a format without sub-blocks and minima leaves alone.
    fn default() -> Self {
        Unpacked {
            scale: 0.0,
            min: 0.0,
            sub_scales: [1; MAX_SUB_BLOCKS],
            sub_mins: [0; MAX_SUB_BLOCKS],
            codes: [0; MAX_BLOCK_ELEMENTS],
        }
    }
}

/// Decodes the blocks of one row and returns the number of elements written: those of the whole blocks that both `row` and `out` hold.
/// The rest of `out` keeps its values.
pub fn decode_row(format: &Format, row: &[u8], out: &mut [f32]) -> usize {
    let blocks = (row.len() / format.block_bytes).min(out.len() / format.block_elements);
    let elements = blocks * format.block_elements;
    (format.decode)(&row[..blocks * format.block_bytes], &mut out[..elements]);
    elements
}

/// What the file of a block format states; `BYTES` is the size of a block.
trait BlockFormat<const BYTES: usize> {
    const ID: i32;
    const NAME: &'static CStr;
    const ELEMENTS: usize;
    const SUB_BLOCK: usize;
    const HAS_MIN: bool = false;
    const FLOATS: &'static [Float];

    /// Writes what the format has: a format with one scale leaves the sub-scales at 1, one without minima leaves those at 0.
    fn unpack(block: &[u8; BYTES], into: &mut Unpacked);
}

fn unpack_block<B: BlockFormat<BYTES>, const BYTES: usize>(block: &[u8], into: &mut Unpacked) {
    if let Some(block) = block.first_chunk() {
        // The target may have held another format's block.
        into.min = 0.0;
        into.sub_scales = [1; MAX_SUB_BLOCKS];
        into.sub_mins = [0; MAX_SUB_BLOCKS];
        B::unpack(block, into);
    }
}

fn decode_blocks<B: BlockFormat<BYTES>, const BYTES: usize>(blocks: &[u8], out: &mut [f32]) {
    let mut unpacked = Unpacked::default();
    for (block, out) in blocks.as_chunks::<BYTES>().0.iter().zip(out.chunks_exact_mut(B::ELEMENTS)) {
        B::unpack(block, &mut unpacked);
        for (g, (out, codes)) in out.chunks_mut(B::SUB_BLOCK).zip(unpacked.codes.chunks(B::SUB_BLOCK)).enumerate() {
            let (scale, min) = unpacked.sub_block(g);
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = scale * f32::from(code) - min;
            }
        }
    }
}

fn decode_plain<const BYTES: usize>(bytes: &[u8], out: &mut [f32], decode: impl Fn([u8; BYTES]) -> f32) {
    for (out, &bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        *out = decode(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_sorted_and_found_by_id() {
        assert!(FORMATS.is_sorted_by(|a, b| a.id < b.id));
        for f in FORMATS {
            assert_eq!(format(f.id).map(|found| found.name), Some(f.name));
        }
        assert!([-1, 4, 5, 9, 15, 38, 40, i32::MIN, i32::MAX].iter().all(|&id| format(id).is_none()));
    }

    #[test]
    fn row_bytes_refuses_cut_blocks_and_overflow() {
        let q4_k = format(12).unwrap();
        assert_eq!(q4_k.row_bytes(0), Some(0));
        assert_eq!(q4_k.row_bytes(512), Some(288));
        assert_eq!(q4_k.row_bytes(511), None);
        assert_eq!(format(0).unwrap().row_bytes(usize::MAX), None);
    }

    #[test]
    fn only_whole_blocks_are_decoded() {
        for f in FORMATS {
            let bytes = vec![0u8; 3 * f.block_bytes - 1];
            let mut out = vec![7.0f32; 4 * f.block_elements];
            assert_eq!(decode_row(f, &bytes, &mut out), 2 * f.block_elements, "{}", f.name);
            assert!(out[..2 * f.block_elements].iter().all(|&x| x == 0.0), "{}", f.name);
            assert!(out[2 * f.block_elements..].iter().all(|&x| x == 7.0), "{}", f.name);
            assert_eq!(decode_row(f, &bytes, &mut out[..f.block_elements - 1]), 0, "{}", f.name);
        }
    }

    #[test]
    fn unpacked_values_are_the_decoded_ones_whatever_the_target_held() {
        for f in FORMATS {
            let Some(unpack) = f.unpack else { continue };
            let block: Vec<u8> = (0..f.block_bytes).map(|i| (i * 37 + 11) as u8 & 0x3f).collect();
            let mut unpacked = Unpacked { scale: 9.0, min: 9.0, sub_scales: [9; _], sub_mins: [9; _], codes: [9; _] };
            let mut out = [0.0; MAX_BLOCK_ELEMENTS];
            unpack(&block, &mut unpacked);
            (f.decode)(&block, &mut out);
            for (i, &value) in out[..f.block_elements].iter().enumerate() {
                assert_eq!(unpacked.value(f.sub_block, i), value, "{} element {i}", f.name);
            }
            assert!(f.has_min || unpacked.min == 0.0 && unpacked.sub_mins == [0; MAX_SUB_BLOCKS], "{}", f.name);
        }
    }
}

//! Activations as the tile kernels read them: symmetric 8-bit codes, `x ~ d * q` with `|q| <= 127`, in groups of four tokens and chunks
//! of 256 columns, with the sums that offsets and mins of the weights need.

use super::formats::{Format, Tile};
use super::{Isa, TOKENS};

/// Columns of a chunk: one super-block, or eight blocks.
pub const CHUNK: usize = 256;

/// One chunk of four tokens for encodings with blocks of 32.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct ByteActs {
    /// `q[step][token]`: the codes of columns `4 step ..+4`.
    pub q: [[u32; TOKENS]; 64],
    /// Per 32 columns: minus the sum of the codes with `column % 4 < 2`, and of the others, as two 16-bit values (the two 16-bit lanes
    /// that `vpmaddubsw` leaves for a row).
    pub minus_sum: [[u32; TOKENS]; 8],
    pub d: [[f32; TOKENS]; 8],
    /// `d` times the sum of the codes, per 32 columns.
    pub sum: [[f32; TOKENS]; 8],
}

/// One chunk of four tokens for super-blocks of 256.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct SuperActs {
    pub q: [[u32; TOKENS]; 64],
    /// As in [`ByteActs`], per 16 columns.
    pub minus_sum: [[u32; TOKENS]; 16],
    /// `d` times the sum of the codes, per 16 columns, and per 32.
    pub sum16: [[f32; TOKENS]; 16],
    pub sum32: [[f32; TOKENS]; 8],
    pub d: [f32; TOKENS],
}

/// One chunk of four tokens for weights that need all 8 bits and their sign: codes widened to 16 bits.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct WordActs {
    /// `q[2 step][token]`: the codes of columns 0 and 2 of the four; `q[2 step + 1][token]`: of columns 1 and 3.
    pub q: [[u32; TOKENS]; 128],
    pub d: [[f32; TOKENS]; 8],
}

/// Codes of one token's chunk before they are interleaved, with their scales: one for each 32 columns.
pub struct Codes {
    pub q: [i8; CHUNK],
    pub d: [f32; 8],
}

/// How an encoding's weights meet activations: which activation layout it reads and which tile kernel it runs.
pub trait Family: 'static {
    type Acts: Copy + Send + Sync + 'static;
    /// Columns of one weight block.
    const ELEMENTS: usize;
    const LAYOUT: Layout;
    /// The tile holds 16-bit values, not bytes.
    const WORDS: bool = false;
    /// Four-column steps of a sub-block, which share a scale, where `sub_scale` counts; 0: floats per 32 alone.
    const SUB_STEPS: usize = 0;
    /// Columns that share an activation scale.
    const ACT_BLOCK: usize;

    fn interleave(codes: &[Codes; TOKENS], out: &mut Self::Acts);

    /// `out[token][row] += ` the tile's product over its first `blocks` blocks.
    fn apply<I: Isa, F: Format<Family = Self>>(
        isa: I,
        tile: &Tile,
        acts: &Self::Acts,
        tokens: usize,
        blocks: usize,
        out: &mut [[f32; 16]],
    ) where
        Self: Sized;
}

/// The activation layouts a call may need; each is made once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    ByteBlocks,
    ByteSuper,
    WordBlocks,
    WordSuper,
    Float,
}

impl Layout {
    pub const ALL: [Layout; 5] =
        [Layout::ByteBlocks, Layout::ByteSuper, Layout::WordBlocks, Layout::WordSuper, Layout::Float];

    /// Bytes of one chunk of four tokens.
    pub const fn bytes(self) -> usize {
        match self {
            Layout::ByteBlocks => size_of::<ByteActs>(),
            Layout::ByteSuper => size_of::<SuperActs>(),
            Layout::WordBlocks | Layout::WordSuper => size_of::<WordActs>(),
            Layout::Float => size_of::<super::float::FloatActs>(),
        }
    }
}

pub enum ByteBlocks {}
pub enum ByteSuper<const SUBS: usize> {}
pub enum WordBlocks {}
pub enum WordSuper {}

#[inline(always)]
fn code_dword(codes: &[Codes; TOKENS], t: usize, step: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| codes[t].q[4 * step + i] as u8))
}

/// Sums of the codes in `steps`, one for each 16-bit lane of a dword.
#[inline(always)]
fn half_sums(q: &[[u32; TOKENS]], t: usize) -> [i16; 2] {
    let mut s = [0i16; 2];
    for v in q {
        let [a, b, c, d] = v[t].to_le_bytes().map(|x| i16::from(x as i8));
        s[0] += a + b;
        s[1] += c + d;
    }
    s
}

#[inline(always)]
fn negated_pair(s: [i16; 2]) -> u32 {
    u32::from(s[0].wrapping_neg() as u16) | u32::from(s[1].wrapping_neg() as u16) << 16
}

#[inline(always)]
fn words(codes: &[Codes; TOKENS], out: &mut WordActs) {
    for step in 0..64 {
        for t in 0..TOKENS {
            let [a, b, c, d] = std::array::from_fn(|i| u32::from(i16::from(codes[t].q[4 * step + i]) as u16));
            out.q[2 * step][t] = a | c << 16;
            out.q[2 * step + 1][t] = b | d << 16;
        }
    }
    for b in 0..8 {
        out.d[b] = std::array::from_fn(|t| codes[t].d[b]);
    }
}

impl Family for ByteBlocks {
    type Acts = ByteActs;
    const ELEMENTS: usize = 32;
    const LAYOUT: Layout = Layout::ByteBlocks;
    const ACT_BLOCK: usize = 32;

    #[inline(always)]
    fn interleave(codes: &[Codes; TOKENS], out: &mut ByteActs) {
        for step in 0..64 {
            out.q[step] = std::array::from_fn(|t| code_dword(codes, t, step));
        }
        for b in 0..8 {
            for t in 0..TOKENS {
                let s = half_sums(&out.q[8 * b..8 * b + 8], t);
                out.minus_sum[b][t] = negated_pair(s);
                out.d[b][t] = codes[t].d[b];
                out.sum[b][t] = codes[t].d[b] * f32::from(s[0] + s[1]);
            }
        }
    }

    #[inline(always)]
    fn apply<I: Isa, F: Format<Family = Self>>(
        isa: I,
        tile: &Tile,
        acts: &ByteActs,
        tokens: usize,
        blocks: usize,
        out: &mut [[f32; 16]],
    ) {
        isa.byte_blocks::<F>(tile, acts, tokens, blocks, out);
    }
}

impl<const SUBS: usize> Family for ByteSuper<SUBS> {
    type Acts = SuperActs;
    const SUB_STEPS: usize = 64 / SUBS;
    const ELEMENTS: usize = 256;
    const LAYOUT: Layout = Layout::ByteSuper;
    const ACT_BLOCK: usize = 256;

    #[inline(always)]
    fn interleave(codes: &[Codes; TOKENS], out: &mut SuperActs) {
        for step in 0..64 {
            out.q[step] = std::array::from_fn(|t| code_dword(codes, t, step));
        }
        out.d = std::array::from_fn(|t| codes[t].d[0]);
        for t in 0..TOKENS {
            let mut sums = [0i16; 16];
            for (j, sum) in sums.iter_mut().enumerate() {
                let s = half_sums(&out.q[4 * j..4 * j + 4], t);
                out.minus_sum[j][t] = negated_pair(s);
                *sum = s[0] + s[1];
                out.sum16[j][t] = out.d[t] * f32::from(*sum);
            }
            for j in 0..8 {
                out.sum32[j][t] = out.d[t] * f32::from(sums[2 * j] + sums[2 * j + 1]);
            }
        }
    }

    #[inline(always)]
    fn apply<I: Isa, F: Format<Family = Self>>(
        isa: I,
        tile: &Tile,
        acts: &SuperActs,
        tokens: usize,
        _: usize,
        out: &mut [[f32; 16]],
    ) {
        isa.byte_super::<F, SUBS>(tile, acts, tokens, out);
    }
}

impl Family for WordBlocks {
    type Acts = WordActs;
    const WORDS: bool = true;
    const ELEMENTS: usize = 32;
    const LAYOUT: Layout = Layout::WordBlocks;
    const ACT_BLOCK: usize = 32;

    #[inline(always)]
    fn interleave(codes: &[Codes; TOKENS], out: &mut WordActs) {
        words(codes, out);
    }

    #[inline(always)]
    fn apply<I: Isa, F: Format<Family = Self>>(
        isa: I,
        tile: &Tile,
        acts: &WordActs,
        tokens: usize,
        blocks: usize,
        out: &mut [[f32; 16]],
    ) {
        isa.word_blocks(tile, acts, tokens, blocks, out);
    }
}

impl Family for WordSuper {
    type Acts = WordActs;
    const WORDS: bool = true;
    const ELEMENTS: usize = 256;
    const LAYOUT: Layout = Layout::WordSuper;
    const ACT_BLOCK: usize = 256;

    #[inline(always)]
    fn interleave(codes: &[Codes; TOKENS], out: &mut WordActs) {
        words(codes, out);
    }

    #[inline(always)]
    fn apply<I: Isa, F: Format<Family = Self>>(
        isa: I,
        tile: &Tile,
        acts: &WordActs,
        tokens: usize,
        _: usize,
        out: &mut [[f32; 16]],
    ) {
        isa.word_blocks(tile, acts, tokens, 8, out);
    }
}

/// Below this amax the reciprocal overflows; such a block counts as zero.
const TINY: f32 = 1e-36;

/// Quantises one token's chunk. A NaN makes its block's scale NaN.
#[inline(always)]
pub fn quantise(x: &[f32; CHUNK], act_block: usize, out: &mut Codes) {
    for (b, block) in x.chunks_exact(act_block).enumerate() {
        // Compared as integers, magnitudes order like numbers and NaN is above all.
        let amax = f32::from_bits(block.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff)));
        let (d, inverse) = if amax < TINY { (0.0, 0.0) } else { (amax / 127.0, 127.0 / amax) };
        for (q, v) in out.q[b * act_block..].iter_mut().zip(block) {
            // Adding and taking away 1.5 * 2^23 rounds to nearest even; `as` saturates and turns NaN to 0.
            *q = ((v * inverse + 12_582_912.0) - 12_582_912.0) as i8;
        }
        out.d[b * act_block / 32..(b + 1) * act_block / 32].fill(d);
    }
}

//! Activations as the tile kernels read them: symmetric 8-bit codes, `x ~ d * q` with `|q| <= 127`, in groups of four tokens and chunks
//! of 256 columns, with the sums that offsets and mins of the weights need.

use super::float::FloatActs;
use super::float_rows::RowActs;
use super::formats::{Format, Scales, Tile};
use super::lanes::Lanes;
use super::{Isa, STREAMS, Stream, TOKENS};

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
    /// Sums of the codes of two times 16 columns, and of two times 32, as two 16-bit values.
    pub sums16: [[u32; TOKENS]; 8],
    pub sums32: [[u32; TOKENS]; 4],
    pub d: [f32; TOKENS],
}

/// One chunk of four tokens for weights that need all 8 bits and their sign: codes widened to 16 bits.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct WordActs {
    /// `q[2 step][token]`: the codes of columns 0 and 2 of the four; `q[2 step + 1][token]`: of columns 1 and 3.
    ///
    /// One or two tokens leave room for theirs once more, as 8-bit digits of `16 high + low`: `q[2 step][2 + token]` the low ones of the four columns,
    /// `q[2 step + 1][2 + token]` the high ones.
    pub q: [[u32; TOKENS]; 128],
    pub d: [[f32; TOKENS]; 8],
    /// Per 32 columns: minus 128 times the sum of the codes.
    pub offset: [[i32; TOKENS]; 8],
}

/// Chunks in a [`Linear`].
pub const SEGMENT: usize = 16;

/// One token's activations of some chunks, columns one after the other, for kernels that go along a row.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Linear {
    /// Codes of 32 columns.
    pub codes: [[[u32; 8]; 8]; SEGMENT],
    /// Per block: 32 columns, or 256 for [`ByteSuper`].
    pub d: [f32; 8 * SEGMENT],
    /// [`ByteBlocks`]: `d` times the sum of the codes, and minus the sum alone.
    pub sum: [f32; 8 * SEGMENT],
    pub minus: [u32; 8 * SEGMENT],
    /// [`ByteSuper`]: as in [`SuperActs`], `[..][chunk]`.
    pub minus_sum: [[u32; SEGMENT]; 16],
    pub sums: [[u32; SEGMENT]; 8],
}

/// One token's chunk before it is interleaved with others.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Codes {
    /// Four columns a dword.
    pub q: [[u32; 16]; 4],
    /// For each 16 columns, sums as in [`ByteActs::minus_sum`], not negated.
    pub sums: [[i16; 2]; 16],
    /// One for each 32 columns.
    pub d: [f32; 8],
}

impl Codes {
    pub const ZERO: Codes = Codes { q: [[0; 16]; 4], sums: [[0; 2]; 16], d: [0.0; 8] };
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
    /// Most tokens for which raw rows are better taken one after the other: to take codes apart again for each costs more or less.
    const ROWWISE: usize = 1;

    /// Puts token `t` of the four in its place.
    fn put<V: Lanes>(codes: &Codes, t: usize, out: &mut Self::Acts);

    /// Puts token `t`'s chunk in its place.
    fn linear(acts: &Self::Acts, t: usize, chunk: usize, out: &mut Linear);

    /// `out[stream][token][row] += ` the product of a chunk's blocks, unpacked in registers; `scales` is room for theirs.
    fn fused<I: Isa, F: Format<Family = Self>>(
        isa: I,
        streams: &[Stream<'_, F::Block>],
        scales: &mut [Scales; STREAMS],
        acts: &Self::Acts,
        out: &mut [&mut [[f32; 16]]],
    ) where
        Self: Sized;

    /// `out[token][row] += ` the tile's product over its first `blocks` blocks.
    fn apply<I: Isa, F: Format<Family = Self>>(
        isa: I,
        tile: &Tile,
        acts: &Self::Acts,
        blocks: usize,
        out: &mut [[f32; 16]],
    ) where
        Self: Sized;
}

/// A chunk of four tokens that stays floats.
pub trait FloatChunk: Copy {
    const ZERO: Self;
    /// Puts token `t` of the four in its place.
    fn put(&mut self, t: usize, x: &[f32; CHUNK]);
}

/// The activation layouts a call may need; each is made once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    ByteBlocks,
    ByteSuper,
    WordBlocks,
    WordSuper,
    Float,
    FloatRows,
}

impl Layout {
    pub const ALL: [Layout; 6] = [
        Layout::ByteBlocks,
        Layout::ByteSuper,
        Layout::WordBlocks,
        Layout::WordSuper,
        Layout::Float,
        Layout::FloatRows,
    ];

    /// Bytes of one chunk of four tokens.
    pub const fn bytes(self) -> usize {
        match self {
            Layout::ByteBlocks => size_of::<ByteActs>(),
            Layout::ByteSuper => size_of::<SuperActs>(),
            Layout::WordBlocks | Layout::WordSuper => size_of::<WordActs>(),
            Layout::Float => size_of::<FloatActs>(),
            Layout::FloatRows => size_of::<RowActs>(),
        }
    }
}

pub enum ByteBlocks {}
pub enum ByteSuper<const SUBS: usize> {}
pub enum WordBlocks {}
pub enum WordSuper {}

#[inline(always)]
fn put_bytes(codes: &Codes, t: usize, out: &mut [[u32; TOKENS]; 64]) {
    for (out, q) in out.iter_mut().zip(codes.q.as_flattened()) {
        out[t] = *q;
    }
}

#[inline(always)]
fn linear_bytes(q: &[[u32; TOKENS]; 64], t: usize, out: &mut [[u32; 8]; 8]) {
    for (out, q) in out.as_flattened_mut().iter_mut().zip(q) {
        *out = q[t];
    }
}

#[inline(always)]
fn linear_words(acts: &WordActs, t: usize, chunk: usize, out: &mut Linear) {
    for (out, q) in out.codes[chunk].as_flattened_mut().iter_mut().zip(acts.q.as_chunks::<2>().0) {
        *out = q[0][t] & 0x00ff_00ff | (q[1][t] & 0x00ff_00ff) << 8;
    }
    for b in 0..8 {
        out.d[8 * chunk + b] = acts.d[b][t];
    }
}

impl SuperActs {
    /// Sums of the columns of sub-blocks `2 i` and `2 i + 1`.
    #[inline(always)]
    pub fn sums<const SUBS: usize>(&self) -> &[[u32; TOKENS]] {
        if SUBS == 16 { &self.sums16 } else { &self.sums32 }
    }
}

#[inline(always)]
fn pair(low: i16, high: i16) -> u32 {
    u32::from(low as u16) | u32::from(high as u16) << 16
}

#[inline(always)]
fn negated_pair(s: [i16; 2]) -> u32 {
    pair(s[0].wrapping_neg(), s[1].wrapping_neg())
}

#[inline(always)]
fn total(s: [i16; 2]) -> f32 {
    f32::from(s[0] + s[1])
}

#[inline(always)]
fn put_words<V: Lanes>(codes: &Codes, t: usize, out: &mut WordActs) {
    for (q, out) in codes.q.iter().zip(out.q.chunks_exact_mut(32)) {
        let (mut even, mut odd) = ([0; 16], [0; 16]);
        for h in 0..V::HALVES {
            let v = V::load(q, h);
            v.even_bytes_i16().store(&mut even, h);
            v.odd_bytes_i16().store(&mut odd, h);
        }
        for (out, (even, odd)) in out.chunks_exact_mut(2).zip(even.into_iter().zip(odd)) {
            out[0][t] = even;
            out[1][t] = odd;
        }
        if t < 2 {
            for (out, [low, high]) in out.chunks_exact_mut(2).zip(q.map(digits)) {
                out[0][2 + t] = low;
                out[1][2 + t] = high;
            }
        }
    }
    for b in 0..8 {
        out.d[b][t] = codes.d[b];
        let [lo, hi] = [codes.sums[2 * b], codes.sums[2 * b + 1]];
        out.offset[b][t] = -128 * i32::from(lo[0] + lo[1] + hi[0] + hi[1]);
    }
}

/// The signed bytes' digits, `byte = 16 high + low`, `low` in -8 ..= 7 and `high` in -8 ..= 8.
#[inline(always)]
fn digits(q: u32) -> [u32; 2] {
    const EIGHTS: u32 = 0x0808_0808;
    const TOPS: u32 = 0x8080_8080;
    // Four bits of each byte as a signed number; the top bits keep the bytes from borrowing from one another.
    let signed = |bits: u32, carry: u32| (((bits & 0x0f0f_0f0f ^ EIGHTS) | TOPS) - EIGHTS + carry) ^ TOPS;
    [signed(q, 0), signed(q >> 4, (q & EIGHTS) >> 3)]
}

impl Family for ByteBlocks {
    type Acts = ByteActs;
    const ELEMENTS: usize = 32;
    const LAYOUT: Layout = Layout::ByteBlocks;
    const ACT_BLOCK: usize = 32;

    #[inline(always)]
    fn put<V: Lanes>(codes: &Codes, t: usize, out: &mut ByteActs) {
        put_bytes(codes, t, &mut out.q);
        for b in 0..8 {
            let [lo, hi] = [codes.sums[2 * b], codes.sums[2 * b + 1]];
            let s = [lo[0] + hi[0], lo[1] + hi[1]];
            out.minus_sum[b][t] = negated_pair(s);
            out.d[b][t] = codes.d[b];
            out.sum[b][t] = codes.d[b] * total(s);
        }
    }

    #[inline(always)]
    fn linear(acts: &ByteActs, t: usize, chunk: usize, out: &mut Linear) {
        linear_bytes(&acts.q, t, &mut out.codes[chunk]);
        for b in 0..8 {
            out.d[8 * chunk + b] = acts.d[b][t];
            out.sum[8 * chunk + b] = acts.sum[b][t];
            let [low, high] = [acts.minus_sum[b][t] as i16, (acts.minus_sum[b][t] >> 16) as i16];
            out.minus[8 * chunk + b] = (i32::from(low) + i32::from(high)) as u32;
        }
    }

    #[inline(always)]
    fn apply<I: Isa, F: Format<Family = Self>>(
        isa: I,
        tile: &Tile,
        acts: &ByteActs,
        blocks: usize,
        out: &mut [[f32; 16]],
    ) {
        isa.byte_blocks::<F>(tile, acts, blocks, out);
    }

    #[inline(always)]
    fn fused<I: Isa, F: Format<Family = Self>>(
        isa: I,
        streams: &[Stream<'_, F::Block>],
        scales: &mut [Scales; STREAMS],
        acts: &ByteActs,
        out: &mut [&mut [[f32; 16]]],
    ) {
        isa.fused_byte_blocks::<F>(streams, scales, acts, out);
    }
}

impl<const SUBS: usize> Family for ByteSuper<SUBS> {
    type Acts = SuperActs;
    const ROWWISE: usize = 2;
    const SUB_STEPS: usize = 64 / SUBS;
    const ELEMENTS: usize = 256;
    const LAYOUT: Layout = Layout::ByteSuper;
    const ACT_BLOCK: usize = 256;

    #[inline(always)]
    fn put<V: Lanes>(codes: &Codes, t: usize, out: &mut SuperActs) {
        put_bytes(codes, t, &mut out.q);
        let d = codes.d[0];
        out.d[t] = d;
        let mut totals = [0; 16];
        for j in 0..16 {
            out.minus_sum[j][t] = negated_pair(codes.sums[j]);
            totals[j] = codes.sums[j][0] + codes.sums[j][1];
        }
        for i in 0..8 {
            out.sums16[i][t] = pair(totals[2 * i], totals[2 * i + 1]);
        }
        for i in 0..4 {
            let sum32 = |j: usize| totals[2 * j] + totals[2 * j + 1];
            out.sums32[i][t] = pair(sum32(2 * i), sum32(2 * i + 1));
        }
    }

    #[inline(always)]
    fn linear(acts: &SuperActs, t: usize, chunk: usize, out: &mut Linear) {
        linear_bytes(&acts.q, t, &mut out.codes[chunk]);
        out.d[chunk] = acts.d[t];
        for j in 0..16 {
            out.minus_sum[j][chunk] = acts.minus_sum[j][t];
        }
        for i in 0..SUBS / 2 {
            out.sums[i][chunk] = acts.sums::<SUBS>()[i][t];
        }
    }

    #[inline(always)]
    fn apply<I: Isa, F: Format<Family = Self>>(isa: I, tile: &Tile, acts: &SuperActs, _: usize, out: &mut [[f32; 16]]) {
        isa.byte_super::<F, SUBS>(tile, acts, out);
    }

    #[inline(always)]
    fn fused<I: Isa, F: Format<Family = Self>>(
        isa: I,
        streams: &[Stream<'_, F::Block>],
        scales: &mut [Scales; STREAMS],
        acts: &SuperActs,
        out: &mut [&mut [[f32; 16]]],
    ) {
        isa.fused_byte_super::<F, SUBS>(streams, scales, acts, out);
    }
}

impl Family for WordBlocks {
    type Acts = WordActs;
    const WORDS: bool = true;
    const ELEMENTS: usize = 32;
    const LAYOUT: Layout = Layout::WordBlocks;
    const ACT_BLOCK: usize = 32;

    #[inline(always)]
    fn put<V: Lanes>(codes: &Codes, t: usize, out: &mut WordActs) {
        put_words::<V>(codes, t, out);
    }

    #[inline(always)]
    fn linear(acts: &WordActs, t: usize, chunk: usize, out: &mut Linear) {
        linear_words(acts, t, chunk, out);
    }

    #[inline(always)]
    fn apply<I: Isa, F: Format<Family = Self>>(
        isa: I,
        tile: &Tile,
        acts: &WordActs,
        blocks: usize,
        out: &mut [[f32; 16]],
    ) {
        isa.word_blocks(tile, acts, blocks, out);
    }

    #[inline(always)]
    fn fused<I: Isa, F: Format<Family = Self>>(
        isa: I,
        streams: &[Stream<'_, F::Block>],
        scales: &mut [Scales; STREAMS],
        acts: &WordActs,
        out: &mut [&mut [[f32; 16]]],
    ) {
        isa.fused_word_blocks::<F>(streams, scales, acts, out);
    }
}

impl Family for WordSuper {
    type Acts = WordActs;
    const WORDS: bool = true;
    const ELEMENTS: usize = 256;
    const LAYOUT: Layout = Layout::WordSuper;
    const ACT_BLOCK: usize = 256;

    #[inline(always)]
    fn put<V: Lanes>(codes: &Codes, t: usize, out: &mut WordActs) {
        put_words::<V>(codes, t, out);
    }

    #[inline(always)]
    fn linear(acts: &WordActs, t: usize, chunk: usize, out: &mut Linear) {
        linear_words(acts, t, chunk, out);
    }

    #[inline(always)]
    fn apply<I: Isa, F: Format<Family = Self>>(isa: I, tile: &Tile, acts: &WordActs, _: usize, out: &mut [[f32; 16]]) {
        isa.word_blocks(tile, acts, 8, out);
    }

    #[inline(always)]
    fn fused<I: Isa, F: Format<Family = Self>>(
        isa: I,
        streams: &[Stream<'_, F::Block>],
        scales: &mut [Scales; STREAMS],
        acts: &WordActs,
        out: &mut [&mut [[f32; 16]]],
    ) {
        isa.fused_word_blocks::<F>(streams, scales, acts, out);
    }
}

/// Below this amax the reciprocal overflows; such a block counts as zero.
pub const TINY: f32 = 1e-36;

/// Quantises one token's chunk, `act_block` columns to a scale. A NaN makes its block's scale NaN.
#[inline(always)]
pub fn quantise(x: &[f32; CHUNK], act_block: usize, out: &mut Codes) {
    for (b, block) in x.chunks_exact(act_block).enumerate() {
        // Compared as integers, magnitudes order like numbers and NaN is above all.
        let amax = f32::from_bits(block.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff)));
        let (d, inverse) = if amax < TINY { (0.0, 0.0) } else { (amax / 127.0, 127.0 / amax) };
        // `as` saturates and turns NaN to 0.
        let code = |v: f32| (v * inverse).round_ties_even() as i8;
        for (i, v) in block.chunks_exact(16).enumerate() {
            let q: [i8; 16] = std::array::from_fn(|i| code(v[i]));
            let mut sums = [0i16; 2];
            for q in q.as_chunks::<4>().0 {
                sums[0] += i16::from(q[0]) + i16::from(q[1]);
                sums[1] += i16::from(q[2]) + i16::from(q[3]);
            }
            let sub = act_block / 16 * b + i;
            out.sums[sub] = sums;
            for (i, q) in q.as_chunks::<4>().0.iter().enumerate() {
                out.q[sub / 4][4 * (sub % 4) + i] = u32::from_le_bytes(q.map(|q| q as u8));
            }
        }
        out.d[act_block / 32 * b..act_block / 32 * (b + 1)].fill(d);
    }
}

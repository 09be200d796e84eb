//! What differs between the GGUF encodings: where codes and scales lie, and so how sixteen blocks become a [`Tile`].
//!
//! Sixteen GGUF blocks (one a row, same columns) are interleaved with their dwords transposed: plane `i` holds dword `i` of every row, and a two-byte (or
//! one-byte) field that fits no dword makes a last narrow plane. GGUF lays bit fields out so that consecutive bytes are consecutive columns, so codes are taken
//! apart with shifts and masks and no shuffle across lanes. Borrowed weights are multiplied from there; packed ones have their codes
//! rearranged once more, into [`Unit`]s. Not a byte more than GGUF has.

use super::TOKENS;
use super::activations::{ByteBlocks, ByteSuper, Family, WordBlocks, WordSuper};
use super::lanes::{Bits, Lanes};
use super::pack::planes_of;

/// Sixteen rows by 256 columns of weights as the kernels read them; it stays in L1 while many tokens pass over it.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Tile {
    /// Byte families: `q[step][row]` holds columns `4 step ..+4`, unsigned, the offset still in.
    /// Word families: `q[2 step]` holds columns 0 and 2 of the four as signed 16-bit values, `q[2 step + 1]` columns 1 and 3.
    pub q: [[u32; 16]; 128],
    pub scales: Scales,
}

/// What the sums of sixteen rows by 256 columns are multiplied by, unpacked.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Scales {
    /// Block families: a float scale per 32 columns. Super-block families: `scale[0]` alone.
    pub scale: [[f32; 16]; 8],
    /// Float added per unit of activation sum. Block families: per 32 columns. Super-block families: `min[0]` alone, times `sub_min`.
    pub min: [[f32; 16]; 8],
    /// Super-block families: the integer scale of each 32 or 16 columns, twice, as two 16-bit values.
    pub sub_scale: [[u32; 16]; 16],
    /// Super-block families: the integer mins of sub-blocks `2 i` and `2 i + 1` as two 16-bit values.
    pub sub_min: [[u32; 16]; 8],
}

impl Tile {
    pub const fn zeroed() -> Self {
        Self { q: [[0; 16]; 128], scales: Scales::ZERO }
    }
}

impl Scales {
    pub const ZERO: Self =
        Self { scale: [[0.0; 16]; 8], min: [[0.0; 16]; 8], sub_scale: [[0; 16]; 16], sub_min: [[0; 16]; 8] };
}

/// Runs the body once for each listed value of a constant, so that shifts can be immediate.
macro_rules! unroll {
    ($name:ident in [$($v:literal)*] $body:block) => { $({ const $name: usize = $v; $body })* };
}

/// The same for each of a unit's pieces.
macro_rules! each_piece {
    ($name:ident, $piece:ident in $pieces:ident $body:block) => {
        unroll!($name in [0 1 2 3 4 5 6 7 8 9 10 11] {
            if $name < $pieces.len() {
                let $piece = &$pieces[$name];
                $body
            }
        })
    };
}

/// Takes codes as they are taken apart: those of the four columns `4 step ..+4`. A trait, not a closure: see [`super::Work`].
pub trait Emit<V> {
    fn emit(&mut self, step: usize, v: V);
}

/// A GGUF block whose codes are taken 32 columns at a time, or four of them at a step from the planes of sixteen; `at` counts bytes from its start.
pub trait Gguf<V: Bits> {
    /// 32 bytes.
    fn bytes(&self, at: usize) -> V;
    /// The low halves of 16 bytes, then the high halves.
    fn nibbles(&self, at: usize) -> V;
    /// 32 bits, each as bit 4 of a byte.
    fn fifth_bits(&self, at: usize) -> V;
}

/// How packed codes lie: the planes of so many steps (four columns each), then those of the next. Every kernel takes units apart in the order in which they
/// lie, all in the same way. The kernels in assembly have these tables as text (`avx2::fused`).
///
/// Where a byte has bits to spare, they hold one more code in pieces: of six bits, GGUF's four low bits here and two high ones there take 17 operations for
/// four codes, this 11.
pub struct Unit {
    /// Of a code.
    pub bits: usize,
    pub planes: usize,
    /// In order of their steps.
    pieces: &'static [Piece],
}

/// Bits `from ..from + width` of each byte of a plane are bits `to ..` of the codes of a step.
#[derive(Clone, Copy)]
struct Piece {
    step: usize,
    plane: usize,
    from: usize,
    to: usize,
    width: usize,
}

const fn piece(step: usize, plane: usize, from: usize, to: usize, width: usize) -> Piece {
    Piece { step, plane, from, to, width }
}

impl Unit {
    pub const fn steps(&self) -> usize {
        8 * self.planes / self.bits
    }

    #[rustfmt::skip]
    const BYTES: Unit = Unit { bits: 8, planes: 8, pieces: &[
        piece(0, 0, 0, 0, 8), piece(1, 1, 0, 0, 8), piece(2, 2, 0, 0, 8), piece(3, 3, 0, 0, 8),
        piece(4, 4, 0, 0, 8), piece(5, 5, 0, 0, 8), piece(6, 6, 0, 0, 8), piece(7, 7, 0, 0, 8),
    ] };
    #[rustfmt::skip]
    const SIX_BITS: Unit = Unit { bits: 6, planes: 3, pieces: &[
        piece(0, 0, 0, 0, 6), piece(1, 1, 0, 0, 6), piece(2, 2, 0, 0, 6),
        piece(3, 0, 6, 0, 2), piece(3, 1, 6, 2, 2), piece(3, 2, 6, 4, 2),
    ] };
    #[rustfmt::skip]
    const FIVE_BITS: Unit = Unit { bits: 5, planes: 5, pieces: &[
        piece(0, 0, 0, 0, 5), piece(1, 1, 0, 0, 5), piece(2, 2, 0, 0, 5), piece(3, 3, 0, 0, 5), piece(4, 4, 0, 0, 5),
        piece(5, 1, 6, 0, 2), piece(5, 0, 5, 2, 3),
        piece(6, 3, 6, 0, 2), piece(6, 2, 5, 2, 3),
        piece(7, 1, 5, 0, 1), piece(7, 3, 5, 1, 1), piece(7, 4, 5, 2, 3),
    ] };
    #[rustfmt::skip]
    const NIBBLES: Unit = Unit { bits: 4, planes: 4, pieces: &[
        piece(0, 0, 0, 0, 4), piece(1, 1, 0, 0, 4), piece(2, 2, 0, 0, 4), piece(3, 3, 0, 0, 4),
        piece(4, 0, 4, 0, 4), piece(5, 1, 4, 0, 4), piece(6, 2, 4, 0, 4), piece(7, 3, 4, 0, 4),
    ] };
    #[rustfmt::skip]
    const THREE_BITS: Unit = Unit { bits: 3, planes: 3, pieces: &[
        piece(0, 0, 0, 0, 3), piece(1, 0, 3, 0, 3), piece(2, 1, 0, 0, 3), piece(3, 0, 6, 0, 2), piece(3, 1, 6, 2, 1),
        piece(4, 1, 3, 0, 3), piece(5, 2, 0, 0, 3), piece(6, 2, 3, 0, 3), piece(7, 1, 7, 0, 1), piece(7, 2, 6, 1, 2),
    ] };
    #[rustfmt::skip]
    const TWO_BITS: Unit = Unit { bits: 2, planes: 1, pieces: &[
        piece(0, 0, 0, 0, 2), piece(1, 0, 2, 0, 2), piece(2, 0, 4, 0, 2), piece(3, 0, 6, 0, 2),
    ] };
}

/// An encoding with 8-bit activations.
///
/// # Safety
/// `Block` is `repr(C)`, any bytes are a valid value, and it consists of `[u32; 16]` planes for the dwords of a GGUF block after its
/// first `HEAD` bytes, then one plane of 16 for the bytes left over (the head, or a tail of two bytes).
pub unsafe trait Format: 'static {
    type Block: Copy + Send + Sync + 'static;
    type Family: super::activations::Family;
    /// Bytes of one GGUF block.
    const BLOCK_BYTES: usize;
    const HEAD: usize = 0;
    /// The head, and so the last plane, is an f16 scale.
    const HALF: bool = Self::HEAD == 2;
    /// Byte families' codes are `weight + 2^SHIFT`; 0: no offset. Word families' are `weight + 128` ([`WORD_OFFSET`]).
    const SHIFT: u32 = 0;
    /// GGUF's codes are signed bytes: interleaved, their top bit is flipped.
    const SIGNED: bool = false;
    /// Whether the tile's `min` counts.
    const MIN: bool = false;

    /// How packed codes lie, from plane `CODES` on.
    const UNIT: Unit;
    const CODES: usize;
    /// Codes are indices of this table.
    const TABLE: Option<&'static [i8; 16]> = None;
    /// Interleaved GGUF blocks are units already: packing rearranges nothing.
    const UNITS_AS_GGUF: bool = false;
    /// Most tokens that are better fused: for each further four, codes are taken apart again.
    const FUSED: usize =
        if Self::TABLE.is_none() && matches!(Self::UNIT.bits, 4 | 8) { 4 * TOKENS } else { 2 * TOKENS };
    /// Of a block.
    const UNITS: usize = <Self::Family as Family>::ELEMENTS / (4 * Self::UNIT.steps());

    /// Takes unit `unit` of a packed block apart, for the rows that `h` stands for (see `lanes`).
    #[inline(always)]
    fn unit<V: Bits>(block: &Self::Block, unit: usize, h: usize, out: &mut impl Emit<V>) {
        let planes = &planes::<Self>(block)[Self::CODES + Self::UNIT.planes * unit..][..Self::UNIT.planes];
        let pieces = Self::UNIT.pieces;
        let mut code = V::splat(0);
        each_piece!(I, piece in pieces {
            let v = V::load(&planes[piece.plane], h);
            let v = if piece.width < 8 {
                let mask = ((1 << piece.width) - 1) << piece.to;
                shifted(v, piece.to as isize - piece.from as isize).and(V::splat(0x0101_0101 * mask))
            } else {
                v
            };
            code = if piece.to == 0 { v } else { code.or(v) };
            if I + 1 == pieces.len() || pieces[I + 1].step != piece.step {
                out.emit(piece.step, if let Some(table) = Self::TABLE { code.lookup(table) } else { code });
            }
        });
    }
    /// The codes of columns `32 I ..+32` of a GGUF block, a column a byte; in word families signed, without the offset.
    fn gguf<V: Bits, const I: usize>(block: &impl Gguf<V>) -> V;
    /// Fills the scales; `slot` is which 32 of the 256 columns (always 0 for super-blocks).
    fn scales<V: Lanes>(block: &Self::Block, slot: usize, out: &mut Scales);
    /// The first of each four dwords of a GGUF block that together hold its scales, where they are dwords; the narrow field aside.
    const HEAD_DWORDS: &[usize] = &[];
}

/// The planes of a block, without the narrow one.
#[inline(always)]
fn planes<F: Format + ?Sized>(block: &F::Block) -> &[[u32; 16]] {
    // SAFETY: by `Format`'s contract a block starts with so many.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(block).cast(), (F::BLOCK_BYTES - F::HEAD) / 4) }
}

/// Sixteen interleaved GGUF blocks, at one step of each 32 columns.
struct Interleaved<'a, F: Format> {
    block: &'a F::Block,
    h: usize,
    step: usize,
}

impl<F: Format> Interleaved<'_, F> {
    #[inline(always)]
    fn plane<V: Bits>(&self, at: usize, i: usize) -> V {
        V::load(&planes::<F>(self.block)[(at - F::HEAD) / 4 + i], self.h)
    }
}

impl<V: Bits, F: Format> Gguf<V> for Interleaved<'_, F> {
    #[inline(always)]
    fn bytes(&self, at: usize) -> V {
        self.plane(at, self.step)
    }
    #[inline(always)]
    fn nibbles(&self, at: usize) -> V {
        let both: V = self.plane(at, self.step % 4);
        both.shr(self.step / 4 * 4).and(V::splat(LOW4))
    }
    #[inline(always)]
    fn fifth_bits(&self, at: usize) -> V {
        // Four bits, to the bottom of a byte each.
        let bits = self.plane::<V>(at, 0).shr(4 * self.step).and(V::splat(15));
        let bits = bits.or(bits.shl(7));
        bits.or(bits.shl(14)).and(V::splat(0x0101_0101)).shl(4)
    }
}

/// Fills the tile from a block, packed or only interleaved.
#[inline(always)]
pub fn unpack<V: Lanes, F: Format, const PACKED: bool>(block: &F::Block, slot: usize, tile: &mut Tile) {
    const { assert!(F::UNITS_AS_GGUF || !<F::Family as Family>::WORDS, "only bytes are taken from GGUF's order") };
    for h in 0..V::HALVES {
        if PACKED || F::UNITS_AS_GGUF {
            for unit in 0..F::UNITS {
                let first = 8 * slot + F::UNIT.steps() * unit;
                if <F::Family as Family>::WORDS {
                    F::unit::<V>(block, unit, h, &mut ToWords { first, h, tile });
                } else {
                    F::unit::<V>(block, unit, h, &mut ToBytes { first, h, tile });
                }
            }
        } else {
            unroll!(I in [0 1 2 3 4 5 6 7] {
                if 32 * I < <F::Family as Family>::ELEMENTS {
                    for step in 0..8 {
                        let code = F::gguf::<V, I>(&Interleaved::<F> { block, h, step });
                        ToBytes { first: 8 * (slot + I), h, tile }.emit(step, code);
                    }
                }
            });
        }
    }
    F::scales::<V>(block, slot, &mut tile.scales);
}

/// Packs an interleaved block: its codes into units. The tile is room.
#[inline(always)]
pub fn pack_codes<V: Lanes, F: Format>(block: &mut F::Block, tile: &mut Tile) {
    if F::UNITS_AS_GGUF {
        return;
    }
    unpack::<V, F, false>(block, 0, tile);
    let (planes, ..) = planes_of::<F>(block);
    let pieces = F::UNIT.pieces;
    let units = planes[F::CODES..].chunks_exact_mut(F::UNIT.planes);
    for (codes, planes) in tile.q.chunks_exact(F::UNIT.steps()).zip(units).take(F::UNITS) {
        for h in 0..V::HALVES {
            let mut v = [V::splat(0); 8];
            each_piece!(I, piece in pieces {
                let mask = ((1 << piece.width) - 1) << piece.from;
                let bits = shifted(V::load(&codes[piece.step], h), piece.from as isize - piece.to as isize);
                v[piece.plane] = v[piece.plane].or(bits.and(V::splat(0x0101_0101 * mask)));
            });
            for (plane, v) in planes.iter_mut().zip(v) {
                v.store(plane, h);
            }
        }
    }
}

struct ToBytes<'a> {
    first: usize,
    h: usize,
    tile: &'a mut Tile,
}

impl<V: Lanes> Emit<V> for ToBytes<'_> {
    #[inline(always)]
    fn emit(&mut self, step: usize, v: V) {
        v.store(&mut self.tile.q[self.first + step], self.h);
    }
}

struct ToWords<'a> {
    first: usize,
    h: usize,
    tile: &'a mut Tile,
}

impl<V: Lanes> Emit<V> for ToWords<'_> {
    #[inline(always)]
    fn emit(&mut self, step: usize, v: V) {
        let (v, at) = (v.sub_bytes(V::splat(WORD_OFFSET)), 2 * (self.first + step));
        v.even_bytes_i16().store(&mut self.tile.q[at], self.h);
        v.odd_bytes_i16().store(&mut self.tile.q[at + 1], self.h);
    }
}

#[inline(always)]
fn shifted<V: Bits>(v: V, left: isize) -> V {
    match left {
        0 => v,
        1.. => v.shl(left as usize),
        _ => v.shr(-left as usize),
    }
}

/// What is added to the weights of word families to make their codes, in each byte. Added or taken away, it flips the top bit.
pub const WORD_OFFSET: u32 = 0x8080_8080;
const LOW4: u32 = 0x0f0f_0f0f;
const BIT4: u32 = 0x1010_1010;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct HalfScaled<const N: usize> {
    codes: [[u32; 16]; N],
    d: [u16; 16],
}

pub struct Q4_0;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q4_0 {
    type Block = HalfScaled<4>;
    type Family = ByteBlocks;
    const BLOCK_BYTES: usize = 18;
    const HEAD: usize = 2;
    const SHIFT: u32 = 3;
    const UNIT: Unit = Unit::NIBBLES;
    const CODES: usize = 0;
    const UNITS_AS_GGUF: bool = true;

    #[inline(always)]
    fn gguf<V: Bits, const I: usize>(block: &impl Gguf<V>) -> V {
        block.nibbles(2)
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            V::store_f32(V::load_f16(&b.d, h), &mut out.scale[slot], h);
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q4_1Block {
    dm: [u32; 16],
    codes: [[u32; 16]; 4],
}

pub struct Q4_1;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q4_1 {
    type Block = Q4_1Block;
    type Family = ByteBlocks;
    const BLOCK_BYTES: usize = 20;
    const HEAD_DWORDS: &[usize] = &[0];
    const MIN: bool = true;
    const UNIT: Unit = Unit::NIBBLES;
    const CODES: usize = 1;
    const UNITS_AS_GGUF: bool = true;

    #[inline(always)]
    fn gguf<V: Bits, const I: usize>(block: &impl Gguf<V>) -> V {
        block.nibbles(4)
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            let dm = V::load(&b.dm, h);
            V::store_f32(dm.low_f16(), &mut out.scale[slot], h);
            V::store_f32(dm.high_f16(), &mut out.min[slot], h);
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q5_0Block {
    codes: [[u32; 16]; 5],
    d: [u16; 16],
}

pub struct Q5_0;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q5_0 {
    type Block = Q5_0Block;
    type Family = ByteBlocks;
    const BLOCK_BYTES: usize = 22;
    const HEAD: usize = 2;
    const SHIFT: u32 = 4;
    const UNIT: Unit = Unit::FIVE_BITS;
    const CODES: usize = 0;

    #[inline(always)]
    fn gguf<V: Bits, const I: usize>(block: &impl Gguf<V>) -> V {
        block.nibbles(6).or(block.fifth_bits(2))
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            V::store_f32(V::load_f16(&b.d, h), &mut out.scale[slot], h);
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q5_1Block {
    dm: [u32; 16],
    codes: [[u32; 16]; 5],
}

pub struct Q5_1;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q5_1 {
    type Block = Q5_1Block;
    type Family = ByteBlocks;
    const BLOCK_BYTES: usize = 24;
    const HEAD_DWORDS: &[usize] = &[0];
    // Codes up to 31 overflow the 16-bit sums unless centred; the min makes up for it.
    const SHIFT: u32 = 4;
    const MIN: bool = true;
    const UNIT: Unit = Unit::FIVE_BITS;
    const CODES: usize = 1;

    #[inline(always)]
    fn gguf<V: Bits, const I: usize>(block: &impl Gguf<V>) -> V {
        block.nibbles(8).or(block.fifth_bits(4))
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            let dm = V::load(&b.dm, h);
            V::store_f32(dm.low_f16(), &mut out.scale[slot], h);
            let min = V::mul_add(dm.low_f16(), V::splat_f32(16.0), dm.high_f16());
            V::store_f32(min, &mut out.min[slot], h);
        }
    }
}

pub struct Q8_0;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q8_0 {
    type Block = HalfScaled<8>;
    type Family = WordBlocks;
    const BLOCK_BYTES: usize = 34;
    const HEAD: usize = 2;
    const SIGNED: bool = true;
    const UNIT: Unit = Unit::BYTES;
    const CODES: usize = 0;
    const UNITS_AS_GGUF: bool = true;

    #[inline(always)]
    fn gguf<V: Bits, const I: usize>(block: &impl Gguf<V>) -> V {
        block.bytes(2)
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            V::store_f32(V::load_f16(&b.d, h), &mut out.scale[slot], h);
        }
    }
}

const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// The values plus 128, as unsigned bytes.
const IQ4_CODES: [i8; 16] = {
    let mut codes = IQ4_VALUES;
    let mut i = 0;
    while i < codes.len() {
        codes[i] = codes[i].wrapping_add(-128);
        i += 1;
    }
    codes
};

pub struct Iq4Nl;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Iq4Nl {
    type Block = HalfScaled<4>;
    type Family = WordBlocks;
    const BLOCK_BYTES: usize = 18;
    const HEAD: usize = 2;
    const UNIT: Unit = Unit::NIBBLES;
    const CODES: usize = 0;
    const TABLE: Option<&'static [i8; 16]> = Some(&IQ4_CODES);
    const UNITS_AS_GGUF: bool = true;

    #[inline(always)]
    fn gguf<V: Bits, const I: usize>(block: &impl Gguf<V>) -> V {
        block.nibbles(2).lookup(&IQ4_VALUES)
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            V::store_f32(V::load_f16(&b.d, h), &mut out.scale[slot], h);
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Mxfp4Block {
    codes: [[u32; 16]; 4],
    e: [u8; 16],
}

/// Twice the e2m1 values, plus 16.
const MXFP4_VALUES: [i8; 16] = [16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4];

pub struct Mxfp4;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Mxfp4 {
    type Block = Mxfp4Block;
    type Family = ByteBlocks;
    const BLOCK_BYTES: usize = 17;
    const HEAD: usize = 1;
    const SHIFT: u32 = 4;
    const UNIT: Unit = Unit::NIBBLES;
    const CODES: usize = 0;
    const TABLE: Option<&'static [i8; 16]> = Some(&MXFP4_VALUES);
    const UNITS_AS_GGUF: bool = true;

    #[inline(always)]
    fn gguf<V: Bits, const I: usize>(block: &impl Gguf<V>) -> V {
        block.nibbles(1).lookup(&MXFP4_VALUES)
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            V::store_f32(V::load_e8m0_halved(&b.e, h), &mut out.scale[slot], h);
        }
    }
}

/// The eight 6-bit scales and mins of Q4_K and Q5_K, four to a dword: `[scales 0-3, scales 4-7], [mins 0-3, mins 4-7]`.
#[inline(always)]
fn k_scales<V: Lanes>(scales: &[[u32; 16]; 3], h: usize) -> ([V; 2], [V; 2]) {
    let [s, m, top] = each!([0, 1, 2] i => V::load(&scales[i], h));
    let (low6, low4, bits45) = (V::splat(0x3f3f_3f3f), V::splat(LOW4), V::splat(0x3030_3030));
    (
        [s.and(low6), top.and(low4).or(s.shr(2).and(bits45))],
        [m.and(low6), top.shr(4).and(low4).or(m.shr(2).and(bits45))],
    )
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q4KBlock {
    d: [u32; 16],
    scales: [[u32; 16]; 3],
    codes: [[u32; 16]; 32],
}

pub struct Q4K;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q4K {
    type Block = Q4KBlock;
    type Family = ByteSuper<8>;
    const BLOCK_BYTES: usize = 144;
    const HEAD_DWORDS: &[usize] = &[0];
    const MIN: bool = true;
    const UNIT: Unit = Unit::NIBBLES;
    const CODES: usize = 4;

    #[inline(always)]
    fn gguf<V: Bits, const I: usize>(block: &impl Gguf<V>) -> V {
        block.bytes(16 + 32 * (I / 2)).shr(4 * (I % 2)).and(V::splat(LOW4))
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, _slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            let d = V::load(&b.d, h);
            V::store_f32(d.low_f16(), &mut out.scale[0], h);
            V::store_f32(V::mul(d.high_f16(), V::splat_f32(-1.0)), &mut out.min[0], h);
            let (scales, mins) = k_scales::<V>(&b.scales, h);
            for half in 0..2 {
                unroll!(I in [0 1 2 3] {
                    scales[half].byte_pair_i16::<{ I as i32 }>().store(&mut out.sub_scale[4 * half + I], h);
                });
                mins[half].low_bytes_u16().store(&mut out.sub_min[2 * half], h);
                mins[half].high_bytes_u16().store(&mut out.sub_min[2 * half + 1], h);
            }
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q5KBlock {
    d: [u32; 16],
    scales: [[u32; 16]; 3],
    codes: [[u32; 16]; 40],
}

pub struct Q5K;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q5K {
    type Block = Q5KBlock;
    // Five bits would overflow the 16-bit sums over 32 columns: each sub-block counts as two.
    type Family = ByteSuper<16>;
    const BLOCK_BYTES: usize = 176;
    const HEAD_DWORDS: &[usize] = &[0];
    const MIN: bool = true;
    const UNIT: Unit = Unit::FIVE_BITS;
    const CODES: usize = 4;

    #[inline(always)]
    fn gguf<V: Bits, const I: usize>(block: &impl Gguf<V>) -> V {
        let low = block.bytes(48 + 32 * (I / 2)).shr(4 * (I % 2)).and(V::splat(LOW4));
        let fifth = block.bytes(16);
        low.or(if I < 4 { fifth.shl(4 - I) } else { fifth.shr(I - 4) }.and(V::splat(BIT4)))
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, _slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            let d = V::load(&b.d, h);
            V::store_f32(d.low_f16(), &mut out.scale[0], h);
            V::store_f32(V::mul(d.high_f16(), V::splat_f32(-1.0)), &mut out.min[0], h);
            let (scales, mins) = k_scales::<V>(&b.scales, h);
            for half in 0..2 {
                unroll!(I in [0 1 2 3] {
                    let scale = scales[half].byte_pair_i16::<{ I as i32 }>();
                    scale.store(&mut out.sub_scale[8 * half + 2 * I], h);
                    scale.store(&mut out.sub_scale[8 * half + 2 * I + 1], h);
                    mins[half].byte_pair_i16::<{ I as i32 }>().store(&mut out.sub_min[4 * half + I], h);
                });
            }
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q6KBlock {
    codes: [[u32; 16]; 48],
    scales: [[u32; 16]; 4],
    d: [u16; 16],
}

pub struct Q6K;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q6K {
    type Block = Q6KBlock;
    type Family = ByteSuper<16>;
    const BLOCK_BYTES: usize = 210;
    const HEAD_DWORDS: &[usize] = &[48];
    const SHIFT: u32 = 5;
    const UNIT: Unit = Unit::SIX_BITS;
    const CODES: usize = 0;

    #[inline(always)]
    fn gguf<V: Bits, const I: usize>(block: &impl Gguf<V>) -> V {
        let (n, field) = (I / 4, I % 4);
        let low = block.bytes(64 * n + 32 * (field % 2)).shr(4 * (field / 2)).and(V::splat(LOW4));
        let top = block.bytes(128 + 32 * n);
        let top = [top.shl(4), top.shl(2), top, top.shr(2)][field];
        low.or(top.and(V::splat(0x3030_3030)))
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, _slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            store_sub_scales(each!([0, 1, 2, 3] i => V::load(&b.scales[i], h)), h, out);
            V::store_f32(V::load_f16(&b.d, h), &mut out.scale[0], h);
        }
    }
}

/// Sixteen signed scales, four to a dword.
#[inline(always)]
fn store_sub_scales<V: Lanes>(scales: [V; 4], h: usize, out: &mut Scales) {
    for i in 0..4 {
        unroll!(B in [0 1 2 3] { scales[i].byte_pair_i16::<{ B as i32 }>().store(&mut out.sub_scale[4 * i + B], h); });
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q2KBlock {
    scales: [[u32; 16]; 4],
    codes: [[u32; 16]; 16],
    d: [u32; 16],
}

pub struct Q2K;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q2K {
    type Block = Q2KBlock;
    type Family = ByteSuper<16>;
    const BLOCK_BYTES: usize = 84;
    const HEAD_DWORDS: &[usize] = &[0, 17];
    const MIN: bool = true;
    const UNIT: Unit = Unit::TWO_BITS;
    const CODES: usize = 4;

    #[inline(always)]
    fn gguf<V: Bits, const I: usize>(block: &impl Gguf<V>) -> V {
        block.bytes(16 + 32 * (I / 4)).shr(2 * (I % 4)).and(V::splat(0x0303_0303))
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, _slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            let d = V::load(&b.d, h);
            V::store_f32(d.low_f16(), &mut out.scale[0], h);
            V::store_f32(V::mul(d.high_f16(), V::splat_f32(-1.0)), &mut out.min[0], h);
            let scales = each!([0, 1, 2, 3] i => V::load(&b.scales[i], h));
            store_sub_scales(each!([0, 1, 2, 3] i => scales[i].and(V::splat(LOW4))), h, out);
            for i in 0..4 {
                let mins = scales[i].shr(4).and(V::splat(LOW4));
                mins.low_bytes_u16().store(&mut out.sub_min[2 * i], h);
                mins.high_bytes_u16().store(&mut out.sub_min[2 * i + 1], h);
            }
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q3KBlock {
    codes: [[u32; 16]; 24],
    scales: [[u32; 16]; 3],
    d: [u16; 16],
}

pub struct Q3K;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q3K {
    type Block = Q3KBlock;
    type Family = ByteSuper<16>;
    const BLOCK_BYTES: usize = 110;
    const HEAD_DWORDS: &[usize] = &[23];
    const SHIFT: u32 = 2;
    const UNIT: Unit = Unit::THREE_BITS;
    const CODES: usize = 0;

    #[inline(always)]
    fn gguf<V: Bits, const I: usize>(block: &impl Gguf<V>) -> V {
        let low = block.bytes(32 + 32 * (I / 4)).shr(2 * (I % 4)).and(V::splat(0x0303_0303));
        let top = block.bytes(0);
        low.or(if I < 2 { top.shl(2 - I) } else { top.shr(I - 2) }.and(V::splat(0x0404_0404)))
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, _slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            // Scale i: four low bits in nibble i of the first two dwords, two high bits in the third.
            let [a, b2, t] = each!([0, 1, 2] i => V::load(&b.scales[i], h));
            let (low4, bits45) = (V::splat(LOW4), V::splat(0x3030_3030));
            let scales = [
                a.and(low4).or(t.shl(4).and(bits45)),
                b2.and(low4).or(t.shl(2).and(bits45)),
                a.shr(4).and(low4).or(t.and(bits45)),
                b2.shr(4).and(low4).or(t.shr(2).and(bits45)),
            ];
            store_sub_scales(each!([0, 1, 2, 3] i => scales[i].sub_bytes(V::splat(0x2020_2020))), h, out);
            V::store_f32(V::load_f16(&b.d, h), &mut out.scale[0], h);
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Iq4XsBlock {
    d: [u32; 16],
    scales_l: [u32; 16],
    codes: [[u32; 16]; 32],
}

pub struct Iq4Xs;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Iq4Xs {
    type Block = Iq4XsBlock;
    type Family = WordSuper;
    const BLOCK_BYTES: usize = 136;
    const HEAD_DWORDS: &[usize] = &[0];
    const UNIT: Unit = Unit::NIBBLES;
    const CODES: usize = 2;
    const TABLE: Option<&'static [i8; 16]> = Some(&IQ4_CODES);
    const UNITS_AS_GGUF: bool = true;

    #[inline(always)]
    fn gguf<V: Bits, const I: usize>(block: &impl Gguf<V>) -> V {
        block.nibbles(8 + 16 * I).lookup(&IQ4_VALUES)
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, _slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            let (dh, low) = (V::load(&b.d, h), V::load(&b.scales_l, h));
            let d = dh.low_f16();
            let minus_32d = V::mul(d, V::splat_f32(-32.0));
            for j in 0..8 {
                let s = low.shr(4 * j).and(V::splat(15));
                let top = dh.shr(16 + 2 * j).and(V::splat(3)).shl(4);
                // Exact: the product of d and a 6-bit integer has at most 17 bits.
                V::store_f32(V::mul_add(d, s.or(top).to_f32(), minus_32d), &mut out.scale[j], h);
            }
        }
    }
}

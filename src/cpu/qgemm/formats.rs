//! What differs between the GGUF encodings: how sixteen interleaved blocks become a [`Tile`].
//!
//! A packed block is sixteen GGUF blocks (one a row, same columns) with their dwords transposed: plane `i` holds dword `i` of every
//! row, and a two-byte (or one-byte) field that fits no dword makes a last narrow plane. Not a byte more than GGUF has, packing is a
//! plain transposition, and since GGUF lays bit fields out so that consecutive bytes are consecutive columns, every unpacker is
//! shifts and masks with no shuffle across lanes. Only the fifth bits of Q5_0 and Q5_1, one dword for 32 columns, are reordered.

use super::activations::{ByteBlocks, ByteSuper, Family, WordBlocks, WordSuper};
use super::lanes::Lanes;

/// Sixteen rows by 256 columns of weights as the kernels read them; it stays in L1 while many tokens pass over it.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Tile {
    /// Byte families: `q[step][row]` holds columns `4 step ..+4`, unsigned, the offset still in.
    /// Word families: `q[2 step]` holds columns 0 and 2 of the four as 16-bit values, `q[2 step + 1]` columns 1 and 3.
    pub q: [[u32; 16]; 128],
    /// Block families: a float scale per 32 columns. Super-block families: `scale[0]` alone.
    pub scale: [[f32; 16]; 8],
    /// Float added per unit of activation sum, per 32 or 16 columns.
    pub min: [[f32; 16]; 16],
    /// Super-block families: the integer scale of each 32 or 16 columns, twice, as two 16-bit values.
    pub sub_scale: [[u32; 16]; 16],
}

impl Tile {
    pub const fn zeroed() -> Self {
        Self { q: [[0; 16]; 128], scale: [[0.0; 16]; 8], min: [[0.0; 16]; 16], sub_scale: [[0; 16]; 16] }
    }
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
    /// The tile's bytes are `weight + 2^SHIFT`; 0: no offset.
    const SHIFT: u32 = 0;
    /// Whether the tile's `min` counts.
    const MIN: bool = false;

    /// The codes come in `PARTS` parts; a part's codes belong to `SUBS` sub-blocks, so that as many accumulators are live at a time.
    const PARTS: usize = 1;
    const SUBS: usize = 1;

    /// Which sub-block of the block the `i`th of part `part` is.
    #[inline(always)]
    fn sub(part: usize, i: usize) -> usize {
        Self::SUBS * part + i
    }
    /// Takes part `PART` apart: `emit(i, step, codes)` with the codes of the four columns `4 step ..+4` of rows `8 h ..+8`.
    fn part<V: Lanes, const PART: usize>(block: &Self::Block, h: usize, emit: impl FnMut(usize, usize, V));
    /// Fills the tile's scales; `slot` is which 32 of its 256 columns (always 0 for super-blocks).
    fn scales<V: Lanes>(block: &Self::Block, slot: usize, tile: &mut Tile);
    /// What packing does beyond the transposition.
    fn reorder(_block: &mut Self::Block) {}
}

/// Fills the tile from a block.
#[inline(always)]
pub fn unpack<V: Lanes, F: Format>(block: &F::Block, slot: usize, tile: &mut Tile) {
    for h in 0..2 {
        unpack_part::<V, F, 0>(block, slot, h, tile);
        unpack_part::<V, F, 1>(block, slot, h, tile);
        unpack_part::<V, F, 2>(block, slot, h, tile);
        unpack_part::<V, F, 3>(block, slot, h, tile);
        unpack_part::<V, F, 4>(block, slot, h, tile);
        unpack_part::<V, F, 5>(block, slot, h, tile);
        unpack_part::<V, F, 6>(block, slot, h, tile);
        unpack_part::<V, F, 7>(block, slot, h, tile);
    }
    F::scales::<V>(block, slot, tile);
}

#[inline(always)]
fn unpack_part<V: Lanes, F: Format, const PART: usize>(block: &F::Block, slot: usize, h: usize, tile: &mut Tile) {
    if PART < F::PARTS {
        F::part::<V, PART>(block, h, |_, step, v| {
            if <F::Family as Family>::WORDS {
                v.even_bytes_i16().store(&mut tile.q[2 * (8 * slot + step)], h);
                v.odd_bytes_i16().store(&mut tile.q[2 * (8 * slot + step) + 1], h);
            } else {
                v.store(&mut tile.q[8 * slot + step], h);
            }
        });
    }
}

const LOW4: u32 = 0x0f0f_0f0f;

/// Runs the body once for each listed value of a constant, so that shifts can be immediate.
macro_rules! unroll {
    ($name:ident in [$($v:literal)*] $body:block) => { $({ const $name: usize = $v; $body })* };
}

/// Columns c and c + 16 of a 32-block share a byte.
#[inline(always)]
fn nibbles<V: Lanes>(qs: &[[u32; 16]; 4], c: usize, h: usize) -> (V, V) {
    let v = V::load(&qs[c], h);
    (v.and(V::splat(LOW4)), v.shr(4).and(V::splat(LOW4)))
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct HalfScaled<const N: usize> {
    qs: [[u32; 16]; N],
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

    #[inline(always)]
    fn part<V: Lanes, const PART: usize>(b: &Self::Block, h: usize, mut emit: impl FnMut(usize, usize, V)) {
        for c in 0..4 {
            let (lo, hi) = nibbles::<V>(&b.qs, c, h);
            emit(0, c, lo);
            emit(0, c + 4, hi);
        }
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, tile: &mut Tile) {
        for h in 0..2 {
            V::store_f32(V::load_f16(&b.d, h), &mut tile.scale[slot], h);
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q4_1Block {
    dm: [u32; 16],
    qs: [[u32; 16]; 4],
}

pub struct Q4_1;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q4_1 {
    type Block = Q4_1Block;
    type Family = ByteBlocks;
    const BLOCK_BYTES: usize = 20;
    const MIN: bool = true;

    #[inline(always)]
    fn part<V: Lanes, const PART: usize>(b: &Self::Block, h: usize, mut emit: impl FnMut(usize, usize, V)) {
        for c in 0..4 {
            let (lo, hi) = nibbles::<V>(&b.qs, c, h);
            emit(0, c, lo);
            emit(0, c + 4, hi);
        }
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, tile: &mut Tile) {
        for h in 0..2 {
            let dm = V::load(&b.dm, h);
            V::store_f32(dm.low_f16(), &mut tile.scale[slot], h);
            V::store_f32(dm.high_f16(), &mut tile.min[slot], h);
        }
    }
}

/// GGUF keeps column k's fifth bit in bit k; here byte i, bit c holds that of column 4 c + i, so that one shift serves four columns.
#[inline(always)]
fn regroup_fifth_bits(qh: &mut [u32; 16]) {
    // Even bits to the low half, odd bits to the high half: bit b goes to bit (b >> 1 | b << 4) mod 32.
    let unshuffle = |mut x: u32| {
        for (mask, n) in [(0x2222_2222, 1), (0x0c0c_0c0c, 2), (0x00f0_00f0, 4), (0x0000_ff00, 8)] {
            let t = (x ^ (x >> n)) & mask;
            x ^= t ^ (t << n);
        }
        x
    };
    for x in qh {
        *x = unshuffle(unshuffle(*x));
    }
}

/// The eight steps of a block of 5-bit codes.
#[inline(always)]
fn five_bits<V: Lanes>(qs: &[[u32; 16]; 4], qh: &[u32; 16], h: usize, mut emit: impl FnMut(usize, usize, V)) {
    let (fifth, bit) = (V::load(qh, h), V::splat(0x1010_1010));
    for c in 0..4 {
        let (lo, hi) = nibbles::<V>(qs, c, h);
        emit(0, c, lo.or(fifth.shl(4 - c).and(bit)));
        emit(0, c + 4, hi.or(fifth.shr(c).and(bit)));
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q5_0Block {
    qh: [u32; 16],
    qs: [[u32; 16]; 4],
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

    #[inline(always)]
    fn part<V: Lanes, const PART: usize>(b: &Self::Block, h: usize, emit: impl FnMut(usize, usize, V)) {
        five_bits::<V>(&b.qs, &b.qh, h, emit);
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, tile: &mut Tile) {
        for h in 0..2 {
            V::store_f32(V::load_f16(&b.d, h), &mut tile.scale[slot], h);
        }
    }
    #[inline(always)]
    fn reorder(b: &mut Self::Block) {
        regroup_fifth_bits(&mut b.qh);
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q5_1Block {
    dm: [u32; 16],
    qh: [u32; 16],
    qs: [[u32; 16]; 4],
}

pub struct Q5_1;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q5_1 {
    type Block = Q5_1Block;
    type Family = ByteBlocks;
    const BLOCK_BYTES: usize = 24;
    // Codes up to 31 overflow the 16-bit sums unless centred; the min makes up for it.
    const SHIFT: u32 = 4;
    const MIN: bool = true;

    #[inline(always)]
    fn part<V: Lanes, const PART: usize>(b: &Self::Block, h: usize, emit: impl FnMut(usize, usize, V)) {
        five_bits::<V>(&b.qs, &b.qh, h, emit);
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, tile: &mut Tile) {
        for h in 0..2 {
            let dm = V::load(&b.dm, h);
            V::store_f32(dm.low_f16(), &mut tile.scale[slot], h);
            let min = V::mul_add(dm.low_f16(), V::splat_f32(16.0), dm.high_f16());
            V::store_f32(min, &mut tile.min[slot], h);
        }
    }
    #[inline(always)]
    fn reorder(b: &mut Self::Block) {
        regroup_fifth_bits(&mut b.qh);
    }
}

pub struct Q8_0;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q8_0 {
    type Block = HalfScaled<8>;
    type Family = WordBlocks;
    const BLOCK_BYTES: usize = 34;
    const HEAD: usize = 2;

    #[inline(always)]
    fn part<V: Lanes, const PART: usize>(b: &Self::Block, h: usize, mut emit: impl FnMut(usize, usize, V)) {
        for c in 0..8 {
            emit(0, c, V::load(&b.qs[c], h));
        }
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, tile: &mut Tile) {
        for h in 0..2 {
            V::store_f32(V::load_f16(&b.d, h), &mut tile.scale[slot], h);
        }
    }
}

const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

pub struct Iq4Nl;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Iq4Nl {
    type Block = HalfScaled<4>;
    type Family = WordBlocks;
    const BLOCK_BYTES: usize = 18;
    const HEAD: usize = 2;

    #[inline(always)]
    fn part<V: Lanes, const PART: usize>(b: &Self::Block, h: usize, mut emit: impl FnMut(usize, usize, V)) {
        for c in 0..4 {
            let (lo, hi) = nibbles::<V>(&b.qs, c, h);
            emit(0, c, lo.lookup(&IQ4_VALUES));
            emit(0, c + 4, hi.lookup(&IQ4_VALUES));
        }
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, tile: &mut Tile) {
        for h in 0..2 {
            V::store_f32(V::load_f16(&b.d, h), &mut tile.scale[slot], h);
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Mxfp4Block {
    qs: [[u32; 16]; 4],
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

    #[inline(always)]
    fn part<V: Lanes, const PART: usize>(b: &Self::Block, h: usize, mut emit: impl FnMut(usize, usize, V)) {
        for c in 0..4 {
            let (lo, hi) = nibbles::<V>(&b.qs, c, h);
            emit(0, c, lo.lookup(&MXFP4_VALUES));
            emit(0, c + 4, hi.lookup(&MXFP4_VALUES));
        }
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, tile: &mut Tile) {
        for h in 0..2 {
            V::store_f32(V::load_e8m0_halved(&b.e, h), &mut tile.scale[slot], h);
        }
    }
}

/// The eight 6-bit scales and mins of Q4_K and Q5_K, four to a dword: `[scales 0-3, scales 4-7], [mins 0-3, mins 4-7]`.
#[inline(always)]
fn k_scales<V: Lanes>(scales: &[[u32; 16]; 3], h: usize) -> ([V; 2], [V; 2]) {
    let [s, m, top] = [0, 1, 2].map(|i| V::load(&scales[i], h));
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
    qs: [[u32; 16]; 32],
}

pub struct Q4K;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q4K {
    type Block = Q4KBlock;
    type Family = ByteSuper<8>;
    const BLOCK_BYTES: usize = 144;
    const MIN: bool = true;

    const PARTS: usize = 4;
    const SUBS: usize = 2;

    #[inline(always)]
    fn part<V: Lanes, const PART: usize>(b: &Self::Block, h: usize, mut emit: impl FnMut(usize, usize, V)) {
        for c in 0..8 {
            let v = V::load(&b.qs[8 * PART + c], h);
            emit(0, 16 * PART + c, v.and(V::splat(LOW4)));
            emit(1, 16 * PART + 8 + c, v.shr(4).and(V::splat(LOW4)));
        }
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, _slot: usize, tile: &mut Tile) {
        for h in 0..2 {
            let d = V::load(&b.d, h);
            V::store_f32(d.low_f16(), &mut tile.scale[0], h);
            let minus_dmin = V::mul(d.high_f16(), V::splat_f32(-1.0));
            let (scales, mins) = k_scales::<V>(&b.scales, h);
            unroll!(I in [0 1 2 3] {
                for half in 0..2 {
                    let j = 4 * half + I;
                    scales[half].byte_pair_i16::<{ I as i32 }>().store(&mut tile.sub_scale[j], h);
                    let m = mins[half].shr(8 * I).and(V::splat(0xff)).to_f32();
                    V::store_f32(V::mul(minus_dmin, m), &mut tile.min[j], h);
                }
            });
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q5KBlock {
    d: [u32; 16],
    scales: [[u32; 16]; 3],
    qh: [[u32; 16]; 8],
    qs: [[u32; 16]; 32],
}

pub struct Q5K;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q5K {
    type Block = Q5KBlock;
    type Family = ByteSuper<8>;
    const BLOCK_BYTES: usize = 176;
    // As for Q5_1.
    const SHIFT: u32 = 4;
    const MIN: bool = true;

    const PARTS: usize = 4;
    const SUBS: usize = 2;

    #[inline(always)]
    fn part<V: Lanes, const PART: usize>(b: &Self::Block, h: usize, mut emit: impl FnMut(usize, usize, V)) {
        let (low4, bit) = (V::splat(LOW4), V::splat(0x1010_1010));
        let fifth_of = |fifth: V, sub: usize| if sub < 4 { fifth.shl(4 - sub) } else { fifth.shr(sub - 4) }.and(bit);
        for c in 0..8 {
            let (fifth, v) = (V::load(&b.qh[c], h), V::load(&b.qs[8 * PART + c], h));
            emit(0, 16 * PART + c, v.and(low4).or(fifth_of(fifth, 2 * PART)));
            emit(1, 16 * PART + 8 + c, v.shr(4).and(low4).or(fifth_of(fifth, 2 * PART + 1)));
        }
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, _slot: usize, tile: &mut Tile) {
        for h in 0..2 {
            let d = V::load(&b.d, h);
            V::store_f32(d.low_f16(), &mut tile.scale[0], h);
            let minus_dmin = V::mul(d.high_f16(), V::splat_f32(-1.0));
            let sixteen_d = V::mul(d.low_f16(), V::splat_f32(16.0));
            let (scales, mins) = k_scales::<V>(&b.scales, h);
            unroll!(I in [0 1 2 3] {
                for half in 0..2 {
                    let j = 4 * half + I;
                    scales[half].byte_pair_i16::<{ I as i32 }>().store(&mut tile.sub_scale[j], h);
                    let [s, m] = [scales[half], mins[half]].map(|v| v.shr(8 * I).and(V::splat(0xff)).to_f32());
                    V::store_f32(V::mul_add(sixteen_d, s, V::mul(minus_dmin, m)), &mut tile.min[j], h);
                }
            });
        }
    }
}

/// Q2_K, Q3_K and Q6_K: 32 consecutive bytes hold bit fields of four times 32 columns. A part is half of the 32 in one of the two 128s,
/// and its sub-blocks of 16 lie 32 columns apart.
#[inline(always)]
fn quarter_sub(part: usize, i: usize) -> usize {
    8 * (part / 2) + 2 * i + part % 2
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q6KBlock {
    ql: [[u32; 16]; 32],
    qh: [[u32; 16]; 16],
    scales: [[u32; 16]; 4],
    d: [u16; 16],
}

pub struct Q6K;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q6K {
    type Block = Q6KBlock;
    type Family = ByteSuper<16>;
    const BLOCK_BYTES: usize = 210;
    const SHIFT: u32 = 5;

    const PARTS: usize = 4;
    const SUBS: usize = 4;

    #[inline(always)]
    fn sub(part: usize, i: usize) -> usize {
        quarter_sub(part, i)
    }
    #[inline(always)]
    fn part<V: Lanes, const PART: usize>(b: &Self::Block, h: usize, mut emit: impl FnMut(usize, usize, V)) {
        let (low4, bits45) = (V::splat(LOW4), V::splat(0x3030_3030));
        let n = PART / 2;
        for c in PART % 2 * 4..PART % 2 * 4 + 4 {
            let [v, w, top] =
                [&b.ql[16 * n + c], &b.ql[16 * n + 8 + c], &b.qh[8 * n + c]].map(|plane| V::load(plane, h));
            emit(0, 32 * n + c, v.and(low4).or(top.shl(4).and(bits45)));
            emit(1, 32 * n + 8 + c, w.and(low4).or(top.shl(2).and(bits45)));
            emit(2, 32 * n + 16 + c, v.shr(4).and(low4).or(top.and(bits45)));
            emit(3, 32 * n + 24 + c, w.shr(4).and(low4).or(top.shr(2).and(bits45)));
        }
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, _slot: usize, tile: &mut Tile) {
        for h in 0..2 {
            store_sub_scales([0, 1, 2, 3].map(|i| V::load(&b.scales[i], h)), h, tile);
            V::store_f32(V::load_f16(&b.d, h), &mut tile.scale[0], h);
        }
    }
}

/// Sixteen signed scales, four to a dword.
#[inline(always)]
fn store_sub_scales<V: Lanes>(scales: [V; 4], h: usize, tile: &mut Tile) {
    for (i, v) in scales.into_iter().enumerate() {
        unroll!(B in [0 1 2 3] { v.byte_pair_i16::<{ B as i32 }>().store(&mut tile.sub_scale[4 * i + B], h); });
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q2KBlock {
    scales: [[u32; 16]; 4],
    qs: [[u32; 16]; 16],
    d: [u32; 16],
}

pub struct Q2K;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q2K {
    type Block = Q2KBlock;
    type Family = ByteSuper<16>;
    const BLOCK_BYTES: usize = 84;
    const MIN: bool = true;

    const PARTS: usize = 4;
    const SUBS: usize = 4;

    #[inline(always)]
    fn sub(part: usize, i: usize) -> usize {
        quarter_sub(part, i)
    }
    #[inline(always)]
    fn part<V: Lanes, const PART: usize>(b: &Self::Block, h: usize, mut emit: impl FnMut(usize, usize, V)) {
        let n = PART / 2;
        for c in PART % 2 * 4..PART % 2 * 4 + 4 {
            let v = V::load(&b.qs[8 * n + c], h);
            for j in 0..4 {
                emit(j, 32 * n + 8 * j + c, v.shr(2 * j).and(V::splat(0x0303_0303)));
            }
        }
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, _slot: usize, tile: &mut Tile) {
        for h in 0..2 {
            let d = V::load(&b.d, h);
            V::store_f32(d.low_f16(), &mut tile.scale[0], h);
            let minus_dmin = V::mul(d.high_f16(), V::splat_f32(-1.0));
            let scales = [0, 1, 2, 3].map(|i| V::load(&b.scales[i], h));
            store_sub_scales(scales.map(|v| v.and(V::splat(LOW4))), h, tile);
            for (i, v) in scales.into_iter().enumerate() {
                for byte in 0..4 {
                    let m = v.shr(8 * byte + 4).and(V::splat(0x0f)).to_f32();
                    V::store_f32(V::mul(minus_dmin, m), &mut tile.min[4 * i + byte], h);
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Q3KBlock {
    hmask: [[u32; 16]; 8],
    qs: [[u32; 16]; 16],
    scales: [[u32; 16]; 3],
    d: [u16; 16],
}

pub struct Q3K;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q3K {
    type Block = Q3KBlock;
    type Family = ByteSuper<16>;
    const BLOCK_BYTES: usize = 110;
    const SHIFT: u32 = 2;

    const PARTS: usize = 4;
    const SUBS: usize = 4;

    #[inline(always)]
    fn sub(part: usize, i: usize) -> usize {
        quarter_sub(part, i)
    }
    #[inline(always)]
    fn part<V: Lanes, const PART: usize>(b: &Self::Block, h: usize, mut emit: impl FnMut(usize, usize, V)) {
        let (low2, bit2) = (V::splat(0x0303_0303), V::splat(0x0404_0404));
        let n = PART / 2;
        for c in PART % 2 * 4..PART % 2 * 4 + 4 {
            let (top, v) = (V::load(&b.hmask[c], h), V::load(&b.qs[8 * n + c], h));
            for j in 0..4 {
                let s = 4 * n + j;
                let third = if s < 2 { top.shl(2 - s) } else { top.shr(s - 2) };
                emit(j, 32 * n + 8 * j + c, v.shr(2 * j).and(low2).or(third.and(bit2)));
            }
        }
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, _slot: usize, tile: &mut Tile) {
        for h in 0..2 {
            // Scale i: four low bits in nibble i of the first two dwords, two high bits in the third.
            let [a, b2, t] = [0, 1, 2].map(|i| V::load(&b.scales[i], h));
            let (low4, bits45) = (V::splat(LOW4), V::splat(0x3030_3030));
            let scales = [
                a.and(low4).or(t.shl(4).and(bits45)),
                b2.and(low4).or(t.shl(2).and(bits45)),
                a.shr(4).and(low4).or(t.and(bits45)),
                b2.shr(4).and(low4).or(t.shr(2).and(bits45)),
            ];
            store_sub_scales(scales.map(|v| v.sub_bytes(V::splat(0x2020_2020))), h, tile);
            V::store_f32(V::load_f16(&b.d, h), &mut tile.scale[0], h);
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Iq4XsBlock {
    d: [u32; 16],
    scales_l: [u32; 16],
    qs: [[u32; 16]; 32],
}

pub struct Iq4Xs;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Iq4Xs {
    type Block = Iq4XsBlock;
    type Family = WordSuper;
    const BLOCK_BYTES: usize = 136;

    const PARTS: usize = 8;

    #[inline(always)]
    fn part<V: Lanes, const PART: usize>(b: &Self::Block, h: usize, mut emit: impl FnMut(usize, usize, V)) {
        for c in 0..4 {
            let v = V::load(&b.qs[4 * PART + c], h);
            emit(0, 8 * PART + c, v.and(V::splat(LOW4)).lookup(&IQ4_VALUES));
            emit(0, 8 * PART + c + 4, v.shr(4).and(V::splat(LOW4)).lookup(&IQ4_VALUES));
        }
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, _slot: usize, tile: &mut Tile) {
        for h in 0..2 {
            let (dh, low) = (V::load(&b.d, h), V::load(&b.scales_l, h));
            let d = dh.low_f16();
            let minus_32d = V::mul(d, V::splat_f32(-32.0));
            for j in 0..8 {
                let s = low.shr(4 * j).and(V::splat(15));
                let top = dh.shr(16 + 2 * j).and(V::splat(3)).shl(4);
                // Exact: the product of d and a 6-bit integer has at most 17 bits.
                V::store_f32(V::mul_add(d, s.or(top).to_f32(), minus_32d), &mut tile.scale[j], h);
            }
        }
    }
}

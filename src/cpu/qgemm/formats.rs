//! What differs between the GGUF encodings: how sixteen interleaved blocks become a [`Tile`].
//!
//! A packed block is sixteen GGUF blocks (one a row, same columns) with their dwords transposed: plane `i` holds dword `i` of every
//! row, and a two-byte (or one-byte) field that fits no dword makes a last narrow plane. Not a byte more than GGUF has, packing is a
//! plain transposition, and since GGUF lays bit fields out so that consecutive bytes are consecutive columns, every unpacker is
//! shifts and masks with no shuffle across lanes. Only the fifth bits of Q5_0 and Q5_1, one dword for 32 columns, are reordered.

use super::activations::{ByteBlocks, ByteSuper, Family, WordBlocks, WordSuper};
use super::lanes::{Bits, Lanes};

/// Sixteen rows by 256 columns of weights as the kernels read them; it stays in L1 while many tokens pass over it.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Tile {
    /// Byte families: `q[step][row]` holds columns `4 step ..+4`, unsigned, the offset still in.
    /// Word families: `q[2 step]` holds columns 0 and 2 of the four as 16-bit values, `q[2 step + 1]` columns 1 and 3.
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

/// Takes codes as a [`Format`] takes them apart: those of the four columns `4 step ..+4`, of the `i`th sub-block of the part. A trait, not a closure: see
/// [`super::Work`].
pub trait Emit<V> {
    fn emit(&mut self, i: usize, step: usize, v: V);
}

/// 32 bytes of one row.
pub trait RowBits: Bits {
    /// # Safety
    /// 32 bytes can be read.
    unsafe fn bytes(p: *const u8) -> Self;
    /// Low halves of 16 bytes, then the high halves.
    ///
    /// # Safety
    /// 16 bytes can be read.
    unsafe fn nibbles(p: *const u8) -> Self;
    /// 32 bits, each as bit 4 of a byte.
    ///
    /// # Safety
    /// 4 bytes can be read.
    unsafe fn fifth_bits(p: *const u8) -> Self;
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
    /// The tile's bytes are `weight + 2^SHIFT`; 0: no offset.
    const SHIFT: u32 = 0;
    /// Whether the tile's `min` counts.
    const MIN: bool = false;

    /// The codes come in `PARTS` parts; a part's codes belong to `SUBS` sub-blocks, so that as many accumulators are live at a time.
    const PARTS: usize = 1;
    const SUBS: usize = 1;

    /// Which sub-block of a super-block of bytes the `i`th of part `part` is.
    #[inline(always)]
    fn sub(part: usize, i: usize) -> usize {
        match Self::CODES {
            Planes::Fields { of_part, .. } => of_part[part].sub[i],
            _ => unreachable!("no sub-blocks"),
        }
    }
    /// Where its codes lie.
    const CODES: Planes;
    /// Takes part `PART` apart, for the rows that `h` stands for (see `lanes`).
    #[inline(always)]
    fn part<V: Bits, const PART: usize>(block: &Self::Block, h: usize, out: &mut impl Emit<V>) {
        // A macro: see `each`.
        macro_rules! plane {
            ($i:expr) => {
                // SAFETY: blocks start with their planes, as the trait asks.
                V::load(unsafe { &*std::ptr::from_ref(block).cast::<[u32; 16]>().add($i) }, h)
            };
        }
        match Self::CODES {
            Planes::Bytes { plane } => {
                for c in 0..8 {
                    out.emit(0, c, plane!(plane + c));
                }
            }
            Planes::Nibbles { plane, fifth, table } => {
                for c in 0..4 {
                    let both = plane!(plane + 4 * PART + c);
                    for i in 0..2 {
                        let mut code = shifted(both, -4 * i).and(V::splat(LOW4));
                        if let Some(fifth) = fifth {
                            code = code.or(shifted(plane!(fifth), 4 * (1 - i) - c as isize).and(V::splat(BIT4)));
                        }
                        if let Some(table) = table {
                            code = code.lookup(table);
                        }
                        out.emit(0, 8 * PART + 4 * i as usize + c, code);
                    }
                }
            }
            Planes::Fields { low, top, of_part } => {
                let steps = <Self::Family as Family>::SUB_STEPS;
                let part = of_part[PART];
                for c in 0..steps {
                    let (v, high) = (plane!(part.plane + c), plane!(part.top + c));
                    for i in 0..2 {
                        let mut code = shifted(v, -part.shift[i]).and(V::splat(low));
                        if top > 0 {
                            code = code.or(shifted(high, part.top_shift[i]).and(V::splat(top)));
                        }
                        out.emit(i, steps * Self::sub(PART, i) + c, code);
                    }
                }
            }
        }
    }
    /// Fills the scales; `slot` is which 32 of the 256 columns (always 0 for super-blocks).
    fn scales<V: Lanes>(block: &Self::Block, slot: usize, out: &mut Scales);
    /// The codes of columns `32 I ..+32` of one GGUF block, one column a byte: what the parts give, for one row.
    ///
    /// # Safety
    /// A whole GGUF block lies at `block`.
    unsafe fn row<V: RowBits, const I: usize>(block: *const u8) -> V;
    /// The first of each four dwords of a GGUF block that together hold its scales, where they are dwords; the narrow field aside.
    const HEAD_DWORDS: &[usize] = &[];
    /// What packing does beyond the transposition.
    fn reorder(_block: &mut Self::Block) {}
}

/// Fills the tile from a block.
#[inline(always)]
pub fn unpack<V: Lanes, F: Format>(block: &F::Block, slot: usize, tile: &mut Tile) {
    for h in 0..V::HALVES {
        unpack_part::<V, F, 0>(block, slot, h, tile);
        unpack_part::<V, F, 1>(block, slot, h, tile);
        unpack_part::<V, F, 2>(block, slot, h, tile);
        unpack_part::<V, F, 3>(block, slot, h, tile);
        unpack_part::<V, F, 4>(block, slot, h, tile);
        unpack_part::<V, F, 5>(block, slot, h, tile);
        unpack_part::<V, F, 6>(block, slot, h, tile);
        unpack_part::<V, F, 7>(block, slot, h, tile);
    }
    F::scales::<V>(block, slot, &mut tile.scales);
}

#[inline(always)]
fn unpack_part<V: Lanes, F: Format, const PART: usize>(block: &F::Block, slot: usize, h: usize, tile: &mut Tile) {
    if PART >= F::PARTS {
    } else if <F::Family as Family>::WORDS {
        F::part::<V, PART>(block, h, &mut ToWords { slot, h, tile });
    } else {
        F::part::<V, PART>(block, h, &mut ToBytes { slot, h, tile });
    }
}

struct ToBytes<'a> {
    slot: usize,
    h: usize,
    tile: &'a mut Tile,
}

impl<V: Lanes> Emit<V> for ToBytes<'_> {
    #[inline(always)]
    fn emit(&mut self, _i: usize, step: usize, v: V) {
        v.store(&mut self.tile.q[8 * self.slot + step], self.h);
    }
}

struct ToWords<'a> {
    slot: usize,
    h: usize,
    tile: &'a mut Tile,
}

impl<V: Lanes> Emit<V> for ToWords<'_> {
    #[inline(always)]
    fn emit(&mut self, _i: usize, step: usize, v: V) {
        let at = 2 * (8 * self.slot + step);
        v.even_bytes_i16().store(&mut self.tile.q[at], self.h);
        v.odd_bytes_i16().store(&mut self.tile.q[at + 1], self.h);
    }
}

/// Where a block's codes lie, in planes (see [`Format`]).
#[derive(Clone, Copy)]
pub enum Planes {
    /// A byte each.
    Bytes { plane: usize },
    /// Columns c and c + 16 of 32 share a byte; bit c of byte i of plane `fifth` is the fifth of column 4 c + i. Where there is a table, a code is an index.
    Nibbles { plane: usize, fifth: Option<usize>, table: Option<&'static [i8; 16]> },
    /// Those of a part's two sub-blocks: `(plane >> shift & low) | (top << top_shift & top)`, each step from the next planes.
    Fields { low: u32, top: u32, of_part: &'static [Fields; 8] },
}

/// A part's two fields. Shifts are of dwords; bits that come from a neighbouring byte are masked away.
#[derive(Clone, Copy)]
pub struct Fields {
    /// Of the first step.
    pub plane: usize,
    /// To the right.
    pub shift: [isize; 2],
    pub top: usize,
    /// To the left; negative: to the right.
    pub top_shift: [isize; 2],
    /// Which sub-blocks they are.
    pub sub: [usize; 2],
}

/// An array of what the expression gives for each part.
macro_rules! of_part {
    (|$part:ident| $fields:expr) => {{
        let mut all = [Fields { plane: 0, shift: [0; 2], top: 0, top_shift: [0; 2], sub: [0; 2] }; 8];
        let mut $part = 0;
        while $part < 8 {
            all[$part] = $fields;
            $part += 1;
        }
        all
    }};
}

#[inline(always)]
fn shifted<V: Bits>(v: V, left: isize) -> V {
    match left {
        0 => v,
        1.. => v.shl(left as usize),
        _ => v.shr(-left as usize),
    }
}

pub const LOW4: u32 = 0x0f0f_0f0f;
pub const BIT4: u32 = 0x1010_1010;

/// Runs the body once for each listed value of a constant, so that shifts can be immediate.
macro_rules! unroll {
    ($name:ident in [$($v:literal)*] $body:block) => { $({ const $name: usize = $v; $body })* };
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
    const CODES: Planes = Planes::Nibbles { plane: 0, fifth: None, table: None };

    #[inline(always)]
    unsafe fn row<V: RowBits, const I: usize>(block: *const u8) -> V {
        // SAFETY: by contract.
        unsafe { V::nibbles(block.add(2)) }
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
    qs: [[u32; 16]; 4],
}

pub struct Q4_1;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q4_1 {
    type Block = Q4_1Block;
    type Family = ByteBlocks;
    const BLOCK_BYTES: usize = 20;
    const HEAD_DWORDS: &[usize] = &[0];
    const MIN: bool = true;
    const CODES: Planes = Planes::Nibbles { plane: 1, fifth: None, table: None };

    #[inline(always)]
    unsafe fn row<V: RowBits, const I: usize>(block: *const u8) -> V {
        // SAFETY: by contract.
        unsafe { V::nibbles(block.add(4)) }
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
    const CODES: Planes = Planes::Nibbles { plane: 1, fifth: Some(0), table: None };

    #[inline(always)]
    unsafe fn row<V: RowBits, const I: usize>(block: *const u8) -> V {
        // SAFETY: by contract.
        unsafe { V::nibbles(block.add(6)).or(V::fifth_bits(block.add(2))) }
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            V::store_f32(V::load_f16(&b.d, h), &mut out.scale[slot], h);
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
    const HEAD_DWORDS: &[usize] = &[0];
    // Codes up to 31 overflow the 16-bit sums unless centred; the min makes up for it.
    const SHIFT: u32 = 4;
    const MIN: bool = true;
    const CODES: Planes = Planes::Nibbles { plane: 2, fifth: Some(1), table: None };

    #[inline(always)]
    unsafe fn row<V: RowBits, const I: usize>(block: *const u8) -> V {
        // SAFETY: by contract.
        unsafe { V::nibbles(block.add(8)).or(V::fifth_bits(block.add(4))) }
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
    const CODES: Planes = Planes::Bytes { plane: 0 };

    #[inline(always)]
    unsafe fn row<V: RowBits, const I: usize>(block: *const u8) -> V {
        // SAFETY: by contract.
        unsafe { V::bytes(block.add(2)) }
    }
    #[inline(always)]
    fn scales<V: Lanes>(b: &Self::Block, slot: usize, out: &mut Scales) {
        for h in 0..V::HALVES {
            V::store_f32(V::load_f16(&b.d, h), &mut out.scale[slot], h);
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
    const CODES: Planes = Planes::Nibbles { plane: 0, fifth: None, table: Some(&IQ4_VALUES) };

    #[inline(always)]
    unsafe fn row<V: RowBits, const I: usize>(block: *const u8) -> V {
        // SAFETY: by contract.
        unsafe { V::nibbles(block.add(2)).lookup(&IQ4_VALUES) }
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
    const CODES: Planes = Planes::Nibbles { plane: 0, fifth: None, table: Some(&MXFP4_VALUES) };

    #[inline(always)]
    unsafe fn row<V: RowBits, const I: usize>(block: *const u8) -> V {
        // SAFETY: by contract.
        unsafe { V::nibbles(block.add(1)).lookup(&MXFP4_VALUES) }
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
    qs: [[u32; 16]; 32],
}

pub struct Q4K;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Q4K {
    type Block = Q4KBlock;
    type Family = ByteSuper<8>;
    const BLOCK_BYTES: usize = 144;
    const HEAD_DWORDS: &[usize] = &[0];
    const MIN: bool = true;

    const PARTS: usize = 4;
    const SUBS: usize = 2;
    const CODES: Planes = Planes::Fields {
        low: LOW4,
        top: 0,
        of_part: &of_part!(|part| Fields {
            plane: 4 + 8 * part,
            shift: [0, 4],
            top: 0,
            top_shift: [0; 2],
            sub: [2 * part, 2 * part + 1]
        }),
    };

    #[inline(always)]
    unsafe fn row<V: RowBits, const I: usize>(block: *const u8) -> V {
        // SAFETY: by contract.
        unsafe { V::bytes(block.add(16 + 32 * (I / 2))).shr(4 * (I % 2)).and(V::splat(LOW4)) }
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
    qh: [[u32; 16]; 8],
    qs: [[u32; 16]; 32],
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

    const PARTS: usize = 8;
    const SUBS: usize = 2;
    const CODES: Planes = Planes::Fields {
        low: LOW4,
        top: BIT4,
        of_part: &of_part!(|part| {
            let (n, first) = (part / 2, 4 * (part % 2));
            let left = 4 - 2 * n as isize;
            Fields {
                plane: 12 + 8 * n + first,
                shift: [0, 4],
                top: 4 + first,
                top_shift: [left, left - 1],
                sub: [4 * n + part % 2, 4 * n + 2 + part % 2],
            }
        }),
    };

    #[inline(always)]
    unsafe fn row<V: RowBits, const I: usize>(block: *const u8) -> V {
        // SAFETY: by contract.
        unsafe {
            let low = V::bytes(block.add(48 + 32 * (I / 2))).shr(4 * (I % 2)).and(V::splat(LOW4));
            let fifth = V::bytes(block.add(16));
            low.or(if I < 4 { fifth.shl(4 - I) } else { fifth.shr(I - 4) }.and(V::splat(BIT4)))
        }
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

/// Q2_K, Q3_K and Q6_K: 32 consecutive bytes hold bit fields of four times 32 columns. Part `4 n + 2 half + pair` is half of the 32 in one of the two
/// 128s, and two of the fields: sub-blocks of 16 that lie 32 columns apart.
const fn quarter(part: usize) -> (usize, usize, usize) {
    (part / 4, part / 2 % 2 * 4, part % 2)
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
    const HEAD_DWORDS: &[usize] = &[48];
    const SHIFT: u32 = 5;

    const PARTS: usize = 8;
    const SUBS: usize = 2;
    const CODES: Planes = Planes::Fields {
        low: LOW4,
        top: 0x3030_3030,
        of_part: &of_part!(|part| {
            let (n, first, field) = quarter(part);
            let at = 8 * n + 2 * field + first / 4;
            let left = 4 - 2 * field as isize;
            Fields {
                plane: 16 * n + 8 * field + first,
                shift: [0, 4],
                top: 32 + 8 * n + first,
                top_shift: [left, left - 4],
                sub: [at, at + 4],
            }
        }),
    };

    #[inline(always)]
    unsafe fn row<V: RowBits, const I: usize>(block: *const u8) -> V {
        // SAFETY: by contract.
        unsafe {
            let (n, field) = (I / 4, I % 4);
            let low = V::bytes(block.add(64 * n + 32 * (field % 2))).shr(4 * (field / 2)).and(V::splat(LOW4));
            let top = V::bytes(block.add(128 + 32 * n));
            let top = [top.shl(4), top.shl(2), top, top.shr(2)][field];
            low.or(top.and(V::splat(0x3030_3030)))
        }
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
    qs: [[u32; 16]; 16],
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

    const PARTS: usize = 8;
    const SUBS: usize = 2;
    const CODES: Planes = Planes::Fields {
        low: 0x0303_0303,
        top: 0,
        of_part: &of_part!(|part| {
            let (n, first, pair) = quarter(part);
            let at = 8 * n + 4 * pair + first / 4;
            let right = 4 * pair as isize;
            Fields { plane: 4 + 8 * n + first, shift: [right, right + 2], top: 0, top_shift: [0; 2], sub: [at, at + 2] }
        }),
    };

    #[inline(always)]
    unsafe fn row<V: RowBits, const I: usize>(block: *const u8) -> V {
        // SAFETY: by contract.
        unsafe { V::bytes(block.add(16 + 32 * (I / 4))).shr(2 * (I % 4)).and(V::splat(0x0303_0303)) }
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
    const HEAD_DWORDS: &[usize] = &[23];
    const SHIFT: u32 = 2;

    const PARTS: usize = 8;
    const SUBS: usize = 2;
    const CODES: Planes = Planes::Fields {
        low: 0x0303_0303,
        top: 0x0404_0404,
        of_part: &of_part!(|part| {
            let (n, first, pair) = quarter(part);
            let at = 8 * n + 4 * pair + first / 4;
            let (right, left) = (4 * pair as isize, 2 - (4 * n + 2 * pair) as isize);
            Fields {
                plane: 8 + 8 * n + first,
                shift: [right, right + 2],
                top: first,
                top_shift: [left, left - 1],
                sub: [at, at + 2],
            }
        }),
    };

    #[inline(always)]
    unsafe fn row<V: RowBits, const I: usize>(block: *const u8) -> V {
        // SAFETY: by contract.
        unsafe {
            let low = V::bytes(block.add(32 + 32 * (I / 4))).shr(2 * (I % 4)).and(V::splat(0x0303_0303));
            let top = V::bytes(block);
            low.or(if I < 2 { top.shl(2 - I) } else { top.shr(I - 2) }.and(V::splat(0x0404_0404)))
        }
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
    qs: [[u32; 16]; 32],
}

pub struct Iq4Xs;
// SAFETY: the layout is as the trait asks.
unsafe impl Format for Iq4Xs {
    type Block = Iq4XsBlock;
    type Family = WordSuper;
    const BLOCK_BYTES: usize = 136;
    const HEAD_DWORDS: &[usize] = &[0];

    const PARTS: usize = 8;
    const CODES: Planes = Planes::Nibbles { plane: 2, fifth: None, table: Some(&IQ4_VALUES) };

    #[inline(always)]
    unsafe fn row<V: RowBits, const I: usize>(block: *const u8) -> V {
        // SAFETY: by contract.
        unsafe { V::nibbles(block.add(8 + 16 * I)).lookup(&IQ4_VALUES) }
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

//! Products in f32: weights decoded to floats, activations as they are. For COMPUTE_F32, and for packed weights that are floats already.

use super::activations::{CHUNK, Family, FloatChunk};
use super::formats::{Format, Tile};
use super::lanes::Lanes;
use super::pack::RawRows;
use super::{Isa, ROWS, STREAMS, TOKENS};

/// Sixteen rows by 256 columns, decoded: `w[column][row]`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct FloatTile {
    pub w: [[f32; 16]; CHUNK],
}

impl FloatTile {
    pub const fn zeroed() -> Self {
        Self { w: [[0.0; 16]; CHUNK] }
    }
}

/// One chunk of four tokens: `x[column][token]`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct FloatActs {
    pub x: [[f32; TOKENS]; CHUNK],
}

impl FloatChunk for FloatActs {
    const ZERO: Self = Self { x: [[0.0; TOKENS]; CHUNK] };
    #[inline(always)]
    fn put(&mut self, t: usize, x: &[f32; CHUNK]) {
        self.x.iter_mut().zip(x).for_each(|(to, x)| to[t] = *x);
    }
}

/// Decodes `steps` four-column steps of an unpacked tile.
#[inline(always)]
pub fn decode_tile<V: Lanes, F: Format>(tile: &Tile, steps: usize, out: &mut FloatTile) {
    let sub = <F::Family as Family>::SUB_STEPS;
    for h in 0..V::HALVES {
        for step in 0..steps {
            let s = &tile.scales;
            let (scale, min) = match step.checked_div(sub) {
                None => (V::load_f32(&s.scale[step / 8], h), V::load_f32(&s.min[step / 8], h)),
                Some(j) => {
                    let pair = V::load(&s.sub_min[j / 2], h);
                    let min = if j % 2 == 0 { pair.low_i16_to_f32() } else { pair.high_i16_to_f32() };
                    let scale = V::load(&s.sub_scale[j], h).low_i16_to_f32();
                    (V::mul(V::load_f32(&s.scale[0], h), scale), V::mul(V::load_f32(&s.min[0], h), min))
                }
            };
            let columns = if <F::Family as Family>::WORDS {
                let (even, odd) = (V::load(&tile.q[2 * step], h), V::load(&tile.q[2 * step + 1], h));
                [even.low_i16_to_f32(), odd.low_i16_to_f32(), even.high_i16_to_f32(), odd.high_i16_to_f32()]
            } else {
                let (v, byte) = (V::load(&tile.q[step], h), V::splat(0xff));
                let minus_offset = V::splat_f32(if F::SHIFT > 0 { -((1 << F::SHIFT) as f32) } else { 0.0 });
                each!([v.and(byte), v.shr(8).and(byte), v.shr(16).and(byte), v.shr(24)]
                    q => V::mul_add(V::splat_f32(1.0), q.to_f32(), minus_offset))
            };
            for (i, q) in columns.into_iter().enumerate() {
                let w = if F::MIN { V::mul_add(q, scale, min) } else { V::mul(q, scale) };
                V::store_f32(w, &mut out.w[4 * step + i], h);
            }
        }
    }
}

/// Weights that are floats. Packed: `[group][column][16 rows]`.
pub trait FloatFormat: 'static {
    type Element: Copy + Send + Sync + 'static;
    /// Two bytes are an f16, not a bf16.
    const HALF: bool = false;
    fn from_le(bytes: &[u8]) -> Self::Element;
    fn decode<V: Lanes>(plane: &[Self::Element; 16], h: usize) -> V::F;
    fn to_f32(v: Self::Element) -> f32;
}

pub struct F32;
pub struct F16;
pub struct Bf16;

impl FloatFormat for F32 {
    type Element = f32;
    #[inline(always)]
    fn from_le(b: &[u8]) -> f32 {
        f32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }
    #[inline(always)]
    fn decode<V: Lanes>(plane: &[f32; 16], h: usize) -> V::F {
        V::load_f32(plane, h)
    }
    #[inline(always)]
    fn to_f32(v: f32) -> f32 {
        v
    }
}

impl FloatFormat for F16 {
    type Element = u16;
    const HALF: bool = true;
    #[inline(always)]
    fn from_le(b: &[u8]) -> u16 {
        u16::from_le_bytes([b[0], b[1]])
    }
    #[inline(always)]
    fn decode<V: Lanes>(plane: &[u16; 16], h: usize) -> V::F {
        V::load_f16(plane, h)
    }
    #[inline(always)]
    fn to_f32(v: u16) -> f32 {
        half::f16::from_bits(v).to_f32()
    }
}

impl FloatFormat for Bf16 {
    type Element = u16;
    #[inline(always)]
    fn from_le(b: &[u8]) -> u16 {
        u16::from_le_bytes([b[0], b[1]])
    }
    #[inline(always)]
    fn decode<V: Lanes>(plane: &[u16; 16], h: usize) -> V::F {
        V::load_bf16(plane, h)
    }
    #[inline(always)]
    fn to_f32(v: u16) -> f32 {
        half::bf16::from_bits(v).to_f32()
    }
}

/// The rows `16 group ..+16`, transposed; rows past the end become zeros.
#[inline(always)]
pub fn pack_columns<F: FloatFormat>(raw: RawRows<'_>, group: usize, out: &mut [[F::Element; 16]]) {
    let size = size_of::<F::Element>();
    let rows = ROWS.min(raw.rows - ROWS * group);
    if rows < ROWS {
        out.fill([F::from_le(&[0; 4]); 16]);
    }
    for r in 0..rows {
        let row = raw.row(ROWS * group + r, out.len() * size);
        for (plane, v) in out.iter_mut().zip(row.chunks_exact(size)) {
            plane[r] = F::from_le(v);
        }
    }
}

#[inline(always)]
pub fn decode_columns<I: Isa, F: FloatFormat>(_isa: I, planes: &[[F::Element; 16]], out: &mut [[f32; 16]]) {
    for (w, plane) in out.iter_mut().zip(planes) {
        for h in 0..I::V::HALVES {
            <I::V as Lanes>::store_f32(F::decode::<I::V>(plane, h), w, h);
        }
    }
}

/// `out[stream][token][row] += ` the product of packed columns, decoded in registers: few tokens are over before a tile would be written. The additions of
/// [`Isa::float`].
#[inline(always)]
pub fn fused<I: Isa, F: FloatFormat>(
    isa: I,
    streams: [&[[F::Element; 16]]; STREAMS],
    count: usize,
    acts: &FloatActs,
    out: &mut [[f32; 16]],
) {
    match (count, out.len() / count) {
        (1, 1) => multiply::<_, _, F, 1, 1>(isa, [streams[0]], acts, out),
        (1, 2) => multiply::<_, _, F, 1, 2>(isa, [streams[0]], acts, out),
        (1, 3) => multiply::<_, _, F, 1, 3>(isa, [streams[0]], acts, out),
        (1, _) => multiply::<_, _, F, 1, 4>(isa, [streams[0]], acts, out),
        (_, 1) => multiply::<_, _, F, 2, 1>(isa, streams, acts, out),
        _ => multiply::<_, _, F, 2, 2>(isa, streams, acts, out),
    }
}

#[inline(always)]
fn multiply<I: Isa<V = V>, V: Lanes, F: FloatFormat, const S: usize, const NT: usize>(
    isa: I,
    streams: [&[[F::Element; 16]]; S],
    acts: &FloatActs,
    out: &mut [[f32; 16]],
) {
    // Of vectors as long as a plane, the second is of no account.
    let mut acc = [[[V::splat_f32(0.0); 2]; NT]; S];
    for (k, x) in acts.x[..streams[0].len()].iter().enumerate() {
        for s in 0..S {
            // A chunk ahead: the hardware's prefetchers come too late for more than two tokens.
            isa.prefetch(streams[s].as_ptr().wrapping_add(CHUNK + k).cast());
            for h in 0..V::HALVES {
                let w = F::decode::<V>(&streams[s][k], h);
                for t in 0..NT {
                    acc[s][t][h] = V::mul_add(w, V::splat_f32(x[t]), acc[s][t][h]);
                }
            }
        }
    }
    for (out, acc) in out.iter_mut().zip(acc.as_flattened()) {
        for h in 0..V::HALVES {
            let sum = V::mul_add(acc[h], V::splat_f32(1.0), V::load_f32(out, h));
            V::store_f32(sum, out, h);
        }
    }
}

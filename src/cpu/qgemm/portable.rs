//! The tile kernels in plain Rust, for CPUs without one of their own: the same integers, floats without fused multiply-add.

use super::activations::{ByteActs, CHUNK, SuperActs, WordActs};
use super::float::{FloatActs, FloatFormat, FloatTile};
use super::float_rows::{LANES, RowActs, SixteenRows, Sums};
use super::formats::Format;
use super::formats::Tile;
use super::lanes::Plain;
use super::{Ahead, Isa, ROWS, TOKENS, Work};

#[derive(Clone, Copy, Debug)]
pub struct Portable;

/// Sum of the centred products of one row and token over some steps; `minus_sum` the token's pair of negated sums.
#[inline(always)]
fn byte_dot(q: &[[u32; 16]], a: &[[u32; 4]], r: usize, t: usize) -> i32 {
    let mut sum = 0;
    for (q, a) in q.iter().zip(a) {
        for (q, a) in q[r].to_le_bytes().into_iter().zip(a[t].to_le_bytes()) {
            sum += i32::from(q) * i32::from(a as i8);
        }
    }
    sum
}

#[inline(always)]
fn pair_sum(v: u32) -> i32 {
    i32::from(v as i16) + i32::from((v >> 16) as i16)
}

impl Isa for Portable {
    type V = Plain;
    type Narrow = Self;

    fn narrow(self) -> Self {
        self
    }

    #[inline(never)]
    fn enter(self, work: impl Work) {
        work.run()
    }

    fn byte_blocks<F: Format>(self, tile: &Tile, acts: &ByteActs, blocks: usize, out: &mut [[f32; ROWS]]) {
        for b in 0..blocks {
            let steps = 8 * b..8 * b + 8;
            for (t, out) in out.iter_mut().enumerate() {
                let offset = if F::SHIFT > 0 { pair_sum(acts.minus_sum[b][t]) << F::SHIFT } else { 0 };
                for (r, y) in out.iter_mut().enumerate() {
                    let dot = byte_dot(&tile.q[steps.clone()], &acts.q[steps.clone()], r, t) + offset;
                    *y += dot as f32 * (tile.scales.scale[b][r] * acts.d[b][t]);
                    if F::MIN {
                        *y += tile.scales.min[b][r] * acts.sum[b][t];
                    }
                }
            }
        }
    }

    fn byte_super<F: Format, const SUBS: usize>(self, tile: &Tile, acts: &SuperActs, out: &mut [[f32; ROWS]]) {
        let steps = 64 / SUBS;
        for (t, out) in out.iter_mut().enumerate() {
            for (r, y) in out.iter_mut().enumerate() {
                let mut dot = 0;
                for j in 0..SUBS {
                    let range = steps * j..steps * (j + 1);
                    let sums = &acts.minus_sum[steps / 4 * j..steps / 4 * (j + 1)];
                    let offset =
                        if F::SHIFT > 0 { sums.iter().map(|s| pair_sum(s[t])).sum::<i32>() << F::SHIFT } else { 0 };
                    let sub = byte_dot(&tile.q[range.clone()], &acts.q[range], r, t) + offset;
                    dot += sub * i32::from(tile.scales.sub_scale[j][r] as i16);
                }
                *y += dot as f32 * (tile.scales.scale[0][r] * acts.d[t]);
                if F::MIN {
                    let mut sum = 0;
                    for i in 0..SUBS / 2 {
                        let (min, sums) = (tile.scales.sub_min[i][r], acts.sums::<SUBS>()[i][t]);
                        sum += i32::from(min as i16) * i32::from(sums as i16)
                            + i32::from((min >> 16) as i16) * i32::from((sums >> 16) as i16);
                    }
                    *y += sum as f32 * (tile.scales.min[0][r] * acts.d[t]);
                }
            }
        }
    }

    fn word_blocks(self, tile: &Tile, acts: &WordActs, blocks: usize, out: &mut [[f32; ROWS]]) {
        for b in 0..blocks {
            for (t, out) in out.iter_mut().enumerate() {
                for (r, y) in out.iter_mut().enumerate() {
                    let mut dot = 0;
                    for i in 16 * b..16 * b + 16 {
                        let (q, a) = (tile.q[i][r], acts.q[i][t]);
                        dot += i32::from(q as i16) * i32::from(a as i16)
                            + i32::from((q >> 16) as i16) * i32::from((a >> 16) as i16);
                    }
                    *y += dot as f32 * (tile.scales.scale[b][r] * acts.d[b][t]);
                }
            }
        }
    }

    fn float(self, tile: &FloatTile, acts: &FloatActs, cols: usize, _: Ahead, out: &mut [[f32; ROWS]]) {
        for (t, out) in out.iter_mut().enumerate() {
            let mut acc = [0.0; ROWS];
            for (w, x) in tile.w[..cols].iter().zip(&acts.x) {
                for (y, w) in acc.iter_mut().zip(w) {
                    *y += w * x[t];
                }
            }
            for (y, acc) in out.iter_mut().zip(acc) {
                *y += acc;
            }
        }
    }
    fn float_rows<F: FloatFormat>(self, rows: SixteenRows<'_>, cols: usize, acts: &[RowActs], sums: &mut [Sums]) {
        let size = size_of::<F::Element>();
        for (chunk, acts) in acts.chunks_exact(sums.len().div_ceil(TOKENS)).enumerate() {
            let at = chunk * CHUNK;
            let count = CHUNK.min(cols - at);
            for (sums, x) in sums.iter_mut().zip(acts.iter().flat_map(|acts| &acts.x)) {
                for (r, sums) in sums.iter_mut().enumerate() {
                    let w = &rows.row(r, (at + count) * size)[at * size..];
                    for (w, x) in w.chunks_exact(LANES * size).zip(x.as_chunks::<LANES>().0) {
                        for ((sum, w), x) in sums.iter_mut().zip(w.chunks_exact(size)).zip(x) {
                            *sum += F::to_f32(F::from_le(w)) * x;
                        }
                    }
                }
            }
        }
    }

    fn add_lanes(self, sums: &Sums) -> [f32; ROWS] {
        sums.map(|[a, b, c, d, e, f, g, h]| ((a + b) + (c + d)) + ((e + f) + (g + h)))
    }
}

//! Products of borrowed weights that are floats, taken as they lie.
//!
//! Naively, `y[t][row] = sum_k w[row][k] * x[t][k]`. A vector is eight columns of a row, an accumulator a row and a token, and its eight lanes are added up at
//! the end of the row: to put sixteen rows side by side, as packed ones lie, takes longer than the product of four tokens.
//!
//! Order of additions: columns 0, 8, 16 ... make one sum, 1, 9, 17 ... the next, each a chain of fused multiply-adds, and the eight sums are added in pairs:
//! `((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))`.

use super::activations::{CHUNK, FloatChunk};
use super::float::{F32, FloatFormat};
use super::pack::RawRows;
use super::{Isa, ROWS, TOKENS};

/// Columns of a vector; rows that end within one are continued with zeros.
pub const LANES: usize = 8;
/// Up to so many tokens pass over a row in one go.
pub const TOGETHER: usize = 3;

/// One chunk of four tokens: `x[token][column]`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct RowActs {
    pub x: [[f32; CHUNK]; TOKENS],
}

impl FloatChunk for RowActs {
    const ZERO: Self = Self { x: [[0.0; CHUNK]; TOKENS] };
    #[inline(always)]
    fn put(&mut self, t: usize, x: &[f32; CHUNK]) {
        self.x[t] = *x;
    }
}

/// What the lanes of sixteen rows' accumulators hold.
pub type Sums = [[f32; LANES]; ROWS];

/// Up to sixteen rows from some column on.
#[derive(Clone, Copy)]
pub struct SixteenRows<'a> {
    pub data: &'a [u8],
    /// How many there are; the last stands for those that are missing.
    pub count: usize,
    /// Bytes from one row to the next.
    pub stride: usize,
    /// Bytes from what is read now to what will be wanted soon.
    pub ahead: usize,
}

impl SixteenRows<'_> {
    /// The first bytes of row `r`.
    #[inline(always)]
    pub fn row(&self, r: usize, bytes: usize) -> &[u8] {
        &self.data[r.min(self.count - 1) * self.stride..][..bytes]
    }
}

/// Room for a chunk of rows that end within a vector.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Padded([[[u8; 4]; CHUNK]; ROWS]);

impl Padded {
    /// The first columns of the rows as [`F32`] weights; from there to the next whole vector they become zeros.
    #[inline(always)]
    fn fill<F: FloatFormat>(&mut self, rows: SixteenRows<'_>, cols: usize) -> SixteenRows<'_> {
        let size = size_of::<F::Element>();
        for (row, out) in rows.data.chunks(rows.stride).zip(&mut self.0) {
            let (out, zeros) = out[..cols.next_multiple_of(LANES)].split_at_mut(cols);
            zeros.fill([0; 4]);
            for (out, w) in out.iter_mut().zip(row.chunks_exact(size)) {
                *out = F::to_f32(F::from_le(w)).to_le_bytes();
            }
        }
        SixteenRows { data: self.0.as_flattened().as_flattened(), stride: 4 * CHUNK, ahead: 0, ..rows }
    }
}

/// `sums[token][row] = ` the lanes of the products of a row group.
#[inline(always)]
pub fn multiply<I: Isa, F: FloatFormat>(
    isa: I,
    raw: RawRows<'_>,
    group: usize,
    cols: usize,
    acts: &[RowActs],
    padded: &mut Padded,
    sums: &mut [Sums],
) {
    /// A row in one go is read so many bytes ahead.
    const AHEAD: usize = 1024;
    sums.fill([[0.0; LANES]; ROWS]);
    let (size, stride, fours) = (size_of::<F::Element>(), raw.row_bytes, sums.len().div_ceil(TOKENS));
    let count_rows = ROWS.min(raw.rows - ROWS * group);
    // More than a few tokens pass over sixteen rows of 16-bit floats in L1 (of f32, in L2); the end of odd rows is padded by itself.
    let run = if sums.len() <= TOGETHER && cols.is_multiple_of(LANES) { cols } else { 2 * CHUNK };
    for first in (0..cols).step_by(run) {
        let count = run.min(cols - first);
        let acts = &acts[first / CHUNK * fours..][..count.div_ceil(CHUNK) * fours];
        let ahead = match first + count {
            _ if count == cols => AHEAD,
            end if end < cols => count * size,
            // The end of these rows is followed by the next group.
            _ => ROWS * stride - first * size,
        };
        let rows = |first: usize, cols: usize| {
            let data = &raw.data[ROWS * group * stride + first * size..][..(count_rows - 1) * stride + cols * size];
            SixteenRows { data, count: count_rows, stride, ahead }
        };
        if count.is_multiple_of(LANES) {
            isa.float_rows::<F>(rows(first, count), count, acts, sums);
            continue;
        }
        for (first, acts) in (first..).step_by(CHUNK).zip(acts.chunks_exact(fours)) {
            let count = CHUNK.min(cols - first);
            let rows = padded.fill::<F>(rows(first, count), count);
            isa.float_rows::<F32>(rows, count.next_multiple_of(LANES), acts, sums);
        }
    }
}

//! GGUF rows to interleaved blocks (see `formats`), once when a weight is packed, or chunk by chunk for borrowed weights.

use super::activations::Family;
use super::formats::{Format, WORD_OFFSET};
use super::{Isa, ROWS};

/// GGUF rows as they lie in the caller's memory, at any alignment.
#[derive(Clone, Copy)]
pub struct RawRows<'a> {
    pub data: &'a [u8],
    pub rows: usize,
    pub row_bytes: usize,
}

impl<'a> RawRows<'a> {
    #[inline(always)]
    pub fn row(&self, r: usize, len: usize) -> &'a [u8] {
        &self.data[r * self.row_bytes..][..len]
    }
}

/// Bytes of the field that fits no dword: the head, or the tail.
const fn narrow<F: Format>() -> usize {
    if F::HEAD > 0 { F::HEAD } else { F::BLOCK_BYTES % 4 }
}

/// The planes of a block, the narrow one, and where in a GGUF block the narrow field lies.
#[inline(always)]
pub fn planes_of<F: Format>(block: &mut F::Block) -> (&mut [[u32; ROWS]], &mut [u8], usize) {
    let dwords = (F::BLOCK_BYTES - F::HEAD) / 4;
    let planes = std::ptr::from_mut(block).cast::<[u32; ROWS]>();
    // SAFETY: by `Format`'s contract a block is `dwords` planes and a narrow one, all plain data.
    unsafe {
        (
            std::slice::from_raw_parts_mut(planes, dwords),
            std::slice::from_raw_parts_mut(planes.add(dwords).cast::<u8>(), narrow::<F>() * ROWS),
            if F::HEAD > 0 { 0 } else { F::BLOCK_BYTES / 4 * 4 },
        )
    }
}

/// Gathers the narrow field of sixteen blocks, `stride` bytes apart from `src` on.
///
/// # Safety
/// They can be read.
#[inline(always)]
pub unsafe fn gather_narrow<I: Isa>(isa: I, src: *const u8, stride: usize, out: &mut [u8]) {
    // SAFETY: by contract.
    unsafe {
        match out.len() / ROWS {
            2 => isa.gather_u16(src, stride, out.first_chunk_mut().expect("sixteen times two")),
            1 => isa.gather_u8(src, stride, out.first_chunk_mut().expect("sixteen")),
            _ => {}
        }
    }
}

/// Interleaves blocks `first ..first + out.len()` of the rows `16 group ..+16`; rows past the end become zeros.
///
/// Naively: for each row and dword, `planes[dword][row] = dword`. For borrowed weights this is on the way of every product, so squares of dwords are
/// transposed in registers, and meanwhile as many blocks are asked for that come next in each of the sixteen rows: so many
/// short streams are more than the hardware follows by itself.
#[inline(always)]
pub fn interleave<I: Isa, F: Format>(isa: I, raw: RawRows<'_>, group: usize, first: usize, out: &mut [F::Block]) {
    const {
        assert!(size_of::<F::Block>() == ROWS * F::BLOCK_BYTES);
        assert!(F::HEAD == 0 || (F::BLOCK_BYTES - F::HEAD).is_multiple_of(4));
        assert!(F::BLOCK_BYTES - F::HEAD >= 16);
        assert!(!F::SIGNED || 4 * F::UNIT.planes * F::UNITS == F::BLOCK_BYTES - F::HEAD, "all dwords are codes");
    }
    let rows = ROWS.min(raw.rows - ROWS * group);
    let (bytes, dwords, narrow) = (F::BLOCK_BYTES, (F::BLOCK_BYTES - F::HEAD) / 4, narrow::<F>());
    let (stride, count) = (raw.row_bytes, out.len());
    let squares = dwords.div_ceil(4);
    let flip = if F::SIGNED { WORD_OFFSET } else { 0 };
    let (mut asked, mut credit) = (0, 0);
    for (i, block) in out.iter_mut().enumerate() {
        let (planes, odd, narrow_at) = planes_of::<F>(block);
        let at = |r: usize| &raw.data[(ROWS * group + r) * stride + (first + i) * bytes..][..bytes];
        if rows == ROWS {
            let (base, _last) = (at(0).as_ptr(), at(ROWS - 1));
            for j in 0..squares {
                // The last square lies over the one before where dwords are left.
                let j4 = (4 * j).min(dwords - 4);
                let planes: &mut [[u32; ROWS]; 4] = planes[j4..].first_chunk_mut().expect("four planes");
                for h in 0..2 {
                    // SAFETY: the first and the last of the 16 rows hold whole blocks here, so all do.
                    unsafe { isa.transpose(base.add(8 * h * stride + F::HEAD + 4 * j4), stride, planes, h) };
                }
                planes.as_flattened_mut().iter_mut().for_each(|v| *v ^= flip);
                // Sixteen rows in so many squares.
                credit += ROWS;
                while credit >= count * squares {
                    credit -= count * squares;
                    let next = base.wrapping_add(asked * stride + (count - i) * bytes);
                    for line in 0..(count * bytes).div_ceil(64) {
                        isa.prefetch(next.wrapping_add(64 * line));
                    }
                    asked += 1;
                }
            }
            // SAFETY: as above.
            unsafe { gather_narrow(isa, base.add(narrow_at), stride, odd) };
            continue;
        }
        planes.fill([0; ROWS]);
        odd.fill(0);
        for r in 0..rows {
            let src = at(r);
            for (plane, v) in planes.iter_mut().zip(src[F::HEAD..].as_chunks().0) {
                plane[r] = u32::from_le_bytes(*v) ^ flip;
            }
            odd[narrow * r..narrow * (r + 1)].copy_from_slice(&src[narrow_at..narrow_at + narrow]);
        }
    }
}

/// Blocks in a row of `cols` columns.
pub const fn blocks_per_row<F: Format>(cols: usize) -> usize {
    cols / <F::Family as Family>::ELEMENTS
}

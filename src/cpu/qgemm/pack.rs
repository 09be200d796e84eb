//! GGUF rows to packed blocks (see `formats`), once when a weight is packed, or chunk by chunk for borrowed weights.

use super::activations::Family;
use super::formats::Format;
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

/// Packs blocks `first ..first + out.len()` of the rows `16 group ..+16`; rows past the end become zeros.
#[inline(always)]
pub fn pack_blocks<I: Isa, F: Format>(isa: I, raw: RawRows<'_>, group: usize, first: usize, out: &mut [F::Block]) {
    const {
        assert!(size_of::<F::Block>() == ROWS * F::BLOCK_BYTES);
        assert!(F::HEAD == 0 || (F::BLOCK_BYTES - F::HEAD).is_multiple_of(4));
    }
    let rows = ROWS.min(raw.rows - ROWS * group);
    let (bytes, dwords) = (F::BLOCK_BYTES, (F::BLOCK_BYTES - F::HEAD) / 4);
    let (narrow, narrow_at) = match F::HEAD {
        0 => (F::BLOCK_BYTES % 4, F::BLOCK_BYTES / 4 * 4),
        head => (head, 0),
    };
    for (i, block) in out.iter_mut().enumerate() {
        // SAFETY: by `Format`'s contract a block is `dwords` planes and a narrow one, all plain data.
        let (planes, odd) = unsafe {
            let planes = (block as *mut F::Block).cast::<[u32; ROWS]>();
            (
                std::slice::from_raw_parts_mut(planes, dwords),
                std::slice::from_raw_parts_mut(planes.add(dwords).cast::<u8>(), narrow * ROWS),
            )
        };
        if rows < ROWS {
            planes.fill([0; ROWS]);
            odd.fill(0);
        }
        let at = |r: usize| &raw.data[(ROWS * group + r) * raw.row_bytes + (first + i) * bytes..][..bytes];
        // Whole groups go four dwords at a time, what is left dword by dword.
        let done = if rows == ROWS { dwords / 4 * 4 } else { 0 };
        if rows == ROWS {
            let (base, _last) = (at(0).as_ptr(), at(ROWS - 1));
            for (j, planes) in planes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                for h in 0..2 {
                    // SAFETY: the first and the last of the 16 rows hold whole blocks here, so all do.
                    unsafe {
                        isa.transpose(base.add(8 * h * raw.row_bytes + F::HEAD + 16 * j), raw.row_bytes, planes, h);
                    }
                }
            }
        }
        for r in 0..rows {
            let src = at(r);
            for (plane, v) in planes[done..].iter_mut().zip(src[F::HEAD + 4 * done..].as_chunks().0) {
                plane[r] = u32::from_le_bytes(*v);
            }
            odd[narrow * r..narrow * (r + 1)].copy_from_slice(&src[narrow_at..narrow_at + narrow]);
        }
        F::reorder(block);
    }
}

/// Blocks in a row of `cols` columns.
pub const fn blocks_per_row<F: Format>(cols: usize) -> usize {
    cols / <F::Family as Family>::ELEMENTS
}

//! GGUF rows to packed blocks (see `formats`), once when a weight is packed, or chunk by chunk for borrowed weights.

use super::ROWS;
use super::activations::Family;
use super::formats::Format;

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
pub fn pack_blocks<F: Format>(raw: RawRows<'_>, group: usize, first: usize, out: &mut [F::Block]) {
    let rows = ROWS.min(raw.rows - ROWS * group);
    let bytes = F::BLOCK_BYTES;
    let tail = (bytes - F::HEAD) % 4;
    let dwords = (bytes - F::HEAD) / 4;
    const {
        assert!(size_of::<F::Block>() == ROWS * F::BLOCK_BYTES && (F::HEAD == 0 || (F::BLOCK_BYTES - F::HEAD) % 4 == 0))
    };
    // SAFETY: by `Format`'s contract a block is plain bytes of this size, and any bytes are a valid block.
    let out_bytes = unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<u8>(), size_of_val(out)) };
    if rows < ROWS {
        out_bytes.fill(0);
    }
    for r in 0..rows {
        let row = &raw.row(ROWS * group + r, (first + out.len()) * bytes)[first * bytes..];
        for (src, dst) in row.chunks_exact(bytes).zip(out_bytes.chunks_exact_mut(ROWS * bytes)) {
            let (planes, narrow) = dst.split_at_mut(dwords * 4 * ROWS);
            for (v, plane) in src[F::HEAD..].chunks_exact(4).zip(planes.chunks_exact_mut(4 * ROWS)) {
                plane[4 * r..4 * r + 4].copy_from_slice(v);
            }
            let odd = if F::HEAD > 0 { &src[..F::HEAD] } else { &src[bytes - tail..] };
            narrow[odd.len() * r..odd.len() * (r + 1)].copy_from_slice(odd);
        }
    }
    out.iter_mut().for_each(F::reorder);
}

/// Blocks in a row of `cols` columns.
pub const fn blocks_per_row<F: Format>(cols: usize) -> usize {
    cols / <F::Family as Family>::ELEMENTS
}

//! What the formats share: bit fields, f16 scales, the 6-bit scales of the K-quants, the IQ4 code book.

/// Fields of `bits` bits in element order. GGUF packs them in planes: `run` consecutive bytes hold the lowest fields of `run`
/// consecutive elements, then the next higher fields of the same bytes hold the following `run` elements, and so on:
///
/// ```text
/// element (c * planes + p) * run + j  =  bits [p * bits, (p + 1) * bits) of byte c * run + j,      planes = 8 / bits
/// ```
///
/// `N` must be `bytes.len() * 8 / bits` and `run` divide `bytes.len()`.
#[inline]
pub(super) fn fields<const N: usize>(bytes: &[u8], bits: usize, run: usize) -> [u8; N] {
    debug_assert!(bytes.len() * 8 == N * bits && bytes.len().is_multiple_of(run));
    let mask = (1u8 << bits) - 1;
    let mut out = [0; N];
    for (out, bytes) in out.chunks_exact_mut(run * 8 / bits).zip(bytes.chunks_exact(run)) {
        for (plane, out) in out.chunks_exact_mut(run).enumerate() {
            for (out, byte) in out.iter_mut().zip(bytes) {
                *out = (byte >> (plane * bits)) & mask;
            }
        }
    }
    out
}

/// Writes `low + 2^shift * high + offset` for each element.
#[inline]
pub(super) fn join(into: &mut [i8], low: &[u8], high: &[u8], shift: u32, offset: i8) {
    for ((into, low), high) in into.iter_mut().zip(low).zip(high) {
        *into = (low | (high << shift)) as i8 + offset;
    }
}

/// Writes `code + offset` for each element.
#[inline]
pub(super) fn shifted(into: &mut [i8], codes: &[u8], offset: i8) {
    for (into, &code) in into.iter_mut().zip(codes) {
        *into = code as i8 + offset;
    }
}

/// Writes `book[code]` for each element.
#[inline]
pub(super) fn looked_up(into: &mut [i8], codes: &[u8], book: &[i8; 16]) {
    for (into, &code) in into.iter_mut().zip(codes) {
        *into = book[usize::from(code & 15)];
    }
}

/// The little-endian f16 at byte `offset`.
#[inline]
pub(super) fn f16_at<const BYTES: usize>(block: &[u8; BYTES], offset: usize) -> f32 {
    half::f16::from_le_bytes([block[offset], block[offset + 1]]).to_f32()
}

/// Scales and minima of the eight sub-blocks of Q4_K and Q5_K, 6 bits each:
///
/// ```text
/// byte  0..4    low 6 bits: scales 0..4      top 2 bits: bits 4, 5 of scales 4..8
/// byte  4..8    low 6 bits: minima 0..4      top 2 bits: bits 4, 5 of minima 4..8
/// byte  8..12   low nibble: bits 0..4 of scales 4..8      high nibble: bits 0..4 of minima 4..8
/// ```
#[inline]
pub(super) fn k_scales(bytes: &[u8], scales: &mut [i8], mins: &mut [i8]) {
    for j in 0..4 {
        let (scale, min, rest) = (bytes[j], bytes[j + 4], bytes[j + 8]);
        scales[j] = (scale & 63) as i8;
        mins[j] = (min & 63) as i8;
        scales[j + 4] = (rest & 15 | (scale >> 6) << 4) as i8;
        mins[j + 4] = (rest >> 4 | (min >> 6) << 4) as i8;
    }
}

/// The non-uniform code book of IQ4_NL and IQ4_XS.
pub(super) const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_follow_the_planes() {
        assert_eq!(fields::<4>(&[0x21, 0x43], 4, 2), [1, 3, 2, 4]);
        assert_eq!(fields::<4>(&[0x21, 0x43], 4, 1), [1, 2, 3, 4]);
        assert_eq!(fields::<8>(&[0b11_10_01_00, 0b00_01_10_11], 2, 2), [0, 3, 1, 2, 2, 1, 3, 0]);
        assert_eq!(fields::<8>(&[0b1000_0101], 1, 1), [1, 0, 1, 0, 0, 0, 0, 1]);
    }

    #[test]
    fn k_scales_cover_six_bits() {
        let (mut scales, mut mins) = ([0; 8], [0; 8]);
        k_scales(&[0xff, 0, 0xc0, 1, 0, 0xff, 0, 2, 0x0f, 0xf0, 0x21, 0], &mut scales, &mut mins);
        assert_eq!(scales, [63, 0, 0, 1, 63, 0, 0x31, 0]);
        assert_eq!(mins, [0, 63, 0, 2, 0, 63, 2, 0]);
    }
}

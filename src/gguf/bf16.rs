//! BF16: the upper half of an IEEE single, little-endian. Defined by GGUF (type 30).

use super::{Float, Format, decode_plain};

pub(super) const FORMAT: Format = Format::plain(30, c"BF16", 2, &[Float::BF16(0)], |bytes, out| {
    decode_plain(bytes, out, |[low, high]| f32::from_le_bytes([0, 0, low, high]))
});

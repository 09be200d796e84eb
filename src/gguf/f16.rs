//! F16: plain IEEE half precision, little-endian. Defined by GGUF (type 1).

use super::{Float, Format, decode_plain};

pub(super) const FORMAT: Format = Format::plain(1, c"F16", 2, &[Float::F16(0)], |bytes, out| {
    decode_plain(bytes, out, |x| half::f16::from_le_bytes(x).to_f32())
});

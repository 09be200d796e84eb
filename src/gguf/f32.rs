//! F32: plain IEEE single precision, little-endian. Defined by GGUF (type 0).

use super::{Float, Format, decode_plain};

pub(super) const FORMAT: Format =
    Format::plain(0, c"F32", 4, &[Float::F32(0)], |bytes, out| decode_plain(bytes, out, f32::from_le_bytes));

//! Eight or sixteen 32-bit lanes, one weight row a lane: all that the unpackers in `formats` need from an instruction set.
//!
//! A *plane* is `[u32; 16]`: the same dword of sixteen rows. `h` picks the half that a vector of eight lanes covers; it is of no account to sixteen.

use half::f16;

/// What taking codes apart needs.
pub trait Bits: Copy {
    fn load(plane: &[u32; 16], h: usize) -> Self;
    fn splat(v: u32) -> Self;
    fn and(self, o: Self) -> Self;
    fn or(self, o: Self) -> Self;
    /// Shifts by `n` < 32, a constant wherever this is inlined.
    fn shl(self, n: usize) -> Self;
    fn shr(self, n: usize) -> Self;
    /// Every byte (0..=15) replaced by its entry in `table`.
    fn lookup(self, table: &[i8; 16]) -> Self;
}

pub trait Lanes: Bits {
    /// The same lanes as `f32`.
    type F: Copy;
    /// How many of its vectors cover a plane.
    const HALVES: usize;

    fn store(self, plane: &mut [u32; 16], h: usize);
    /// Byte-wise difference, wrapping.
    fn sub_bytes(self, o: Self) -> Self;
    /// Bytes 0 and 2 of each lane, sign-extended, as two 16-bit values.
    fn even_bytes_i16(self) -> Self;
    /// Bytes 1 and 3 of each lane, sign-extended, as two 16-bit values.
    fn odd_bytes_i16(self) -> Self;
    /// Bytes 0 and 1 of each lane, and 2 and 3, unsigned, as two 16-bit values.
    fn low_bytes_u16(self) -> Self;
    fn high_bytes_u16(self) -> Self;
    /// Signed byte `N` of each lane, twice, as two 16-bit values.
    fn byte_pair_i16<const N: i32>(self) -> Self;

    fn load_f16(plane: &[u16; 16], h: usize) -> Self::F;
    fn load_bf16(plane: &[u16; 16], h: usize) -> Self::F;
    fn load_f32(plane: &[f32; 16], h: usize) -> Self::F;
    fn load_e8m0_halved(plane: &[u8; 16], h: usize) -> Self::F;
    /// The low 16 bits of each lane read as f16.
    fn low_f16(self) -> Self::F;
    /// The high 16 bits of each lane read as f16.
    fn high_f16(self) -> Self::F;
    /// Each lane, a signed integer, converted.
    fn to_f32(self) -> Self::F;
    /// The low, and the high, 16 bits of each lane as signed integers, converted.
    fn low_i16_to_f32(self) -> Self::F;
    fn high_i16_to_f32(self) -> Self::F;
    fn splat_f32(v: f32) -> Self::F;
    fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`
    fn mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn store_f32(v: Self::F, plane: &mut [f32; 16], h: usize);
}

/// Plain Rust: runs anywhere, and the compiler turns it into whatever vectors the target has.
#[derive(Clone, Copy)]
pub struct Plain([u32; 8]);

impl Plain {
    #[inline(always)]
    fn map(self, f: impl Fn(u32) -> u32) -> Self {
        Self(self.0.map(f))
    }
}

impl Bits for Plain {
    #[inline(always)]
    fn load(plane: &[u32; 16], h: usize) -> Self {
        Self(std::array::from_fn(|i| plane[8 * h + i]))
    }
    #[inline(always)]
    fn splat(v: u32) -> Self {
        Self([v; 8])
    }
    #[inline(always)]
    fn and(self, o: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & o.0[i]))
    }
    #[inline(always)]
    fn or(self, o: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] | o.0[i]))
    }
    #[inline(always)]
    fn shl(self, n: usize) -> Self {
        self.map(|v| v << n)
    }
    #[inline(always)]
    fn shr(self, n: usize) -> Self {
        self.map(|v| v >> n)
    }
    #[inline(always)]
    fn lookup(self, table: &[i8; 16]) -> Self {
        self.map(|v| u32::from_le_bytes(v.to_le_bytes().map(|b| table[usize::from(b & 15)] as u8)))
    }
}

impl Lanes for Plain {
    type F = [f32; 8];
    const HALVES: usize = 2;

    #[inline(always)]
    fn store(self, plane: &mut [u32; 16], h: usize) {
        plane[8 * h..8 * h + 8].copy_from_slice(&self.0);
    }
    #[inline(always)]
    fn sub_bytes(self, o: Self) -> Self {
        Self(std::array::from_fn(|i| {
            let (a, b) = (self.0[i].to_le_bytes(), o.0[i].to_le_bytes());
            u32::from_le_bytes(std::array::from_fn(|j| a[j].wrapping_sub(b[j])))
        }))
    }
    #[inline(always)]
    fn even_bytes_i16(self) -> Self {
        self.map(|v| {
            let b = v.to_le_bytes();
            u32::from(i16::from(b[0] as i8) as u16) | u32::from(i16::from(b[2] as i8) as u16) << 16
        })
    }
    #[inline(always)]
    fn odd_bytes_i16(self) -> Self {
        self.map(|v| {
            let b = v.to_le_bytes();
            u32::from(i16::from(b[1] as i8) as u16) | u32::from(i16::from(b[3] as i8) as u16) << 16
        })
    }
    #[inline(always)]
    fn low_bytes_u16(self) -> Self {
        self.map(|v| v & 0xff | (v & 0xff00) << 8)
    }
    #[inline(always)]
    fn high_bytes_u16(self) -> Self {
        self.map(|v| v >> 16 & 0xff | v >> 8 & 0xff_0000)
    }
    #[inline(always)]
    fn byte_pair_i16<const N: i32>(self) -> Self {
        self.map(|v| u32::from(i16::from((v >> (8 * N)) as i8) as u16) * 0x1_0001)
    }
    #[inline(always)]
    fn load_f16(plane: &[u16; 16], h: usize) -> Self::F {
        std::array::from_fn(|i| f16::from_bits(plane[8 * h + i]).to_f32())
    }
    #[inline(always)]
    fn load_e8m0_halved(plane: &[u8; 16], h: usize) -> Self::F {
        std::array::from_fn(|i| e8m0_halved(plane[8 * h + i]))
    }
    #[inline(always)]
    fn low_f16(self) -> Self::F {
        self.0.map(|v| f16::from_bits(v as u16).to_f32())
    }
    #[inline(always)]
    fn high_f16(self) -> Self::F {
        self.0.map(|v| f16::from_bits((v >> 16) as u16).to_f32())
    }
    #[inline(always)]
    fn to_f32(self) -> Self::F {
        self.0.map(|v| v as i32 as f32)
    }
    #[inline(always)]
    fn low_i16_to_f32(self) -> Self::F {
        self.0.map(|v| f32::from(v as i16))
    }
    #[inline(always)]
    fn high_i16_to_f32(self) -> Self::F {
        self.0.map(|v| f32::from((v >> 16) as i16))
    }
    #[inline(always)]
    fn load_bf16(plane: &[u16; 16], h: usize) -> Self::F {
        std::array::from_fn(|i| f32::from_bits(u32::from(plane[8 * h + i]) << 16))
    }
    #[inline(always)]
    fn load_f32(plane: &[f32; 16], h: usize) -> Self::F {
        std::array::from_fn(|i| plane[8 * h + i])
    }
    #[inline(always)]
    fn splat_f32(v: f32) -> Self::F {
        [v; 8]
    }
    #[inline(always)]
    fn mul(a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn store_f32(v: Self::F, plane: &mut [f32; 16], h: usize) {
        plane[8 * h..8 * h + 8].copy_from_slice(&v);
    }
}

/// `2^(e - 128)`: half of what an E8M0 byte says, exact also where it is subnormal. MXFP4's table holds doubled values.
#[inline(always)]
pub fn e8m0_halved(e: u8) -> f32 {
    let e = u32::from(e);
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 })
}

//! Element types, and the trait kernels are generic over.

use crate::fp8;
pub use half::{bf16, f16};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum DType {
    F32 = 1,
    F16 = 2,
    BF16 = 3,
    F8E4M3 = 4,
    F8E5M2 = 5,
    F8E8M0 = 6,
    U8 = 7,
    I8 = 8,
    U32 = 9,
    I32 = 10,
    I64 = 11,
}

/// What activations may be.
pub const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16];

impl DType {
    pub const ALL: [DType; 11] = {
        use DType::*;
        [F32, F16, BF16, F8E4M3, F8E5M2, F8E8M0, U8, I8, U32, I32, I64]
    };

    /// The ABI's number, born an enum here; `None` where there is no such dtype.
    pub fn from_abi(number: i32) -> Option<DType> {
        Self::ALL.into_iter().find(|d| *d as i32 == number)
    }

    pub const fn size(self) -> usize {
        match self {
            DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::U8 | DType::I8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::F32 | DType::U32 | DType::I32 => 4,
            DType::I64 => 8,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::F8E4M3 => "F8_E4M3",
            DType::F8E5M2 => "F8_E5M2",
            DType::F8E8M0 => "F8_E8M0",
            DType::U8 => "U8",
            DType::I8 => "I8",
            DType::U32 => "U32",
            DType::I32 => "I32",
            DType::I64 => "I64",
        }
    }

    pub const fn is_fp8(self) -> bool {
        matches!(self, DType::F8E4M3 | DType::F8E5M2)
    }

    /// Largest finite value, the divisor of a group's scale. Only fp8 caches have scales.
    pub const fn fp8_max(self) -> f32 {
        match self {
            DType::F8E5M2 => fp8::E5M2_MAX,
            _ => fp8::E4M3_MAX,
        }
    }
}

/// Memory of this type may be viewed as any bit pattern of it.
///
/// # Safety
/// Every bit pattern is a value, there is no padding, and `DTYPE.size() == size_of::<Self>()`.
pub unsafe trait Plain: Copy + Send + Sync + 'static {
    const DTYPE: DType;
}

/// A floating-point element: read to f32, rounded from f32 (to nearest even; fp8 saturates).
pub trait Element: Plain {
    fn to_f32(self) -> f32;
    fn from_f32(x: f32) -> Self;
}

macro_rules! plain {
    ($($t:ty = $d:ident),*) => { $(
        // SAFETY: an integer, float or transparent wrapper of one; the size is asserted.
        unsafe impl Plain for $t { const DTYPE: DType = DType::$d; }
        const _: () = assert!(DType::$d.size() == size_of::<$t>());
    )* };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct E4m3(pub u8);
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct E5m2(pub u8);
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct E8m0(pub u8);

plain!(f32 = F32, f16 = F16, bf16 = BF16, E4m3 = F8E4M3, E5m2 = F8E5M2, E8m0 = F8E8M0);
plain!(u8 = U8, i8 = I8, u32 = U32, i32 = I32, i64 = I64);

macro_rules! element {
    ($t:ty, $x:ident, $to:expr, $from:expr) => {
        impl Element for $t {
            #[inline(always)]
            fn to_f32(self) -> f32 {
                let $x = self;
                $to
            }
            #[inline(always)]
            fn from_f32($x: f32) -> Self {
                $from
            }
        }
    };
}

element!(f32, x, x, x);
element!(f16, x, x.to_f32(), f16::from_f32(x));
element!(bf16, x, x.to_f32(), bf16::from_f32(x));
element!(E4m3, x, fp8::E4M3_TO_F32[x.0 as usize], E4m3(fp8::f32_to_e4m3(x)));
element!(E5m2, x, fp8::E5M2_TO_F32[x.0 as usize], E5m2(fp8::f32_to_e5m2(x)));
element!(E8m0, x, fp8::e8m0_to_f32(x.0), E8m0(fp8::f32_to_e8m0_ceil(x)));

/// Run `$body` with `$T` the Rust type of an activation dtype (F32, F16, BF16), which validation has already admitted.
#[macro_export]
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F16 => {
                type $T = $crate::dtype::f16;
                $body
            }
            $crate::dtype::DType::BF16 => {
                type $T = $crate::dtype::bf16;
                $body
            }
            d => {
                debug_assert_eq!(d, $crate::dtype::DType::F32);
                type $T = f32;
                $body
            }
        }
    };
}

/// Run `$body` with `$T` the Rust type of a cache dtype (F32, F16, BF16, F8_E4M3, F8_E5M2).
#[macro_export]
macro_rules! with_cache_dtype {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F8E4M3 => {
                type $T = $crate::dtype::E4m3;
                $body
            }
            $crate::dtype::DType::F8E5M2 => {
                type $T = $crate::dtype::E5m2;
                $body
            }
            d => $crate::with_float!(d, $T => $body),
        }
    };
}

//! Which instruction set the CPU kernels use: detected once a context, a value of [`Avx2`] or [`Avx512`] the proof of a feature.

use crate::error::{Error, Result};

/// Environment variable that holds the kernels to a lower level, for tests; it never raises above what the CPU has.
pub const VARIABLE: &str = "PAGEDKV_CPU_ISA";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Only the plain implementations that define what is right.
    Reference,
    /// The blocked, threaded kernels in portable Rust.
    Scalar,
    Avx2,
    Avx512,
}

impl Level {
    pub const ALL: [Level; 4] = [Level::Reference, Level::Scalar, Level::Avx2, Level::Avx512];

    pub fn name(self) -> &'static str {
        match self {
            Level::Reference => "reference",
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
        }
    }
}

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

/// Proof that the CPU has AVX-512 F, BW, VL, DQ and VNNI, on top of [`Avx2`].
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

impl Avx512 {
    pub fn avx2(self) -> Avx2 {
        Avx2(())
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Isa {
    level: Level,
}

impl Isa {
    pub fn detect() -> Result<Self> {
        let best = Self::best();
        let level = match std::env::var(VARIABLE) {
            Err(_) => best,
            Ok(name) => {
                let asked = Level::ALL.into_iter().find(|l| l.name() == name).ok_or_else(|| {
                    Error::value(VARIABLE, format!("is \"{name}\", must be reference, scalar, avx2 or avx512"))
                })?;
                asked.min(best)
            }
        };
        Ok(Isa { level })
    }

    /// The same, with a lower level forced from code.
    pub fn at_most(level: Level) -> Self {
        Isa { level: level.min(Self::best()) }
    }

    fn best() -> Level {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") && has!("f16c") {
                let wide =
                    has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq") && has!("avx512vnni");
                return if wide { Level::Avx512 } else { Level::Avx2 };
            }
        }
        Level::Scalar
    }

    pub fn level(self) -> Level {
        self.level
    }

    pub fn avx2(self) -> Option<Avx2> {
        (self.level >= Level::Avx2).then_some(Avx2(()))
    }

    pub fn avx512(self) -> Option<Avx512> {
        (self.level >= Level::Avx512).then_some(Avx512(()))
    }

    /// What every implementation but the reference asks first.
    pub fn not_reference(self) -> Result<(), String> {
        if self.level == Level::Reference { Err(format!("{VARIABLE}=reference")) } else { Ok(()) }
    }
}

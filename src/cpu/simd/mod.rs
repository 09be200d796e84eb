//! Eight lanes of f32: the algorithms are written once over [`Simd`], a file an instruction set.
//!
//! A value that implements `Simd` is the proof that the CPU has the instructions, so its methods are safe. [`run`] enters the function compiled for them;
//! everything below it that handles lanes must be `#[inline(always)]`, or each instruction becomes a call.
//!
//! Every method gives the same bits on every implementation (NaN payloads aside), except [`Simd::mul_add`], whose product only some round.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod scalar;

use super::isa::Isa;
use crate::dtype::Element;
pub use scalar::Scalar;

pub const LANES: usize = 8;

pub trait Simd: Copy + Send + Sync + 'static {
    /// 8 x f32
    type F: Copy;
    /// 8 x f64
    type D: Copy;
    /// Rows of a register tile two vectors wide: as many as there are registers for the sums, two operands and a broadcast.
    const ROWS: usize;

    fn splat(self, x: f32) -> Self::F;
    /// Read to f32.
    fn load<T: Element>(self, x: &[T; LANES]) -> Self::F;
    /// Round from f32: to nearest even, fp8 saturates.
    fn store<T: Element>(self, y: &mut [T; LANES], x: Self::F);
    /// Two vectors, one after the other: narrow dtypes share the packing.
    #[inline(always)]
    fn store_pair<T: Element>(self, y: &mut [T; 2 * LANES], x: [Self::F; 2]) {
        self.store(y.first_chunk_mut().unwrap(), x[0]);
        self.store(y.last_chunk_mut().unwrap(), x[1]);
    }
    #[inline(always)]
    fn load_pair<T: Element>(self, x: &[T; 2 * LANES]) -> [Self::F; 2] {
        [self.load(x.first_chunk().unwrap()), self.load(x.last_chunk().unwrap())]
    }
    /// What is left of `x` after it went through `T`.
    fn round<T: Element>(self, x: Self::F) -> Self::F;

    fn add(self, x: Self::F, y: Self::F) -> Self::F;
    fn sub(self, x: Self::F, y: Self::F) -> Self::F;
    fn mul(self, x: Self::F, y: Self::F) -> Self::F;
    fn div(self, x: Self::F, y: Self::F) -> Self::F;
    /// `x * y + z`; the product is rounded where there is no fused instruction. Where it is exact anyway the bits are the same.
    fn mul_add(self, x: Self::F, y: Self::F, z: Self::F) -> Self::F;
    /// `x > y ? x : y`, so `y` where either is NaN.
    fn max(self, x: Self::F, y: Self::F) -> Self::F;
    /// |x|, 0 where that is infinite or NaN.
    fn finite_abs(self, x: Self::F) -> Self::F;
    /// Bit `i` set where `x[i] > y[i]`.
    fn gt_mask(self, x: Self::F, y: Self::F) -> u32;
    /// Lanes 1 0 3 2 5 4 7 6.
    fn swap_pairs(self, x: Self::F) -> Self::F;
    /// Columns of eight rows.
    fn transpose(self, x: [Self::F; LANES]) -> [Self::F; LANES];

    /// `a` where `x < y`, else `b`.
    fn select_lt(self, x: Self::F, y: Self::F, a: Self::F, b: Self::F) -> Self::F;
    /// To the nearest integer, ties to even; for magnitudes below 2^22.
    fn nearest(self, x: Self::F) -> Self::F;
    /// `x * 2^n` for whole `n` that keep the result normal; NaN `x` (then `n` may be NaN too) stays NaN.
    fn times_power(self, x: Self::F, n: Self::F) -> Self::F;
    /// 16 columns of 16 rows of e4m3 codes, turned and scaled: `to[k][i] = rows[i][k] * scale[i]`.
    fn load_e4m3_panel(
        self,
        rows: [&[u8; 2 * LANES]; 2 * LANES],
        scale: [Self::F; 2],
        to: &mut [[f32; LANES]; 4 * LANES],
    );

    /// Asks for the cache lines of `bytes` bytes at `p`, which need not be valid: to be read, or to be written.
    #[inline(always)]
    fn prefetch(self, _p: *const u8, _bytes: usize) {}
    #[inline(always)]
    fn prefetch_write(self, _p: *const u8, _bytes: usize) {}

    fn zero_f64(self) -> Self::D;
    /// `sum + x * x` in f64, where the square is exact.
    fn add_square(self, sum: Self::D, x: Self::F) -> Self::D;
    fn to_array_f64(self, x: Self::D) -> [f64; LANES];

    #[inline(always)]
    fn to_array(self, x: Self::F) -> [f32; LANES] {
        let mut y = [0.0; LANES];
        self.store(&mut y, x);
        y
    }

    /// The largest lane that is not NaN; -inf if there is none.
    #[inline(always)]
    fn reduce_max(self, x: Self::F) -> f32 {
        self.to_array(x).into_iter().fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m })
    }

    /// Sum of the lanes: halves, then quarters, then pairs.
    #[inline(always)]
    fn reduce_add(self, x: Self::F) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.to_array(x);
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }

    /// 2^x to a few units in the last place and exactly 1 at 0; 0 below 2^-125; NaN stays NaN. For x up to 127.
    #[inline(always)]
    fn exp2(self, x: Self::F) -> Self::F {
        // 2^f for |f| <= 1/2 by its Taylor series, ln(2)^k / k!; the first term left out is below a tenth of an ulp.
        const C: [f32; 7] = {
            let (mut c, mut term, mut k) = ([0.0; 7], 1.0, 0);
            while k < c.len() {
                term *= std::f64::consts::LN_2 / (k + 1) as f64;
                c[k] = term as f32;
                k += 1;
            }
            c
        };
        let floor = self.splat(-125.0);
        let clamped = self.max(floor, x);
        let n = self.nearest(clamped);
        let f = self.sub(clamped, n);
        let mut p = self.splat(C[6]);
        for c in C[..6].iter().rev() {
            p = self.mul_add(p, f, self.splat(*c));
        }
        p = self.mul_add(p, f, self.splat(1.0));
        self.select_lt(x, floor, self.splat(0.0), self.times_power(p, n))
    }
}

/// A computation over lanes, to be compiled for each instruction set.
pub trait Kernel {
    type Output;
    /// Must be `#[inline(always)]`.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// Run with the best lanes `isa` allows.
#[inline]
pub fn run<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if let Some(proof) = isa.avx2() {
        // SAFETY: `proof` is only made where the CPU has the features.
        return unsafe { avx2::run(proof, kernel) };
    }
    let _ = isa;
    kernel.run(Scalar)
}

/// Cast a slice.
#[inline(always)]
pub fn convert<S: Simd, A: Element, B: Element>(s: S, x: &[A], y: &mut [B]) {
    debug_assert_eq!(x.len(), y.len());
    let ((pairs, x), (y_pairs, y)) = (x.as_chunks(), y.as_chunks_mut());
    for (x, y) in pairs.iter().zip(y_pairs) {
        s.store_pair(y, s.load_pair(x));
    }
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks(), y.as_chunks_mut());
    for (x, y) in x.iter().zip(y) {
        s.store(y, s.load(x));
    }
    for (x, y) in x_rest.iter().zip(y_rest) {
        *y = B::from_f32(x.to_f32());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Level;
    use crate::dtype::{E4m3, E5m2, bf16, f16};

    fn same(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
    }

    /// f32 values at and around everything that rounds, saturates or is special in a smaller format, then random bits.
    fn values() -> Vec<f32> {
        let mut v = Vec::new();
        for exponent in 0..=255u32 {
            for mantissa in [0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0x3ffff, 0x40000, 0x7_ffff, 0x8_0000]
            {
                for top in 0..16u32 {
                    v.push(exponent << 23 | ((top << 19) ^ mantissa) & 0x7f_ffff);
                }
            }
        }
        for x in [448.0f32, 464.0, 463.99997, 480.0, 57344.0, 61440.0, 65504.0, 65520.0, 65519.996] {
            v.extend([x.to_bits() - 1, x.to_bits(), x.to_bits() + 1]);
        }
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        for _ in 0..400_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            v.push((state >> 32) as u32);
        }
        v.truncate(v.len() / LANES * LANES);
        v.iter().flat_map(|&b| [f32::from_bits(b), f32::from_bits(b | 0x8000_0000)]).collect()
    }

    struct Store<'a, T>(&'a [f32], &'a mut [T]);
    impl<T: Element> Kernel for Store<'_, T> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            convert(s, self.0, self.1)
        }
    }
    struct Load<'a, T>(&'a [T], &'a mut [f32]);
    impl<T: Element> Kernel for Load<'_, T> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            convert(s, self.0, self.1)
        }
    }
    struct Round<'a, T>(&'a mut [f32], T);
    impl<T: Element> Kernel for Round<'_, T> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for x in self.0.as_chunks_mut().0 {
                s.store(x, s.round::<T>(s.load(x)));
            }
        }
    }

    fn check<T: Element + std::fmt::Debug>(every: &[T]) {
        let x = values();
        for level in [Level::Scalar, Level::Avx2] {
            let isa = Isa::at_most(level);
            let mut y = vec![T::from_f32(0.0); x.len()];
            run(isa, Store(&x, &mut y));
            let mut rounded = x.clone();
            run(isa, Round(&mut rounded, T::from_f32(0.0)));
            for ((&x, &y), &r) in x.iter().zip(&y).zip(&rounded) {
                let want = T::from_f32(x).to_f32();
                assert!(
                    same(want, y.to_f32()) && same(want, r),
                    "{level:?} {x:e} {:x}: {want:e} {y:?} {r:e}",
                    x.to_bits()
                );
            }
            let mut z = vec![0.0; every.len()];
            run(isa, Load(every, &mut z));
            for (&x, &z) in every.iter().zip(&z) {
                assert!(same(x.to_f32(), z), "{level:?} {x:?} {z:e}");
            }
        }
    }

    #[test]
    fn conversions_are_those_of_the_element_types() {
        let bytes: Vec<u8> = (0..=255).collect();
        let words: Vec<u16> = (0..=u16::MAX).collect();
        check(&bytes.iter().map(|&b| E4m3(b)).collect::<Vec<_>>());
        check(&bytes.iter().map(|&b| E5m2(b)).collect::<Vec<_>>());
        check(&words.iter().map(|&w| f16::from_bits(w)).collect::<Vec<_>>());
        check(&words.iter().map(|&w| bf16::from_bits(w)).collect::<Vec<_>>());
        check(&values());
    }

    struct Everything([f32; 8], [f32; 8]);
    impl Kernel for Everything {
        type Output = Vec<f32>;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<f32> {
            let (x, y) = (s.load(&self.0), s.load(&self.1));
            let mut out = Vec::new();
            for v in [s.add(x, y), s.sub(x, y), s.mul(x, y), s.div(x, y), s.max(x, y), s.finite_abs(x), s.swap_pairs(x)]
            {
                out.extend(s.to_array(v));
            }
            out.push(s.gt_mask(x, y) as f32);
            out.extend(s.to_array(s.select_lt(x, y, s.splat(1.0), y)));
            out.extend([s.reduce_max(x), s.reduce_add(s.finite_abs(y))]);
            for v in s.transpose([x, y, s.add(x, y), s.splat(7.0), y, x, s.mul(x, y), s.sub(y, x)]) {
                out.extend(s.to_array(v));
            }
            let squares = s.add_square(s.add_square(s.zero_f64(), x), y);
            out.extend(s.to_array_f64(squares).map(|x| x as f32));
            out
        }
    }

    #[test]
    fn arithmetic_is_the_same_on_every_instruction_set() {
        let specials = [0.0, -0.0, 1.5, -2.25, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-40, 3e38, -1e-3];
        for i in 0..specials.len() {
            let x = std::array::from_fn(|l| specials[(i + l) % specials.len()]);
            for j in 0..specials.len() {
                let y = std::array::from_fn(|l| specials[(i * 3 + j + l * 7) % specials.len()]);
                let [a, b] = [Level::Scalar, Level::Avx2].map(|level| run(Isa::at_most(level), Everything(x, y)));
                assert!(a.iter().zip(&b).all(|(&a, &b)| same(a, b)), "{x:?} {y:?}\n{a:?}\n{b:?}");
            }
        }
    }

    struct Exp2<'a>(&'a mut [f32]);
    impl Kernel for Exp2<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for x in self.0.as_chunks_mut().0 {
                s.store(x, s.exp2(s.load(x)));
            }
        }
    }

    #[test]
    fn exp2_is_good_to_a_few_ulp() {
        for level in [Level::Scalar, Level::Avx2] {
            let x: Vec<f32> = (0..1_600_000).map(|i| i as f32 * -1e-4 + 20.0).collect();
            let mut y = x.clone();
            run(Isa::at_most(level), Exp2(&mut y));
            for (&x, &y) in x.iter().zip(&y) {
                let want = (x as f64).exp2();
                let near = if x < -125.0 { y == 0.0 } else { (y as f64 - want).abs() <= 2.5e-7 * want };
                assert!(near, "{level:?}: 2^{x} is {y:e}, must be {want:e}");
            }
            let mut odd = [0.0, -0.0, f32::NEG_INFINITY, f32::NAN, -f32::NAN, 1.0, -125.0, 127.0];
            run(Isa::at_most(level), Exp2(&mut odd));
            assert_eq!(odd[..3], [1.0, 1.0, 0.0]);
            assert!(odd[3].is_nan() && odd[4].is_nan());
            assert_eq!(odd[5..], [2.0, (-125.0f32).exp2(), 127.0f32.exp2()]);
        }
    }

    struct Panel<'a>(&'a [[u8; 16]; 16], &'a [f32; 16]);
    impl Kernel for Panel<'_> {
        type Output = [[f32; 8]; 32];
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> [[f32; 8]; 32] {
            let mut to = [[0.0; 8]; 32];
            let (scale, _) = self.1.as_chunks();
            s.load_e4m3_panel(self.0.each_ref(), [s.load(&scale[0]), s.load(&scale[1])], &mut to);
            to
        }
    }

    #[test]
    fn panels_are_turned_and_scaled() {
        let codes: [[u8; 16]; 16] = std::array::from_fn(|i| std::array::from_fn(|k| (16 * i + k) as u8));
        let scale = std::array::from_fn(|i| 0.5 + i as f32);
        for level in [Level::Scalar, Level::Avx2] {
            let got = run(Isa::at_most(level), Panel(&codes, &scale));
            for (i, row) in codes.iter().enumerate() {
                for (k, code) in row.iter().enumerate() {
                    let (got, want) = (got.as_flattened()[16 * k + i], E4m3(*code).to_f32() * scale[i]);
                    assert!(same(got, want), "{level:?} row {i} column {k}: {got}, must be {want}");
                }
            }
        }
    }
}

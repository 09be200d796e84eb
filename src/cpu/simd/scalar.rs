//! Portable lanes: loops over arrays, which compilers turn into whatever the target has.

use super::{LANES, Simd};
use crate::dtype::{E4m3, Element};

#[derive(Clone, Copy, Debug)]
pub struct Scalar;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    let mut y = [0.0; LANES];
    for (i, y) in y.iter_mut().enumerate() {
        *y = f(i);
    }
    y
}

impl Simd for Scalar {
    type F = [f32; LANES];
    type D = [f64; LANES];
    const ROWS: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }

    #[inline(always)]
    fn load<T: Element>(self, x: &[T; LANES]) -> Self::F {
        each(|i| x[i].to_f32())
    }

    #[inline(always)]
    fn store<T: Element>(self, y: &mut [T; LANES], x: Self::F) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::from_f32(x);
        }
    }

    #[inline(always)]
    fn round<T: Element>(self, x: Self::F) -> Self::F {
        each(|i| T::from_f32(x[i]).to_f32())
    }

    #[inline(always)]
    fn add(self, x: Self::F, y: Self::F) -> Self::F {
        each(|i| x[i] + y[i])
    }

    #[inline(always)]
    fn sub(self, x: Self::F, y: Self::F) -> Self::F {
        each(|i| x[i] - y[i])
    }

    #[inline(always)]
    fn mul(self, x: Self::F, y: Self::F) -> Self::F {
        each(|i| x[i] * y[i])
    }

    #[inline(always)]
    fn div(self, x: Self::F, y: Self::F) -> Self::F {
        each(|i| x[i] / y[i])
    }

    #[inline(always)]
    fn mul_add(self, x: Self::F, y: Self::F, z: Self::F) -> Self::F {
        each(|i| x[i] * y[i] + z[i])
    }

    #[inline(always)]
    fn max(self, x: Self::F, y: Self::F) -> Self::F {
        each(|i| if x[i] > y[i] { x[i] } else { y[i] })
    }

    #[inline(always)]
    fn finite_abs(self, x: Self::F) -> Self::F {
        each(|i| if x[i].is_finite() { x[i].abs() } else { 0.0 })
    }

    #[inline(always)]
    fn gt_mask(self, x: Self::F, y: Self::F) -> u32 {
        (0..LANES).fold(0, |mask, i| mask | u32::from(x[i] > y[i]) << i)
    }

    #[inline(always)]
    fn swap_pairs(self, x: Self::F) -> Self::F {
        each(|i| x[i ^ 1])
    }

    #[inline(always)]
    fn transpose(self, x: [Self::F; LANES]) -> [Self::F; LANES] {
        let mut y = [[0.0; LANES]; LANES];
        for (i, row) in x.iter().enumerate() {
            for (j, &x) in row.iter().enumerate() {
                y[j][i] = x;
            }
        }
        y
    }

    #[inline(always)]
    fn select_lt(self, x: Self::F, y: Self::F, a: Self::F, b: Self::F) -> Self::F {
        each(|i| if x[i] < y[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn nearest(self, x: Self::F) -> Self::F {
        // 1.5 * 2^23 leaves no bit for a fraction.
        const MAGIC: f32 = 12_582_912.0;
        each(|i| (x[i] + MAGIC) - MAGIC)
    }

    #[inline(always)]
    fn times_power(self, x: Self::F, n: Self::F) -> Self::F {
        // NaN as an integer is 0.
        each(|i| f32::from_bits(x[i].to_bits().wrapping_add((n[i] as i32 as u32) << 23)))
    }

    #[inline(always)]
    fn load_e4m3_panel(
        self,
        rows: [&[u8; 2 * LANES]; 2 * LANES],
        scale: [Self::F; 2],
        to: &mut [[f32; LANES]; 4 * LANES],
    ) {
        let to = to.as_flattened_mut();
        for (i, row) in rows.into_iter().enumerate() {
            let scale = scale[i / LANES][i % LANES];
            for (k, &code) in row.iter().enumerate() {
                to[2 * LANES * k + i] = E4m3(code).to_f32() * scale;
            }
        }
    }

    #[inline(always)]
    fn zero_f64(self) -> Self::D {
        [0.0; LANES]
    }

    #[inline(always)]
    fn add_square(self, mut sum: Self::D, x: Self::F) -> Self::D {
        for (sum, x) in sum.iter_mut().zip(x) {
            *sum += x as f64 * x as f64;
        }
        sum
    }

    #[inline(always)]
    fn to_array_f64(self, x: Self::D) -> [f64; LANES] {
        x
    }
}

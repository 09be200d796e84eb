//! Finishing rows of multi-head latent attention: rotary embedding of q and k, and the latent part's norm.

use super::simd::{Kernel, LANES, Simd};
use crate::dtype::{DType, Element};
use crate::op::Rope;
use crate::with_float;

/// The rotation of one position, shared by all heads. Both pairings become `y[j] = x[j] * a[j] + x[partner(j)] * b[j]`, with the cosine in `a` and the sine in `b`,
/// negated where the partner is the pair's second: the same products and the same one addition as
/// `y0 = x0 cos - x1 sin, y1 = x0 sin + x1 cos`, hence the same bits.
#[derive(Debug)]
pub struct Rotation<'a> {
    rope: Rope,
    a: &'a [f32],
    b: &'a [f32],
}

impl<'a> Rotation<'a> {
    /// `freqs`: one row of freqs_cis, `cos, sin` pairs; `scratch`: twice its length.
    pub fn new<T: Element>(freqs: &[T], rope: Rope, scratch: &'a mut [f32]) -> Self {
        let width = freqs.len();
        let (a, b) = scratch[..2 * width].split_at_mut(width);
        for (i, pair) in freqs.chunks_exact(2).enumerate() {
            let (cos, sin) = (pair[0].to_f32(), pair[1].to_f32());
            let (j0, j1) = rope.pair(i, width);
            (a[j0], a[j1]) = (cos, cos);
            (b[j0], b[j1]) = (-sin, sin);
        }
        Rotation { rope, a, b }
    }

    pub fn width(&self) -> usize {
        self.a.len()
    }

    /// Rotate one head: `y = round(rotate(x))`. In place is fine.
    ///
    /// # Safety
    /// `x` is readable and `y` writable for [`Self::width`] elements, the same memory or disjoint; nobody else uses them meanwhile.
    #[inline(always)]
    pub unsafe fn apply<S: Simd, T: Element>(&self, s: S, x: *const T, y: *mut T) {
        let (a, a_rest) = self.a.as_chunks::<LANES>();
        let b = self.b.as_chunks::<LANES>().0;
        let width = self.width();
        // SAFETY (all below): offsets stay below `width`; every element is read before any element of its pair is written.
        match self.rope {
            Rope::Interleaved => {
                let (pairs, single) = a.as_chunks::<2>();
                for (i, (a, b)) in pairs.iter().zip(b.as_chunks::<2>().0).enumerate() {
                    // SAFETY: as above.
                    let v = s.load_pair(&unsafe { x.add(i * 2 * LANES).cast::<[T; 2 * LANES]>().read() });
                    let mut r = v;
                    for j in 0..2 {
                        r[j] = s.add(s.mul(v[j], s.load(&a[j])), s.mul(s.swap_pairs(v[j]), s.load(&b[j])));
                    }
                    // SAFETY: as above.
                    s.store_pair(unsafe { &mut *y.add(i * 2 * LANES).cast::<[T; 2 * LANES]>() }, r);
                }
                if let [a] = single {
                    let i = b.len() - 1;
                    // SAFETY: as above.
                    let v = s.load(&unsafe { x.add(i * LANES).cast::<[T; LANES]>().read() });
                    let r = s.add(s.mul(v, s.load(a)), s.mul(s.swap_pairs(v), s.load(&b[i])));
                    // SAFETY: as above.
                    s.store(unsafe { &mut *y.add(i * LANES).cast::<[T; LANES]>() }, r);
                }
                for i in (width - a_rest.len()) / 2..width / 2 {
                    // SAFETY: as above.
                    unsafe { self.pair(2 * i, 2 * i + 1, x, y) };
                }
            }
            Rope::HalfSplit => {
                let half = width / 2;
                let whole = half / LANES * LANES;
                for i in (0..whole).step_by(LANES) {
                    // SAFETY: as above.
                    let [v0, v1] = [i, half + i].map(|j| unsafe { x.add(j).cast::<[T; LANES]>().read() });
                    let (v0, v1) = (s.load(&v0), s.load(&v1));
                    let [a0, a1] = [i, half + i].map(|j| *self.a[j..].first_chunk::<LANES>().unwrap());
                    let [b0, b1] = [i, half + i].map(|j| *self.b[j..].first_chunk::<LANES>().unwrap());
                    let r0 = s.add(s.mul(v0, s.load(&a0)), s.mul(v1, s.load(&b0)));
                    let r1 = s.add(s.mul(v1, s.load(&a1)), s.mul(v0, s.load(&b1)));
                    // SAFETY: as above.
                    unsafe {
                        s.store(&mut *y.add(i).cast::<[T; LANES]>(), r0);
                        s.store(&mut *y.add(half + i).cast::<[T; LANES]>(), r1);
                    }
                }
                for i in whole..half {
                    // SAFETY: as above.
                    unsafe { self.pair(i, half + i, x, y) };
                }
            }
        }
    }

    /// # Safety
    /// As [`Self::apply`], `j0` and `j1` below the width.
    #[inline(always)]
    unsafe fn pair<T: Element>(&self, j0: usize, j1: usize, x: *const T, y: *mut T) {
        // SAFETY: by contract.
        unsafe {
            let (x0, x1) = (x.add(j0).read().to_f32(), x.add(j1).read().to_f32());
            y.add(j0).write(T::from_f32(x0 * self.a[j0] + x1 * self.b[j0]));
            y.add(j1).write(T::from_f32(x1 * self.a[j1] + x0 * self.b[j1]));
        }
    }

    /// Rotate f32 numbers in place, each rounded to `T`.
    #[inline(always)]
    pub fn apply_rounded<S: Simd, T: Element>(&self, s: S, x: &mut [f32]) {
        assert_eq!(x.len(), self.width());
        let p = x.as_mut_ptr();
        // SAFETY: `x` is exclusively ours and as wide as the rotation.
        unsafe { self.apply(s, p.cast_const(), p) };
        round_slice::<S, T>(s, x);
    }
}

#[inline(always)]
fn round_slice<S: Simd, T: Element>(s: S, x: &mut [f32]) {
    if T::DTYPE == DType::F32 {
        return;
    }
    let (x, rest) = x.as_chunks_mut();
    for x in x {
        s.store(x, s.round::<T>(s.load(x)));
    }
    for x in rest {
        *x = T::from_f32(*x).to_f32();
    }
}

/// Finish a cache row `[C + R]` in place: the latent part `x / sqrt(mean(x²) + epsilon)` rounded to `dtype`, times gamma, rounded again; the rest rotated
/// and rounded. The sum of squares is in f64 over lanes in a fixed order: exact but for the last bits of 53.
///
/// A kernel of its own, not part of its callers: they would compile it once for each of their element types.
#[derive(Debug)]
pub struct FinishRow<'a> {
    pub row: &'a mut [f32],
    pub gamma: &'a [f32],
    pub epsilon: f32,
    pub rotation: &'a Rotation<'a>,
    pub dtype: DType,
}

impl Kernel for FinishRow<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (latent, roped) = self.row.split_at_mut(self.gamma.len());
        with_float!(self.dtype, T => {
            rms_norm::<S, T>(s, latent, self.gamma, self.epsilon);
            self.rotation.apply_rounded::<S, T>(s, roped);
        })
    }
}

#[inline(always)]
fn rms_norm<S: Simd, T: Element>(s: S, x: &mut [f32], gamma: &[f32], epsilon: f32) {
    let root = (mean_square(s, x) as f32 + epsilon).sqrt();
    let divisor = s.splat(root);
    let ((x, x_rest), (gamma, gamma_rest)) = (x.as_chunks_mut(), gamma.as_chunks());
    for (x, gamma) in x.iter_mut().zip(gamma) {
        let normed = s.round::<T>(s.div(s.load(x), divisor));
        s.store(x, s.round::<T>(s.mul(normed, s.load(gamma))));
    }
    for (x, gamma) in x_rest.iter_mut().zip(gamma_rest) {
        let normed = T::from_f32(*x / root).to_f32();
        *x = T::from_f32(normed * gamma).to_f32();
    }
}

#[inline(always)]
fn mean_square<S: Simd>(s: S, x: &[f32]) -> f64 {
    let (pairs, rest) = x.as_chunks::<{ 2 * LANES }>();
    let (mut even, mut odd) = (s.zero_f64(), s.zero_f64());
    for pair in pairs {
        let (lanes, _) = pair.as_chunks();
        even = s.add_square(even, s.load(&lanes[0]));
        odd = s.add_square(odd, s.load(&lanes[1]));
    }
    let mut sum = 0.0;
    for (even, odd) in s.to_array_f64(even).into_iter().zip(s.to_array_f64(odd)) {
        sum += even + odd;
    }
    for &x in rest {
        sum += x as f64 * x as f64;
    }
    sum / x.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, Level};
    use crate::cpu::simd;

    #[test]
    fn rows_are_finished_as_the_definition_says() {
        let mut state = 1u64;
        let mut random = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        for (c, r) in [(512, 64), (1, 2), (7, 6), (128, 8), (33, 20), (16, 48)] {
            for rope in [Rope::Interleaved, Rope::HalfSplit] {
                for dtype in crate::dtype::FLOATS {
                    let gamma: Vec<f32> = (0..c).map(|_| random() + 1.0).collect();
                    let freqs: Vec<f32> = (0..r).map(|_| random()).collect();
                    let row: Vec<f32> = (0..c + r).map(|_| random() * 3.0).collect();
                    let mut want = row.clone();
                    crate::cpu::reference::finish_row(&mut want, &gamma, 1e-6, &freqs, rope, *dtype);
                    for level in [Level::Scalar, Level::Avx2] {
                        let mut got = row.clone();
                        let mut scratch = vec![0.0; 2 * freqs.len()];
                        let rotation = Rotation::new(&freqs, rope, &mut scratch);
                        let (row, rotation) = (&mut got[..], &rotation);
                        simd::run(
                            Isa::at_most(level),
                            FinishRow { row, gamma: &gamma, epsilon: 1e-6, rotation, dtype: *dtype },
                        );
                        assert_eq!(got, want, "{c} {r} {rope:?} {dtype:?} {level:?}");
                    }
                }
            }
        }
    }
}

//! Random numbers that are the same in every run.

#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 32) as u32
    }

    pub fn below(&mut self, n: usize) -> usize {
        ((self.bits() as u64 * n as u64) >> 32) as usize
    }

    /// Close to normal: the sum of twelve uniform numbers.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| (self.bits() >> 8) as f32 / (1 << 24) as f32).sum::<f32>() - 6.0
    }

    #[allow(dead_code, reason = "each test uses its part")]
    pub fn shuffle<T>(&mut self, x: &mut [T]) {
        for i in (1..x.len()).rev() {
            x.swap(i, self.below(i + 1));
        }
    }
}

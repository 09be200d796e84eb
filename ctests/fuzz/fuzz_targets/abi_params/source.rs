//! Decisions from the fuzzer's bytes. An exhausted source answers 0, which every question takes as the plain choice.

use super::gguf_random::Random;

pub struct Source<'a> {
    bytes: &'a [u8],
    /// For contents, which need no search: seeded by the whole input.
    pub random: Random,
}

impl<'a> Source<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        let seed =
            bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        Source { bytes, random: Random::new(seed) }
    }

    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.bytes.split_first() else { return 0 };
        self.bytes = rest;
        first
    }

    pub fn word(&mut self) -> u64 {
        (0..8).fold(0, |w, _| w << 8 | u64::from(self.byte()))
    }

    /// In `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n
    }

    /// In `low..=high`.
    pub fn within(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// True once in `n`.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == n - 1
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// A number that breaks things, near `now` or far from it.
    pub fn awkward(&mut self, now: u64) -> u64 {
        match self.below(16) {
            0 => 0,
            1 => 1,
            2 => now.wrapping_add(1),
            3 => now.wrapping_sub(1),
            4 => now.wrapping_mul(2),
            5 => u64::MAX,
            6 => 1 << 31,
            7 => i64::MAX as u64,
            8 => i64::MIN as u64,
            9 => u64::from(f32::NAN.to_bits()),
            10 => u64::from(f32::INFINITY.to_bits()),
            11 => u64::from((-1.0f32).to_bits()),
            12 => 1 << 62,
            13 => u64::from(u32::MAX),
            14 => u64::from(self.byte()),
            _ => self.word(),
        }
    }
}

//! Random weights of any GGUF format, for tests, fuzzing and benchmarks: `#[path = "support/gguf_random.rs"] mod gguf_random;`
//!
//! No quantiser is needed: a block's integer fields are random (so every code and sub-scale occurs) and its float fields are then set so that the
//! decoded values look like weights, zero-mean and at most about 1. It works from the format's table row alone.

use pagedkv::gguf::{Float, Format, decode_row};

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

#[allow(dead_code, reason = "each user needs some of it")]
impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `low..high`.
    pub fn uniform(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * ((self.next() >> 40) as f32 / (1u64 << 24) as f32)
    }

    /// Normal with mean 0 and variance 1 (the sum of twelve uniforms: tails end at 6).
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform(0.0, 1.0)).sum::<f32>() - 6.0
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for bytes in bytes.chunks_mut(8) {
            bytes.copy_from_slice(&self.next().to_le_bytes()[..bytes.len()]);
        }
    }
}

/// `rows` tight rows of `cols` weights each. `cols` must be a multiple of the format's block. The same arguments give the same bytes.
pub fn random_rows(format: &Format, rows: usize, cols: usize, seed: u64) -> Vec<u8> {
    let row_bytes = format.row_bytes(cols).expect("cols is a multiple of the block");
    let mut random = Random::new(seed ^ (format.id as u64) << 32);
    let mut bytes = vec![0; rows * row_bytes];
    random.fill(&mut bytes);
    let mut values = vec![0.0; format.block_elements];
    for block in bytes.chunks_exact_mut(format.block_bytes) {
        // What a block decodes to is linear in its float fields, at most a scale and a minimum.
        let mut part = |field: usize| {
            for (f, &float) in format.floats.iter().enumerate() {
                put(block, float, f32::from(f == field));
            }
            decode_row(format, block, &mut values);
            let mean = values.iter().sum::<f32>() / values.len() as f32;
            (mean, values.iter().fold(0.0f32, |max, x| max.max((x - mean).abs())))
        };
        let (mean, max) = part(0);
        let scale = if format.block_elements == 1 {
            random.uniform(-1.0, 1.0)
        } else {
            let sign = if format.has_min || random.next() & 1 == 0 { 1.0 } else { -1.0 };
            sign * random.uniform(0.3, 1.0) / max.max(1.0)
        };
        if let [_, _] = format.floats {
            let (min_mean, _) = part(1);
            let min = if min_mean == 0.0 { 0.0 } else { -scale * mean / min_mean * random.uniform(0.9, 1.1) };
            put(block, format.floats[1], min);
        }
        put(block, format.floats[0], scale);
    }
    bytes
}

/// Writes `value`, rounded to the field's type, into a block.
pub fn put(block: &mut [u8], field: Float, value: f32) {
    let bits = value.to_bits();
    match field {
        Float::F32(at) => block[at..at + 4].copy_from_slice(&value.to_le_bytes()),
        Float::F16(at) => block[at..at + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes()),
        Float::BF16(at) => block[at..at + 2].copy_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
        Float::E8M0(at) => block[at] = (bits >> 23) as u8,
    }
}

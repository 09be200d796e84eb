//! The indexer through the C API: exact on integers against the plain implementation, close to float64 on random numbers, and the same bits however the work
//! is cut.

#[path = "support/api.rs"]
mod api;
#[path = "support/isa.rs"]
mod isa;
#[path = "support/random.rs"]
mod random;

use api::*;
use isa::context;
use pagedkv::abi::collection::pkv_collection_options;
use pagedkv::abi::indexer::pkv_mla_indexer_fp8_params;
use pagedkv::cpu::isa::Level;
use pagedkv::dtype::DType;
use random::Random;
use std::ptr::null_mut;

const FAST: [Level; 2] = [Level::Scalar, Level::Avx2];
const DIRT: u8 = 0xCD;

#[derive(Clone)]
struct Problem {
    batch: Batch,
    page: usize,
    heads: usize,
    depth: usize,
    top_k: usize,
    causal: bool,
    q: Tensor,
    q_s: Tensor,
    blocks: Tensor,
    scales: Tensor,
}

#[derive(Clone, Copy, PartialEq)]
enum Numbers {
    /// Small integers and powers of two: every sum is exact, many are equal.
    Integers,
    Normal,
}

const LAYERS: usize = 2;
const LAYER: usize = 1;

#[derive(Clone, PartialEq, Debug)]
struct Answer {
    indices: Vec<i32>,
    scores: Vec<f32>,
}

impl Answer {
    /// NaN equal to NaN.
    fn bits(&self) -> (Vec<i32>, Vec<u32>) {
        (
            self.indices.clone(),
            self.scores.iter().map(|x| if x.is_nan() { u32::MAX } else { (x + 0.0).to_bits() }).collect(),
        )
    }
}

impl Problem {
    fn new(
        sequences: &[(u32, u32)],
        page: usize,
        [heads, depth, top_k]: [usize; 3],
        causal: bool,
        numbers: Numbers,
        seed: u64,
    ) -> Self {
        let mut random = Random(seed);
        let pages: usize = sequences.iter().map(|s| ((s.0 + s.1) as usize).div_ceil(page)).sum();
        let num_blocks = pages + 3;
        let mut order: Vec<u32> = (0..num_blocks as u32).collect();
        random.shuffle(&mut order);
        let batch = Batch::new(sequences, page as u32, || order.pop().unwrap());
        let tokens = batch.tokens();
        let mut number = |scale: f32| match numbers {
            Numbers::Integers => (random.below(5) as f32) - 2.0,
            Numbers::Normal => random.normal() * scale,
        };
        let q: Vec<f32> = (0..tokens * heads * depth).map(|_| number(30.0)).collect();
        let k: Vec<f32> = (0..num_blocks * LAYERS * page * depth).map(|_| number(30.0)).collect();
        let q_s: Vec<f32> = (0..tokens * heads).map(|_| number(0.01)).collect();
        let scales: Vec<f32> = (0..num_blocks * LAYERS * page)
            .map(|_| match numbers {
                Numbers::Integers => [0.5, 1.0, 2.0][random.below(3)],
                Numbers::Normal => 0.001 * (1.0 + random.below(1000) as f32),
            })
            .collect();
        let mut out = Problem {
            page,
            heads,
            depth,
            top_k,
            causal,
            q: Tensor::from_f32(DType::F8E4M3, &[tokens, heads, depth], &q),
            q_s: Tensor::from_f32(DType::F32, &[tokens, heads], &q_s),
            blocks: Tensor::from_f32(DType::F8E4M3, &[num_blocks, 1, LAYERS, page, 1, depth], &k),
            scales: Tensor::from_f32(DType::F32, &[num_blocks, 1, LAYERS, page, 1, 1], &scales),
            batch,
        };
        out.poison();
        out
    }

    fn length(&self, b: usize) -> usize {
        (self.batch.cache_lengths[b] + self.batch.row_offsets[b + 1] - self.batch.row_offsets[b]) as usize
    }

    fn visible(&self, t: usize) -> usize {
        let (b, p) = self.batch.position(t);
        if self.causal { p + 1 } else { self.length(b) }
    }

    fn slot(&self, b: usize, p: usize) -> usize {
        let (block, slot) = self.batch.locate(b, p, self.page);
        (block * LAYERS + LAYER) * self.page + slot
    }

    /// NaN in every slot that no sequence owns.
    fn poison(&mut self) {
        let mut owned = vec![false; self.scales.bytes / 4];
        for b in 0..self.batch.cache_lengths.len() {
            (0..self.length(b)).for_each(|p| owned[self.slot(b, p)] = true);
        }
        for (i, _) in owned.iter().enumerate().filter(|(_, owned)| !**owned) {
            let depth = self.depth;
            self.blocks.bytes_mut()[i * depth..][..depth].fill(0x7f);
            self.scales.bytes_mut()[i * 4..][..4].fill(0xff);
        }
    }

    fn set_key(&mut self, b: usize, p: usize, code: impl Fn(usize) -> u8, scale: f32) {
        let (slot, depth) = (self.slot(b, p), self.depth);
        for d in 0..depth {
            self.blocks.bytes_mut()[slot * depth + d] = code(d);
        }
        self.scales.bytes_mut()[slot * 4..][..4].copy_from_slice(&scale.to_le_bytes());
    }

    fn run(&self, ctx: &Context, given: bool) -> Answer {
        let options = pkv_collection_options {
            struct_size: size_of::<pkv_collection_options>(),
            dtype: DType::F8E4M3 as i32,
            scale_dtype: DType::F32 as i32,
            num_blocks: self.blocks.shape[0] as u32,
            num_layers: LAYERS as u32,
            page_size: self.page as u32,
            num_heads: 1,
            head_size: self.depth as u32,
            is_mla: 1,
            blocks: self.blocks.buffer(),
            scales: self.scales.buffer(),
            ..zeroed()
        };
        let collection = Collection::new(ctx, &options);
        let tokens = self.batch.tokens();
        // One padded row that must stay as it is.
        let mut indices = Tensor::new(DType::I32, &[tokens + 1, self.top_k]);
        let mut scores = Tensor::new(DType::F32, &[tokens + 1, self.top_k]);
        indices.bytes_mut().fill(DIRT);
        scores.bytes_mut().fill(DIRT);
        let b = self.batch.abi();
        let mut params: pkv_mla_indexer_fp8_params = zeroed();
        params.struct_size = size_of_val(&params);
        params.collection = collection.0;
        params.batch = &b;
        (params.layer_idx, params.mask, params.top_k) = (LAYER as u32, !self.causal as i32, self.top_k as u32);
        (params.q, params.q_s) = (self.q.abi(), self.q_s.abi());
        (params.output_indices, params.output_scores) = (indices.abi(), scores.abi());
        INDEXER.ok(ctx, &params, given);
        let used = tokens * self.top_k * 4;
        for output in [&indices, &scores] {
            assert!(output.bytes()[used..].iter().all(|&x| x == DIRT), "a padded row was written");
        }
        let indices = indices.bytes()[..used].chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap()));
        Answer { indices: indices.collect(), scores: scores.to_f32()[..tokens * self.top_k].to_vec() }
    }

    /// Scores of a token in f64, with the sum of the absolute terms.
    fn scores(&self, t: usize) -> Vec<(f64, f64)> {
        let (b, _) = self.batch.position(t);
        let q = self.q.to_f32();
        let (q, q_s) = (&q[t * self.heads * self.depth..], &self.q_s.to_f32()[t * self.heads..][..self.heads]);
        let (k, k_s) = (self.blocks.to_f32(), self.scales.to_f32());
        (0..self.visible(t))
            .map(|p| {
                let slot = self.slot(b, p);
                let k = &k[slot * self.depth..][..self.depth];
                let (mut sum, mut size) = (0.0, 0.0);
                for (h, &w) in q_s.iter().enumerate() {
                    let terms = q[h * self.depth..][..self.depth].iter().zip(k).map(|(q, k)| *q as f64 * *k as f64);
                    let dot: f64 = terms.clone().sum();
                    sum += w as f64 * dot.max(0.0);
                    size += (w as f64).abs() * terms.map(f64::abs).sum::<f64>();
                }
                (sum * k_s[slot] as f64, size * k_s[slot] as f64)
            })
            .collect()
    }

    /// The answer is the top k of the f64 scores, as far as rounding of sums in f32 lets it be told.
    fn check(&self, answer: &Answer) {
        for t in 0..self.batch.tokens() {
            let scores = self.scores(t);
            let columns = t * self.top_k..(t + 1) * self.top_k;
            let (indices, values) = (&answer.indices[columns.clone()], &answer.scores[columns]);
            let n = self.top_k.min(scores.len());
            assert!(indices[n..].iter().all(|&i| i == -1) && values[n..].iter().all(|&x| x == f32::NEG_INFINITY));
            let mut chosen = vec![false; scores.len()];
            let tolerance = |p: usize| 4e-6 * scores[p].1;
            for (i, (&p, &value)) in indices[..n].iter().zip(values).enumerate() {
                let p = usize::try_from(p).expect("a chosen key has a position");
                assert!(!std::mem::replace(&mut chosen[p], true), "row {t} has position {p} twice");
                assert!(
                    (value as f64 - scores[p].0).abs() <= tolerance(p),
                    "row {t} key {p}: {value}, {:?}",
                    scores[p]
                );
                if i > 0 {
                    let before = values[i - 1];
                    assert!(before > value || before == value && indices[i - 1] < p as i32, "row {t} column {i}");
                }
            }
            for p in (0..scores.len()).filter(|&p| !chosen[p]) {
                assert!(scores[p].0 - tolerance(p) <= values[n - 1] as f64 + tolerance(indices[n - 1] as usize));
            }
        }
    }

    /// One answer on every fast instruction set, thread count and workspace.
    fn answer(&self) -> Answer {
        let mut first: Option<Answer> = None;
        for level in FAST {
            for threads in [1, 2, 3] {
                let ctx = context(level, threads);
                for given in [false, true] {
                    let answer = self.run(&ctx, given);
                    let first = first.get_or_insert(answer.clone());
                    assert!(
                        first.bits() == answer.bits(),
                        "{level:?} with {threads} threads, workspace {given}, differs"
                    );
                }
            }
        }
        first.unwrap()
    }

    fn check_exact(&self) -> Answer {
        let want = self.run(&context(Level::Reference, 1), false);
        let have = self.answer();
        assert!(have.bits() == want.bits(), "differs from the plain implementation");
        have
    }
}

#[test]
fn integers_match_the_plain_implementation_to_the_last_index() {
    let mut seed = 0;
    for (i, page) in [1, 2, 7, 16, 32, 64, 128, 256].into_iter().enumerate() {
        for (j, depth) in [32, 64, 96, 128, 7, 1].into_iter().enumerate() {
            let heads = [1, 2, 3, 4, 5, 7, 8, 63][(i + 3 * j) % 8];
            let top_k = [1, 5, 64, 300][(i + j) % 4];
            seed += 1;
            let sequences = [(70, 9), (0, 23), (131, 1), (0, 1)];
            Problem::new(&sequences, page, [heads, depth, top_k], (i + j) % 3 != 0, Numbers::Integers, seed)
                .check_exact();
        }
    }
}

#[test]
fn random_numbers_are_close_to_float64() {
    for (i, [heads, depth, top_k]) in [[64, 128, 50], [5, 64, 17], [3, 96, 200], [64, 32, 1]].into_iter().enumerate() {
        for causal in [false, true] {
            let problem = Problem::new(
                &[(150, 3), (0, 11), (40, 1)],
                16,
                [heads, depth, top_k],
                causal,
                Numbers::Normal,
                i as u64,
            );
            problem.check(&problem.answer());
            problem.check(&problem.run(&context(Level::Reference, 1), false));
        }
    }
}

#[test]
fn every_column_is_written_at_widths_around_top_k() {
    for keys in [1, 1023, 1025, 2047, 2048, 2049, 4200] {
        for causal in [false, true] {
            let problem = Problem::new(&[(keys - 1, 1)], 64, [2, 32, 2048], causal, Numbers::Integers, keys as u64);
            let answer = problem.check_exact();
            let n = 2048.min(keys as usize);
            assert!(answer.indices[..n].iter().all(|&i| (0..keys as i32).contains(&i)));
            assert!(answer.indices[n..].iter().all(|&i| i == -1));
            let one = Problem { top_k: 1, ..problem }.check_exact();
            assert_eq!(one.indices[0], answer.indices[0]);
        }
    }
}

#[test]
fn equal_scores_give_the_lowest_positions_in_every_run() {
    let mut problem = Problem::new(&[(3000, 5)], 32, [4, 32, 500], false, Numbers::Integers, 1);
    for p in 0..3005 {
        problem.set_key(0, p, |_| 0x38, 1.0);
    }
    for level in [Level::Reference, Level::Scalar, Level::Avx2] {
        let ctx = context(level, 3);
        for _ in 0..if level == Level::Reference { 1 } else { 20 } {
            let answer = problem.run(&ctx, true);
            for row in answer.indices.chunks(500) {
                assert!(row.iter().enumerate().all(|(i, &p)| p == i as i32));
            }
        }
    }
    let problem = Problem::new(&[(700, 40)], 32, [64, 128, 300], true, Numbers::Normal, 2);
    let ctx = context(Level::Avx2, 3);
    let first = problem.run(&ctx, false).bits();
    assert!((0..20).all(|_| problem.run(&ctx, false).bits() == first));
}

#[test]
fn a_row_is_the_same_alone_and_in_a_batch() {
    let sequences = [(900, 30), (0, 0), (2500, 1), (33, 17)];
    let problem = Problem::new(&sequences, 7, [5, 64, 100], true, Numbers::Normal, 5);
    let together = problem.answer().bits();
    for t in 0..problem.batch.tokens() {
        let (b, p) = problem.batch.position(t);
        let (pages, row) = (problem.batch.max_pages as usize, problem.heads * problem.depth);
        let mut alone = problem.clone();
        alone.batch = Batch {
            row_offsets: vec![0, 1],
            cache_lengths: vec![p as u32],
            table: problem.batch.table[b * pages..][..pages].to_vec(),
            max_pages: pages as u32,
        };
        alone.q =
            Tensor::from_bytes(DType::F8E4M3, &[1, problem.heads, problem.depth], &problem.q.bytes()[t * row..][..row]);
        let weights = &problem.q_s.bytes()[t * problem.heads * 4..][..problem.heads * 4];
        alone.q_s = Tensor::from_bytes(DType::F32, &[1, problem.heads], weights);
        for threads in [1, 3] {
            let one = alone.run(&context(Level::Avx2, threads), true).bits();
            assert_eq!(one.0, together.0[t * 100..][..100], "row {t}");
            assert_eq!(one.1, together.1[t * 100..][..100], "row {t}");
        }
    }
}

#[test]
fn nan_and_infinite_scores_stay_in_order() {
    for causal in [false, true] {
        let mut problem = Problem::new(&[(600, 20)], 16, [3, 32, 640], causal, Numbers::Integers, 9);
        for p in (0..600).step_by(7) {
            problem.set_key(0, p, |d| if d == 3 { 0x7f } else { 0x38 }, 1.0);
        }
        for (p, scale) in
            [(5, f32::INFINITY), (11, f32::NEG_INFINITY), (18, f32::NAN), (19, 0.0), (25, -1.0), (26, -0.0)]
        {
            problem.set_key(0, p, |_| 0x38, scale);
        }
        for top_k in [640, 550, 100, 3] {
            let answer = Problem { top_k, ..problem.clone() }.check_exact();
            for row in answer.indices.chunks(top_k) {
                let mut seen: Vec<i32> = row.iter().copied().filter(|&i| i >= 0).collect();
                assert!(row.iter().all(|i| (-1..620).contains(i)));
                seen.sort_unstable();
                assert!(seen.windows(2).all(|w| w[0] < w[1]), "a position twice");
            }
        }
        // All NaN: positions in order.
        for p in 0..620 {
            problem.set_key(0, p, |_| 0xff, 1.0);
        }
        let answer = Problem { top_k: 30, ..problem }.check_exact();
        assert!(answer.indices.chunks(30).all(|row| row.iter().enumerate().all(|(i, &p)| p == i as i32)));
        assert!(answer.scores.iter().all(|x| x.is_nan()));
    }
}

#[test]
fn sequences_without_tokens_change_nothing() {
    let whole = [(90, 4), (10, 3)];
    let base = Problem::new(&whole, 8, [4, 32, 20], true, Numbers::Normal, 3);
    let want = base.answer().bits();
    for places in [vec![0], vec![1], vec![2], vec![0, 1, 2], vec![0, 0, 0]] {
        let mut problem = base.clone();
        let pages = base.batch.max_pages as usize;
        for place in places {
            let at = problem.batch.row_offsets[place];
            problem.batch.row_offsets.insert(place, at);
            problem.batch.cache_lengths.insert(place, 0);
            let column = place * pages;
            problem.batch.table.splice(column..column, vec![u32::MAX; pages]);
        }
        assert!(problem.answer().bits() == want);
    }
    let empty = Problem::new(&[(0, 0)], 8, [4, 32, 20], true, Numbers::Normal, 3);
    assert!(empty.answer().indices.is_empty());
}

#[test]
fn long_contexts_with_near_equal_scores() {
    let keys = 128 * 1024;
    let mut problem = Problem::new(&[(keys - 1, 1)], 64, [4, 32, 2048], true, Numbers::Integers, 4);
    // Integers of which most are equal and the best differ by one.
    for p in 0..keys as usize {
        let extra = (p * 7919) % 50021 < 1500;
        problem.set_key(0, p, |d| if d == 0 && extra { 0x3c } else { 0x38 }, 1.0);
    }
    problem.q = Tensor::from_f32(DType::F8E4M3, &[1, 4, 32], &[1.0; 128]);
    problem.q_s = Tensor::from_f32(DType::F32, &[1, 4], &[1.0, 2.0, 1.0, 0.5]);
    let answer = problem.check_exact();
    let better = (0..keys as usize).filter(|p| (p * 7919) % 50021 < 1500).count();
    assert!(better > 2048 && answer.scores.iter().all(|&x| x == 4.5 * 32.5));
    let random = Problem::new(&[(20_000, 2)], 128, [2, 32, 700], true, Numbers::Normal, 6);
    random.check(&random.answer());
}

#[test]
fn scratch_does_not_grow_with_the_context() {
    let ctx = context(Level::Avx2, 2);
    let base = Problem::new(&[(1, 1)], 64, [64, 128, 2048], true, Numbers::Integers, 4);
    let size = |tokens: i64, context: u32| {
        let options = pkv_collection_options {
            struct_size: size_of::<pkv_collection_options>(),
            dtype: DType::F8E4M3 as i32,
            scale_dtype: DType::F32 as i32,
            num_blocks: 4,
            num_layers: 1,
            page_size: 64,
            num_heads: 1,
            head_size: 128,
            is_mla: 1,
            ..zeroed()
        };
        let collection = Collection::new(&ctx, &options);
        let mut b = base.batch.abi();
        (b.max_cache_length, b.max_seq_length) = (context, tokens as u32);
        let mut params: pkv_mla_indexer_fp8_params = zeroed();
        params.struct_size = size_of_val(&params);
        (params.collection, params.batch, params.top_k) = (collection.0, &b, 2048);
        let tensor = |dtype: DType, shape: &[i64]| {
            let mut t = Tensor::new(dtype, &[0]).abi();
            (t.data, t.ndim) = (null_mut(), shape.len() as i32);
            t.shape[..shape.len()].copy_from_slice(shape);
            t
        };
        params.q = tensor(DType::F8E4M3, &[tokens, 64, 128]);
        params.q_s = tensor(DType::F32, &[tokens, 64]);
        params.output_indices = tensor(DType::I32, &[tokens, 2048]);
        let mut bytes = 0;
        // SAFETY: a query looks at shapes only.
        ok(|e| unsafe { (INDEXER.size)(ctx.0, &params, &mut bytes, e) });
        bytes
    };
    assert_eq!(size(128, 8192), size(128, 64 << 20));
    assert_eq!(size(1, 4096), size(1, 128 << 20));
    assert!(
        size(1, 128 << 20) < 1 << 20 && size(128, 128 << 20) < 8 << 20,
        "{} {}",
        size(1, 1 << 27),
        size(128, 1 << 27)
    );
    for (tokens, context) in [(1, 1), (1, 100), (7, 100), (8, 5000), (100, 5000), (100_000, 1 << 20)] {
        assert!(
            size(tokens, context) <= size(tokens + 1, context) && size(tokens, context) <= size(tokens, context + 1)
        );
    }
}

#[test]
fn seventy_thousand_tokens() {
    let problem = Problem::new(&[(0, 300), (2, 1)], 16, [1, 8, 2], true, Numbers::Integers, 8);
    // Sequences may share blocks for reading: as many rows as one likes over the same few keys.
    let mut many = problem.clone();
    let (tokens, pages) = (70_000, problem.batch.max_pages as usize);
    many.batch = Batch {
        row_offsets: (0..=tokens as u32).collect(),
        cache_lengths: (0..tokens as u32).map(|t| t % 300).collect(),
        table: problem.batch.table[..pages].repeat(tokens),
        max_pages: pages as u32,
    };
    many.q = Tensor::from_bytes(
        DType::F8E4M3,
        &[tokens, 1, 8],
        &problem.q.bytes()[..300 * 8].repeat(tokens / 300 + 1)[..tokens * 8],
    );
    many.q_s = Tensor::from_bytes(
        DType::F32,
        &[tokens, 1],
        &problem.q_s.bytes()[..300 * 4].repeat(tokens / 300 + 1)[..tokens * 4],
    );
    let want = problem.run(&context(Level::Reference, 1), false).bits();
    let have = many.run(&context(Level::Avx2, 2), true).bits();
    for t in 0..tokens {
        assert_eq!(have.0[2 * t..][..2], want.0[t % 300 * 2..][..2], "row {t}");
        assert_eq!(have.1[2 * t..][..2], want.1[t % 300 * 2..][..2], "row {t}");
    }
}

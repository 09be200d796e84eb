//! MLA prefill through the C API: every instruction set against the reference implementation over odd shapes, and what must not change a bit.

#[path = "support/api.rs"]
mod api;

use api::*;
use pagedkv::abi::collection::pkv_collection_options;
use pagedkv::abi::merge::pkv_merge_attention_params;
use pagedkv::abi::prefill::{PKV_PREFILL_FINISHED, pkv_mla_prefill_fp8_params};
use pagedkv::cpu::isa::{Level, VARIABLE};
use pagedkv::dtype::DType::{self, *};
use std::sync::Mutex;

/// A context at an instruction set. The variable is read while a context is made, so making one takes a lock.
const LAYERS: usize = 2;
const LAYER: usize = 1;

fn context(level: Level, threads: u32) -> Context {
    static LOCK: Mutex<()> = Mutex::new(());
    let _lock = LOCK.lock().unwrap_or_else(|e| e.into_inner());
    // SAFETY: whoever reads the environment in this process holds the lock.
    unsafe { std::env::set_var(VARIABLE, level.name()) };
    Context::new(threads)
}

const FAST: [Level; 2] = [Level::Scalar, Level::Avx2];

struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as u32
    }
    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }
    fn uniform(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }
    fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.uniform()).sum::<f32>() * 0.7
    }
    fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

#[derive(Clone, Debug)]
struct Shape {
    dtype: DType,
    cache: DType,
    /// Of an fp8 cache with scales: their dtype and the columns that share one.
    scales: Option<(DType, u32)>,
    page: usize,
    heads: usize,
    nope: usize,
    rope: usize,
    v: usize,
    latent: usize,
    /// (cached, new)
    sequences: Vec<(u32, u32)>,
    mask: i32,
    window: u32,
    chunk: u32,
    alibi: bool,
    half_split: bool,
    in_place: bool,
    /// What the softmax scale has beyond 1 / sqrt(nope + rope).
    mscale: f32,
}

impl Default for Shape {
    fn default() -> Self {
        Shape {
            dtype: F32,
            cache: F32,
            scales: None,
            page: 16,
            heads: 2,
            nope: 64,
            rope: 32,
            v: 64,
            latent: 128,
            sequences: vec![(0, 20)],
            mask: 0,
            window: 5,
            chunk: 8,
            alibi: false,
            half_split: false,
            in_place: false,
            mscale: 1.0,
        }
    }
}

impl Shape {
    fn length(&self, b: usize) -> usize {
        (self.sequences[b].0 + self.sequences[b].1) as usize
    }

    fn tokens(&self) -> usize {
        self.sequences.iter().map(|s| s.1 as usize).sum()
    }

    /// All cached rows of every sequence.
    fn all_keys(&self) -> Keys {
        Keys {
            offsets: vec![0; self.sequences.len()],
            counts: (0..self.sequences.len()).map(|b| self.length(b)).collect(),
        }
    }
}

/// Which cached rows a call looks at.
#[derive(Clone, Debug)]
struct Keys {
    offsets: Vec<usize>,
    counts: Vec<usize>,
}

#[derive(Clone)]
struct Problem {
    shape: Shape,
    batch: Batch,
    q: Tensor,
    kv: Tensor,
    freqs: Tensor,
    gamma: Tensor,
    w: Tensor,
    ws: Tensor,
    blocks: Tensor,
    scales: Option<Tensor>,
}

#[derive(Clone)]
struct Results {
    output: Tensor,
    lse: Tensor,
    q: Tensor,
    blocks: Tensor,
    scales: Option<Tensor>,
}

impl Results {
    fn bits(&self) -> Vec<u8> {
        let scales = self.scales.as_ref().map_or(&[][..], Tensor::bytes);
        [self.output.bytes(), self.lse.bytes(), self.q.bytes(), self.blocks.bytes(), scales].concat()
    }
    /// Bytes of one row of the output and of the lse.
    fn row(&self, t: usize) -> Vec<u8> {
        let row = |x: &Tensor| {
            let n = x.bytes / x.shape[0].max(1);
            x.bytes()[t * n..][..n].to_vec()
        };
        [row(&self.output), row(&self.lse)].concat()
    }
}

impl Problem {
    /// Random inputs. Slots that no sequence has are NaN; table entries past a sequence's pages are no block at all.
    fn new(shape: &Shape, seed: u64) -> Self {
        let s = shape.clone();
        let mut r = Random(seed);
        let row = s.latent + s.rope;
        let pages: usize = (0..s.sequences.len()).map(|b| s.length(b).div_ceil(s.page)).sum();
        let num_blocks = pages + 2;
        // A random order of blocks.
        let mut order: Vec<u32> = (0..num_blocks as u32).collect();
        (1..num_blocks).for_each(|i| order.swap(i, r.below(i + 1)));
        let mut order = order.into_iter();
        let batch = Batch::new(&s.sequences, s.page as u32, || order.next().unwrap());

        let mut blocks = Tensor::new(s.cache, &[num_blocks, 1, LAYERS, s.page, 1, row]);
        blocks.bytes_mut().fill(0xff);
        let groups = s.scales.map_or(0, |(_, g)| row.div_ceil(g as usize));
        let mut scales = s.scales.map(|(dtype, _)| {
            let mut t = Tensor::new(dtype, &[num_blocks, 1, LAYERS, s.page, 1, groups]);
            t.bytes_mut().fill(0xff);
            t
        });
        for b in 0..s.sequences.len() {
            // New rows only where they lie in the cache already.
            let filled = if s.in_place { s.length(b) } else { s.sequences[b].0 as usize };
            for p in 0..filled {
                let (block, slot) = batch.locate(b, p, s.page);
                let at = (block * LAYERS + LAYER) * s.page + slot;
                // With scales: codes of up to 448 and scales that bring them back to about 1.
                let factor = if scales.is_some() { 100.0 } else { 1.0 };
                let x: Vec<f32> = (0..row).map(|_| r.normal() * factor).collect();
                let x = Tensor::from_f32(s.cache, &[row], &x);
                blocks.bytes_mut()[at * x.bytes..][..x.bytes].copy_from_slice(x.bytes());
                if let Some(t) = &mut scales {
                    let x: Vec<f32> = (0..groups).map(|_| 0.01 * (1.0 + 0.5 * r.uniform())).collect();
                    let x = Tensor::from_f32(t.dtype, &[groups], &x);
                    t.bytes_mut()[at * x.bytes..][..x.bytes].copy_from_slice(x.bytes());
                }
            }
        }
        let tokens = s.tokens();
        let features = s.heads * (s.nope + s.v);
        let positions = (0..s.sequences.len()).map(|b| s.length(b)).max().unwrap_or(0) + 1;
        let freqs: Vec<f32> = (0..positions * s.rope / 2)
            .flat_map(|i| {
                let (p, pair) = (i / (s.rope / 2), i % (s.rope / 2));
                let angle = p as f32 * 10000f32.powf(-2.0 * pair as f32 / s.rope as f32);
                [angle.cos(), angle.sin()]
            })
            .collect();
        let gamma: Vec<f32> = (0..s.latent).map(|_| 1.0 + 0.2 * r.uniform()).collect();
        let ws: Vec<f32> = (0..features.div_ceil(128) * (s.latent / 128))
            .map(|_| (1.0 + 0.7 * r.uniform()) / (s.latent as f32).sqrt())
            .collect();
        Problem {
            q: Tensor::from_f32(
                s.dtype,
                &[tokens, s.heads, s.nope + s.rope],
                &r.normals(tokens * s.heads * (s.nope + s.rope)),
            ),
            kv: Tensor::from_f32(s.dtype, &[tokens, row], &r.normals(tokens * row)),
            freqs: Tensor::from_f32(F32, &[positions, s.rope], &freqs),
            gamma: Tensor::from_f32(s.dtype, &[s.latent], &gamma),
            w: Tensor::from_f32(F8E4M3, &[features, s.latent], &r.normals(features * s.latent)),
            ws: Tensor::from_f32(F32, &[features.div_ceil(128), s.latent / 128], &ws),
            blocks,
            scales,
            batch,
            shape: s,
        }
    }

    fn run(&self, ctx: &Context, given: bool) -> Results {
        self.run_keys(ctx, given, &self.shape.all_keys(), false)
    }

    fn run_keys(&self, ctx: &Context, given: bool, keys: &Keys, finished: bool) -> Results {
        let s = &self.shape;
        let tokens = s.tokens();
        let results = Results {
            output: Tensor::from_bytes(
                s.dtype,
                &[tokens, s.heads, s.v],
                &vec![0xcd; tokens * s.heads * s.v * s.dtype.size()],
            ),
            lse: Tensor::from_f32(F32, &[tokens, s.heads], &vec![f32::NAN; tokens * s.heads]),
            q: self.q.clone(),
            blocks: self.blocks.clone(),
            scales: self.scales.clone(),
        };
        let mut options: pkv_collection_options = zeroed();
        options.struct_size = size_of_val(&options);
        options.dtype = s.cache as i32;
        (options.num_blocks, options.num_layers) = (self.blocks.shape[0] as u32, LAYERS as u32);
        (options.page_size, options.num_heads, options.head_size) = (s.page as u32, 1, (s.latent + s.rope) as u32);
        options.is_mla = 1;
        options.blocks = results.blocks.buffer();
        if let (Some((dtype, granularity)), Some(scales)) = (s.scales, &results.scales) {
            (options.scale_dtype, options.quantization_granularity) = (dtype as i32, granularity);
            options.scales = scales.buffer();
        }
        let collection = Collection::new(ctx, &options);
        let batch = self.batch.abi();
        let mut rows = vec![0u32];
        keys.counts.iter().for_each(|&n| rows.push(rows.last().unwrap() + n as u32));
        let offsets: Vec<u32> = keys.offsets.iter().map(|&o| o as u32).collect();
        let mut params: pkv_mla_prefill_fp8_params = zeroed();
        params.struct_size = size_of_val(&params);
        (params.collection, params.batch, params.layer_idx) = (collection.0, &batch, LAYER as u32);
        params.rope = s.half_split as i32;
        (params.mask, params.window, params.chunk, params.score_mod) = (s.mask, s.window, s.chunk, s.alibi as i32);
        (params.scale, params.epsilon) = (s.mscale / ((s.nope + s.rope) as f32).sqrt(), 1e-6);
        params.flags = if finished { PKV_PREFILL_FINISHED } else { 0 };
        params.buffer_length = *rows.last().unwrap() as i64;
        params.buffer_row_offsets = rows.as_ptr();
        params.cache_offsets = offsets.as_ptr();
        params.q = results.q.abi();
        if !s.in_place && !finished {
            params.kv = self.kv.abi();
        }
        (params.freqs_cis, params.kv_norm_gamma) = (self.freqs.abi(), self.gamma.abi());
        (params.kv_b_proj, params.kv_b_proj_scale) = (self.w.abi(), self.ws.abi());
        (params.output, params.lse) = (results.output.abi(), results.lse.abi());
        PREFILL.ok(ctx, &params, given);
        results
    }

    /// The same with q and cache as a call left them.
    fn after(&self, r: &Results) -> Problem {
        Problem { q: r.q.clone(), blocks: r.blocks.clone(), scales: r.scales.clone(), ..self.clone() }
    }

    /// Sequence `b` alone, from its `skip`-th new token on: earlier ones become history.
    fn alone(&self, b: usize, skip: usize) -> Problem {
        let mut shape = self.shape.clone();
        let (cached, new) = shape.sequences[b];
        shape.sequences = vec![(cached + skip as u32, new - skip as u32)];
        let first = self.batch.row_offsets[b] as usize + skip;
        let end = self.batch.row_offsets[b + 1] as usize;
        let rows = |x: &Tensor| {
            let n = x.bytes / x.shape[0];
            let mut dims = x.shape.clone();
            dims[0] = end - first;
            Tensor::from_bytes(x.dtype, &dims, &x.bytes()[first * n..end * n])
        };
        let max_pages = self.batch.max_pages as usize;
        let batch = Batch {
            row_offsets: vec![0, (end - first) as u32],
            cache_lengths: vec![shape.sequences[0].0],
            table: self.batch.table[b * max_pages..][..max_pages].to_vec(),
            max_pages: max_pages as u32,
        };
        Problem { q: rows(&self.q), kv: rows(&self.kv), batch, shape, ..self.clone() }
    }
}

fn bound(dtype: DType) -> f64 {
    match dtype {
        BF16 => 3e-3,
        F16 => 4e-4,
        _ => 3e-6,
    }
}

/// Against the reference, output and lse; what is written besides must be nearly all equal to the bit.
fn compare(what: &str, have: &Results, want: &Results) {
    let bound = bound(want.output.dtype);
    let error = relative_error(&have.output.to_f32(), &want.output.to_f32());
    assert!(error <= bound, "{what}: output is off by {error:e}");
    let error = relative_error(&have.lse.to_f32(), &want.lse.to_f32());
    assert!(error <= bound, "{what}: lse is off by {error:e}");
    for (name, a, b) in [("q", &have.q, &want.q), ("blocks", &have.blocks, &want.blocks)] {
        let size = a.dtype.size();
        let differ = a.bytes().chunks(size).zip(b.bytes().chunks(size)).filter(|(a, b)| a != b).count();
        assert!(differ * 200 <= a.bytes / size, "{what}: {differ} elements of {name} differ");
    }
}

/// Shapes that between them have every value of every list.
fn grid() -> Vec<Shape> {
    let caches: [(DType, Option<(DType, u32)>); 8] = [
        (F32, None),
        (BF16, None),
        (F8E4M3, None),
        (F8E4M3, Some((F32, 128))),
        (F16, None),
        (F8E4M3, Some((BF16, 0))),
        (F8E4M3, Some((F8E8M0, 32))),
        (F8E4M3, Some((F8E8M0, 0))),
    ];
    let batches: [&[(u32, u32)]; 7] = [
        &[(0, 20)],
        &[(0, 0), (3, 17), (0, 1)],
        &[(130, 7), (5, 0), (0, 52)],
        &[(0, 1)],
        &[(40, 1), (0, 13), (16, 0)],
        &[(0, 0)],
        &[(7, 60), (0, 3)],
    ];
    let widths = [(64, 32, 64), (24, 8, 40), (128, 64, 128), (17, 6, 5)];
    (0..84)
        .map(|i| {
            let (cache, scales) = caches[(i + i / 8) % 8];
            let (nope, rope, v) = widths[i / 2 % 4];
            Shape {
                dtype: [F32, BF16, F16][i / 3 % 3],
                cache,
                scales: scales
                    .map(|(d, g)| (d, if g == 0 { (if i % 4 == 1 { 128 } else { 256 }) + rope as u32 } else { g })),
                page: [1, 2, 7, 16, 64][i % 5],
                heads: [1, 2, 3, 16][i / 5 % 4],
                nope,
                rope,
                v,
                latent: if i % 4 == 1 { 128 } else { 256 },
                sequences: batches[i % 7].to_vec(),
                mask: (i / 4 % 4) as i32,
                window: [1, 5, 33][i % 3],
                chunk: [1, 8, 50][i % 3],
                alibi: i % 3 == 1,
                half_split: i % 2 == 1,
                in_place: i / 2 % 2 == 1,
                mscale: 1.0,
            }
        })
        .collect()
}

#[test]
fn every_instruction_set_computes_what_the_reference_does() {
    for (i, shape) in grid().iter().enumerate() {
        let problem = Problem::new(shape, i as u64 + 1);
        let want = problem.run(&context(Level::Reference, 1), false);
        for level in FAST {
            let have = problem.run(&context(level, 2), false);
            compare(&format!("{level:?} {shape:?}"), &have, &want);
        }
    }
}

#[test]
fn threads_and_workspace_change_no_bit() {
    for (i, shape) in grid().iter().enumerate().step_by(3) {
        let problem = Problem::new(shape, i as u64 + 1);
        for level in FAST {
            let first = problem.run(&context(level, 1), false).bits();
            for (threads, given) in [(1, true), (2, false), (5, true)] {
                let bits = problem.run(&context(level, threads), given).bits();
                assert!(bits == first, "{level:?} {threads} threads, workspace {given}: {shape:?}");
            }
        }
    }
}

#[test]
fn a_row_is_the_same_alone_and_in_a_batch() {
    let sequences = vec![(3, 75), (0, 0), (140, 9), (0, 50), (300, 1)];
    for (i, mask) in (0..4).enumerate() {
        let shape = Shape {
            dtype: [F32, BF16][i % 2],
            heads: 3,
            nope: 24,
            v: 40,
            page: 7,
            mask,
            window: 21,
            chunk: 30,
            alibi: i == 2,
            sequences: sequences.clone(),
            ..Shape::default()
        };
        let problem = Problem::new(&shape, 77 + i as u64);
        for level in FAST {
            let ctx = context(level, 2);
            let whole = problem.run(&ctx, false);
            let finished = problem.after(&whole);
            for (b, &(_, new)) in sequences.iter().enumerate() {
                let first = problem.batch.row_offsets[b] as usize;
                for skip in [0, 1, 5, 47, 48, 74] {
                    if skip >= new as usize {
                        continue;
                    }
                    let alone = finished.alone(b, skip);
                    let part = alone.run_keys(&ctx, false, &alone.shape.all_keys(), true);
                    for t in 0..alone.shape.tokens() {
                        assert!(
                            part.row(t) == whole.row(first + skip + t),
                            "{level:?} mask {mask} sequence {b} from {skip}: row {t}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn chunks_of_keys_merge_to_the_whole() {
    let mut r = Random(5);
    for (i, dtype) in [F32, BF16].into_iter().enumerate() {
        let sequences = vec![(0, 9), (33, 18), (5, 0), (64, 2), (0, 1)];
        let shape = Shape { dtype, cache: dtype, page: 16, sequences, alibi: i == 1, ..Shape::default() };
        let problem = Problem::new(&shape, 9);
        for level in FAST {
            let ctx = context(level, 2);
            let whole = problem.run(&ctx, false);
            for size in [1, 15, 16, 17, 0] {
                // Round after round takes so many more keys of each sequence: from some round on a sequence has none left.
                let mut at = vec![0; shape.sequences.len()];
                let mut state: Option<(Problem, Tensor, Tensor)> = None;
                while state.is_none() || (0..at.len()).any(|b| at[b] < shape.length(b)) {
                    let take = if size == 0 { 1 + r.below(40) } else { size };
                    let counts: Vec<usize> = (0..at.len()).map(|b| take.min(shape.length(b) - at[b])).collect();
                    let keys = Keys { offsets: at.clone(), counts: counts.clone() };
                    at.iter_mut().zip(&counts).for_each(|(at, n)| *at += n);
                    state = Some(match state {
                        None => {
                            let part = problem.run_keys(&ctx, false, &keys, false);
                            (problem.after(&part), part.output, part.lse)
                        }
                        Some((problem, output, lse)) => {
                            let part = problem.run_keys(&ctx, false, &keys, true);
                            assert!(
                                part.q.bytes() == problem.q.bytes() && part.blocks.bytes() == problem.blocks.bytes()
                            );
                            let mut params: pkv_merge_attention_params = zeroed();
                            params.struct_size = size_of_val(&params);
                            (params.output_a, params.lse_a) = (output.abi(), lse.abi());
                            (params.output_b, params.lse_b) = (part.output.abi(), part.lse.abi());
                            (params.output, params.lse) = (output.abi(), lse.abi());
                            MERGE.ok(&ctx, &params, false);
                            (problem, output, lse)
                        }
                    });
                }
                let (_, output, lse) = state.unwrap();
                let bound = if dtype == F32 { 3e-6 } else { 1.5e-2 };
                let error = relative_error(&output.to_f32(), &whole.output.to_f32());
                assert!(error <= bound, "{level:?} {dtype:?} chunks of {size}: output is off by {error:e}");
                let error = relative_error(&lse.to_f32(), &whole.lse.to_f32());
                assert!(error <= 3e-6, "{level:?} {dtype:?} chunks of {size}: lse is off by {error:e}");
            }
        }
    }
}

#[test]
fn rows_without_keys_are_zero_and_their_lse_minus_infinity() {
    let shape = Shape { sequences: vec![(40, 6), (0, 5), (20, 3)], heads: 3, ..Shape::default() };
    let problem = Problem::new(&shape, 3);
    for level in FAST {
        let ctx = context(level, 2);
        let finished = problem.after(&problem.run(&ctx, false));
        // Keys past what the first sequence's rows see; none at all; all.
        let keys = Keys { offsets: vec![43, 0, 0], counts: vec![3, 0, 23] };
        let part = finished.run_keys(&ctx, false, &keys, true);
        let (output, lse) = (part.output.to_f32(), part.lse.to_f32());
        for t in 0..14 {
            // Rows 40, 41 and 42 of the first sequence come before key 43; the second sequence has no keys.
            let empty = t < 3 || (6..11).contains(&t);
            for h in 0..3 {
                let row = &output[(t * 3 + h) * shape.v..][..shape.v];
                assert_eq!(row.iter().all(|x| x.to_bits() == 0), empty, "{level:?} row {t} head {h}");
                assert_eq!(lse[t * 3 + h] == f32::NEG_INFINITY, empty, "{level:?} row {t} head {h}");
            }
        }
        compare(&format!("{level:?}"), &part, &finished.run_keys(&context(Level::Reference, 1), false, &keys, true));
        let none = finished.run_keys(&ctx, false, &Keys { offsets: vec![46, 5, 0], counts: vec![0; 3] }, true);
        assert!(none.output.to_f32().iter().all(|x| x.to_bits() == 0));
        assert!(none.lse.to_f32().iter().all(|x| *x == f32::NEG_INFINITY));
    }
}

#[test]
fn what_a_row_does_not_see_cannot_poison_it() {
    for dtype in [F32, BF16] {
        let shape =
            Shape { dtype, cache: dtype, sequences: vec![(10, 30), (0, 4)], heads: 3, v: 40, ..Shape::default() };
        let clean = Problem::new(&shape, 4);
        let mut dirty = clean.clone();
        // The new row at position 25 of the first sequence is NaN: only rows from there on see it.
        let n = dirty.kv.bytes / 34;
        dirty.kv.bytes_mut()[15 * n..16 * n].fill(0xff);
        for level in FAST {
            let ctx = context(level, 2);
            let (a, b) = (clean.run(&ctx, false), dirty.run(&ctx, false));
            for t in 0..34 {
                if (15..30).contains(&t) {
                    let row = 3 * shape.v;
                    assert!(b.output.to_f32()[t * row..][..row].iter().all(|x| x.is_nan()), "{level:?} row {t}");
                } else {
                    assert!(a.row(t) == b.row(t), "{level:?} {dtype:?} row {t}");
                }
            }
        }
    }
}

#[test]
fn odd_latents_quantise_as_the_reference_does() {
    // All zero, subnormal, above 1200, infinite, and one huge element among small ones.
    let shape = Shape { in_place: false, sequences: vec![(6, 3)], latent: 256, ..Shape::default() };
    let mut problem = Problem::new(&shape, 6);
    let row = shape.latent + shape.rope;
    let mut x = problem.blocks.to_f32();
    let (block, _) = problem.batch.locate(0, 0, shape.page);
    let first = (block * LAYERS + LAYER) * shape.page;
    for (p, value) in [0.0, 1e-40, 5000.0, 1e-30, 448.0].into_iter().enumerate() {
        x[(first + p) * row..][..128].fill(value);
    }
    x[(first + 5) * row + 3] = 1e6;
    problem.blocks = Tensor::from_f32(F32, &problem.blocks.shape, &x);
    let want = problem.run(&context(Level::Reference, 1), false);
    for level in FAST {
        compare(&format!("{level:?}"), &problem.run(&context(level, 1), false), &want);
    }
}

#[test]
fn heads_in_groups_give_the_same_bits() {
    // 16 heads of these widths over 9000 rows are more than the 64 MiB that are taken at once.
    let shape = Shape {
        dtype: BF16,
        cache: BF16,
        heads: 16,
        nope: 64,
        v: 64,
        page: 64,
        sequences: vec![(9000, 2)],
        ..Shape::default()
    };
    let problem = Problem::new(&shape, 8);
    let ctx = context(Level::Avx2, 2);
    let whole = problem.run(&ctx, true);
    // One head at a time, by its own rows of q and of the weights.
    let finished = problem.after(&whole);
    for h in [0, 7, 8, 15] {
        let mut one = finished.clone();
        one.shape.heads = 1;
        let width = (shape.nope + shape.rope) * 2;
        let q: Vec<u8> = (0..2).flat_map(|t| finished.q.bytes()[(t * 16 + h) * width..][..width].to_vec()).collect();
        one.q = Tensor::from_bytes(BF16, &[2, 1, shape.nope + shape.rope], &q);
        let features = shape.nope + shape.v;
        one.w =
            Tensor::from_bytes(F8E4M3, &[features, 128], &problem.w.bytes()[h * features * 128..][..features * 128]);
        one.ws = Tensor::from_f32(F32, &[1, 1], &problem.ws.to_f32()[h..=h]);
        let part = one.run_keys(&ctx, false, &one.shape.all_keys(), true);
        for t in 0..2 {
            let row = shape.v * 2;
            assert!(
                part.output.bytes()[t * row..][..row] == whole.output.bytes()[(t * 16 + h) * row..][..row],
                "head {h} row {t}"
            );
        }
    }
}

/// Distances are small integers however far from the start: further than f32 counts, the same tokens give the same bits.
#[test]
fn distances_are_exact_far_from_the_start() {
    const FAR: usize = 1 << 24;
    let shape = Shape { alibi: true, sequences: vec![(130, 3)], in_place: true, ..Shape::default() };
    let near = Problem::new(&shape, 3);
    let mut far = near.clone();
    far.batch.cache_lengths[0] += FAR as u32;
    // Pages that no key is taken from may all lie in one block.
    far.batch.table.splice(..0, vec![0; FAR / shape.page]);
    far.batch.max_pages += (FAR / shape.page) as u32;
    let keys = shape.all_keys();
    let far_keys = Keys { offsets: vec![FAR], ..keys.clone() };
    for level in FAST {
        let ctx = context(level, 1);
        let [have, want] =
            [far.run_keys(&ctx, true, &far_keys, true), near.run_keys(&ctx, true, &keys, true)].map(|r| r.bits());
        assert!(have == want, "{level:?}");
    }
}

/// DeepSeek with YaRN multiplies 1 / sqrt(192) by mscale squared. With one key the lse is the scaled logit.
#[test]
fn the_scale_is_the_callers() {
    let shape = Shape { nope: 128, rope: 64, v: 128, sequences: vec![(0, 1)], ..Shape::default() };
    let lse = |mscale: f32, level| {
        let problem = Problem::new(&Shape { mscale, ..shape.clone() }, 8);
        problem.run(&context(level, 1), false).lse.to_f32()
    };
    for level in [Level::Reference, Level::Scalar, Level::Avx2] {
        for (yarn, logit) in lse(1.8738, level).into_iter().zip(lse(192f32.sqrt(), level)) {
            let want = 0.072_168_8 * 1.8738 * logit;
            assert!(logit != 0.0 && (yarn - want).abs() <= 1e-5 * want.abs(), "{level:?}: {yarn}, must be {want}");
        }
    }
}

#[test]
fn an_empty_batch_does_nothing() {
    let shape = Shape { sequences: vec![], ..Shape::default() };
    for level in FAST {
        let problem = Problem::new(&shape, 1);
        let r = problem.run(&context(level, 2), true);
        assert!(r.blocks.bytes() == problem.blocks.bytes());
    }
}

//! kv_store, kv_gather, merge_attention and mla_rope_rmsnorm_quantize through the C API: against definitions written out here, and the fast implementations
//! against the plain ones to the bit, over shapes that hurt.

#[path = "support/api.rs"]
mod api;
#[path = "support/isa.rs"]
mod isa;
#[path = "support/random.rs"]
mod random;

use api::*;
use isa::context;
use pagedkv::abi::collection::pkv_collection_options;
use pagedkv::abi::kv::{pkv_kv_gather_params, pkv_kv_store_params};
use pagedkv::abi::merge::pkv_merge_attention_params;
use pagedkv::abi::rope::pkv_mla_rope_rmsnorm_quantize_params;
use pagedkv::abi::types::{pkv_buffer, pkv_tensor};
use pagedkv::cpu::isa::Level;
use pagedkv::dtype::DType::{self, *};
use random::Random;

const FLOATS: [DType; 3] = [F32, F16, BF16];
/// (level, threads)
const WAYS: [(Level, u32); 5] =
    [(Level::Scalar, 1), (Level::Scalar, 3), (Level::Avx2, 1), (Level::Avx2, 2), (Level::Avx2, 3)];
const LAYERS: usize = 2;
const LAYER: usize = 1;
/// Bytes before and after a cache's storage that nobody may touch.
const FENCE: usize = 256;

#[derive(Clone, Copy)]
struct Kind {
    dtype: DType,
    scale: Option<DType>,
    granularity: usize,
}

const fn plain(dtype: DType) -> Kind {
    Kind { dtype, scale: None, granularity: 0 }
}

const KINDS: [Kind; 11] = [
    plain(F32),
    plain(F16),
    plain(BF16),
    plain(F8E4M3),
    plain(F8E5M2),
    Kind { dtype: F8E4M3, scale: Some(F32), granularity: 0 },
    Kind { dtype: F8E4M3, scale: Some(F32), granularity: 128 },
    Kind { dtype: F8E4M3, scale: Some(BF16), granularity: 20 },
    Kind { dtype: F8E4M3, scale: Some(F8E8M0), granularity: 32 },
    Kind { dtype: F8E5M2, scale: Some(F32), granularity: 5 },
    Kind { dtype: F8E5M2, scale: Some(F8E8M0), granularity: 1 },
];

/// Storage with fences on both sides, filled with a pattern, and the options of a collection over it.
#[derive(Clone)]
struct Storage {
    blocks: Tensor,
    scales: Tensor,
    options: pkv_collection_options,
}

impl Storage {
    fn new(kind: Kind, blocks: usize, page: usize, heads: usize, head_size: usize, mla: bool) -> Self {
        let planes = if mla { 1 } else { 2 };
        let rows = blocks * planes * LAYERS * page * heads;
        let granularity = if kind.granularity == 0 { head_size } else { kind.granularity.min(head_size) };
        let groups = head_size.div_ceil(granularity);
        let storage = |bytes: usize| {
            let mut t = Tensor::new(U8, &[bytes + 2 * FENCE]);
            t.bytes_mut().fill(0x5a);
            t
        };
        let options = pkv_collection_options {
            struct_size: size_of::<pkv_collection_options>(),
            dtype: kind.dtype as i32,
            scale_dtype: kind.scale.map_or(0, |d| d as i32),
            num_blocks: blocks as u32,
            num_layers: LAYERS as u32,
            page_size: page as u32,
            num_heads: heads as u32,
            head_size: head_size as u32,
            is_mla: mla as u32,
            quantization_granularity: if kind.scale.is_some() { kind.granularity as u32 } else { 0 },
            ..zeroed()
        };
        let scale_bytes = kind.scale.map_or(0, |d| rows * groups * d.size());
        Storage { blocks: storage(rows * head_size * kind.dtype.size()), scales: storage(scale_bytes), options }
    }

    fn collection(&self, ctx: &Context) -> Collection {
        let inner = |t: &Tensor| pkv_buffer {
            data: t.buffer().data.cast::<u8>().wrapping_add(FENCE).cast(),
            size: t.bytes - 2 * FENCE,
        };
        Collection::new(
            ctx,
            &pkv_collection_options { blocks: inner(&self.blocks), scales: inner(&self.scales), ..self.options },
        )
    }

    fn bits(&self) -> Vec<u8> {
        for t in [&self.blocks, &self.scales] {
            let (first, last) = (&t.bytes()[..FENCE], &t.bytes()[t.bytes - FENCE..]);
            assert!(first.iter().chain(last).all(|&b| b == 0x5a), "a fence was written");
        }
        [self.blocks.bytes(), self.scales.bytes()].concat()
    }

    /// What a head's row holds, by definition: code times scale.
    fn row(&self, kv: usize, block: usize, slot: usize, head: usize) -> Vec<f32> {
        let o = &self.options;
        let (page, heads, width) = (o.page_size as usize, o.num_heads as usize, o.head_size as usize);
        let planes = if o.is_mla == 1 { 1 } else { 2 };
        let row = (((block * planes + kv) * LAYERS + LAYER) * page + slot) * heads + head;
        let dtype = DType::from_abi(o.dtype).unwrap();
        let numbers = |t: &Tensor, dtype: DType, first: usize, n: usize| {
            Tensor::from_bytes(dtype, &[n], &t.bytes()[FENCE + first * dtype.size()..][..n * dtype.size()]).to_f32()
        };
        let codes = numbers(&self.blocks, dtype, row * width, width);
        let Some(scale_dtype) = DType::from_abi(o.scale_dtype) else { return codes };
        let granularity =
            if o.quantization_granularity == 0 { width } else { width.min(o.quantization_granularity as usize) };
        let groups = width.div_ceil(granularity);
        let scales = numbers(&self.scales, scale_dtype, row * groups, groups);
        codes.iter().enumerate().map(|(i, c)| c * scales[i / granularity]).collect()
    }
}

fn batch(sequences: &[(u32, u32)], page: usize, random: &mut Random) -> (Batch, usize) {
    let pages: usize = sequences.iter().map(|s| ((s.0 + s.1) as usize).div_ceil(page)).sum();
    let mut order: Vec<u32> = (0..pages as u32 + 2).collect();
    random.shuffle(&mut order);
    (Batch::new(sequences, page as u32, || order.pop().unwrap()), pages + 2)
}

/// Numbers of many sizes, some of them special.
fn numbers(n: usize, special: bool, random: &mut Random) -> Vec<f32> {
    (0..n)
        .map(|i| match random.below(if special { 40 } else { 39 }) {
            0 => 0.0,
            1 => random.normal() * 1e-40,
            2 => random.normal() * 500.0,
            39 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0][i % 4],
            _ => random.normal(),
        })
        .collect()
}

/// A tensor's rows spread out: the same numbers at strides with a gap between rows, which holds NaN.
struct Strided {
    memory: Tensor,
    view: pkv_tensor,
}

impl Strided {
    fn new(x: &Tensor, before: usize, after: usize) -> Self {
        let [rows, heads, width] = x.shape[..] else { panic!("three dimensions") };
        let size = x.dtype.size();
        let step = before + width + after;
        let mut memory = Tensor::new(x.dtype, &[rows, heads, step]);
        memory.bytes_mut().fill(0xff);
        for r in 0..rows * heads {
            memory.bytes_mut()[(r * step + before) * size..][..width * size]
                .copy_from_slice(&x.bytes()[r * width * size..][..width * size]);
        }
        let mut view = x.abi();
        view.data = memory.abi().data.cast::<u8>().wrapping_add(before * size).cast();
        view.stride = [(heads * step) as i64, step as i64, 1, 0];
        Strided { memory, view }
    }
}

fn store(ctx: &Context, storage: &Storage, kv: u32, batch: &Batch, values: pkv_tensor) {
    let collection = storage.collection(ctx);
    let b = batch.abi();
    let mut params: pkv_kv_store_params = zeroed();
    params.struct_size = size_of_val(&params);
    (params.collection, params.batch, params.layer_idx, params.kv_idx) = (collection.0, &b, LAYER as u32, kv);
    params.values = values;
    KV_STORE.ok(ctx, &params, true);
}

fn gather(ctx: &Context, storage: &Storage, kv: u32, batch: &Batch, [rows, offsets]: [&[u32]; 2], out: pkv_tensor) {
    let collection = storage.collection(ctx);
    let b = batch.abi();
    let mut params: pkv_kv_gather_params = zeroed();
    params.struct_size = size_of_val(&params);
    (params.collection, params.batch, params.layer_idx, params.kv_idx) = (collection.0, &b, LAYER as u32, kv);
    (params.buffer_row_offsets, params.cache_offsets) = (rows.as_ptr(), offsets.as_ptr());
    params.out = out;
    KV_GATHER.ok(ctx, &params, true);
}

#[test]
fn stored_rows_are_the_plain_implementations_bits_and_come_back() {
    let mut random = Random(1);
    for (i, kind) in KINDS.into_iter().enumerate() {
        for (j, page) in [1, 2, 7, 16, 32, 64, 128, 256].into_iter().enumerate() {
            let (heads, head_size) = [(1, 128), (3, 33), (2, 64), (1, 576), (5, 7), (1, 1)][(i + j) % 6];
            let dtype = FLOATS[(i + 2 * j) % 3];
            let (batch, blocks) = batch(&[(0, 0), (19, 5), (0, 0), (0, 21), (130, 1), (0, 0)], page, &mut random);
            let tokens = batch.tokens();
            let shape = [tokens, heads, head_size];
            let values = Tensor::from_f32(dtype, &shape, &numbers(tokens * heads * head_size, true, &mut random));
            let strided = Strided::new(&values, 3, 2);
            let empty = Storage::new(kind, blocks, page, heads, head_size, false);
            let kv = (i % 2) as u32;
            let want = empty.clone();
            store(&context(Level::Reference, 1), &want, kv, &batch, values.abi());
            let want_bits = want.bits();
            assert!(want_bits != empty.bits());

            // Gather everything but the first position of each sequence that has more than one, in a buffer with a row too many.
            let lengths: Vec<u32> =
                (0..6).map(|b| batch.cache_lengths[b] + batch.row_offsets[b + 1] - batch.row_offsets[b]).collect();
            let offsets: Vec<u32> = lengths.iter().map(|&n| (n > 1) as u32).collect();
            let mut rows = vec![0u32];
            for b in 0..6 {
                rows.push(rows[b] + lengths[b] - offsets[b]);
            }
            let total = rows[6] as usize;
            let out_dtype = FLOATS[(i + j) % 3];
            let mut expected = Tensor::new(out_dtype, &[total + 1, heads, head_size]);
            expected.bytes_mut().fill(0x77);
            let dirty = expected.clone();
            gather(&context(Level::Reference, 1), &want, kv, &batch, [&rows, &offsets], expected.abi());
            for (b, &offset) in offsets.iter().enumerate() {
                for r in rows[b] as usize..rows[b + 1] as usize {
                    let (block, slot) = batch.locate(b, offset as usize + r - rows[b] as usize, page);
                    for h in 0..heads {
                        let have = &expected.to_f32()[(r * heads + h) * head_size..][..head_size];
                        let row =
                            Tensor::from_f32(out_dtype, &[head_size], &want.row(kv as usize, block, slot, h)).to_f32();
                        assert!(have.iter().zip(row).all(|(&a, b)| a == b || a.is_nan() && b.is_nan()));
                    }
                }
            }

            for (level, threads) in WAYS {
                let ctx = context(level, threads);
                for view in [values.abi(), strided.view] {
                    let storage = empty.clone();
                    store(&ctx, &storage, kv, &batch, view);
                    assert!(same_numbers(&storage, &want), "kind {i} page {page} {dtype:?} {level:?} {threads}");
                    assert!(kind.scale.is_none() && kind.dtype.size() > 1 || storage.bits() == want_bits);
                }
                let out = dirty.clone();
                gather(&ctx, &want, kv, &batch, [&rows, &offsets], out.abi());
                let (have, want) = (out.to_f32(), expected.to_f32());
                assert!(have.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()));
            }
        }
    }
}

/// The same bits, NaN payloads of wide caches aside.
fn same_numbers(a: &Storage, b: &Storage) -> bool {
    let dtype = DType::from_abi(a.options.dtype).unwrap();
    let read = |s: &Storage| {
        let inner = &s.blocks.bytes()[FENCE..s.blocks.bytes - FENCE];
        Tensor::from_bytes(dtype, &[inner.len() / dtype.size()], inner).to_f32()
    };
    let fences = a.bits().len() == b.bits().len();
    fences
        && a.scales.bytes() == b.scales.bytes()
        && read(a).iter().zip(read(b)).all(|(x, y)| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan())
}

#[test]
fn odd_groups_are_quantised_as_the_definition_says() {
    // Zero, denormal, one infinity, one NaN, amax at .75 of 448, at 448, beyond, and near the largest number there is.
    let rows: [[f32; 4]; 9] = [
        [0.0, -0.0, 0.0, 0.0],
        [1e-42, -3e-43, 0.0, 1e-44],
        [f32::INFINITY, 2.0, -1.0, 0.5],
        [f32::NAN, 2.0, -1.0, 0.5],
        [336.0, -1.5, 100.0, 0.001],
        [448.0, 447.0, -448.0, 1.0],
        [1e30, -1e29, 5.0, 0.0],
        [3e38, -3e38, 1.0, 0.0],
        [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::INFINITY],
    ];
    let values = Tensor::from_f32(F32, &[9, 1, 4], &rows.concat());
    let batch = Batch::new(&[(0, 9)], 16, || 0);
    for (dtype, max) in [(F8E4M3, 448.0f32), (F8E5M2, 57344.0)] {
        for scale in [F32, BF16, F8E8M0] {
            let mut all = Vec::new();
            for level in [Level::Reference, Level::Scalar, Level::Avx2] {
                let storage = Storage::new(Kind { dtype, scale: Some(scale), granularity: 4 }, 1, 16, 1, 4, true);
                store(&context(level, 1), &storage, 0, &batch, values.abi());
                for (slot, row) in rows.iter().enumerate() {
                    let have = storage.row(0, 0, slot, 0);
                    let amax = row.iter().filter(|x| x.is_finite()).fold(0.0f32, |m, x| m.max(x.abs()));
                    for (&x, y) in row.iter().zip(have) {
                        if x.is_nan() {
                            assert!(y.is_nan());
                        } else if x.is_infinite() {
                            assert!(y.signum() == x.signum() && y.is_finite() && y.abs() >= amax * 0.99);
                        } else if amax / max < f32::MIN_POSITIVE {
                            assert!(y.abs() <= 1e-38, "scale 1: what is far below it is 0");
                        } else {
                            // Half a step of the format, of a scale at most twice too large (powers of two) or rounded (bf16, which may clip).
                            let step = if dtype == F8E4M3 { 1.0 / 16.0 } else { 1.0 / 8.0 };
                            let tolerance = step * x.abs() + 0.004 * x.abs() + amax * 2e-2 * step;
                            assert!((x - y).abs() <= tolerance, "{dtype:?} {scale:?} {x:e}: {y:e}");
                        }
                    }
                }
                all.push(storage.bits());
            }
            assert!(all[0] == all[1] && all[0] == all[2]);
        }
    }
}

struct Rope {
    batch: Batch,
    blocks: usize,
    page: usize,
    kind: Kind,
    latent: usize,
    width: usize,
    q: Tensor,
    kv: Tensor,
    freqs: Tensor,
    gamma: Tensor,
    epsilon: f32,
}

impl Rope {
    fn new(
        sequences: &[(u32, u32)],
        page: usize,
        kind: Kind,
        [heads, latent, width]: [usize; 3],
        [dtype, table]: [DType; 2],
        seed: u64,
    ) -> Self {
        let mut random = Random(seed);
        let (batch, blocks) = batch(sequences, page, &mut random);
        let tokens = batch.tokens();
        let positions = sequences.iter().map(|s| s.0 + s.1).max().unwrap() as usize;
        let freqs: Vec<f32> = (0..positions * width / 2)
            .flat_map(|i| {
                let (p, pair) = (i / (width / 2), i % (width / 2));
                let angle = p as f64 * 10000f64.powf(-2.0 * pair as f64 / width as f64) + 0.3 * pair as f64;
                [angle.cos() as f32, angle.sin() as f32]
            })
            .collect();
        let mut tensor = |shape: &[usize], dtype| {
            let x: Vec<f32> = (0..shape.iter().product()).map(|_| random.normal()).collect();
            Tensor::from_f32(dtype, shape, &x)
        };
        Rope {
            q: tensor(&[tokens, heads, width], dtype),
            kv: tensor(&[tokens, latent + width], dtype),
            gamma: tensor(&[latent], table),
            freqs: Tensor::from_f32(table, &[positions, width], &freqs),
            epsilon: 1e-6,
            batch,
            blocks,
            page,
            kind,
            latent,
            width,
        }
    }

    fn storage(&self) -> Storage {
        Storage::new(self.kind, self.blocks, self.page, 1, self.latent + self.width, true)
    }

    fn run(&self, ctx: &Context, storage: &Storage, rope: i32, [q, output]: [pkv_tensor; 2], given: bool) {
        let collection = storage.collection(ctx);
        let b = self.batch.abi();
        let mut params: pkv_mla_rope_rmsnorm_quantize_params = zeroed();
        params.struct_size = size_of_val(&params);
        (params.collection, params.batch, params.layer_idx) = (collection.0, &b, LAYER as u32);
        (params.rope, params.epsilon) = (rope, self.epsilon);
        (params.q_rope, params.q_rope_output) = (q, output);
        (params.kv, params.freqs_cis, params.gamma) = (self.kv.abi(), self.freqs.abi(), self.gamma.abi());
        ROPE.ok(ctx, &params, given);
    }

    /// Rotated in f64.
    fn rotate(&self, x: &[f32], position: usize, rope: i32) -> Vec<f64> {
        let freqs = &self.freqs.to_f32()[position * self.width..][..self.width];
        let mut y = vec![0.0; self.width];
        for i in 0..self.width / 2 {
            let (j0, j1) = if rope == 0 { (2 * i, 2 * i + 1) } else { (i, i + self.width / 2) };
            let (x0, x1, cos, sin) = (x[j0] as f64, x[j1] as f64, freqs[2 * i] as f64, freqs[2 * i + 1] as f64);
            y[j0] = x0 * cos - x1 * sin;
            y[j1] = x0 * sin + x1 * cos;
        }
        y
    }
}

fn step(dtype: DType) -> f64 {
    match dtype {
        F32 => 2e-7,
        F16 => 1.0 / 1024.0,
        BF16 => 1.0 / 128.0,
        F8E5M2 => 0.25,
        _ => 0.125,
    }
}

#[test]
fn rope_and_norm_follow_float64_and_the_pairings_differ() {
    for (dtype, kind) in [(F32, plain(F32)), (F16, plain(F16)), (BF16, plain(BF16)), (BF16, KINDS[6])] {
        let problem = Rope::new(&[(37, 3), (0, 0), (0, 5)], 16, kind, [3, 128, 64], [dtype, F32], 7);
        for level in [Level::Reference, Level::Scalar, Level::Avx2] {
            let outputs = [0, 1].map(|rope| {
                let (storage, output) = (problem.storage(), Tensor::new(dtype, &problem.q.shape));
                problem.run(&context(level, 2), &storage, rope, [problem.q.abi(), output.abi()], true);
                let (q, kv, have, gamma) =
                    (problem.q.to_f32(), problem.kv.to_f32(), output.to_f32(), problem.gamma.to_f32());
                for t in 0..problem.batch.tokens() {
                    let (b, p) = problem.batch.position(t);
                    for h in 0..3 {
                        let at = (t * 3 + h) * 64;
                        for (have, want) in have[at..][..64].iter().zip(problem.rotate(&q[at..][..64], p, rope)) {
                            assert!((*have as f64 - want).abs() <= step(dtype) * (want.abs() + 0.01) + 2e-6);
                        }
                    }
                    let row = &kv[t * 192..][..192];
                    let mean = row[..128].iter().map(|x| (*x as f64).powi(2)).sum::<f64>() / 128.0;
                    let mut want: Vec<f64> = row[..128]
                        .iter()
                        .zip(&gamma)
                        .map(|(x, g)| *x as f64 / (mean + 1e-6).sqrt() * *g as f64)
                        .collect();
                    want.extend(problem.rotate(&row[128..], p, rope));
                    let (block, slot) = problem.batch.locate(b, p, 16);
                    let have = storage.row(0, block, slot, 0);
                    let scale = want.iter().fold(0.0f64, |m, x| m.max(x.abs())) / 448.0;
                    for (have, want) in have.iter().zip(want) {
                        let fp8 = if kind.dtype == F8E4M3 { want.abs() / 15.0 + scale * 0.002 } else { 0.0 };
                        let tolerance = 2.0 * step(dtype) * (want.abs() + 0.01) + fp8 + 2e-6;
                        assert!((*have as f64 - want).abs() <= tolerance, "{dtype:?} {have} {want}");
                    }
                }
                [output.bytes(), &storage.bits()].concat()
            });
            assert!(outputs[0] != outputs[1]);
        }
    }
}

#[test]
fn rope_and_norm_have_the_plain_implementations_bits() {
    let shapes = [[1, 512, 64], [3, 16, 8], [2, 7, 6], [5, 33, 20], [128, 128, 64], [1, 1, 2]];
    for (i, kind) in KINDS.into_iter().enumerate() {
        for (j, page) in [1, 2, 7, 16, 32, 64, 128, 256].into_iter().enumerate() {
            let dtype = FLOATS[(i + j) % 3];
            let table = if (i + j) % 2 == 0 { F32 } else { dtype };
            let sequences = [(0, 0), (9, 4), (0, 0), (0, 17), (300, 1), (0, 0)];
            let problem =
                Rope::new(&sequences, page, kind, shapes[(i * 5 + j) % 6], [dtype, table], (i * 8 + j) as u64);
            let rope = ((i + j / 2) % 2) as i32;
            let (want, output) = (problem.storage(), Tensor::new(dtype, &problem.q.shape));
            problem.run(&context(Level::Reference, 1), &want, rope, [problem.q.abi(), output.abi()], false);
            for (way, (level, threads)) in WAYS.into_iter().enumerate() {
                let ctx = context(level, threads);
                // q as the tail of wider heads, in place there or to a buffer of its own.
                let tail = Strided::new(&problem.q, 11, 0);
                let own = Tensor::new(dtype, &problem.q.shape);
                let in_place = way % 2 == 0;
                let storage = problem.storage();
                problem.run(
                    &ctx,
                    &storage,
                    rope,
                    [tail.view, if in_place { tail.view } else { own.abi() }],
                    way % 3 == 0,
                );
                assert!(storage.bits() == want.bits(), "kind {i} page {page} {dtype:?} {level:?} {threads}");
                let (have, untouched) =
                    if in_place { (&tail.memory, Strided::new(&output, 11, 0).memory) } else { (&own, output.clone()) };
                assert!(have.bytes() == untouched.bytes(), "kind {i} page {page} {dtype:?} {level:?} {threads}");
            }
        }
    }
}

#[test]
fn a_token_is_the_same_alone_and_among_seventy_thousand() {
    let tokens = 70_000;
    let problem = Rope::new(&[(0, tokens)], 64, KINDS[8], [1, 16, 8], [BF16, F32], 3);
    let all = problem.storage();
    let output = Tensor::new(BF16, &problem.q.shape);
    problem.run(&context(Level::Avx2, 2), &all, 0, [problem.q.abi(), output.abi()], true);
    let plain = problem.storage();
    let again = Tensor::new(BF16, &problem.q.shape);
    problem.run(&context(Level::Reference, 1), &plain, 0, [problem.q.abi(), again.abi()], true);
    assert!(all.bits() == plain.bits() && output.bytes() == again.bytes());
    for p in [0u32, 1, 65_535, 65_536, 69_999] {
        let mut one = Rope::new(&[(p, 1)], 64, KINDS[8], [1, 16, 8], [BF16, F32], 3);
        let row = |t: &Tensor, width: usize| {
            Tensor::from_bytes(BF16, &[1, 1, width], &t.bytes()[p as usize * width * 2..][..width * 2])
        };
        one.q = row(&problem.q, 8);
        one.kv = row(&problem.kv, 24);
        one.kv.shape = vec![1, 24];
        one.gamma = problem.gamma.clone();
        let (storage, alone) = (one.storage(), Tensor::new(BF16, &[1, 1, 8]));
        one.run(&context(Level::Scalar, 1), &storage, 0, [one.q.abi(), alone.abi()], false);
        assert_eq!(alone.bytes(), &output.bytes()[p as usize * 16..][..16]);
        let at = |problem: &Rope, b: usize| problem.batch.locate(b, p as usize, 64);
        let ((block, slot), (all_block, all_slot)) = (at(&one, 0), at(&problem, 0));
        assert_eq!(storage.row(0, block, slot, 0), all.row(0, all_block, all_slot, 0));
    }

    let kind = KINDS[7];
    let mut random = Random(5);
    let (batch, blocks) = batch(&[(0, tokens)], 16, &mut random);
    let values = Tensor::from_f32(BF16, &[tokens as usize, 1, 24], &numbers(tokens as usize * 24, false, &mut random));
    let [have, want] = [(Level::Avx2, 2), (Level::Reference, 1)].map(|(level, threads)| {
        let storage = Storage::new(kind, blocks, 16, 1, 24, true);
        let ctx = context(level, threads);
        store(&ctx, &storage, 0, &batch, values.abi());
        let out = Tensor::new(F16, &[tokens as usize, 1, 24]);
        gather(&ctx, &storage, 0, &batch, [&[0, tokens], &[0]], out.abi());
        [&storage.bits(), out.bytes()].concat()
    });
    assert!(have == want);
}

fn merge(ctx: &Context, sides: [(&pkv_tensor, &pkv_tensor); 2], output: pkv_tensor, lse: pkv_tensor) {
    let mut params: pkv_merge_attention_params = zeroed();
    params.struct_size = size_of_val(&params);
    [(params.output_a, params.lse_a), (params.output_b, params.lse_b)] = sides.map(|(x, lse)| (*x, *lse));
    (params.output, params.lse) = (output, lse);
    MERGE.ok(ctx, &params, true);
}

#[test]
fn partial_results_are_joined() {
    let special = [0.0, f32::NEG_INFINITY, 3.0, -90.0, 88.0, 1e30, f32::INFINITY, f32::NAN, -1e-3];
    for (i, [tokens, heads, width]) in [[81, 1, 128], [81, 3, 33], [81, 2, 7], [81, 16, 64]].into_iter().enumerate() {
        for dtype in FLOATS {
            let mut random = Random(i as u64);
            let n = tokens * heads;
            let mut x: Vec<Vec<f32>> = (0..2).map(|_| (0..n * width).map(|_| random.normal()).collect()).collect();
            let lse: Vec<Vec<f32>> = (0..2)
                .map(|side| {
                    let pick = |r: usize| if side == 0 { special[r / 9 % 9] } else { special[r % 9] };
                    (0..n).map(|r| if r % heads == 0 { pick(r / heads) } else { random.normal() * 4.0 }).collect()
                })
                .collect();
            // A side without keys may hold anything.
            for side in 0..2 {
                for r in (0..n).filter(|&r| lse[side][r] == f32::NEG_INFINITY) {
                    x[side][r * width..][..width].fill([f32::NAN, f32::INFINITY][r % 2]);
                }
            }
            let outputs: Vec<Tensor> = x.iter().map(|x| Tensor::from_f32(dtype, &[tokens, heads, width], x)).collect();
            let lses: Vec<Tensor> = lse.iter().map(|x| Tensor::from_f32(F32, &[tokens, heads], x)).collect();
            let rounded: Vec<Vec<f32>> = outputs.iter().map(Tensor::to_f32).collect();
            let mut first: Option<Vec<u8>> = None;
            for (level, threads) in [(Level::Reference, 1)].into_iter().chain(WAYS) {
                let ctx = context(level, threads);
                for alias in [None, Some(0), Some(1)] {
                    let (a, b) = (outputs.clone(), lses.clone());
                    let (own, own_lse) =
                        (Tensor::new(dtype, &[tokens, heads, width]), Tensor::new(F32, &[tokens, heads]));
                    let (out, out_lse) = alias.map_or((&own, &own_lse), |side| (&a[side], &b[side]));
                    merge(&ctx, [(&a[0].abi(), &b[0].abi()), (&a[1].abi(), &b[1].abi())], out.abi(), out_lse.abi());
                    let (have, have_lse) = (out.to_f32(), out_lse.to_f32());
                    for r in 0..n {
                        let (la, lb) = (lse[0][r] as f64, lse[1][r] as f64);
                        let row = &have[r * width..][..width];
                        if la == f64::NEG_INFINITY && lb == f64::NEG_INFINITY {
                            assert!(row.iter().all(|&x| x == 0.0) && have_lse[r] == f32::NEG_INFINITY);
                            continue;
                        }
                        if la.is_nan() || lb.is_nan() || la == f64::INFINITY && lb == f64::INFINITY {
                            assert!(row.iter().all(|x| x.is_nan()) && have_lse[r].is_nan());
                            continue;
                        }
                        let wa = 1.0 / (1.0 + (lb - la).exp());
                        let (wa, wb) = (wa, if la == f64::NEG_INFINITY { 1.0 } else { 1.0 / (1.0 + (la - lb).exp()) });
                        let want_lse = la.max(lb) + (-(la - lb).abs()).exp().ln_1p();
                        assert!(
                            have_lse[r] as f64 == want_lse
                                || (have_lse[r] as f64 - want_lse).abs() <= 1e-6 * want_lse.abs().max(1.0)
                        );
                        for (d, &have) in row.iter().enumerate() {
                            let part = |w: f64, side: usize| {
                                if w == 0.0 { 0.0 } else { w * rounded[side][r * width + d] as f64 }
                            };
                            let want = part(wa, 0) + part(wb, 1);
                            let tolerance =
                                step(dtype) * (want.abs() + 0.1) + 2e-7 * (part(wa, 0).abs() + part(wb, 1).abs());
                            assert!((have as f64 - want).abs() <= tolerance, "{level:?} {r}: {have} {want}");
                        }
                    }
                    if level != Level::Reference {
                        let bits: Vec<u8> = have
                            .iter()
                            .chain(&have_lse)
                            .flat_map(|x| if x.is_nan() { [0xff; 4] } else { x.to_le_bytes() })
                            .collect();
                        assert!(first.get_or_insert(bits.clone()) == &bits, "{level:?} {threads} {alias:?}");
                    }
                }
            }
        }
    }
}

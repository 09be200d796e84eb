//! GGUF matmuls through the C API over a grid of shapes: every encoding, packed and borrowed, both compute modes, every instruction set here.

#[path = "support/api.rs"]
mod api;
#[path = "support/gguf_random.rs"]
mod gguf_random;
#[path = "support/isa.rs"]
mod isa;

use api::*;
use gguf_random::{Random, put, random_rows};
use isa::context;
use pagedkv::abi::collection::pkv_collection_options;
use pagedkv::abi::qkv::pkv_qkv_matmul_gguf_params;
use pagedkv::abi::weight::*;
use pagedkv::cpu::isa::{Isa, Level};
use pagedkv::dtype::DType;
use pagedkv::gguf::{FORMATS, Format, decode_row};

const HEAD: usize = 7;
const LAYERS: usize = 3;
const LAYER: usize = 1;

/// The fast paths that this CPU has.
fn fast() -> impl Iterator<Item = Level> {
    [Level::Scalar, Level::Avx2, Level::Avx512].into_iter().filter(|&level| has(level))
}

fn has(level: Level) -> bool {
    Isa::at_most(level).level() == level
}

struct Weights {
    formats: [&'static Format; 3],
    /// Of K, V and each head of Q.
    head: usize,
    cols: usize,
    /// Bytes between the rows.
    gaps: [usize; 3],
    raw: [Vec<u8>; 3],
    rows: [usize; 3],
}

impl Weights {
    fn new(format: &'static Format, q_rows: usize, cols: usize) -> Self {
        Self::mixed([format; 3], HEAD, q_rows, cols)
    }

    fn mixed(formats: [&'static Format; 3], head: usize, q_rows: usize, cols: usize) -> Self {
        let rows = [q_rows, head, head];
        let raw = [0, 1, 2].map(|i| random_rows(formats[i], rows[i], cols, 7 + i as u64));
        Weights { formats, head, cols, gaps: [0; 3], raw, rows }
    }

    fn row_bytes(&self, i: usize) -> usize {
        self.raw[i].len() / self.rows[i]
    }

    /// The rows as they lie in memory.
    fn spread(&self, i: usize) -> Vec<u8> {
        let gap = vec![0xff; self.gaps[i]];
        self.raw[i].chunks_exact(self.row_bytes(i)).flat_map(|row| [row, &gap].concat()).collect()
    }

    /// Q, K and V rows of all tokens as f32; K and V from an F32 cache.
    fn run(&self, ctx: &Context, x: &Tensor, compute: i32, flags: u32) -> [Vec<f32>; 3] {
        let tokens = x.shape[0];
        let mut options: pkv_collection_options = zeroed();
        options.struct_size = size_of_val(&options);
        options.dtype = DType::F32 as i32;
        (options.num_blocks, options.num_layers, options.page_size) = (tokens.div_ceil(5) as u32, LAYERS as u32, 5);
        (options.num_heads, options.head_size) = (1, self.head as u32);
        let blocks = Tensor::new(DType::F32, &[options.num_blocks as usize, 2, LAYERS, 5, 1, self.head]);
        options.blocks = blocks.buffer();
        let collection = Collection::new(ctx, &options);
        let mut next = 0;
        let batch = Batch::new(&[(0, tokens as u32)], 5, || {
            next += 1;
            next - 1
        });
        let data = [0, 1, 2].map(|i| self.spread(i));
        let handles = [0, 1, 2].map(|i| {
            let mut o: pkv_gguf_weight_options = zeroed();
            o.struct_size = size_of_val(&o);
            (o.data, o.data_size) = (data[i].as_ptr().cast(), data[i].len() - self.gaps[i]);
            (o.rows, o.cols, o.encoding, o.flags) = (self.rows[i] as i64, self.cols as i64, self.formats[i].id, flags);
            o.row_bytes = (self.row_bytes(i) + self.gaps[i]) as i64;
            let mut handle = std::ptr::null_mut();
            // SAFETY: options hold live pointers.
            ok(|e| unsafe { pkv_gguf_weight_create(ctx.0, &o, &mut handle, e) });
            handle
        });
        let q = Tensor::new(DType::F32, &[tokens, self.rows[0]]);
        let mut p: pkv_qkv_matmul_gguf_params = zeroed();
        p.struct_size = size_of_val(&p);
        let b = batch.abi();
        (p.collection, p.batch, p.layer_idx, p.compute) = (collection.0, &b, LAYER as u32, compute);
        (p.q_weight, p.k_weight, p.v_weight) = (handles[0], handles[1], handles[2]);
        (p.hidden_state, p.q_output) = (x.abi(), q.abi());
        QKV.ok(ctx, &p, true);
        // SAFETY: made above, destroyed once.
        handles.into_iter().for_each(|h| unsafe { pkv_gguf_weight_destroy(h) });
        let cache = blocks.to_f32();
        let row = |t: usize, kv: usize, layer: usize| {
            &cache[(((t / 5 * 2 + kv) * LAYERS + layer) * 5 + t % 5) * self.head..][..self.head]
        };
        let rows = |kv: usize| (0..tokens).flat_map(|t| row(t, kv, LAYER).to_vec()).collect();
        for (t, kv, layer) in (0..tokens).flat_map(|t| (0..2 * LAYERS).map(move |i| (t, i % 2, i / 2))) {
            assert!(layer == LAYER || row(t, kv, layer).iter().all(|&x| x == 0.0), "layer {layer} was written");
        }
        [q.to_f32(), rows(0), rows(1)]
    }

    /// The exact products in f64, and the bound: 1.1 x the error of exact arithmetic on activations rounded to 8 bits.
    fn exact(&self, x: &[f32], i: usize) -> (Vec<f64>, f64) {
        let block = self.formats[i].activation_block.max(1);
        let mut w = vec![0.0; self.cols];
        let decoded: Vec<Vec<f32>> = self.raw[i]
            .chunks_exact(self.row_bytes(i))
            .map(|row| {
                decode_row(self.formats[i], row, &mut w);
                w.clone()
            })
            .collect();
        let (mut out, mut error, mut norm) = (vec![], 0.0, 0.0);
        for x in x.chunks_exact(self.cols) {
            let rounded: Vec<f64> = x
                .chunks(block)
                .flat_map(|x| {
                    let d = x.iter().fold(0.0f64, |m, &x| m.max((x as f64).abs())) / 127.0;
                    x.iter().map(move |&x| if d > 0.0 { (x as f64 / d).round_ties_even() * d } else { 0.0 })
                })
                .collect();
            for w in &decoded {
                let y: f64 = w.iter().zip(x).map(|(w, x)| *w as f64 * *x as f64).sum();
                let z: f64 = w.iter().zip(&rounded).map(|(w, x)| *w as f64 * x).sum();
                error += (y - z).powi(2);
                norm += y * y;
                out.push(y);
            }
        }
        (out, 1.1 * (error / norm).sqrt())
    }
}

fn off(have: &[f32], want: &[f64]) -> f64 {
    let error: f64 = have.iter().zip(want).map(|(a, b)| (*a as f64 - b).powi(2)).sum();
    (error / want.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

fn activations(dtype: DType, tokens: usize, cols: usize) -> Tensor {
    let mut random = Random::new(tokens as u64 * 31 + cols as u64);
    let x: Vec<f32> = (0..tokens * cols).map(|_| random.normal()).collect();
    Tensor::from_f32(dtype, &[tokens, cols], &x)
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn every_encoding_is_right_and_the_same_however_it_is_cut() {
    for format in FORMATS {
        for (n, blocks, tokens) in [
            (7, 1, 1),
            (63, 5, 2),
            (70, 3, 3),
            (14, 2, 4),
            (63, 9, 5),
            (133, 1, 17),
            (7, 17, 33),
            (35, 2, 300),
            (21, 133, 2),
            (21, 17, 8),
            // Enough rows that two groups of them advance together.
            (1071, 2, 2),
            (1071, 1, 4),
        ] {
            // Just beyond the 4096 columns that rows are taken in, where there are many blocks.
            let elements = format.block_elements.max(32);
            // Rows of floats may end anywhere.
            let odd = if format.block_elements == 1 && tokens % 3 == 2 { 3 } else { 0 };
            let w = Weights::new(format, n, elements * blocks.min(4608 / elements) + odd);
            let x = activations([DType::F32, DType::F16, DType::BF16][tokens % 3], tokens, w.cols);
            let f = x.to_f32();
            let ideal = [0, 1, 2].map(|i| w.exact(&f, i));
            for level in fast() {
                let contexts = [1, 2].map(|threads| context(level, threads));
                for compute in [0, 1] {
                    let [packed, borrowed] =
                        [PKV_WEIGHT_PACK, 0].map(|flags| (flags, w.run(&contexts[0], &x, compute, flags)));
                    // Rows of floats are added up as they lie, and in another order where they lie packed.
                    if format.block_elements > 1 {
                        assert!(
                            packed.1.iter().zip(&borrowed.1).all(|(a, b)| bits(a) == bits(b)),
                            "{} {level:?}",
                            format.name
                        );
                    }
                    for (flags, base) in [packed, borrowed] {
                        let call = format!(
                            "{} {n} x {} M {tokens} {level:?} compute {compute} flags {flags}",
                            format.name, w.cols
                        );
                        for (have, (want, bound)) in base.iter().zip(&ideal) {
                            let bound = if compute == 1 || format.activation_block == 0 { 1e-5 } else { *bound };
                            let error = off(have, want);
                            assert!(error <= bound, "{call}: {error:e}, bound {bound:e}");
                        }
                        let threads = w.run(&contexts[1], &x, compute, flags);
                        assert!(base.iter().zip(&threads).all(|(a, b)| bits(a) == bits(b)), "{call}, two threads");
                        // A row alone has the bits it has in the batch.
                        for t in [0, tokens / 2, tokens - 1] {
                            let row = &x.bytes()[x.bytes().len() / tokens * t..][..x.bytes().len() / tokens];
                            let row = Tensor::from_bytes(x.dtype, &[1, w.cols], row);
                            let alone = w.run(&contexts[0], &row, compute, flags);
                            for (i, (alone, base)) in alone.iter().zip(&base).enumerate() {
                                let n = w.rows[i];
                                assert_eq!(bits(alone), bits(&base[n * t..][..n]), "{call}, row {t} of weight {i}");
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Sums over blocks are kept in as few bits as the encoding allows: the largest codes, all of one sign or of both, are what they must have room for.
#[test]
fn the_largest_codes_have_room() {
    const FILLS: [u8; HEAD] = [0x00, 0xff, 0x7f, 0x80, 0x0f, 0xf0, 0x87];
    let sign = |t: usize, k: usize| if t > 0 && k >> (t - 1) & 1 == 1 { -1.0 } else { 1.0 };
    for format in FORMATS.iter().filter(|f| f.activation_block > 0) {
        let cols = 2 * format.block_elements.max(256);
        let rows = FILLS.map(|fill| vec![fill; format.row_bytes(cols).expect("whole blocks")]).concat();
        let mut w = Weights { raw: [0; 3].map(|_| rows.clone()), ..Weights::new(format, HEAD, cols) };
        for block in w.raw.iter_mut().flat_map(|rows| rows.chunks_exact_mut(format.block_bytes)) {
            format.floats.iter().for_each(|&float| put(block, float, 0.125));
        }
        for tokens in [1, 2, 3, 4, 9, 18] {
            // Signs that change with every column, every two, every four ...; the other half of the tokens has them the other way round.
            let x: Vec<f32> = (0..tokens * cols)
                .map(|i| sign(i / cols / 2, i % cols) * if i / cols % 2 == 1 { -1.0 } else { 1.0 })
                .collect();
            let (exact, _) = w.exact(&x, 0);
            let x = Tensor::from_f32(DType::F32, &[tokens, cols], &x);
            for level in fast() {
                for flags in [PKV_WEIGHT_PACK, 0] {
                    for have in w.run(&context(level, 1), &x, 0, flags) {
                        let error = off(&have, &exact);
                        assert!(error <= 1e-6, "{} M {tokens} {level:?} {flags}: {error:e}", format.name);
                    }
                }
            }
        }
    }
}

/// Where the CPU has AVX-512, or in an emulator that has it (`python3 ctests/run.py avx512`), where the variable says that it must be there.
#[test]
fn avx512_has_the_bits_of_avx2() {
    let wide = has(Level::Avx512);
    let wanted = std::env::var_os("PAGEDKV_TEST_AVX512").is_some();
    assert!(wide || !wanted, "this CPU has no AVX-512 VNNI");
    if !wide {
        return;
    }
    let contexts = [Level::Avx512, Level::Avx2].map(|level| context(level, 1));
    let (mut compared, mut against_exact) = (0, 0);
    for format in FORMATS {
        let long = if format.block_elements == 1 { &[4, 7][..] } else { &[] };
        for (i, tokens) in (1..=17).chain([36]).chain(long.iter().copied()).enumerate() {
            let head = [1, 65, 7, 63, 16][i % 5];
            let blocks = [1, 3, 2, 8, 1, 9, 5][i % 7].min(if format.block_elements == 256 { 3 } else { 9 });
            // Rows of floats may be longer than what is taken in one go, and end anywhere.
            let cols = if i < 18 { format.block_elements.max(32) * blocks } else { 547 };
            let w = Weights::mixed([format; 3], head, head * (1 + i % 2), cols);
            let x = activations([DType::F32, DType::F16, DType::BF16][i % 3], tokens, w.cols);
            // Every combination where an emulator has time for it.
            let calls = [(0, PKV_WEIGHT_PACK), (0, 0), (1, PKV_WEIGHT_PACK), (1, 0)].into_iter().enumerate();
            for (_, (compute, flags)) in calls.filter(|(call, _)| tokens <= 4 || call % 3 == i % 3) {
                let [have, want] = contexts.each_ref().map(|ctx| w.run(ctx, &x, compute, flags));
                let call = format!("{} {head} x {} M {tokens} {compute} {flags}", format.name, w.cols);
                for (i, (have, want)) in have.iter().zip(&want).enumerate() {
                    assert_eq!(bits(have), bits(want), "{call}");
                    compared += have.len();
                    if tokens <= 5 && flags == 0 {
                        let (exact, bound) = w.exact(&x.to_f32(), i);
                        let bound = if compute == 1 || format.activation_block == 0 { 1e-5 } else { bound };
                        // A handful of numbers may lie further off than whole matrices do.
                        let error = off(have, &exact);
                        assert!(error <= 3.0 * bound, "{call}: {error:e}, bound {bound:e}");
                        against_exact += have.len();
                    }
                }
            }
        }
        if wanted {
            println!(
                "{}: {compared} numbers have the bits of AVX2, {against_exact} are near the exact ones",
                format.name
            );
        }
    }
}

#[test]
fn each_weight_has_its_own_encoding_and_row_stride() {
    let x = activations(DType::F32, 3, 256);
    for first in 0..FORMATS.len() {
        let formats = [0, 5, 9].map(|i| &FORMATS[(first + i) % FORMATS.len()]);
        let weights = Weights { gaps: [5, 0, 64], ..Weights::mixed(formats, HEAD, 21, 256) };
        for level in fast() {
            let ctx = context(level, 1);
            for (compute, flags) in [(0, 0), (0, PKV_WEIGHT_PACK), (1, 0), (1, PKV_WEIGHT_PACK)] {
                let have = weights.run(&ctx, &x, compute, flags);
                for (i, format) in formats.into_iter().enumerate() {
                    let alike = Weights::new(format, 21, 256).run(&ctx, &x, compute, flags);
                    assert_eq!(
                        bits(&have[i]),
                        bits(&alike[i]),
                        "{} as weight {i} {level:?} {compute} {flags}",
                        format.name
                    );
                }
            }
        }
    }
}

#[test]
fn a_narrow_matrix_has_the_bits_of_a_wide_one() {
    const WIDE: usize = 65;
    for format in FORMATS {
        let cols = format.block_elements.max(32);
        let x = activations(DType::F32, 17, cols);
        let wide = Weights::mixed([format; 3], WIDE, WIDE, cols);
        for level in fast() {
            let ctx = context(level, 1);
            for (compute, flags) in [(0, 0), (0, PKV_WEIGHT_PACK), (1, 0), (1, PKV_WEIGHT_PACK)] {
                let all = wide.run(&ctx, &x, compute, flags);
                for n in [1, 7, 63, WIDE] {
                    let raw = wide.raw.each_ref().map(|raw| raw[..wide.row_bytes(0) * n].to_vec());
                    let narrow = Weights { formats: [format; 3], head: n, cols, gaps: [0; 3], raw, rows: [n; 3] };
                    for tokens in 1..=x.shape[0] {
                        let first = Tensor::from_f32(DType::F32, &[tokens, cols], &x.to_f32()[..tokens * cols]);
                        for (have, want) in narrow.run(&ctx, &first, compute, flags).iter().zip(&all) {
                            let rows = have.chunks_exact(n).zip(want.chunks_exact(WIDE));
                            let same = rows.into_iter().all(|(a, b)| bits(a) == bits(&b[..n]));
                            assert!(same, "{} {n} x {cols} M {tokens} {level:?} {compute} {flags}", format.name);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_of_nan_or_infinities_leaves_the_others_alone() {
    for format in FORMATS {
        let w = Weights::new(format, 21, 512);
        let x = activations(DType::F32, 6, 512);
        for level in fast() {
            let ctx = context(level, 1);
            for compute in [0, 1] {
                let clean = w.run(&ctx, &x, compute, PKV_WEIGHT_PACK);
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut values = x.to_f32();
                    values[2 * 512 + 100] = bad;
                    let dirty =
                        w.run(&ctx, &Tensor::from_f32(DType::F32, &[6, 512], &values), compute, PKV_WEIGHT_PACK);
                    for i in 0..3 {
                        let n = w.rows[i];
                        for t in [0, 1, 3, 4, 5] {
                            assert_eq!(bits(&dirty[i][n * t..][..n]), bits(&clean[i][n * t..][..n]), "{}", format.name);
                        }
                        if bad.is_nan() {
                            assert!(dirty[i][2 * n..3 * n].iter().all(|y| y.is_nan()), "{} {level:?}", format.name);
                        }
                    }
                }
            }
        }
    }
}

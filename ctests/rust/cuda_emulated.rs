//! The CUDA backend without a GPU: the whole road (driver, NVRTC, cache, launch structs, kernels) through the C API, on the emulation of
//! `ctests/cuda_emu`. Needs g++ and python3.
//!
//! Each test runs in a process of its own, with the fake driver first on the loader's path. Where only numbers are compared, tensors lie in host
//! memory, which the emulated kernels reach; tests of memory itself use the fake driver's, which the host cannot touch.

#[path = "support/api.rs"]
mod api;
#[path = "support/cases.rs"]
mod cases;
#[path = "support/cuda.rs"]
mod cuda;

use api::*;
use cuda::*;
use pagedkv::abi::collection::*;
use pagedkv::abi::context::PKV_BACKEND_CUDA;
use pagedkv::abi::indexer::pkv_mla_indexer_fp8_params;
use pagedkv::abi::kv::*;
use pagedkv::abi::merge::pkv_merge_attention_params;
use pagedkv::abi::prefill::{PKV_PREFILL_FINISHED, pkv_mla_prefill_fp8_params};
use pagedkv::abi::rope::pkv_mla_rope_rmsnorm_quantize_params;
use pagedkv::abi::status::*;
use pagedkv::abi::types::*;
use pagedkv::cpu::isa::Level;
use pagedkv::dtype::DType;
use std::ptr::null_mut;

/// Functions that have CUDA kernels, by their names in the golden cases.
const OPS: [&str; 6] = [
    "kv_store_ragged",
    "kv_gather",
    "merge_attention",
    "mla_rope_rmsnorm_quantize",
    "mla_prefill_fp8",
    "mla_indexer_ragged_fp8",
];

fn on(backend: i32) -> Context {
    Context::with(|o| o.backend = backend)
}

#[test]
fn golden_cases() {
    emulated("golden_cases", &[(BACKEND, "cuda")], || {
        let ran = cases::run(&[Level::ALL[0]], |op| OPS.contains(&op));
        assert_eq!(ran.len(), OPS.len(), "{ran:?}");
        assert!(count("cuLaunchKernel") > 0);
    });
}

// ---- kernels that one architecture has, in their siblings' places ----

const HOPPER: (&str, &str) = ("PAGEDKV_CUDA_KERNELS", "hopper");

fn hopper_kernels_launched() -> i64 {
    count("kernels of *_sm90.cu launched")
}

#[test]
fn golden_cases_on_hopper_kernels() {
    emulated("golden_cases_on_hopper_kernels", &[(BACKEND, "cuda"), HOPPER], || {
        let ran = cases::run(&[Level::ALL[0]], |op| op == "mla_prefill_fp8" || op == "mla_indexer_ragged_fp8");
        assert_eq!(ran.len(), 2, "{ran:?}");
        assert!(hopper_kernels_launched() > 0);
    });
}

#[test]
fn odd_shapes_on_hopper_kernels() {
    for reverse in ["0", "1"] {
        emulated("odd_shapes_on_hopper_kernels", &[("PKV_EMU_REVERSE", reverse), HOPPER], || {
            prefill_grid(64, 12);
            indexer_grid(84, 8);
            assert!(hopper_kernels_launched() > 0);
        });
        if in_child("odd_shapes_on_hopper_kernels") {
            return;
        }
    }
}

#[test]
fn a_hopper_kernel_alone() {
    let name = "a_hopper_kernel_alone";
    for file in ["mla_prefill_fp8_project_sm90.cu", "mla_prefill_fp8_attention_sm90.cu"] {
        emulated(name, &[(HOPPER.0, file)], || {
            prefill_grid(64, 6);
            assert!((1..=2).contains(&hopper_kernels_launched())); // F16, BF16
        });
        if in_child(name) {
            return;
        }
    }
}

/// Nobody gets them who does not ask for them, or whose card has them not.
#[test]
fn hopper_kernels_are_off() {
    let name = "hopper_kernels_are_off";
    for env in [vec![], vec![("PAGEDKV_CUDA_KERNELS", "mma")], vec![HOPPER, ("PKV_EMU_ARCH", "100")]] {
        emulated(name, &env, || {
            prefill_grid(94, 3);
            assert_eq!(hopper_kernels_launched(), 0);
        });
        if in_child(name) {
            return;
        }
    }
}

#[test]
fn kernels_that_do_not_exist_are_refused() {
    emulated("kernels_that_do_not_exist_are_refused", &[("PAGEDKV_CUDA_KERNELS", "volta")], || {
        let mut o: pagedkv::abi::context::pkv_context_options = zeroed();
        o.struct_size = size_of_val(&o);
        (o.abi_version, o.backend) = (pagedkv::abi::version::PKV_ABI_VERSION, PKV_BACKEND_CUDA);
        let mut ctx = null_mut();
        // SAFETY: live structs.
        let made = call(|e| unsafe { pagedkv::abi::context::pkv_context_create(&o, &mut ctx, e) });
        let (status, argument, message) = made.unwrap_err();
        assert_eq!((status, argument.as_str()), (PKV_ERR_VALUE, "PAGEDKV_CUDA_KERNELS"), "{message}");
    });
}

// ---- against the CPU backend, over odd shapes ----

/// One random call of each op, on both backends, over the same bytes.
struct Twin {
    random: Random,
    cpu: Context,
    cuda: Context,
}

/// What a lane does differently on the two sides: nothing, or sums in another order before a rounding.
#[derive(Clone, Copy, PartialEq)]
enum Match {
    Bits,
    Nearly,
}

impl Twin {
    fn new(seed: u64) -> Self {
        Twin { random: Random(seed), cpu: on(0), cuda: on(PKV_BACKEND_CUDA) }
    }

    fn tensor(&mut self, dtype: DType, shape: &[usize]) -> Tensor {
        let n = shape.iter().product();
        let x: Vec<f32> = (0..n).map(|_| self.random.value()).collect();
        Tensor::from_f32(dtype, shape, &x)
    }

    /// A tensor `[.., width]` with rows `pad` elements apart, and its ABI view.
    fn strided(
        &mut self,
        dtype: DType,
        shape: &[usize],
        pad: usize,
    ) -> (Tensor, impl Fn(&Tensor) -> pkv_tensor + use<>) {
        let (last, outer) = shape.split_last().unwrap();
        let mut wide = outer.to_vec();
        wide.push(last + pad);
        let t = self.tensor(dtype, &wide);
        let shape = shape.to_vec();
        let view = move |t: &Tensor| {
            let mut v = t.abi();
            let mut step = 1;
            for d in (0..shape.len()).rev() {
                v.shape[d] = shape[d] as i64;
                v.stride[d] = step as i64;
                step *= if d == shape.len() - 1 { shape[d] + pad } else { shape[d] };
            }
            v
        };
        (t, view)
    }

    fn options(&mut self, heads: u32, head_size: u32, is_mla: u32) -> pkv_collection_options {
        let r = &mut self.random;
        let dtype = r.pick(&[DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2]);
        let mut o: pkv_collection_options = zeroed();
        o.struct_size = size_of_val(&o);
        o.dtype = dtype as i32;
        if dtype.is_fp8() && r.below(3) > 0 {
            o.scale_dtype = r.pick(&[DType::F32, DType::BF16, DType::F8E8M0]) as i32;
            o.quantization_granularity = r.pick(&[0, 1, 3, 8, 32, 128, 1000]);
        }
        (o.num_layers, o.page_size) = (1 + r.below(2) as u32, r.pick(&[1, 2, 7, 16]));
        (o.num_heads, o.head_size, o.is_mla) = (heads, head_size, is_mla);
        o.num_blocks = 64;
        o
    }

    /// Blocks in random order, no block twice; sequences without new tokens and without a cache among them.
    fn batch(&mut self, o: &mut pkv_collection_options, sequences: usize, most: u64) -> Batch {
        let lengths: Vec<(u32, u32)> = (0..sequences)
            .map(|_| {
                (
                    self.random.below(most) as u32,
                    if self.random.below(4) == 0 { 0 } else { self.random.below(most) as u32 },
                )
            })
            .collect();
        let pages: u32 = lengths.iter().map(|(a, b)| (a + b).div_ceil(o.page_size)).sum();
        o.num_blocks = pages + 3;
        let mut ids: Vec<u32> = (0..o.num_blocks).collect();
        for i in (1..ids.len()).rev() {
            ids.swap(i, self.random.below(i as u64 + 1) as usize);
        }
        Batch::new(&lengths, o.page_size, || ids.pop().unwrap())
    }

    /// The collection over copies of the same random bytes, on either side.
    fn storage(&mut self, o: &pkv_collection_options) -> (Tensor, Option<Tensor>) {
        let (mut blocks, mut scales) = (0, 0);
        // SAFETY: live structs.
        ok(|e| unsafe { pkv_collection_storage_size(o, &mut blocks, &mut scales, e) });
        let dtype = DType::from_abi(o.dtype).unwrap();
        let blocks = self.tensor(dtype, &[blocks / dtype.size()]);
        let scales = DType::from_abi(o.scale_dtype).map(|d| {
            let n = scales / d.size();
            let x: Vec<f32> = (0..n).map(|_| 2f32.powi(self.random.below(9) as i32 - 4)).collect();
            Tensor::from_f32(d, &[n], &x)
        });
        (blocks, scales)
    }

    /// Runs `call` on both contexts over copies of `tensors`, the first `compared` of which are compared afterwards.
    fn run(
        &self,
        what: &str,
        tensors: &[&Tensor],
        options: Option<&pkv_collection_options>,
        how: Match,
        call: impl Fn(&Context, Option<&Collection>, &[Tensor]),
    ) {
        let mut results = Vec::new();
        for ctx in [&self.cpu, &self.cuda] {
            let copies: Vec<Tensor> = tensors.iter().map(|&t| t.clone()).collect();
            let collection = options.map(|o| {
                let mut o = *o;
                o.blocks = copies[0].buffer();
                o.scales =
                    if o.scale_dtype != 0 { copies[1].buffer() } else { pkv_buffer { data: null_mut(), size: 0 } };
                Collection::new(ctx, &o)
            });
            call(ctx, collection.as_ref(), &copies);
            drop(collection);
            results.push(copies);
        }
        let (want, have) = (&results[0], &results[1]);
        for (i, (want, have)) in want.iter().zip(have).enumerate() {
            compare(&format!("{what}, tensor {i}"), have, want, how);
        }
    }
}

fn compare(what: &str, have: &Tensor, want: &Tensor, how: Match) {
    if have.bytes() == want.bytes() {
        return;
    }
    let (h, w) = (have.to_f32(), want.to_f32());
    let size = have.dtype.size();
    let mut off = 0;
    for i in 0..h.len() {
        let same = have.bytes()[i * size..][..size] == want.bytes()[i * size..][..size];
        if same || h[i].is_nan() && w[i].is_nan() {
            continue;
        }
        off += 1;
        // A sum in another order moves a value by a rounding of its dtype, fp8 codes by one step.
        // Below `least` two summands may have cancelled, and the roundings are theirs.
        let (step, least) = match have.dtype {
            DType::F32 => (1e-5, 1.0),
            DType::F16 => (2e-3, 1e-2),
            DType::BF16 => (1.6e-2, 1e-2),
            _ => (0.26, 1e-2),
        };
        let close = (h[i] - w[i]).abs() <= step * w[i].abs().max(least);
        assert!(how == Match::Nearly && close, "{what}: element {i} is {}, must be {}", h[i], w[i]);
    }
    let most = if have.dtype == DType::F32 { h.len() } else { h.len() / 50 + 2 };
    assert!(off <= most, "{what}: {off} of {} elements differ", h.len());
}

fn store_grid(seed: u64) {
    let mut twin = Twin::new(seed);
    for round in 0..60 {
        let dtype = twin.random.pick(&[DType::F32, DType::F16, DType::BF16]);
        let (heads, head_size) = (twin.random.pick(&[1, 2, 5]), twin.random.pick(&[1, 3, 8, 20, 64, 128, 257, 576]));
        let mut o = twin.options(heads, head_size, 0);
        let batch = twin.batch(&mut o, round % 7, 9);
        let pad = twin.random.pick(&[0, 8, 3]);
        let rows = batch.tokens() + twin.random.below(3) as usize;
        let (values, view) = twin.strided(dtype, &[rows, heads as usize, head_size as usize], pad);
        let (blocks, scales) = twin.storage(&o);
        let none = Tensor::new(DType::F32, &[0]);
        let (layer, kv) = (twin.random.below(o.num_layers.into()) as u32, twin.random.below(2) as u32);
        let what = format!("store {round}: {dtype:?} {o:?} pad {pad}");
        twin.run(&what, &[&blocks, scales.as_ref().unwrap_or(&none), &values], Some(&o), Match::Bits, |ctx, c, t| {
            let b = batch.abi();
            let mut p: pkv_kv_store_params = zeroed();
            p.struct_size = size_of_val(&p);
            (p.collection, p.batch) = (c.unwrap().0, &b);
            (p.layer_idx, p.kv_idx, p.values) = (layer, kv, view(&t[2]));
            KV_STORE.ok(ctx, &p, round % 2 == 0);
        });
    }
}

fn gather_grid(seed: u64) {
    let mut twin = Twin::new(seed);
    for round in 0..60 {
        let dtype = twin.random.pick(&[DType::F32, DType::F16, DType::BF16]);
        let (heads, head_size) = (twin.random.pick(&[1, 3]), twin.random.pick(&[1, 3, 8, 20, 64, 128, 257, 576]));
        let mut o = twin.options(heads, head_size, 0);
        let batch = twin.batch(&mut o, round % 7, 9);
        let (mut rows, mut offsets) = (vec![0u32], Vec::new());
        for b in 0..batch.cache_lengths.len() {
            let length = batch.cache_lengths[b] + batch.row_offsets[b + 1] - batch.row_offsets[b];
            let start = twin.random.below(u64::from(length) + 1) as u32;
            offsets.push(start);
            rows.push(rows[b] + twin.random.below(u64::from(length - start) + 1) as u32);
        }
        let from_zero = twin.random.below(3) == 0;
        let pad = twin.random.pick(&[0, 8, 3]);
        let length = *rows.last().unwrap() as usize + twin.random.below(3) as usize;
        let (out, view) = twin.strided(dtype, &[length, heads as usize, head_size as usize], pad);
        let (blocks, scales) = twin.storage(&o);
        let none = Tensor::new(DType::F32, &[0]);
        let what = format!("gather {round}: {dtype:?} {o:?} pad {pad}");
        twin.run(&what, &[&blocks, scales.as_ref().unwrap_or(&none), &out], Some(&o), Match::Bits, |ctx, c, t| {
            let b = batch.abi();
            let mut p: pkv_kv_gather_params = zeroed();
            p.struct_size = size_of_val(&p);
            (p.collection, p.batch, p.kv_idx) = (c.unwrap().0, &b, 1);
            p.buffer_row_offsets = rows.as_ptr();
            p.cache_offsets = if from_zero { std::ptr::null() } else { offsets.as_ptr() };
            p.out = view(&t[2]);
            KV_GATHER.ok(ctx, &p, false);
        });
    }
}

fn rope_grid(seed: u64) {
    let mut twin = Twin::new(seed);
    for round in 0..80 {
        let dtype = twin.random.pick(&[DType::F32, DType::F16, DType::BF16]);
        let (latent, width) = twin.random.pick(&[(1, 2), (5, 6), (16, 8), (40, 16), (128, 64), (512, 64), (100, 30)]);
        let heads = twin.random.pick(&[1, 3, 16, 130]);
        let mut o = twin.options(1, (latent + width) as u32, 1);
        let batch = twin.batch(&mut o, round % 5, 6);
        let tokens = batch.tokens() + twin.random.below(2) as usize;
        let q_pad = twin.random.pick(&[0, 128, 3]);
        let (q, q_view) = twin.strided(dtype, &[tokens, heads, width], q_pad);
        let (out, out_view) = twin.strided(dtype, &[tokens, heads, width], twin_pad(round));
        let (kv, kv_view) = twin.strided(dtype, &[tokens, latent + width], q_pad);
        let table = twin.random.pick(&[DType::F32, dtype]);
        let (freqs, gamma) = (twin.tensor(table, &[16, width]), twin.tensor(twin_dtype(round, dtype), &[latent]));
        let (blocks, scales) = twin.storage(&o);
        let none = Tensor::new(DType::F32, &[0]);
        let in_place = round % 3 == 0;
        let what = format!("rope {round}: {dtype:?} {latent}+{width} heads {heads} {o:?} in place {in_place}");
        let tensors = [&blocks, scales.as_ref().unwrap_or(&none), &q, &out, &kv, &freqs, &gamma];
        twin.run(&what, &tensors, Some(&o), Match::Nearly, |ctx, c, t| {
            let b = batch.abi();
            let mut p: pkv_mla_rope_rmsnorm_quantize_params = zeroed();
            p.struct_size = size_of_val(&p);
            (p.collection, p.batch) = (c.unwrap().0, &b);
            (p.rope, p.epsilon) = (round as i32 % 2, 1e-6);
            p.q_rope = q_view(&t[2]);
            p.q_rope_output = if in_place { q_view(&t[2]) } else { out_view(&t[3]) };
            (p.kv, p.freqs_cis, p.gamma) = (kv_view(&t[4]), t[5].abi(), t[6].abi());
            ROPE.ok(ctx, &p, false);
        });
    }
}

fn twin_pad(round: usize) -> usize {
    [0, 16, 5][round % 3]
}

fn twin_dtype(round: usize, dtype: DType) -> DType {
    if round.is_multiple_of(4) { dtype } else { DType::F32 }
}

fn merge_grid(seed: u64) {
    let mut twin = Twin::new(seed);
    for round in 0..40 {
        let dtype = twin.random.pick(&[DType::F32, DType::F16, DType::BF16]);
        let (tokens, heads) = (twin.random.pick(&[0, 1, 5, 33]), twin.random.pick(&[1, 3, 16]));
        let width = twin.random.pick(&[1, 7, 64, 128, 200]);
        let shape = [tokens, heads, width];
        let (a, a_view) = twin.strided(dtype, &shape, twin_pad(round));
        let (b, b_view) = twin.strided(dtype, &shape, twin_pad(round + 1));
        let (out, out_view) = twin.strided(dtype, &shape, twin_pad(round / 3));
        let mut lse = || {
            let mut x: Vec<f32> = (0..tokens * heads).map(|_| twin.random.value()).collect();
            x.iter_mut().for_each(|x| *x = if twin.random.below(5) == 0 { f32::NEG_INFINITY } else { *x });
            Tensor::from_f32(DType::F32, &[tokens, heads], &x)
        };
        let (lse_a, lse_b, lse) = (lse(), lse(), lse());
        let what = format!("merge {round}: {dtype:?} {shape:?}");
        twin.run(&what, &[&a, &b, &out, &lse_a, &lse_b, &lse], None, Match::Nearly, |ctx, _, t| {
            let mut p: pkv_merge_attention_params = zeroed();
            p.struct_size = size_of_val(&p);
            (p.output_a, p.output_b) = (a_view(&t[0]), b_view(&t[1]));
            p.output = if round % 4 == 1 { a_view(&t[0]) } else { out_view(&t[2]) };
            (p.lse_a, p.lse_b) = (t[3].abi(), t[4].abi());
            match round % 3 {
                0 => p.lse = t[5].abi(),
                1 => p.lse = t[3].abi(),
                _ => {}
            }
            MERGE.ok(ctx, &p, false);
        });
    }
}

/// ‖have - want‖ / ‖want‖; what is not finite must be the same on both sides.
fn relative_error(what: &str, have: &Tensor, want: &Tensor) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (i, (&h, &w)) in have.to_f32().iter().zip(&want.to_f32()).enumerate() {
        if !w.is_finite() || !h.is_finite() {
            assert!(h == w || h.is_nan() && w.is_nan(), "{what}: element {i} is {h}, must be {w}");
            continue;
        }
        error += f64::from(h - w).powi(2);
        norm += f64::from(w).powi(2);
    }
    if norm == 0.0 { f64::sqrt(error) } else { (error / norm).sqrt() }
}

fn prefill_grid(seed: u64, rounds: usize) {
    let mut twin = Twin::new(seed);
    for round in 0..rounds {
        let dtype = [DType::BF16, DType::F16, DType::F32][round % 3];
        let latent = twin.random.pick(&[128, 128, 256]);
        let widths = [
            (128, 64, 128),
            (64, 32, 64),
            (20, 6, 24),
            (33, 10, 45),
            (192, 64, 200),
            (8, 8, 8),
            (300, 16, 40),
            (98, 30, 77),
        ];
        let (nope, rope, v) = twin.random.pick(&widths);
        let heads = twin.random.pick(&[1, 2, 3, 5]);
        let mut o = twin.options(1, (latent + rope) as u32, 1);
        if o.dtype == DType::F8E5M2 as i32 {
            o.dtype = DType::F8E4M3 as i32;
        }
        let most = twin.random.pick(&[9, 40]);
        let batch = twin.batch(&mut o, 1 + round % 4, most);
        let (mut rows, mut offsets) = (vec![0u32], Vec::new());
        for b in 0..batch.cache_lengths.len() {
            let length = batch.cache_lengths[b] + batch.row_offsets[b + 1] - batch.row_offsets[b];
            let whole = twin.random.below(2) == 0;
            let start = if whole { 0 } else { twin.random.below(u64::from(length) + 1) as u32 };
            let n = if whole { length } else { twin.random.below(u64::from(length - start) + 1) as u32 };
            offsets.push(start);
            rows.push(rows[b] + n);
        }
        let tokens = batch.tokens() + twin.random.below(2) as usize;
        // Without outliers: a score's error must not decide which key wins.
        let mut even = |dtype: DType, shape: &[usize], size: f32| {
            let n = shape.iter().product();
            let x: Vec<f32> = (0..n).map(|_| (twin.random.below(2001) as f32 / 1000.0 - 1.0) * size).collect();
            Tensor::from_f32(dtype, shape, &x)
        };
        let pad = if round % 4 == 3 { 3 } else { 0 };
        let features = heads * (nope + v);
        let q = even(dtype, &[tokens, heads, nope + rope + pad], 1.0);
        let output = Tensor::new(dtype, &[tokens, heads, v + pad]);
        let lse = Tensor::new(DType::F32, &[tokens, heads]);
        let kv = even(dtype, &[tokens, latent + rope], 1.0);
        let (freqs, gamma) = (even(DType::F32, &[100, rope], 1.0), even(dtype, &[latent], 1.0));
        let weight = even(DType::F8E4M3, &[features, latent + 16 * pad], 8.0);
        let weight_scale = even(DType::F32, &[features.div_ceil(128), latent / 128], 0.05);
        let (mut blocks, mut scales) = (0, 0);
        // SAFETY: live structs.
        ok(|e| unsafe { pkv_collection_storage_size(&o, &mut blocks, &mut scales, e) });
        let cached = DType::from_abi(o.dtype).unwrap();
        let blocks = even(cached, &[blocks / cached.size()], 1.0);
        let scales = DType::from_abi(o.scale_dtype).map_or(Tensor::new(DType::F32, &[0]), |d| {
            Tensor::from_f32(d, &[scales / d.size()], &vec![0.5; scales / d.size()])
        });
        let (finished, in_place) = (round % 5 == 4, round % 2 == 1);
        let what = format!("prefill {round}: {dtype:?} {latent} {nope}+{rope}/{v} heads {heads} pad {pad} {o:?}");

        let mut results = Vec::new();
        for ctx in [&twin.cpu, &twin.cuda] {
            let t: Vec<Tensor> = [&blocks, &scales, &q, &output, &lse].into_iter().cloned().collect();
            let mut o = o;
            o.blocks = t[0].buffer();
            o.scales = if o.scale_dtype != 0 { t[1].buffer() } else { NO_WORKSPACE };
            let collection = Collection::new(ctx, &o);
            let b = batch.abi();
            let mut p: pkv_mla_prefill_fp8_params = zeroed();
            p.struct_size = size_of_val(&p);
            (p.collection, p.batch) = (collection.0, &b);
            (p.rope, p.mask, p.score_mod) = (round as i32 / 2 % 2, round as i32 / 3 % 4, (round % 3 == 1) as i32);
            (p.window, p.chunk, p.epsilon) = (1 + round as u32 % 6, 2 + round as u32 % 7, 1e-6);
            p.scale = 1.0 / ((nope + rope) as f32).sqrt();
            p.flags = if finished { PKV_PREFILL_FINISHED } else { 0 };
            (p.buffer_length, p.buffer_row_offsets) = (i64::from(*rows.last().unwrap()), rows.as_ptr());
            p.cache_offsets = offsets.as_ptr();
            let narrowed = |t: &Tensor, width: usize| {
                let mut v = t.abi();
                let mut step = 1;
                for d in (0..t.shape.len()).rev() {
                    (v.stride[d], step) = (step, step * t.shape[d] as i64);
                }
                v.shape[t.shape.len() - 1] = width as i64;
                v
            };
            (p.q, p.output, p.lse) = (narrowed(&t[2], nope + rope), narrowed(&t[3], v), t[4].abi());
            if !finished {
                (p.freqs_cis, p.kv_norm_gamma) = (freqs.abi(), gamma.abi());
                if !in_place {
                    p.kv = kv.abi();
                }
            }
            (p.kv_b_proj, p.kv_b_proj_scale) = (narrowed(&weight, latent), weight_scale.abi());
            PREFILL.ok(ctx, &p, round % 3 != 0);
            drop(collection);
            results.push(t);
        }
        let (want, have) = (&results[0], &results[1]);
        for (i, name) in ["blocks", "scales", "q"].iter().enumerate() {
            compare(&format!("{what}, {name}"), &have[i], &want[i], Match::Nearly);
        }
        let bound = match dtype {
            DType::BF16 => 1e-2,
            DType::F16 => 2e-3,
            _ => 1e-4,
        };
        for (i, name) in [(3, "output"), (4, "lse")] {
            let error = relative_error(&format!("{what}, {name}"), &have[i], &want[i]);
            assert!(error <= bound, "{what}: {name} is off by {error:e}");
        }
    }
}

/// Small integers, so that every sum is exact, ties are common, and both sides must agree to the bit.
fn indexer_grid(seed: u64, rounds: usize) {
    let mut twin = Twin::new(seed);
    for round in 0..rounds {
        let (heads, depth) = (twin.random.pick(&[1, 2, 3, 16, 64, 70]), twin.random.pick(&[16, 32, 40, 64, 128, 136]));
        let mut o = twin.options(1, depth as u32, (round % 2) as u32);
        (o.dtype, o.scale_dtype, o.quantization_granularity) = (DType::F8E4M3 as i32, DType::F32 as i32, 0);
        let most = twin.random.pick(&[5, 40, 150]);
        let batch = twin.batch(&mut o, 1 + round % 5, most);
        let tokens = batch.tokens() + twin.random.below(3) as usize;
        let top_k = twin.random.pick(&[1, 7, 64, 300]);
        let mut small = |dtype: DType, shape: &[usize], from: i32, to: i32| {
            let n = shape.iter().product();
            let x: Vec<f32> =
                (0..n).map(|_| (from + twin.random.below((to - from + 1) as u64) as i32) as f32).collect();
            Tensor::from_f32(dtype, shape, &x)
        };
        let (mut blocks, mut scales) = (0, 0);
        // SAFETY: live structs.
        ok(|e| unsafe { pkv_collection_storage_size(&o, &mut blocks, &mut scales, e) });
        let blocks = small(DType::F8E4M3, &[blocks], -2, 2);
        let scales = small(DType::F32, &[scales / 4], 1, 2);
        let q = small(DType::F8E4M3, &[tokens, heads, depth], -2, 2);
        let q_s = small(DType::F32, &[tokens, heads], -2, 2);
        let (indices, scores) = (Tensor::new(DType::I32, &[tokens, top_k]), Tensor::new(DType::F32, &[tokens, top_k]));
        let what = format!("indexer {round}: heads {heads} depth {depth} top_k {top_k} {o:?}");
        let tensors = [&blocks, &scales, &q, &q_s, &indices, &scores];
        twin.run(&what, &tensors, Some(&o), Match::Bits, |ctx, c, t| {
            let b = batch.abi();
            let mut p: pkv_mla_indexer_fp8_params = zeroed();
            p.struct_size = size_of_val(&p);
            (p.collection, p.batch) = (c.unwrap().0, &b);
            (p.mask, p.top_k) = ((round % 3 == 2) as i32, top_k as u32);
            (p.q, p.q_s, p.output_indices) = (t[2].abi(), t[3].abi(), t[4].abi());
            if round % 4 != 3 {
                p.output_scores = t[5].abi();
            }
            INDEXER.ok(ctx, &p, round % 2 == 0);
        });
    }
}

#[test]
fn odd_shapes() {
    emulated("odd_shapes", &[], || {
        store_grid(1);
        gather_grid(2);
        rope_grid(3);
        merge_grid(4);
        prefill_grid(24, 24);
        indexer_grid(44, 24);
    });
}

#[test]
fn odd_shapes_in_reverse_order() {
    emulated("odd_shapes_in_reverse_order", &[("PKV_EMU_REVERSE", "1")], || {
        store_grid(5);
        gather_grid(6);
        rope_grid(7);
        merge_grid(8);
        prefill_grid(28, 24);
        indexer_grid(48, 24);
    });
}

/// A grid dimension of 65535 is no limit.
#[test]
fn many_tokens() {
    emulated("many_tokens", &[], || {
        for tokens in [65535, 65536, 70000] {
            let mut twin = Twin::new(tokens as u64);
            let mut o = twin.options(1, 4, 1);
            (o.dtype, o.scale_dtype, o.quantization_granularity) = (DType::F8E4M3 as i32, DType::F32 as i32, 0);
            (o.num_layers, o.page_size, o.num_blocks) = (1, 16, tokens as u32 / 16 + 4);
            let mut next = 0..o.num_blocks;
            let batch = Batch::new(&[(0, 0), (3, tokens as u32 - 1), (0, 1)], 16, || next.next_back().unwrap());
            let values = twin.tensor(DType::BF16, &[tokens, 1, 4]);
            let (blocks, scales) = twin.storage(&o);
            twin.run("store", &[&blocks, scales.as_ref().unwrap(), &values], Some(&o), Match::Bits, |ctx, c, t| {
                let b = batch.abi();
                let mut p: pkv_kv_store_params = zeroed();
                p.struct_size = size_of_val(&p);
                (p.collection, p.batch, p.values) = (c.unwrap().0, &b, t[2].abi());
                KV_STORE.ok(ctx, &p, false);
            });
        }
    });
}

// ---- device memory, streams, graphs ----

/// A small fp8 collection in device memory, a batch and values for it.
struct Scene {
    ctx: Context,
    collection: Collection,
    options: pkv_collection_options,
    row_offsets: DeviceMemory,
    cache_lengths: DeviceMemory,
    table: DeviceMemory,
    values: DeviceMemory,
}

// SAFETY: handles and device addresses, which any thread may use.
unsafe impl Sync for Scene {}

const SCENE_ROWS: usize = 12;
const SCENE_WIDTH: usize = 32;

impl Scene {
    fn new() -> Self {
        let ctx = on(PKV_BACKEND_CUDA);
        let mut options: pkv_collection_options = zeroed();
        options.struct_size = size_of_val(&options);
        (options.dtype, options.scale_dtype) = (DType::F8E4M3 as i32, DType::F32 as i32);
        (options.num_blocks, options.num_layers, options.page_size) = (6, 2, 4);
        (options.num_heads, options.head_size) = (1, SCENE_WIDTH as u32);
        let collection = Collection::new(&ctx, &options);
        let x: Vec<f32> = (0..SCENE_ROWS * SCENE_WIDTH).map(|i| i as f32 - 100.0).collect();
        Scene {
            ctx,
            collection,
            options,
            row_offsets: DeviceMemory::of_u32(&[0, 5, 8]),
            cache_lengths: DeviceMemory::of_u32(&[1, 0]),
            table: DeviceMemory::of_u32(&[5, 2, 0, 1]),
            values: DeviceMemory::of(Tensor::from_f32(DType::F32, &[x.len()], &x).bytes()),
        }
    }

    fn store(&self, stream: Stream, workspace: pkv_buffer) -> Result<(), (pkv_status, String, String, i32)> {
        let b = pagedkv::abi::batch::pkv_batch {
            struct_size: size_of::<pagedkv::abi::batch::pkv_batch>(),
            input_row_offsets: self.row_offsets.ptr().cast(),
            cache_lengths: self.cache_lengths.ptr().cast(),
            lookup_table: self.table.ptr().cast(),
            lookup_table_stride: 0,
            batch_size: 2,
            max_pages: 2,
            max_seq_length: 8,
            max_cache_length: 8,
        };
        let mut p: pkv_kv_store_params = zeroed();
        p.struct_size = size_of_val(&p);
        (p.collection, p.batch, p.layer_idx, p.kv_idx) = (self.collection.0, &b, 1, 1);
        p.values = pkv_tensor {
            data: self.values.ptr(),
            dtype: DType::F32 as i32,
            ndim: 3,
            shape: [SCENE_ROWS as i64, 1, SCENE_WIDTH as i64, 0],
            stride: [0; 4],
        };
        let mut e = new_error();
        // SAFETY: live structs; device memory of the fake driver.
        let status = unsafe { pkv_kv_store(self.ctx.0, pkv_stream { native: stream.0 }, &p, workspace, &mut e) };
        if status == PKV_OK { Ok(()) } else { Err((status, text(&e.argument), text(&e.message), e.native_code)) }
    }

    /// Blocks and scales as they lie on the device.
    fn storage(&self) -> (Vec<u8>, Vec<u8>) {
        let mut o = self.options;
        // SAFETY: live structs.
        ok(|e| unsafe { pkv_collection_info(self.collection.0, &mut o, e) });
        (download(o.blocks.data, o.blocks.size), download(o.scales.data, o.scales.size))
    }

    /// Slots (block, slot) of layer 1's values with anything in them.
    fn written(&self) -> Vec<(usize, usize)> {
        let (blocks, scales) = self.storage();
        let rows = blocks.chunks_exact(SCENE_WIDTH).zip(scales.chunks_exact(4)).enumerate();
        let used = rows.filter(|(_, (row, scale))| row.iter().chain(*scale).any(|&x| x != 0));
        // Blocks are [block, kv, layer, slot].
        used.map(|(i, _)| {
            assert_eq!(i / 4 % 4, 3, "only values of layer 1");
            (i / 16, i % 4)
        })
        .collect()
    }
}

const NO_WORKSPACE: pkv_buffer = pkv_buffer { data: null_mut(), size: 0 };

/// Slots of the scene's batch: positions 1 .. 6 of the first sequence, 0 .. 3 of the second.
const SCENE_SLOTS: [(usize, usize); 8] = [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (5, 1), (5, 2), (5, 3)];

#[test]
fn device_memory_is_zeroed_written_and_given_back() {
    emulated("device_memory_is_zeroed_written_and_given_back", &[], || {
        {
            let scene = Scene::new();
            assert!(scene.written().is_empty(), "a new collection is zeroed");
            scene.store(Stream::NULL, NO_WORKSPACE).unwrap();
            assert_eq!(scene.written(), SCENE_SLOTS);
        }
        assert_eq!((count("contexts"), count("overruns")), (1, 0), "the test's own reference");
        release_memory();
        assert_eq!(count("allocations"), 0);
    });
}

#[test]
fn the_current_context_is_left_alone() {
    emulated("the_current_context_is_left_alone", &[], || {
        let scene = Scene::new();
        for current in [None, Some(())] {
            let before = set_current(current.is_some());
            scene.store(Stream::NULL, NO_WORKSPACE).unwrap();
            drop(Collection::new(&scene.ctx, &scene.options));
            assert_eq!(get_current(), before);
        }
    });
}

#[test]
fn calls_do_not_synchronise_and_replay_from_a_graph() {
    emulated("calls_do_not_synchronise_and_replay_from_a_graph", &[], || {
        let scene = Scene::new();
        let stream = Stream::new();
        let syncs = || ["cuStreamSynchronize", "cuCtxSynchronize", "cuMemAlloc_v2", "cuMemAllocAsync"].map(count);
        let before = syncs();
        // The first call of all, kernels not loaded yet, under the strictest kind of capture.
        stream.begin_capture();
        scene.store(stream, NO_WORKSPACE).unwrap();
        assert_eq!(syncs(), before);
        let graph = stream.end_capture();
        assert_eq!(graph.nodes(), 1);
        assert!(scene.written().is_empty(), "captured, not run");
        graph.launch();
        assert_eq!(scene.written(), SCENE_SLOTS);
        // The same graph with another batch: fewer tokens, other places.
        scene.row_offsets.upload_u32(&[0, 0, 2]);
        scene.cache_lengths.upload_u32(&[8, 3]);
        scene.table.upload_u32(&[9, 9, 3, 4]);
        graph.launch();
        let mut slots = SCENE_SLOTS.to_vec();
        slots.extend([(3, 3), (4, 0)]);
        slots.sort_unstable();
        assert_eq!(scene.written(), slots);
    });
}

#[test]
fn bad_batches_stay_inside_the_collection() {
    emulated("bad_batches_stay_inside_the_collection", &[], || {
        let scene = Scene::new();
        let store = || scene.store(Stream::NULL, NO_WORKSPACE).unwrap();
        scene.table.upload_u32(&[6, 2, u32::MAX, 1]); // block ids past the pool: those slots are skipped
        store();
        assert_eq!(scene.written(), [(2, 0), (2, 1)]);
        scene.table.upload_u32(&[5, 2, 0, 1]);
        scene.cache_lengths.upload_u32(&[u32::MAX, 1 << 31]); // pages past the table
        store();
        assert_eq!(scene.written(), [(2, 0), (2, 1)]);
        scene.cache_lengths.upload_u32(&[1, 0]);
        for offsets in [[0, 100, 50], [7, 3, 8], [u32::MAX, 0, u32::MAX], [5, 5, 4_000_000_000]] {
            scene.row_offsets.upload_u32(&offsets); // falling, past the rows of `values`
            store();
        }
        scene.written(); // still nothing but values of layer 1
        drop(scene);
        release_memory();
        assert_eq!((count("allocations"), count("overruns")), (0, 0));
    });
}

#[test]
fn the_host_cannot_read_device_memory() {
    // The tests above would not notice a library that reads its device arrays on the host, were this not so.
    let output = child("the_host_cannot_read_device_memory", &[], || {
        let memory = DeviceMemory::of_u32(&[1, 2, 3]);
        // SAFETY: none: it must end the process.
        let value = unsafe { memory.ptr().cast::<u32>().read_volatile() };
        println!("read {value}");
    });
    if let Some(output) = output {
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

// ---- faults ----

fn context_error(device: i32) -> (pkv_status, String, String, i32) {
    let mut options: pagedkv::abi::context::pkv_context_options = zeroed();
    options.struct_size = size_of_val(&options);
    (options.abi_version, options.backend, options.device) =
        (pagedkv::abi::version::PKV_ABI_VERSION, PKV_BACKEND_CUDA, device);
    let (mut ctx, mut e) = (null_mut(), new_error());
    // SAFETY: live structs.
    let status = unsafe { pagedkv::abi::context::pkv_context_create(&options, &mut ctx, &mut e) };
    assert!(ctx.is_null());
    (status, text(&e.argument), text(&e.message), e.native_code)
}

#[test]
fn no_driver() {
    emulated("no_driver", &[("LD_LIBRARY_PATH", "")], || {
        let (status, argument, message, native) = context_error(0);
        // A machine with a real driver but no device says so in the driver's words.
        assert_eq!((status, argument.as_str()), (PKV_ERR_NO_DEVICE, "options.backend"), "{message} {native}");
    });
}

#[test]
fn no_device() {
    emulated("no_device", &[("PKV_EMU_DEVICES", "0")], || {
        let (status, _, message, native) = context_error(0);
        assert_eq!((status, native), (PKV_ERR_NO_DEVICE, 100), "{message}");
        assert!(message.contains("CUDA_ERROR_NO_DEVICE"), "{message}");
    });
}

#[test]
fn an_old_driver() {
    emulated("an_old_driver", &[("LD_LIBRARY_PATH", "old")], || {
        let (status, _, message, _) = context_error(0);
        assert_eq!(status, PKV_ERR_NO_DEVICE, "{message}");
        assert!(message.contains("cuLibraryLoadData"), "{message}");
    });
}

#[test]
fn other_devices() {
    emulated("other_devices", &[("PKV_EMU_DEVICES", "2")], || {
        for device in [2, -1] {
            let (status, argument, message, _) = context_error(device);
            assert_eq!((status, argument.as_str()), (PKV_ERR_NO_DEVICE, "options.device"), "{message}");
        }
        drop(Context::with(|o| (o.backend, o.device) = (PKV_BACKEND_CUDA, 1)));
    });
}

#[test]
fn an_old_device() {
    emulated("an_old_device", &[("PKV_EMU_ARCH", "75")], || {
        let (status, _, message, _) = context_error(0);
        assert_eq!(status, PKV_ERR_UNSUPPORTED);
        assert!(message.contains("7.5"), "{message}");
        assert_eq!(count("contexts"), 0);
    });
}

#[test]
fn failing_calls_name_themselves_and_keep_their_code() {
    emulated("failing_calls_name_themselves_and_keep_their_code", &[], || {
        let scene = Scene::new();
        for (call, code, status) in [
            ("cuLibraryLoadData", 700, PKV_ERR_DEVICE),
            ("cuLibraryGetKernel", 500, PKV_ERR_DEVICE),
            ("cuKernelGetFunction", 700, PKV_ERR_DEVICE),
            ("cuLaunchKernel", 719, PKV_ERR_DEVICE),
            ("cuLaunchKernel", 2, PKV_ERR_NO_MEMORY),
            ("cuLaunchKernel", 123456, PKV_ERR_DEVICE), // a code no header knows
            ("cuCtxPushCurrent_v2", 201, PKV_ERR_DEVICE),
        ] {
            // Both images that a cold start tries must fail to load.
            let twice = if call == "cuLibraryLoadData" { format!(",{call}=2:{code}") } else { String::new() };
            inject(&format!("{call}=1:{code}{twice}"));
            let (got, _, message, native) = scene.store(Stream::NULL, NO_WORKSPACE).unwrap_err();
            assert_eq!((got, native), (status, code), "{call}: {message}");
            assert!(message.contains(call.trim_end_matches("_v2")) && message.contains(&code.to_string()), "{message}");
            inject("cuLibraryLoadData=1000000:1");
            assert!(scene.written().is_empty());
        }
        // Nothing of it sticks.
        scene.store(Stream::NULL, NO_WORKSPACE).unwrap();
        assert_eq!(scene.written(), SCENE_SLOTS);
    });
}

#[test]
fn no_memory() {
    emulated("no_memory", &[], || {
        let scene = Scene::new();
        for (call, code) in [("cuMemAlloc_v2", 2), ("cuMemsetD8Async", 700)] {
            let before = count("allocations");
            inject(&format!("{call}=1:{code}"));
            let mut out = null_mut();
            let mut e = new_error();
            // SAFETY: live structs.
            let status = unsafe { pkv_collection_create(scene.ctx.0, &scene.options, &mut out, &mut e) };
            let want = if code == 2 { PKV_ERR_NO_MEMORY } else { PKV_ERR_DEVICE };
            assert_eq!((status, e.native_code), (want, code), "{}", text(&e.message));
            assert_eq!(count("allocations"), before, "what was allocated before the failure is freed");
        }
    });
}

#[test]
#[cfg(not(feature = "cuda-fatbin"))]
fn the_compiler_fails() {
    emulated("the_compiler_fails", &[("PKV_EMU_NVRTC_FAIL", "1")], || {
        let scene = Scene::new();
        let (status, _, message, _) = scene.store(Stream::NULL, NO_WORKSPACE).unwrap_err();
        assert_eq!(status, PKV_ERR_UNSUPPORTED);
        assert!(message.contains("kv_store.cu") && message.contains("told to fail"), "{message}");
    });
}

#[test]
#[cfg(not(feature = "cuda-fatbin"))]
fn no_compiler() {
    emulated("no_compiler", &[("LD_LIBRARY_PATH", "driver-only")], || {
        let scene = Scene::new();
        let (status, _, message, _) = scene.store(Stream::NULL, NO_WORKSPACE).unwrap_err();
        assert_eq!(status, PKV_ERR_UNSUPPORTED, "{message}");
        assert!(message.contains("NVRTC"), "{message}");
        // The workspace query is how an engine asks beforehand.
        let mut p: pkv_merge_attention_params = zeroed();
        p.struct_size = size_of_val(&p);
        let t = [Tensor::new(DType::F32, &[1, 1, 8]), Tensor::new(DType::F32, &[1, 1])];
        (p.output_a, p.output_b, p.output) = (t[0].abi(), t[0].abi(), t[0].abi());
        (p.lse_a, p.lse_b) = (t[1].abi(), t[1].abi());
        let mut bytes = 0;
        // SAFETY: live structs.
        let (status, _, message) = call(|e| unsafe { (MERGE.size)(scene.ctx.0, &p, &mut bytes, e) }).unwrap_err();
        assert!(status == PKV_ERR_UNSUPPORTED && message.contains("NVRTC"), "{status} {message}");
    });
}

/// The machine code inside the library is what runs, for a card that it has code for and for one that must translate its PTX.
#[test]
#[cfg(feature = "cuda-fatbin")]
fn no_compiler_is_needed() {
    for arch in ["80", "130"] {
        let env = [("LD_LIBRARY_PATH", "driver-only"), ("PKV_EMU_ARCH", arch)];
        emulated("no_compiler_is_needed", &env, || {
            let scene = Scene::new();
            scene.store(Stream::NULL, NO_WORKSPACE).unwrap();
            assert_eq!(scene.written(), SCENE_SLOTS);
            assert_eq!((count("cuLibraryLoadData"), cache_files().len()), (1, 0));
        });
        if in_child("no_compiler_is_needed") {
            return;
        }
    }
}

/// NVRTC by path: its folder, the file, and what is not there.
#[test]
#[cfg(not(feature = "cuda-fatbin"))]
fn the_compiler_is_where_the_environment_says() {
    let name = "the_compiler_is_where_the_environment_says";
    for place in ["", "libnvrtc.so.13", "nowhere", "driver-only"] {
        let path = emulation().join(place);
        let env = [("LD_LIBRARY_PATH", "driver-only"), ("PAGEDKV_NVRTC", path.to_str().unwrap()), ("PLACE", place)];
        emulated(name, &env, || {
            let scene = Scene::new();
            match (std::env::var("PLACE").unwrap().as_str(), scene.store(Stream::NULL, NO_WORKSPACE)) {
                ("" | "libnvrtc.so.13", result) => {
                    result.unwrap();
                    assert_eq!(scene.written(), SCENE_SLOTS);
                }
                (_, result) => {
                    let (status, _, message, _) = result.unwrap_err();
                    assert_eq!(status, PKV_ERR_UNSUPPORTED, "{message}");
                    assert!(message.contains("PAGEDKV_NVRTC=/"), "{message}");
                }
            }
        });
        if in_child(name) {
            return;
        }
    }
}

/// A card newer than the compiler runs PTX, which is cached as machine code is.
#[test]
#[cfg(not(feature = "cuda-fatbin"))]
fn a_card_that_the_compiler_does_not_know() {
    emulated("a_card_that_the_compiler_does_not_know", &[("PKV_EMU_ARCH", "130")], || {
        let scene = Scene::new();
        scene.store(Stream::NULL, NO_WORKSPACE).unwrap();
        assert_eq!(scene.written(), SCENE_SLOTS);
        let files = cache_files();
        assert!(files.len() == 1 && files[0].extension().is_some_and(|e| e == "ptx"), "{files:?}");
        assert!(files[0].to_str().unwrap().contains("compute_80"), "{files:?}");
    });
}

#[test]
fn qkv_is_unsupported_and_says_so() {
    emulated("qkv_is_unsupported_and_says_so", &[(BACKEND, "cuda")], || {
        let ctx = on(PKV_BACKEND_CUDA);
        let mut o = Scene::new().options;
        (o.dtype, o.scale_dtype) = (DType::F32 as i32, 0);
        let collection = Collection::new(&ctx, &o);
        let weights = Tensor::new(DType::F32, &[SCENE_WIDTH, 32]);
        let mut w: pagedkv::abi::weight::pkv_gguf_weight_options = zeroed();
        w.struct_size = size_of_val(&w);
        (w.data, w.data_size) = (weights.buffer().data, weights.bytes);
        (w.rows, w.cols) = (SCENE_WIDTH as i64, 32);
        let mut weight = null_mut();
        // SAFETY: live structs.
        let created = call(|e| unsafe { pagedkv::abi::weight::pkv_gguf_weight_create(ctx.0, &w, &mut weight, e) });
        if let Err((status, ..)) = created {
            assert_eq!(status, PKV_ERR_UNSUPPORTED);
            return;
        }
        let hidden = Tensor::new(DType::F32, &[0, 32]);
        let out = Tensor::new(DType::F32, &[0, SCENE_WIDTH]);
        let b = Batch::default().abi();
        let mut p: pagedkv::abi::qkv::pkv_qkv_matmul_gguf_params = zeroed();
        p.struct_size = size_of_val(&p);
        (p.collection, p.batch) = (collection.0, &b);
        (p.q_weight, p.k_weight, p.v_weight) = (weight, weight, weight);
        (p.hidden_state, p.q_output) = (hidden.abi(), out.abi());
        assert_eq!(QKV.call(&ctx, &p, true).unwrap_err().0, PKV_ERR_UNSUPPORTED);
        // SAFETY: made above, destroyed once.
        unsafe { pagedkv::abi::weight::pkv_gguf_weight_destroy(weight) };
    });
}

// ---- the cache of compiled kernels ----

#[test]
#[cfg(not(feature = "cuda-fatbin"))]
fn eight_threads_compile_once() {
    emulated("eight_threads_compile_once", &[], || {
        let scene = Scene::new();
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| scene.store(Stream::NULL, NO_WORKSPACE).unwrap());
            }
        });
        assert_eq!((compilations(), count("cuLibraryLoadData"), count("cuLaunchKernel")), (1, 1, 8));
        assert_eq!(scene.written(), SCENE_SLOTS);
    });
}

fn cache_files() -> Vec<std::path::PathBuf> {
    let directory = std::env::var("PAGEDKV_CACHE_DIR").unwrap();
    std::fs::read_dir(directory).map_or(vec![], |d| d.map(|e| e.unwrap().path()).collect())
}

#[test]
#[cfg(not(feature = "cuda-fatbin"))]
fn a_second_process_finds_the_first_ones_code() {
    let cache = temporary("second_process");
    let name = "a_second_process_finds_the_first_ones_code";
    for (run, compiled) in ["cold", "warm", "damaged", "mended"].into_iter().zip(["1", "0", "1", "0"]) {
        if run == "damaged" {
            for file in std::fs::read_dir(&cache).into_iter().flatten() {
                std::fs::write(file.unwrap().path(), b"half a file").unwrap();
            }
        }
        let env = [("PAGEDKV_CACHE_DIR", cache.to_str().unwrap()), ("EXPECTED", compiled)];
        emulated(name, &env, || {
            let scene = Scene::new();
            scene.store(Stream::NULL, NO_WORKSPACE).unwrap();
            assert_eq!(scene.written(), SCENE_SLOTS);
            assert_eq!(compilations().to_string(), std::env::var("EXPECTED").unwrap());
            assert_eq!(cache_files().len(), 1, "{:?}", cache_files());
        });
        if in_child(name) {
            return;
        }
    }
}

#[test]
#[cfg(not(feature = "cuda-fatbin"))]
fn processes_share_a_cold_cache() {
    let cache = temporary("shared_cache");
    let name = "processes_share_a_cold_cache";
    let one = || {
        emulated(name, &[("PAGEDKV_CACHE_DIR", cache.to_str().unwrap())], || {
            let scene = Scene::new();
            scene.store(Stream::NULL, NO_WORKSPACE).unwrap();
            assert_eq!(scene.written(), SCENE_SLOTS);
            assert!(cache_files().iter().any(|f| f.extension().is_some_and(|e| e == "cubin")));
        });
    };
    if in_child(name) {
        return one();
    }
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(one);
        }
    });
    let files: Vec<_> = std::fs::read_dir(&cache).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
}

#[test]
fn an_unwritable_cache_is_no_obstacle() {
    emulated("an_unwritable_cache_is_no_obstacle", &[("PAGEDKV_CACHE_DIR", "/dev/null/nowhere")], || {
        let scene = Scene::new();
        scene.store(Stream::NULL, NO_WORKSPACE).unwrap();
        assert_eq!(scene.written(), SCENE_SLOTS);
    });
}

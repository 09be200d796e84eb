//! The golden cases (ctests/golden/*.safetensors) through the C API: inputs, and results of an independent float64 reference. Every case runs on every
//! instruction set, at 1 and 2 threads, with and without a given workspace; the last two must not change a bit.

use crate::api::*;
use pagedkv::abi::collection::pkv_collection_options;
use pagedkv::abi::prefill::PKV_PREFILL_FINISHED;
use pagedkv::abi::types::pkv_buffer;
use pagedkv::abi::weight::*;
use pagedkv::cpu::isa::Level;
use pagedkv::dtype::DType;
use pagedkv::gguf;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::Path;
use std::ptr::null_mut;

struct Case {
    name: String,
    meta: HashMap<String, String>,
    tensors: HashMap<String, Tensor>,
}

impl Case {
    fn load(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let meta = header.metadata().clone().unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.tensors().into_iter().map(|(name, t)| {
            let dtype = match t.dtype() {
                Dtype::F32 => DType::F32,
                Dtype::F16 => DType::F16,
                Dtype::BF16 => DType::BF16,
                Dtype::F8_E4M3 => DType::F8E4M3,
                Dtype::F8_E5M2 => DType::F8E5M2,
                Dtype::U8 => DType::U8,
                Dtype::U32 => DType::U32,
                Dtype::I32 => DType::I32,
                d => panic!("dtype {d:?} in {}", path.display()),
            };
            (name, Tensor::from_bytes(dtype, t.shape(), t.data()))
        });
        Case { name: path.file_stem().unwrap().to_str().unwrap().into(), meta, tensors: tensors.collect() }
    }

    fn get(&self, key: &str) -> &str {
        self.meta.get(key).unwrap_or_else(|| panic!("{} has no {key}", self.name))
    }

    fn num<T: std::str::FromStr<Err: std::fmt::Debug>>(&self, key: &str) -> T {
        self.get(key).parse().unwrap()
    }

    fn tensor(&self, key: &str) -> &Tensor {
        self.tensors.get(key).unwrap_or_else(|| panic!("{} has no {key}", self.name))
    }

    fn abi(&self, key: &str) -> pagedkv::abi::types::pkv_tensor {
        self.tensors.get(key).map_or_else(zeroed, Tensor::abi)
    }

    fn batch(&self) -> Batch {
        let table = self.tensor("lookup_table");
        Batch {
            row_offsets: self.tensor("row_offsets").to_u32(),
            cache_lengths: self.tensor("cache_lengths").to_u32(),
            table: table.to_u32(),
            max_pages: table.shape[1] as u32,
        }
    }

    fn dtype(&self, key: &str) -> DType {
        match self.get(key) {
            "f32" => DType::F32,
            "f16" => DType::F16,
            "bf16" => DType::BF16,
            "e4m3" => DType::F8E4M3,
            "e5m2" => DType::F8E5M2,
            d => panic!("{d} in {}", self.name),
        }
    }

    fn rope(&self) -> i32 {
        if self.get("interleaved") == "1" { 0 } else { 1 }
    }
}

/// A case's cache: blocks and scales as they were before, in a collection over them.
#[derive(Clone)]
struct Cache {
    blocks: Tensor,
    scales: Option<Tensor>,
    options: pkv_collection_options,
}

impl Cache {
    fn new(case: &Case) -> Self {
        let find = |a: &str, b: &str| case.tensors.get(a).or(case.tensors.get(b)).cloned();
        let blocks = find("blocks_before", "blocks").unwrap();
        let scale_dtype = match case.meta.get("scale_dtype").map(String::as_str) {
            Some("bf16") => DType::BF16,
            Some("e8m0") => DType::F8E8M0,
            _ => DType::F32,
        };
        // Scales are written as f32 numbers whatever the collection holds.
        let scales = find("scales_before", "scales").map(|s| Tensor::from_f32(scale_dtype, &s.shape, &s.to_f32()));
        let [num_blocks, kv, layers, page, heads, head_size] = blocks.shape[..] else {
            panic!("blocks are six-dimensional")
        };
        let granularity = case.meta.get("quantization_granularity").map_or(0, |g| g.parse().unwrap());
        let options = pkv_collection_options {
            struct_size: size_of::<pkv_collection_options>(),
            dtype: blocks.dtype as i32,
            scale_dtype: scales.as_ref().map_or(0, |s| s.dtype as i32),
            num_blocks: num_blocks as u32,
            num_layers: layers as u32,
            page_size: page as u32,
            num_heads: heads as u32,
            head_size: head_size as u32,
            is_mla: (kv == 1) as u32,
            quantization_granularity: if scales.is_some() { granularity } else { 0 },
            ..zeroed()
        };
        Cache { blocks, scales, options }
    }

    fn collection(&self, ctx: &Context) -> Collection {
        let mut options = self.options;
        options.blocks = self.blocks.buffer();
        options.scales = self.scales.as_ref().map_or(pkv_buffer { data: null_mut(), size: 0 }, Tensor::buffer);
        Collection::new(ctx, &options)
    }

    fn row_len(&self) -> usize {
        (self.options.num_heads * self.options.head_size) as usize
    }

    /// First element of a slot's row.
    fn row(&self, kv: usize, layer: usize, block: usize, slot: usize) -> usize {
        let o = &self.options;
        let planes = if o.is_mla == 1 { 1 } else { 2 };
        (((block * planes + kv) * o.num_layers as usize + layer) * o.page_size as usize + slot) * self.row_len()
    }

    /// The same for scales.
    fn scale_row(&self, kv: usize, layer: usize, block: usize, slot: usize) -> usize {
        let groups = *self.scales.as_ref().unwrap().shape.last().unwrap();
        self.row(kv, layer, block, slot) / self.options.head_size as usize * groups
    }

    /// (block, slot) of every new token.
    fn new_slots(&self, batch: &Batch) -> Vec<(usize, usize)> {
        (0..batch.tokens())
            .map(|t| {
                let (b, p) = batch.position(t);
                batch.locate(b, p, self.options.page_size as usize)
            })
            .collect()
    }

    /// NaN wherever no sequence has a position: it must change nothing.
    fn poison(&mut self, batch: &Batch, layer: usize) {
        let o = self.options;
        let mut owned = vec![false; (o.num_blocks * o.page_size) as usize];
        for b in 0..batch.cache_lengths.len() {
            let length = (batch.cache_lengths[b] + batch.row_offsets[b + 1] - batch.row_offsets[b]) as usize;
            for p in 0..length {
                let (block, slot) = batch.locate(b, p, o.page_size as usize);
                owned[block * o.page_size as usize + slot] = true;
            }
        }
        let size = self.blocks.dtype.size();
        for (i, _) in owned.iter().enumerate().filter(|(_, owned)| !**owned) {
            let (block, slot) = (i / o.page_size as usize, i % o.page_size as usize);
            let row = self.row(0, layer, block, slot) * size;
            let bytes = self.row_len() * size;
            self.blocks.bytes_mut()[row..][..bytes].fill(0xff);
            let scale_row = self.scales.as_ref().map(|_| self.scale_row(0, layer, block, slot) * 4);
            if let (Some(scales), Some(row)) = (&mut self.scales, scale_row) {
                scales.bytes_mut()[row..][..4].fill(0xff);
            }
        }
    }
}

/// Every way a case is run; `f(ctx, given workspace)` gives the bits of all results, which must not differ.
fn same_bits(case: &Case, mut f: impl FnMut(&Context, bool) -> Vec<u8>) {
    let mut first: Option<Vec<u8>> = None;
    for threads in [1, 2] {
        let ctx = Context::new(threads);
        for given in [false, true] {
            let bits = f(&ctx, given);
            assert!(
                first.get_or_insert(bits.clone()) == &bits,
                "{}: other bits at {threads} threads, workspace {given}",
                case.name
            );
        }
    }
}

/// All bits but those of the slots' rows are as before.
fn unwritten_bits_stay(
    case: &Case,
    cache: &Cache,
    before: &Cache,
    slots: &[(usize, usize)],
    planes: &[(usize, usize)],
) {
    let check = |what: &str, now: &Tensor, before: &Tensor, row: &dyn Fn(usize, usize, usize, usize) -> usize| {
        let (size, row_len) = (before.dtype.size(), row(0, 0, 0, 1) - row(0, 0, 0, 0));
        let mut written = vec![false; before.bytes / size];
        for &(block, slot) in slots {
            for &(kv, layer) in planes {
                written[row(kv, layer, block, slot)..][..row_len].fill(true);
            }
        }
        for (i, written) in written.iter().enumerate() {
            let at = i * size..(i + 1) * size;
            let same = now.bytes()[at.clone()] == before.bytes()[at];
            assert!(*written || same, "{}: {what}[{i}] was not to be written", case.name);
        }
    };
    check("blocks", &cache.blocks, &before.blocks, &|kv, layer, block, slot| cache.row(kv, layer, block, slot));
    if let (Some(now), Some(before)) = (&cache.scales, &before.scales) {
        check("scales", now, before, &|kv, layer, block, slot| cache.scale_row(kv, layer, block, slot));
    }
}

/// Rounded results: nearly all equal to the bit, the rest one step of the dtype away.
fn nearly_equal(case: &Case, what: &str, have: &Tensor, want: &Tensor) {
    assert_eq!(have.dtype, want.dtype);
    if have.dtype == DType::F32 {
        let error = relative_error(&have.to_f32(), &want.to_f32());
        assert!(error < 1e-5, "{}: {what} is off by {error:e}", case.name);
        return;
    }
    let (a, b) = (have.to_f32(), want.to_f32());
    let step = match have.dtype {
        DType::BF16 => 1.0 / 128.0,
        DType::F16 => 1.0 / 1024.0,
        _ => 1.0 / 7.0,
    };
    let mut differ = 0;
    for (i, (a, b)) in a.iter().zip(&b).enumerate() {
        if a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan()) {
            differ += 1;
            assert!((a - b).abs() <= step * b.abs().max(0.002), "{}: {what}[{i}] is {a}, must be {b}", case.name);
        }
    }
    assert!(differ * 100 <= a.len(), "{}: {differ} of {} elements of {what} differ", case.name, a.len());
}

fn store(case: &Case) {
    let batch = case.batch();
    let (kv, layer) = (case.num("kv_idx"), case.num("layer_idx"));
    same_bits(case, |ctx, given| {
        let cache = Cache::new(case);
        let collection = cache.collection(ctx);
        let mut params: pagedkv::abi::kv::pkv_kv_store_params = zeroed();
        params.struct_size = size_of_val(&params);
        params.collection = collection.0;
        let b = batch.abi();
        params.batch = &b;
        (params.layer_idx, params.kv_idx) = (layer, kv);
        params.values = case.abi("values");
        KV_STORE.ok(ctx, &params, given);
        let want = case.tensor("blocks_after");
        for (i, (a, b)) in cache.blocks.to_f32().iter().zip(want.to_f32()).enumerate() {
            assert!(
                a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
                "{}: blocks[{i}] is {a}, must be {b}",
                case.name
            );
        }
        if let Some(scales) = &cache.scales {
            assert_eq!(scales.to_f32(), case.tensor("scales_after").to_f32(), "{}", case.name);
        }
        cache.blocks.bytes().to_vec()
    });
}

fn gather(case: &Case) {
    let batch = case.batch();
    same_bits(case, |ctx, given| {
        let cache = Cache::new(case);
        let collection = cache.collection(ctx);
        let want = case.tensor("out");
        let out = Tensor::new(want.dtype, &want.shape);
        let (rows, offsets) = (case.tensor("buffer_row_offsets").to_u32(), case.tensor("cache_offsets").to_u32());
        let mut params: pagedkv::abi::kv::pkv_kv_gather_params = zeroed();
        params.struct_size = size_of_val(&params);
        params.collection = collection.0;
        let b = batch.abi();
        params.batch = &b;
        (params.layer_idx, params.kv_idx) = (case.num("layer_idx"), case.num("kv_idx"));
        (params.buffer_row_offsets, params.cache_offsets) = (rows.as_ptr(), offsets.as_ptr());
        params.out = out.abi();
        KV_GATHER.ok(ctx, &params, given);
        assert_eq!(out.bytes(), want.bytes(), "{}", case.name);
        out.bytes().to_vec()
    });
}

fn merge(case: &Case) {
    for alias in [false, true] {
        same_bits(case, |ctx, given| {
            let want = case.tensor("output");
            let mut a = case.tensor("output_a").clone();
            let lse_a = case.tensor("lse_a").clone();
            let (output, lse) = if alias {
                (a.clone(), lse_a.clone())
            } else {
                (Tensor::new(want.dtype, &want.shape), Tensor::new(DType::F32, &want.shape[..2]))
            };
            let mut params: pagedkv::abi::merge::pkv_merge_attention_params = zeroed();
            params.struct_size = size_of_val(&params);
            params.output_a = if alias { output.abi() } else { a.abi() };
            params.lse_a = if alias { lse.abi() } else { lse_a.abi() };
            (params.output_b, params.lse_b) = (case.abi("output_b"), case.abi("lse_b"));
            (params.output, params.lse) = (output.abi(), lse.abi());
            MERGE.ok(ctx, &params, given);
            a.bytes_mut().fill(0);
            assert!(relative_error(&output.to_f32(), &want.to_f32()) < 1e-6, "{}", case.name);
            assert!(relative_error(&lse.to_f32(), &case.tensor("lse").to_f32()) < 1e-6, "{}", case.name);
            [output.bytes(), lse.bytes()].concat()
        });
    }
}

fn rope(case: &Case) {
    let batch = case.batch();
    let layer: usize = case.num("layer_idx");
    for in_place in [false, true] {
        same_bits(case, |ctx, given| {
            let cache = Cache::new(case);
            let collection = cache.collection(ctx);
            let q = case.tensor("q_rope").clone();
            let output = if in_place { q.clone() } else { Tensor::new(q.dtype, &q.shape) };
            let mut params: pagedkv::abi::rope::pkv_mla_rope_rmsnorm_quantize_params = zeroed();
            params.struct_size = size_of_val(&params);
            params.collection = collection.0;
            let b = batch.abi();
            params.batch = &b;
            (params.layer_idx, params.rope, params.epsilon) = (layer as u32, case.rope(), case.num("epsilon"));
            params.q_rope = if in_place { output.abi() } else { q.abi() };
            params.q_rope_output = output.abi();
            (params.kv, params.freqs_cis, params.gamma) = (case.abi("kv"), case.abi("freqs_cis"), case.abi("gamma"));
            ROPE.ok(ctx, &params, given);
            nearly_equal(case, "q_rope_output", &output, case.tensor("q_rope_output"));
            nearly_equal(case, "blocks", &cache.blocks, case.tensor("blocks_after"));
            unwritten_bits_stay(case, &cache, &Cache::new(case), &cache.new_slots(&batch), &[(0, layer)]);
            if let Some(scales) = &cache.scales {
                assert!(
                    relative_error(&scales.to_f32(), &case.tensor("scales_after").to_f32()) < 1e-2,
                    "{}",
                    case.name
                );
            }
            [output.bytes(), cache.blocks.bytes(), cache.scales.as_ref().map_or(&[], Tensor::bytes)].concat()
        });
    }
}

/// The case's table, with NaN up to the batch's bounds: a device context, which knows no more of the positions, asks for that many rows.
fn rotations(case: &Case, batch: &pagedkv::abi::batch::pkv_batch) -> Option<Tensor> {
    let table = case.tensors.get("freqs_cis")?;
    let mut x = table.to_f32();
    let rows = table.shape[0].max((batch.max_seq_length + batch.max_cache_length) as usize);
    x.resize(rows * table.shape[1], f32::NAN);
    Some(Tensor::from_f32(table.dtype, &[rows, table.shape[1]], &x))
}

fn prefill(case: &Case) {
    let batch = case.batch();
    let layer: usize = case.num("layer_idx");
    let dtype = case.dtype("dtype");
    for poison in [false, true] {
        same_bits(case, |ctx, given| {
            let mut cache = Cache::new(case);
            if poison {
                cache.poison(&batch, layer);
            }
            let before = cache.clone();
            let collection = cache.collection(ctx);
            let q = case.tensor("q").clone();
            let shape = &case.tensor("output").shape;
            let (output, lse) = (Tensor::new(dtype, shape), Tensor::new(DType::F32, &shape[..2]));
            let (rows, offsets) = (case.tensor("buffer_row_offsets").to_u32(), case.tensor("cache_offsets").to_u32());
            let b = batch.abi();
            let freqs_cis = rotations(case, &b);
            let mut params: pagedkv::abi::prefill::pkv_mla_prefill_fp8_params = zeroed();
            params.struct_size = size_of_val(&params);
            params.collection = collection.0;
            params.batch = &b;
            (params.layer_idx, params.rope, params.epsilon, params.scale) =
                (layer as u32, case.rope(), case.num("epsilon"), case.num("scale"));
            params.mask = match case.get("mask") {
                "causal" => 0,
                "null" => 1,
                "sliding_window_causal" => 2,
                "chunked_causal" => 3,
                m => panic!("mask {m}"),
            };
            params.score_mod = (case.get("score_mod") == "alibi") as i32;
            (params.window, params.chunk, params.flags) = (case.num("window"), case.num("chunk"), case.num("flags"));
            params.m_scale_granularity = case.num("m_scale_granularity");
            params.n_scale_granularity = case.num("n_scale_granularity");
            params.k_scale_granularity = case.num("k_scale_granularity");
            (params.buffer_length, params.buffer_row_offsets, params.cache_offsets) =
                (case.num("buffer_length"), rows.as_ptr(), offsets.as_ptr());
            (params.q, params.kv) = (q.abi(), case.abi("kv"));
            (params.freqs_cis, params.kv_norm_gamma) =
                (freqs_cis.as_ref().map_or_else(zeroed, Tensor::abi), case.abi("kv_norm_gamma"));
            (params.kv_b_proj, params.kv_b_proj_scale) = (case.abi("kv_b_proj"), case.abi("kv_b_proj_scale"));
            (params.output, params.lse) = (output.abi(), lse.abi());
            PREFILL.ok(ctx, &params, given);

            let bound = match dtype {
                DType::BF16 => 1e-2,
                DType::F16 => 2e-3,
                _ => 1e-4,
            };
            let error = relative_error(&output.to_f32(), &case.tensor("output").to_f32());
            assert!(error <= bound, "{}: output is off by {error:e}", case.name);
            let error = relative_error(&lse.to_f32(), &case.tensor("lse").to_f32());
            assert!(error <= bound, "{}: lse is off by {error:e}", case.name);
            nearly_equal(case, "q", &q, case.tensor("q_after"));
            let finished = params.flags & PKV_PREFILL_FINISHED != 0;
            let slots = if finished { vec![] } else { cache.new_slots(&batch) };
            unwritten_bits_stay(case, &cache, &before, &slots, &[(0, layer)]);
            if !poison {
                nearly_equal(case, "blocks", &cache.blocks, case.tensor("blocks_after"));
            }
            [output.bytes(), lse.bytes(), q.bytes()].concat()
        });
    }
}

fn indexer(case: &Case) {
    let batch = case.batch();
    let layer: usize = case.num("layer_idx");
    let want_scores = case.tensor("scores");
    let columns = want_scores.shape[1];
    let all = want_scores.to_f32();
    for poison in [false, true] {
        same_bits(case, |ctx, given| {
            let mut cache = Cache::new(case);
            if poison {
                cache.poison(&batch, layer);
            }
            let collection = cache.collection(ctx);
            let want = case.tensor("output_indices");
            let mut indices = Tensor::new(DType::I32, &want.shape);
            indices.bytes_mut().fill(0x5a);
            let scores = Tensor::new(DType::F32, &want.shape);
            let mut params: pagedkv::abi::indexer::pkv_mla_indexer_fp8_params = zeroed();
            params.struct_size = size_of_val(&params);
            params.collection = collection.0;
            let b = batch.abi();
            params.batch = &b;
            (params.layer_idx, params.mask, params.top_k) =
                (layer as u32, (case.get("mask") == "null") as i32, case.num("top_k"));
            (params.q, params.q_s) = (case.abi("q"), case.abi("q_s"));
            (params.output_indices, params.output_scores) = (indices.abi(), scores.abi());
            INDEXER.ok(ctx, &params, given);
            let (have, want) = (indices.to_u32(), want.to_u32());
            if case.get("exact") == "1" {
                assert_eq!(have, want, "{}", case.name);
            }
            let top_k: usize = case.num("top_k");
            for (i, (&have, &want)) in have.iter().zip(&want).enumerate() {
                let row = &all[i / top_k * columns..][..columns];
                let got = scores.to_f32()[i];
                assert_eq!(have == u32::MAX, want == u32::MAX, "{}: index {i}", case.name);
                if have == u32::MAX {
                    assert_eq!(got, f32::NEG_INFINITY);
                    continue;
                }
                // Where scores are a rounding apart another key may stand here, but its score is as good.
                let (a, b) = (row[have as usize], row[want as usize]);
                let close =
                    |x: f32, y: f32| x == y || (x.is_nan() && y.is_nan()) || (x - y).abs() <= 1e-4 * y.abs().max(1e-3);
                assert!(
                    close(a, b) && close(got, a),
                    "{}: index {i} is key {have} ({a}), must be {want} ({b}); score {got}",
                    case.name
                );
            }
            [indices.bytes(), scores.bytes()].concat()
        });
    }
}

struct Weight {
    handle: *mut pkv_gguf_weight,
}

impl Weight {
    fn new(ctx: &Context, encoding: i32, raw: &Tensor, cols: usize, flags: u32) -> Self {
        let mut options: pkv_gguf_weight_options = zeroed();
        options.struct_size = size_of_val(&options);
        options.data = raw.abi().data;
        options.data_size = raw.bytes;
        (options.rows, options.cols) = (raw.shape[0] as i64, cols as i64);
        (options.encoding, options.flags) = (encoding, flags);
        let mut handle = null_mut();
        // SAFETY: live structs.
        ok(|e| unsafe { pkv_gguf_weight_create(ctx.0, &options, &mut handle, e) });
        Weight { handle }
    }
}

impl Drop for Weight {
    fn drop(&mut self) {
        // SAFETY: made by pkv_gguf_weight_create, destroyed once.
        unsafe { pkv_gguf_weight_destroy(self.handle) }
    }
}

/// ‖error‖ / ‖ref‖ that exact arithmetic makes of `x` rounded to 8 bits a block: round to nearest, symmetric, `max|x| / 127` a step.
fn ideal_error(format: &gguf::Format, raw: &Tensor, x: &[f32], cols: usize) -> f64 {
    let mut w = vec![0.0; cols];
    let (mut error, mut norm) = (0.0, 0.0);
    for row in raw.bytes().chunks_exact(raw.shape[1]) {
        gguf::decode_row(format, row, &mut w);
        for x in x.chunks_exact(cols) {
            let (mut exact, mut rounded) = (0.0f64, 0.0f64);
            for (x, w) in x.chunks(format.activation_block.max(1)).zip(w.chunks(format.activation_block.max(1))) {
                let d = x.iter().fold(0.0f64, |m, &x| m.max((x as f64).abs())) / 127.0;
                for (&x, &w) in x.iter().zip(w) {
                    exact += x as f64 * w as f64;
                    rounded += if d > 0.0 { (x as f64 / d).round_ties_even() * d * w as f64 } else { 0.0 };
                }
            }
            error += (exact - rounded).powi(2);
            norm += exact * exact;
        }
    }
    (error / norm).sqrt()
}

fn qkv(case: &Case) {
    let batch = case.batch();
    let layer: usize = case.num("layer_idx");
    let hidden = case.tensor("hidden_state");
    let cols = hidden.shape[1];
    let x = hidden.to_f32();
    let encoding = |key: &str| gguf::FORMATS.iter().find(|f| f.name == case.get(key)).unwrap();
    let formats = ["encoding_q", "encoding_k", "encoding_v"].map(encoding);
    let weights = ["q_weight", "k_weight", "v_weight"].map(|w| case.tensor(w));
    for compute in [0, 1] {
        let bounds = [0, 1, 2].map(|i| match compute {
            0 if formats[i].activation_block > 0 => 1.1 * ideal_error(formats[i], weights[i], &x, cols),
            _ => 1e-5,
        });
        for flags in [0, PKV_WEIGHT_PACK] {
            same_bits(case, |ctx, given| {
                let cache = Cache::new(case);
                let collection = cache.collection(ctx);
                let handles = [0, 1, 2].map(|i| Weight::new(ctx, formats[i].id, weights[i], cols, flags));
                let q = Tensor::new(DType::F32, &case.tensor("q_output").shape);
                let mut params: pagedkv::abi::qkv::pkv_qkv_matmul_gguf_params = zeroed();
                params.struct_size = size_of_val(&params);
                params.collection = collection.0;
                let b = batch.abi();
                params.batch = &b;
                (params.layer_idx, params.compute) = (layer as u32, compute);
                [params.q_weight, params.k_weight, params.v_weight] = [0, 1, 2].map(|i| handles[i].handle.cast_const());
                (params.hidden_state, params.q_output) = (hidden.abi(), q.abi());
                (params.q_bias, params.k_bias, params.v_bias) =
                    (case.abi("q_bias"), case.abi("k_bias"), case.abi("v_bias"));
                QKV.ok(ctx, &params, given);

                let check = |what: &str, have: &[f32], want: &str, bound: f64| {
                    let error = relative_error(have, &case.tensor(want).to_f32());
                    assert!(
                        error <= bound,
                        "{}: {what} is off by {error:e}, bound {bound:e}, compute {compute}, flags {flags}",
                        case.name
                    );
                };
                check("q", &q.to_f32(), "q_output", bounds[0]);
                let slots = cache.new_slots(&batch);
                unwritten_bits_stay(case, &cache, &Cache::new(case), &slots, &[(0, layer), (1, layer)]);
                let rounding = match cache.blocks.dtype {
                    DType::F32 => 0.0,
                    DType::BF16 => 2.5e-3,
                    _ => 4e-2,
                };
                for (kv, want) in [(0, "k_output"), (1, "v_output")] {
                    let rows: Vec<f32> =
                        slots.iter().flat_map(|&(block, slot)| dequantised(&cache, kv, layer, block, slot)).collect();
                    check(want, &rows, want, bounds[kv + 1] + rounding);
                }
                if compute == 1 {
                    nearly_equal(case, "blocks", &cache.blocks, case.tensor("blocks_after"));
                    if let Some(scales) = &cache.scales {
                        let error = relative_error(&scales.to_f32(), &case.tensor("scales_after").to_f32());
                        assert!(error < 1e-5, "{}: scales are off by {error:e}", case.name);
                    }
                }
                [q.bytes(), cache.blocks.bytes(), cache.scales.as_ref().map_or(&[], Tensor::bytes)].concat()
            });
        }
    }
}

/// A slot's row, times its scales.
fn dequantised(cache: &Cache, kv: usize, layer: usize, block: usize, slot: usize) -> Vec<f32> {
    let start = cache.row(kv, layer, block, slot);
    let mut row = cache.blocks.to_f32()[start..][..cache.row_len()].to_vec();
    if let Some(scales) = &cache.scales {
        let (head_size, groups) = (cache.options.head_size as usize, *scales.shape.last().unwrap());
        let granularity = cache.options.quantization_granularity as usize;
        let all = scales.to_f32();
        for (i, x) in row.iter_mut().enumerate() {
            *x *= all[cache.scale_row(kv, layer, block, slot) + i / head_size * groups + i % head_size / granularity];
        }
    }
    row
}

/// Every case whose op is asked for, at every level; gives how many ran of each op.
pub fn run(levels: &[Level], wanted: impl Fn(&str) -> bool) -> HashMap<String, usize> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("ctests/golden");
    let mut paths: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    paths.sort();
    let mut ran = HashMap::<String, usize>::new();
    let cases: Vec<Case> = paths.iter().filter(|p| !p.ends_with("gguf.safetensors")).map(|p| Case::load(p)).collect();
    let cases: Vec<Case> = cases.into_iter().filter(|case| wanted(case.get("op"))).collect();
    for (isa, case) in levels.iter().flat_map(|isa| cases.iter().map(move |case| (isa, case))) {
        // SAFETY: the one test of this process, and no other thread runs here.
        unsafe { std::env::set_var(pagedkv::cpu::isa::VARIABLE, isa.name()) };
        let run = match case.get("op") {
            "kv_store_ragged" => store,
            "kv_gather" => gather,
            "merge_attention" => merge,
            "mla_rope_rmsnorm_quantize" => rope,
            "mla_prefill_fp8" => prefill,
            "mla_indexer_ragged_fp8" => indexer,
            "qkv_matmul_ragged_paged_gguf" => qkv,
            op => panic!("{}: no such op {op}", case.name),
        };
        run(case);
        *ran.entry(case.get("op").to_string()).or_default() += 1;
    }
    ran
}

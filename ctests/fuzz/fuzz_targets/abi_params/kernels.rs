//! A good call of each kernel, of a small random shape.

use super::call::{ArrayField, Call, Image, TensorField, Writes};
use super::gguf_random::random_rows;
use super::source::Source;
use super::world::{Wanted, World, context};
use pagedkv::abi::indexer::*;
use pagedkv::abi::kv::*;
use pagedkv::abi::merge::*;
use pagedkv::abi::prefill::*;
use pagedkv::abi::qkv::*;
use pagedkv::abi::rope::*;
use pagedkv::abi::status::PKV_OK;
use pagedkv::abi::types::*;
use pagedkv::abi::weight::*;
use pagedkv::gguf::FORMATS;
use std::mem::offset_of;
use std::ptr::{null, null_mut};

const FLOATS: &[i32] = &[PKV_F32, PKV_F16, PKV_BF16];
const CACHES: &[i32] = &[PKV_F32, PKV_F16, PKV_BF16, PKV_F8_E4M3, PKV_F8_E5M2];
const SCALES: &[i32] = &[0, PKV_F32, PKV_BF16, PKV_F8_E8M0];
const ABSENT: pkv_tensor = pkv_tensor { data: null_mut(), dtype: 0, ndim: 0, shape: [0; 4], stride: [0; 4] };

/// A description without memory: contiguous, or with gaps between rows; a ragged one may have rows to spare.
fn tensor(source: &mut Source<'_>, dtype: i32, shape: &[usize], ragged: bool) -> pkv_tensor {
    let mut t = pkv_tensor { dtype, ndim: shape.len() as i32, ..ABSENT };
    for (to, &n) in t.shape.iter_mut().zip(shape) {
        *to = n as i64;
    }
    if ragged {
        t.shape[0] += source.pick(&[0, 0, 1, 3]);
    }
    if source.below(3) == 1 {
        let last = shape.len() - 1;
        t.stride[last] = 1;
        for d in (0..last).rev() {
            t.stride[d] = t.stride[d + 1] * t.shape[d + 1].max(1) + source.below(4) as i64;
        }
    }
    t
}

macro_rules! field {
    ($params:ident . $name:ident, $writes:expr) => {
        field!($params.$name, $writes, None)
    };
    ($params:ident . $name:ident, $writes:expr, $alias:expr) => {
        TensorField { name: stringify!($name), offset: offset_of!($params, $name), writes: $writes, alias: $alias }
    };
}

/// A Call with the names and places that all params structs of kernels share.
macro_rules! call {
    ($run:ident, $query:ident, $params:expr, $tensors:expr) => {
        Call {
            name: stringify!($run),
            // SAFETY: the caller of these passes on what the header demands.
            query: |ctx, params, bytes, err| unsafe { $query(ctx, params.cast(), bytes, err) },
            // SAFETY: as above.
            run: |ctx, stream, params, workspace, err| unsafe { $run(ctx, stream, params.cast(), workspace, err) },
            params: Image::of(&$params),
            tensors: $tensors,
            arrays: Vec::new(),
            handles: Vec::new(),
            batch: None,
            stores: |_| Vec::new(),
            layer_idx: None,
            faults: Vec::new(),
            spoilt: false,
        }
    };
    ($type:ident, $world:expr, $run:ident, $query:ident, $params:expr, $tensors:expr) => {
        Call {
            handles: vec![offset_of!($type, collection)],
            batch: Some(offset_of!($type, batch)),
            layer_idx: Some(offset_of!($type, layer_idx)),
            faults: if $world.foreign { vec!["a foreign handle"] } else { Vec::new() },
            ..call!($run, $query, $params, $tensors)
        }
    };
}

pub fn kv_store(source: &mut Source<'_>) {
    let is_mla = source.below(2) as u32;
    let (num_heads, head_size) = (source.within(1, 3), source.pick(&[8, 1, 5, 64, 130]));
    let world =
        World::new(source, Wanted { dtypes: CACHES, scales: SCALES, is_mla, num_heads, head_size, whole_rows: false });
    let dtype = source.pick(FLOATS);
    let params = pkv_kv_store_params {
        struct_size: size_of::<pkv_kv_store_params>(),
        collection: world.collection,
        batch: null(),
        layer_idx: source.below(world.options.num_layers as usize) as u32,
        kv_idx: if is_mla == 1 { 0 } else { source.below(2) as u32 },
        values: tensor(source, dtype, &[world.tokens(), num_heads, head_size], true),
    };
    type P = pkv_kv_store_params;
    let tensors = vec![field!(P.values, Writes::Nothing)];
    let call = call!(P, world, pkv_kv_store, pkv_kv_store_workspace_size, params, tensors);
    Call { stores: |params| vec![params.get(offset_of!(P, kv_idx))], ..call }.go(source, world);
}

/// buffer_row_offsets and cache_offsets that the batch can serve; cache_offsets may be NULL.
fn buffer_rows(
    source: &mut Source<'_>,
    world: &World,
    row_offsets_at: usize,
    cache_offsets_at: usize,
) -> Vec<ArrayField> {
    let (mut rows, mut offsets) = (vec![0], Vec::new());
    let from_start = source.below(3) == 0;
    for (b, &cached) in world.cache_lengths.iter().enumerate() {
        let length = (cached + world.row_offsets[b + 1] - world.row_offsets[b]) as usize;
        let first = if from_start { 0 } else { source.within(0, length) };
        let n = if source.below(3) == 0 { length - first } else { source.within(0, length - first) };
        offsets.push(first as u32);
        rows.push(rows[b] + n as u32);
    }
    if from_start {
        offsets.clear();
    }
    vec![
        ArrayField { name: "buffer_row_offsets", offset: row_offsets_at, extra: 1, values: rows },
        ArrayField { name: "cache_offsets", offset: cache_offsets_at, extra: 0, values: offsets },
    ]
}

pub fn kv_gather(source: &mut Source<'_>) {
    let is_mla = source.below(2) as u32;
    let (num_heads, head_size) = (source.within(1, 3), source.pick(&[8, 1, 5, 64, 130]));
    let world =
        World::new(source, Wanted { dtypes: CACHES, scales: SCALES, is_mla, num_heads, head_size, whole_rows: false });
    type P = pkv_kv_gather_params;
    let arrays = buffer_rows(source, &world, offset_of!(P, buffer_row_offsets), offset_of!(P, cache_offsets));
    let rows = *arrays[0].values.last().expect("it starts with 0") as usize;
    let dtype = source.pick(FLOATS);
    let params = P {
        struct_size: size_of::<P>(),
        collection: world.collection,
        batch: null(),
        layer_idx: source.below(world.options.num_layers as usize) as u32,
        kv_idx: if is_mla == 1 { 0 } else { source.below(2) as u32 },
        buffer_row_offsets: null(),
        cache_offsets: null(),
        out: tensor(source, dtype, &[rows, num_heads, head_size], true),
    };
    let tensors = vec![field!(P.out, Writes::BufferRows)];
    Call { arrays, ..call!(P, world, pkv_kv_gather, pkv_kv_gather_workspace_size, params, tensors) }.go(source, world);
}

pub fn merge_attention(source: &mut Source<'_>) {
    let shape = [source.within(0, 6), source.within(1, 3), source.pick(&[8, 1, 5, 64])];
    let dtype = source.pick(FLOATS);
    let mut of = |dtype, shape: &[usize]| tensor(source, dtype, shape, false);
    type P = pkv_merge_attention_params;
    let mut params = P {
        struct_size: size_of::<P>(),
        output_a: of(dtype, &shape),
        lse_a: of(PKV_F32, &shape[..2]),
        output_b: of(dtype, &shape),
        lse_b: of(PKV_F32, &shape[..2]),
        output: of(dtype, &shape),
        lse: of(PKV_F32, &shape[..2]),
    };
    if source.below(4) == 1 {
        params.lse = ABSENT;
    }
    let same = source.pick(&[0, 2]);
    let tensors = vec![
        field!(P.output_a, Writes::Nothing),
        field!(P.lse_a, Writes::Nothing),
        field!(P.output_b, Writes::Nothing),
        field!(P.lse_b, Writes::Nothing),
        field!(P.output, Writes::All, Some(same)),
        field!(P.lse, Writes::All, Some(same + 1)),
    ];
    // No batch and no collection of interest, but a context and memory.
    let world = World::new(
        source,
        Wanted { dtypes: FLOATS, scales: &[0], is_mla: 0, num_heads: 1, head_size: 1, whole_rows: true },
    );
    call!(pkv_merge_attention, pkv_merge_attention_workspace_size, params, tensors).go(source, world);
}

pub fn qkv_matmul_gguf(source: &mut Source<'_>) {
    let (kv_heads, group, head_size) = (source.within(1, 2), source.within(1, 3), source.pick(&[8, 1, 5, 16]));
    let mut world = World::new(
        source,
        Wanted { dtypes: CACHES, scales: SCALES, is_mla: 0, num_heads: kv_heads, head_size, whole_rows: false },
    );
    let cols = source.pick(&[256, 256, 256, 512]);
    let rows = [kv_heads * group * head_size, kv_heads * head_size, kv_heads * head_size];
    let same = source.below(2) == 0;
    let mut format = &FORMATS[source.below(FORMATS.len())];
    for (i, rows) in rows.into_iter().enumerate() {
        if !same && i > 0 {
            format = &FORMATS[source.below(FORMATS.len())];
        }
        let tight = random_rows(format, rows, cols, source.random.next());
        let row_bytes = format.row_bytes(cols).expect("cols is a multiple of every block");
        let stride = row_bytes + source.pick(&[0, 0, 0, 1, 6]);
        let shift = source.pick(&[0, 0, 1]);
        let size = (rows - 1) * stride + row_bytes;
        let data = world.memory.alloc("weight", size, shift, |bytes| {
            for (to, from) in bytes.chunks_mut(stride).zip(tight.chunks(row_bytes)) {
                to[..row_bytes].copy_from_slice(from);
            }
        });
        let options = pkv_gguf_weight_options {
            struct_size: size_of::<pkv_gguf_weight_options>(),
            data: data.cast(),
            data_size: size,
            rows: rows as i64,
            cols: cols as i64,
            row_bytes: if stride == row_bytes { 0 } else { stride as i64 },
            encoding: format.id,
            flags: source.below(2) as u32,
        };
        let mut weight = null_mut();
        // SAFETY: good options over memory of ours, which outlives the weight.
        assert_eq!(
            unsafe { pkv_gguf_weight_create(world.ctx, &options, &mut weight, null_mut()) },
            PKV_OK,
            "{options:?}"
        );
        world.weights.push(weight);
    }
    if source.once_in(64) {
        world.foreign = true;
        world.ctx = context((0..3).find(|&i| context(i) != world.ctx).expect("there are three"));
    }
    type P = pkv_qkv_matmul_gguf_params;
    let tokens = world.tokens();
    let (input, output) = (source.pick(FLOATS), source.pick(FLOATS));
    let mut bias = |rows: usize| if source.below(2) == 0 { ABSENT } else { tensor(source, PKV_F32, &[rows], false) };
    let (q_bias, k_bias, v_bias) = (bias(rows[0]), bias(rows[1]), bias(rows[2]));
    let params = P {
        struct_size: size_of::<P>(),
        collection: world.collection,
        batch: null(),
        q_weight: world.weights[0],
        k_weight: world.weights[1],
        v_weight: world.weights[2],
        layer_idx: source.below(world.options.num_layers as usize) as u32,
        compute: source.below(2) as i32,
        hidden_state: tensor(source, input, &[tokens, cols], true),
        q_output: tensor(source, output, &[tokens, rows[0]], true),
        q_bias,
        k_bias,
        v_bias,
    };
    let tensors = vec![
        field!(P.hidden_state, Writes::Nothing),
        field!(P.q_output, Writes::Tokens(0)),
        field!(P.q_bias, Writes::Nothing),
        field!(P.k_bias, Writes::Nothing),
        field!(P.v_bias, Writes::Nothing),
    ];
    let mut call = call!(P, world, pkv_qkv_matmul_gguf, pkv_qkv_matmul_gguf_workspace_size, params, tensors);
    call.handles.extend([offset_of!(P, q_weight), offset_of!(P, k_weight), offset_of!(P, v_weight)]);
    Call { stores: |_| vec![0, 1], ..call }.go(source, world);
}

pub fn mla_rope_rmsnorm_quantize(source: &mut Source<'_>) {
    let (heads, latent, width) = (source.within(1, 3), source.pick(&[8, 1, 5, 128]), source.pick(&[4, 2, 6, 64]));
    let head_size = latent + width;
    let world = World::new(
        source,
        Wanted { dtypes: CACHES, scales: SCALES, is_mla: 1, num_heads: 1, head_size, whole_rows: false },
    );
    type P = pkv_mla_rope_rmsnorm_quantize_params;
    let (dtype, tokens) = (source.pick(FLOATS), world.tokens());
    let (freqs, gamma) = (source.pick(&[PKV_F32, dtype]), source.pick(&[PKV_F32, dtype]));
    let params = P {
        struct_size: size_of::<P>(),
        collection: world.collection,
        batch: null(),
        layer_idx: source.below(world.options.num_layers as usize) as u32,
        rope: source.below(2) as i32,
        q_rope: tensor(source, dtype, &[tokens, heads, width], true),
        q_rope_output: tensor(source, dtype, &[tokens, heads, width], true),
        kv: tensor(source, dtype, &[tokens, head_size], true),
        freqs_cis: tensor(source, freqs, &[32, width], false),
        gamma: tensor(source, gamma, &[latent], false),
        epsilon: 1e-6,
        reserved: 0,
    };
    let tensors = vec![
        field!(P.q_rope, Writes::Nothing),
        field!(P.q_rope_output, Writes::Tokens(0), Some(0)),
        field!(P.kv, Writes::Nothing),
        field!(P.freqs_cis, Writes::Nothing),
        field!(P.gamma, Writes::Nothing),
    ];
    let call =
        call!(P, world, pkv_mla_rope_rmsnorm_quantize, pkv_mla_rope_rmsnorm_quantize_workspace_size, params, tensors);
    Call { stores: |_| vec![0], ..call }.go(source, world);
}

pub fn mla_prefill_fp8(source: &mut Source<'_>) {
    let (heads, latent, width) = (source.within(1, 3), source.pick(&[128, 128, 256]), source.pick(&[4, 2, 6, 64]));
    let (nope, v_head_dim) = (source.pick(&[8, 1, 5, 8, 64]), source.pick(&[8, 1, 5, 8, 64]));
    let head_size = latent + width;
    let wanted = Wanted { dtypes: &CACHES[..4], scales: SCALES, is_mla: 1, num_heads: 1, head_size, whole_rows: false };
    let world = World::new(source, wanted);
    type P = pkv_mla_prefill_fp8_params;
    let arrays = buffer_rows(source, &world, offset_of!(P, buffer_row_offsets), offset_of!(P, cache_offsets));
    let buffer_length = i64::from(*arrays[0].values.last().expect("it starts with 0"));
    let (dtype, tokens) = (source.pick(FLOATS), world.tokens());
    let (freqs, gamma) = (source.pick(&[PKV_F32, dtype]), source.pick(&[PKV_F32, dtype]));
    let features = heads * (nope + v_head_dim);
    // 0: from kv; 1: in place; 2: finished before.
    let how = source.below(3);
    let params = P {
        struct_size: size_of::<P>(),
        collection: world.collection,
        batch: null(),
        layer_idx: source.below(world.options.num_layers as usize) as u32,
        rope: source.below(2) as i32,
        mask: source.below(4) as i32,
        score_mod: source.below(2) as i32,
        window: source.within(1, 9) as u32,
        chunk: source.within(1, 9) as u32,
        m_scale_granularity: source.pick(&[0, 1]),
        n_scale_granularity: source.pick(&[0, 128]),
        k_scale_granularity: source.pick(&[0, 128]),
        scale: 0.125,
        epsilon: 1e-6,
        flags: if how == 2 { PKV_PREFILL_FINISHED } else { 0 },
        buffer_length,
        buffer_row_offsets: null(),
        cache_offsets: null(),
        q: tensor(source, dtype, &[tokens, heads, nope + width], true),
        kv: if how == 0 { tensor(source, dtype, &[tokens, head_size], true) } else { ABSENT },
        freqs_cis: if how == 2 { ABSENT } else { tensor(source, freqs, &[32, width], false) },
        kv_norm_gamma: if how == 2 { ABSENT } else { tensor(source, gamma, &[latent], false) },
        kv_b_proj: tensor(source, PKV_F8_E4M3, &[features, latent], false),
        kv_b_proj_scale: tensor(source, PKV_F32, &[features.div_ceil(128), latent / 128], false),
        output: tensor(source, dtype, &[tokens, heads, v_head_dim], true),
        lse: if source.below(2) == 0 { ABSENT } else { tensor(source, PKV_F32, &[tokens, heads], true) },
    };
    let tensors = vec![
        field!(P.q, if how == 2 { Writes::Nothing } else { Writes::Tokens(nope) }),
        field!(P.kv, Writes::Nothing),
        field!(P.freqs_cis, Writes::Nothing),
        field!(P.kv_norm_gamma, Writes::Nothing),
        field!(P.kv_b_proj, Writes::Nothing),
        field!(P.kv_b_proj_scale, Writes::Nothing),
        field!(P.output, Writes::Tokens(0)),
        field!(P.lse, Writes::Tokens(0)),
    ];
    let call = call!(P, world, pkv_mla_prefill_fp8, pkv_mla_prefill_fp8_workspace_size, params, tensors);
    let stores = |params: &Image| {
        if params.get::<u32>(offset_of!(P, flags)) == PKV_PREFILL_FINISHED { Vec::new() } else { vec![0] }
    };
    Call { arrays, stores, ..call }.go(source, world);
}

pub fn mla_indexer_fp8(source: &mut Source<'_>) {
    let (heads, depth, is_mla) = (source.within(1, 4), source.pick(&[8, 1, 5, 64, 128]), source.below(2) as u32);
    let wanted =
        Wanted { dtypes: &[PKV_F8_E4M3], scales: &[PKV_F32], is_mla, num_heads: 1, head_size: depth, whole_rows: true };
    let world = World::new(source, wanted);
    type P = pkv_mla_indexer_fp8_params;
    // A byte is every top_k up to 256, so that no single one can hide.
    let (tokens, top_k) = (world.tokens(), source.within(1, 256));
    let params = P {
        struct_size: size_of::<P>(),
        collection: world.collection,
        batch: null(),
        layer_idx: source.below(world.options.num_layers as usize) as u32,
        mask: source.below(2) as i32,
        top_k: top_k as u32,
        reserved: 0,
        q: tensor(source, PKV_F8_E4M3, &[tokens, heads, depth], true),
        q_s: tensor(source, PKV_F32, &[tokens, heads], true),
        output_indices: tensor(source, PKV_I32, &[tokens, top_k], true),
        output_scores: if source.below(2) == 0 { ABSENT } else { tensor(source, PKV_F32, &[tokens, top_k], true) },
    };
    let tensors = vec![
        field!(P.q, Writes::Nothing),
        field!(P.q_s, Writes::Nothing),
        field!(P.output_indices, Writes::Tokens(0)),
        field!(P.output_scores, Writes::Tokens(0)),
    ];
    call!(P, world, pkv_mla_indexer_fp8, pkv_mla_indexer_fp8_workspace_size, params, tensors).go(source, world);
}

//! `kernels/mla_prefill_fp8.cuh` tells the sequence of launches; here are their grids, the scratch between them, and which attention kernel fits.

use super::mla_rope_rmsnorm_quantize::{self as rope, NewRows};
use super::params::{BatchParams, CacheParams};
use super::{
    Kernel, LaunchParams, Shape, THREADS, WARPS, by_dtype, entries, launch, prepare, refuse_hopper,
    refuse_without_kernels, rows_aligned,
};
use crate::context::{Backend, Context};
use crate::dtype::DType;
use crate::error::Result;
use crate::op::mla_prefill_fp8::{Args, Mask, MlaPrefillFp8, SCALE_BLOCK, ScoreMod};
use crate::plan::{Impl, Stream};
use crate::workspace::{ALIGNMENT, Arena, Span, windowed};
use std::ffi::c_void;
use std::ptr::null_mut;

pub const IMPLS: &[Impl<MlaPrefillFp8>] = &[
    Impl {
        name: "cuda, sm_90a",
        refuse: |ctx, a| refuse(ctx, a, Hopper::choose(ctx, a)?),
        layout: |ctx, a, arena| {
            Scratch::take(&Plan::new(a, Hopper::choose(ctx, a).unwrap_or_default()), a, arena);
        },
        run: |ctx, a, arena, stream| run(ctx, a, arena, stream, Hopper::choose(ctx, a).unwrap_or_default()),
    },
    Impl {
        name: "cuda",
        refuse: |ctx, a| refuse(ctx, a, Hopper::default()),
        layout: |_, a, arena| {
            Scratch::take(&Plan::new(a, Hopper::default()), a, arena);
        },
        run: |ctx, a, arena, stream| run(ctx, a, arena, stream, Hopper::default()),
    },
];

/// Which launches take a kernel of sm_90a.
#[derive(Clone, Copy, Default)]
struct Hopper {
    project: bool,
    attention: bool,
}

impl Hopper {
    /// Why there is none.
    fn choose(ctx: &Context, a: &Args<'_>) -> Result<Self, String> {
        match (refuse_project_sm90(ctx, a), refuse_attention_sm90(ctx, a)) {
            (Err(project), Err(attention)) => Err(format!("{project}; {attention}")),
            (project, attention) => Ok(Hopper { project: project.is_ok(), attention: attention.is_ok() }),
        }
    }
}

static LATENT: [Kernel; 3] = entries!("mla_prefill_fp8_latent");
static PROJECT: [Kernel; 3] = entries!("mla_prefill_fp8_project");
/// F16, BF16.
static PROJECT_SM90: [Kernel; 2] = [
    Kernel { file: "mla_prefill_fp8_project_sm90.cu", name: "mla_prefill_fp8_project_sm90_f16" },
    Kernel { file: "mla_prefill_fp8_project_sm90.cu", name: "mla_prefill_fp8_project_sm90_bf16" },
];

/// As in `mla_prefill_fp8_project.cu`.
mod project {
    pub const ROWS: usize = 128;
    pub const FEATURES: usize = 128;
    pub const THREADS: u32 = 256;
    pub const SHARED: u32 = 99840;
}

/// As in `mla_prefill_fp8_project_sm90.cu`; its tiles are the same.
mod project_sm90 {
    pub const THREADS: u32 = 384;
    pub const SHARED: u32 = 201296;
}

/// Columns that rows of K, V and the keys' rope part are padded to.
const COLUMN_PAD: usize = 8;

/// K and V of as many heads as this holds lie in scratch at once.
const GROUP_BYTES: usize = 256 << 20;

// ---- the attention kernels ----

/// A config of `mla_prefill_fp8_attention.cu`, or its sibling for sm_90a.
struct Attention {
    /// F16, BF16.
    kernels: [Kernel; 2],
    /// Padded columns of a key; columns of V that one pass takes.
    key_columns: usize,
    value_columns: usize,
    tile_rows: usize,
    threads: u32,
    shared: u32,
}

macro_rules! attention {
    ($file:literal, $name:literal, $key_columns:literal, $value_columns:literal, $tile_rows:literal, $threads:literal, $shared:literal) => {
        Attention {
            kernels: [
                Kernel { file: $file, name: concat!("mla_prefill_fp8_attention_", $name, "_f16") },
                Kernel { file: $file, name: concat!("mla_prefill_fp8_attention_", $name, "_bf16") },
            ],
            key_columns: $key_columns,
            value_columns: $value_columns,
            tile_rows: $tile_rows,
            threads: $threads,
            shared: $shared,
        }
    };
}

static NARROW: Attention = attention!("mla_prefill_fp8_attention.cu", "narrow", 96, 64, 64, 128, 35840);
static STANDARD: Attention = attention!("mla_prefill_fp8_attention.cu", "standard", 192, 128, 128, 256, 94208);
static STANDARD_FEW: Attention = attention!("mla_prefill_fp8_attention.cu", "standard_few", 192, 128, 64, 128, 68608);
static WIDE: Attention = attention!("mla_prefill_fp8_attention.cu", "wide", 256, 128, 64, 128, 84992);
/// In the place of both standard ones.
static SM90: Attention = attention!("mla_prefill_fp8_attention_sm90.cu", "sm90", 192, 128, 128, 384, 213088);

static PLAIN: [Kernel; 3] = [
    Kernel { file: "mla_prefill_fp8_attention.cu", name: "mla_prefill_fp8_attention_plain_f32" },
    Kernel { file: "mla_prefill_fp8_attention.cu", name: "mla_prefill_fp8_attention_plain_f16" },
    Kernel { file: "mla_prefill_fp8_attention.cu", name: "mla_prefill_fp8_attention_plain_bf16" },
];

/// What a launch of an attention kernel needs to know of it.
#[derive(Clone, Copy)]
struct Chosen {
    kernel: &'static Kernel,
    tile_rows: usize,
    value_columns: usize,
    threads: u32,
    shared: u32,
}

/// By dtype and widths alone, but for the rows of a tile, which change no bit of the result.
fn choose(dtype: DType, key_columns: usize, value_columns: usize, max_seq_length: usize, sm90: bool) -> Chosen {
    let fits = |a: &&Attention| key_columns <= a.key_columns && value_columns <= a.value_columns;
    let tensor = match dtype {
        DType::F32 => None,
        _ if fits(&&NARROW) => Some(&NARROW),
        _ if sm90 && key_columns <= SM90.key_columns => Some(&SM90),
        _ if key_columns <= STANDARD.key_columns && max_seq_length <= 64 => Some(&STANDARD_FEW),
        _ if key_columns <= STANDARD.key_columns => Some(&STANDARD),
        _ if key_columns <= WIDE.key_columns => Some(&WIDE),
        _ => None,
    };
    match tensor {
        Some(a) => Chosen {
            kernel: &a.kernels[usize::from(dtype == DType::BF16)],
            tile_rows: a.tile_rows,
            value_columns: a.value_columns,
            threads: a.threads,
            shared: a.shared,
        },
        None => Chosen {
            kernel: by_dtype(&PLAIN, dtype),
            tile_rows: 16,
            value_columns: 128,
            threads: THREADS,
            shared: 6272,
        },
    }
}

// ---- sizes ----

/// Everything that follows from the shapes.
struct Plan {
    rows: usize,
    key_stride: usize,
    value_stride: usize,
    rope_stride: usize,
    /// Heads that are projected and attended to at once, and what their keys and values may take.
    group: usize,
    group_bytes: usize,
    attention: Chosen,
    /// Blocks of an attention launch, a head.
    attention_blocks: usize,
}

impl Plan {
    fn new(a: &Args<'_>, hopper: Hopper) -> Self {
        let [key_stride, value_stride, rope_stride] =
            [a.nope_dim, a.v_head_dim, a.rope_dim].map(|n| n.next_multiple_of(COLUMN_PAD));
        let (key_columns, longest) = (key_stride + rope_stride, a.batch.max_seq_length);
        let attention = choose(a.q.dtype, key_columns, a.v_head_dim, longest, hopper.attention);
        let passes = a.v_head_dim.div_ceil(attention.value_columns);
        // The kernel's own rule: sequence b gets the tiles from row_offsets[b] / tile_rows + b on.
        let attention_blocks = (a.q.shape[0] / attention.tile_rows + a.batch.batch_size).saturating_mul(passes);
        let head_bytes =
            a.buffer_length.saturating_mul(key_stride + value_stride).saturating_mul(a.q.dtype.size()).max(1);
        let most = i32::MAX as usize / attention_blocks.max(1);
        let group_bytes = windowed(a.num_heads, head_bytes, 1, GROUP_BYTES);
        let group = (group_bytes / head_bytes).min(most).clamp(1, a.num_heads);
        let rows = a.buffer_length;
        Plan { rows, key_stride, value_stride, rope_stride, group, group_bytes, attention, attention_blocks }
    }

    /// Tiles of features that a group of heads touches; they start at multiples of 128 whatever the group.
    fn project_blocks(&self, first_head: usize, heads: usize, head_features: usize) -> usize {
        let first = first_head * head_features / project::FEATURES;
        let end = ((first_head + heads) * head_features).div_ceil(project::FEATURES);
        self.rows.div_ceil(project::ROWS).saturating_mul(end - first)
    }
}

struct Scratch {
    codes: Span<u8>,
    scales: Span<f32>,
    k_rope: Span<u8>,
    /// Of a group of heads; the values follow.
    keys: Span<u8>,
}

impl Scratch {
    fn take(plan: &Plan, a: &Args<'_>, arena: &mut Arena) -> Self {
        let bytes = |rows: usize, columns: usize| rows.saturating_mul(columns).saturating_mul(a.q.dtype.size());
        Scratch {
            codes: arena.take(plan.rows.saturating_mul(a.kv_lora_rank)),
            scales: arena.take(scale_stride(plan.rows).saturating_mul(a.kv_lora_rank / SCALE_BLOCK)),
            k_rope: arena.take(bytes(plan.rows, plan.rope_stride)),
            keys: arena.take(plan.group_bytes.saturating_add(ALIGNMENT)),
        }
    }
}

/// A tile of the projection reads the scales of all its rows.
fn scale_stride(rows: usize) -> usize {
    rows.checked_next_multiple_of(project::ROWS).unwrap_or(usize::MAX)
}

fn refuse(ctx: &Context, a: &Args<'_>, hopper: Hopper) -> Result<(), String> {
    refuse_without_kernels(ctx)?;
    if a.finish.is_some() {
        rope::refuse(ctx, &a.cache)?;
    }
    let plan = Plan::new(a, hopper);
    let head_features = a.nope_dim + a.v_head_dim;
    let limit = i32::MAX as usize;
    if plan.rows > u32::MAX as usize || a.kv_b_proj.shape[0] > limit || a.kv_lora_rank > limit {
        return Err("buffer_length or kv_b_proj is beyond 32-bit row numbers".into());
    }
    if plan.attention_blocks > limit || plan.project_blocks(0, plan.group, head_features) > limit / 2 {
        return Err("a launch would take more than 2^31 blocks".into());
    }
    Ok(())
}

fn refuse_project_sm90(ctx: &Context, a: &Args<'_>) -> Result<(), String> {
    if a.q.dtype == DType::F32 {
        return Err("sums of fp8 products on wgmma are not good enough for F32".into());
    }
    if !rows_aligned(&a.kv_b_proj) {
        return Err("rows of kv_b_proj are not on 16 bytes".into());
    }
    let kernel = &PROJECT_SM90[0];
    refuse_hopper(ctx, kernel).map_err(|reason| format!("{} {reason}", kernel.file))
}

fn refuse_attention_sm90(ctx: &Context, a: &Args<'_>) -> Result<(), String> {
    let kernel = &SM90.kernels[0];
    let plan = Plan::new(a, Hopper { attention: true, ..Hopper::default() });
    if plan.attention.kernel.file != kernel.file {
        return Err(format!("{} is not for such heads, or F32", kernel.file));
    }
    refuse_hopper(ctx, kernel).map_err(|reason| format!("{} {reason}", kernel.file))
}

fn run(ctx: &Context, a: &Args<'_>, arena: &mut Arena, stream: Stream, hopper: Hopper) -> Result<()> {
    if a.q.shape[0] == 0 || a.batch.batch_size == 0 {
        return Ok(());
    }
    let plan = Plan::new(a, hopper);
    let scratch = Scratch::take(&plan, a, arena);
    let dtype = a.q.dtype;
    let keys = scratch.keys.as_ptr();
    let values =
        keys.wrapping_add((plan.group * plan.rows * plan.key_stride * dtype.size()).next_multiple_of(ALIGNMENT));
    let (project, project_shared) = match hopper.project {
        true => (&PROJECT_SM90[usize::from(dtype == DType::BF16)], project_sm90::SHARED),
        false => (by_dtype(&PROJECT, dtype), project::SHARED),
    };
    let Chosen { kernel: attention, shared: attention_shared, .. } = plan.attention;
    // Before q is roped in place.
    prepare(ctx, &[(by_dtype(&LATENT, dtype), 0), (project, project_shared), (attention, attention_shared)])?;
    if let Some(f) = &a.finish {
        let q_rope = a.q.columns_from(a.nope_dim);
        let rows = NewRows {
            cache: &a.cache,
            batch: &a.batch,
            rope: f.rope,
            q_rope: &q_rope,
            q_rope_output: &q_rope,
            kv: f.kv.as_ref(),
            freqs_cis: &f.freqs_cis,
            gamma: &f.gamma,
            epsilon: f.epsilon,
        };
        rope::finish(ctx, &rows, stream)?;
    }
    let batch = BatchParams::new(&a.batch);
    let buffer = BufferParams {
        row_offsets: a.rows.raw_row_offsets,
        cache_offsets: a.rows.raw_cache_offsets,
        rows: plan.rows as u64,
    };
    if plan.rows > 0 {
        let cache = CacheParams::new(&a.cache);
        let params = MlaPrefillLatentParams {
            batch,
            cache,
            buffer,
            codes: scratch.codes.as_ptr(),
            scales: scratch.scales.as_ptr(),
            k_rope: scratch.k_rope.as_ptr().cast(),
            scale_stride: scale_stride(plan.rows) as i64,
            latent: a.kv_lora_rank as u32,
            rope_width: a.rope_dim as u32,
            rope_stride: plan.rope_stride as u32,
            vector: u32::from(cache.vector(4)),
        };
        let shape = Shape::strided(plan.rows as u64, WARPS, THREADS, 0);
        // SAFETY: the struct describes the checked arguments and the scratch laid out for them.
        unsafe { launch(ctx, by_dtype(&LATENT, dtype), shape, &params, stream)? };
    }
    for first_head in (0..a.num_heads).step_by(plan.group) {
        let heads = plan.group.min(a.num_heads - first_head);
        if plan.rows > 0 {
            let params = MlaPrefillProjectParams {
                codes: scratch.codes.as_ptr(),
                scales: scratch.scales.as_ptr(),
                weight: a.kv_b_proj.as_ptr(),
                weight_scales: a.kv_b_proj_scale.as_ptr().cast(),
                rows_used: buffer.row_offsets.wrapping_add(a.batch.batch_size),
                keys: keys.cast(),
                values: values.cast(),
                scale_stride: scale_stride(plan.rows) as i64,
                weight_stride: a.kv_b_proj.stride[0] as i64,
                weight_scale_stride: a.kv_b_proj_scale.stride[0] as i64,
                rows: plan.rows as u64,
                latent: a.kv_lora_rank as u32,
                features: a.kv_b_proj.shape[0] as u32,
                first_head: first_head as u32,
                heads: heads as u32,
                nope: a.nope_dim as u32,
                value_width: a.v_head_dim as u32,
                key_stride: plan.key_stride as u32,
                value_stride: plan.value_stride as u32,
                vector: u32::from(rows_aligned(&a.kv_b_proj)),
                reserved: 0,
            };
            let blocks = plan.project_blocks(first_head, heads, a.nope_dim + a.v_head_dim) as u32;
            let (threads, blocks) = match ctx.backend() {
                Backend::Cuda(device) if hopper.project => {
                    (project_sm90::THREADS, blocks.min(device.multiprocessors()))
                }
                _ => (project::THREADS, blocks),
            };
            let shape = Shape { grid: [blocks, 1, 1], threads, shared: project_shared };
            // SAFETY: as above.
            unsafe { launch(ctx, project, shape, &params, stream)? };
        }
        let (mask, mask_width) = match a.mask {
            Mask::Causal => (0, 0),
            Mask::Null => (1, 0),
            Mask::SlidingWindowCausal(window) => (2, window),
            Mask::ChunkedCausal(chunk) => (3, chunk),
        };
        let params = MlaPrefillAttentionParams {
            batch,
            buffer,
            q: a.q.as_ptr().cast(),
            keys: keys.cast(),
            values: values.cast(),
            k_rope: scratch.k_rope.as_ptr().cast(),
            output: a.output.as_ptr().cast(),
            lse: a.lse.map_or(null_mut(), |lse| lse.as_ptr().cast()),
            q_token_stride: a.q.stride[0] as i64,
            q_head_stride: a.q.stride[1] as i64,
            output_token_stride: a.output.stride[0] as i64,
            output_head_stride: a.output.stride[1] as i64,
            lse_stride: a.lse.map_or(0, |lse| lse.stride[0] as i64),
            tokens: tokens(a) as u64,
            num_heads: a.num_heads as u32,
            first_head: first_head as u32,
            heads: heads as u32,
            nope: a.nope_dim as u32,
            rope_width: a.rope_dim as u32,
            value_width: a.v_head_dim as u32,
            key_stride: plan.key_stride as u32,
            value_stride: plan.value_stride as u32,
            rope_stride: plan.rope_stride as u32,
            mask,
            mask_width: mask_width as u32,
            alibi: u32::from(a.score_mod == ScoreMod::Alibi),
            scale: a.scale,
            q_vector: u32::from(
                rows_aligned(&a.q) && a.nope_dim.is_multiple_of(COLUMN_PAD) && a.rope_dim.is_multiple_of(COLUMN_PAD),
            ),
            output_vector: u32::from(
                a.v_head_dim.is_multiple_of(2) && a.output.stride[..2].iter().all(|s| s.is_multiple_of(2)),
            ),
            reserved: 0,
        };
        let Chosen { threads, tile_rows, value_columns, .. } = plan.attention;
        let tiles = tokens(a) / tile_rows + a.batch.batch_size;
        let blocks = tiles * a.v_head_dim.div_ceil(value_columns) * heads;
        let shape = Shape { grid: [blocks as u32, 1, 1], threads, shared: attention_shared };
        // SAFETY: as above.
        unsafe { launch(ctx, attention, shape, &params, stream)? };
    }
    Ok(())
}

/// Rows that q, output and lse all have; the batch's own count is on the device.
fn tokens(a: &Args<'_>) -> usize {
    let rows = a.q.shape[0].min(a.output.shape[0]);
    a.lse.map_or(rows, |lse| rows.min(lse.shape[0]))
}

// ---- launch structs, as in kernels/mla_prefill_fp8.cuh ----

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct BufferParams {
    row_offsets: *const u32,
    cache_offsets: *const u32,
    rows: u64,
}
const _: () = assert!(size_of::<BufferParams>() == 24);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct MlaPrefillLatentParams {
    batch: BatchParams,
    cache: CacheParams,
    buffer: BufferParams,
    codes: *mut u8,
    scales: *mut f32,
    k_rope: *mut c_void,
    scale_stride: i64,
    latent: u32,
    rope_width: u32,
    rope_stride: u32,
    vector: u32,
}
const _: () = assert!(size_of::<MlaPrefillLatentParams>() == 192);
// SAFETY: the layout of the kernel's struct; filled from checked arguments.
unsafe impl LaunchParams for MlaPrefillLatentParams {}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct MlaPrefillProjectParams {
    codes: *const u8,
    scales: *const f32,
    weight: *const u8,
    weight_scales: *const f32,
    rows_used: *const u32,
    keys: *mut c_void,
    values: *mut c_void,
    scale_stride: i64,
    weight_stride: i64,
    weight_scale_stride: i64,
    rows: u64,
    latent: u32,
    features: u32,
    first_head: u32,
    heads: u32,
    nope: u32,
    value_width: u32,
    key_stride: u32,
    value_stride: u32,
    vector: u32,
    reserved: u32,
}
const _: () = assert!(size_of::<MlaPrefillProjectParams>() == 128);
// SAFETY: as above.
unsafe impl LaunchParams for MlaPrefillProjectParams {}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct MlaPrefillAttentionParams {
    batch: BatchParams,
    buffer: BufferParams,
    q: *const c_void,
    keys: *const c_void,
    values: *const c_void,
    k_rope: *const c_void,
    output: *mut c_void,
    lse: *mut f32,
    q_token_stride: i64,
    q_head_stride: i64,
    output_token_stride: i64,
    output_head_stride: i64,
    lse_stride: i64,
    tokens: u64,
    num_heads: u32,
    first_head: u32,
    heads: u32,
    nope: u32,
    rope_width: u32,
    value_width: u32,
    key_stride: u32,
    value_stride: u32,
    rope_stride: u32,
    mask: u32,
    mask_width: u32,
    alibi: u32,
    scale: f32,
    q_vector: u32,
    output_vector: u32,
    reserved: u32,
}
const _: () = assert!(size_of::<MlaPrefillAttentionParams>() == 224);
// SAFETY: as above.
unsafe impl LaunchParams for MlaPrefillAttentionParams {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_has_a_kernel() {
        for (dtype, key, value, longest, name, on_sm90) in [
            (DType::BF16, 192, 128, 4096, "standard_bf16", "sm90_bf16"),
            (DType::F16, 192, 128, 64, "standard_few_f16", "sm90_f16"),
            (DType::F16, 96, 64, 4096, "narrow_f16", "narrow_f16"),
            (DType::BF16, 96, 65, 4096, "standard_bf16", "sm90_bf16"),
            (DType::BF16, 256, 256, 4096, "wide_bf16", "wide_bf16"),
            (DType::BF16, 264, 8, 4096, "plain_bf16", "plain_bf16"),
            (DType::F32, 96, 64, 4096, "plain_f32", "plain_f32"),
        ] {
            for (sm90, name) in [(false, name), (true, on_sm90)] {
                let kernel = choose(dtype, key, value, longest, sm90).kernel;
                assert_eq!(kernel.name, format!("mla_prefill_fp8_attention_{name}"));
                assert_eq!(kernel.file.ends_with("_sm90.cu"), name.starts_with("sm90"));
            }
        }
    }
}

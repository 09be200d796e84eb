//! `kernels/mla_indexer_fp8.cuh` tells the two launches of a window of query rows; here are the windows, their grids and their scratch.

use super::params::{BatchParams, CacheParams};
use super::{Kernel, LaunchParams, Shape, launch, refuse_hopper, refuse_without_kernels, rows_aligned};
use crate::context::{Backend, Context};
use crate::error::Result;
use crate::op::mla_indexer_fp8::{Args, MlaIndexerFp8};
use crate::plan::{Impl, Stream};
use crate::workspace::{Arena, Span, windowed};
use std::ptr::null_mut;

pub const IMPLS: &[Impl<MlaIndexerFp8>] = &[
    Impl {
        name: "cuda, sm_90a",
        refuse: |ctx, a| {
            refuse(ctx, a)?;
            refuse_sm90(ctx, a)
        },
        layout: |_, a, arena| {
            _ = take_scratch(&Plan::new(a), arena);
        },
        run: |ctx, a, arena, stream| run(ctx, a, arena, stream, true),
    },
    Impl {
        name: "cuda",
        refuse,
        layout: |_, a, arena| {
            _ = take_scratch(&Plan::new(a), arena);
        },
        run: |ctx, a, arena, stream| run(ctx, a, arena, stream, false),
    },
];

static SCORE: Kernel = Kernel { file: "mla_indexer_fp8_score.cu", name: "mla_indexer_fp8_score" };
static SCORE_PLAIN: Kernel = Kernel { file: "mla_indexer_fp8_score.cu", name: "mla_indexer_fp8_score_plain" };
static SCORE_SM90: Kernel = Kernel { file: "mla_indexer_fp8_score_sm90.cu", name: "mla_indexer_fp8_score_sm90" };
static SELECT: Kernel = Kernel { file: "mla_indexer_fp8_select.cu", name: "mla_indexer_fp8_select" };

/// As in `mla_indexer_fp8_score.cu`.
mod score {
    pub const KEYS: usize = 128;
    pub const ROWS: usize = 16;
    pub const DEPTH: usize = 128;
    pub const THREADS: u32 = 128;
    pub const SHARED: u32 = 71680;
}

/// As in `mla_indexer_fp8_score_sm90.cu`.
mod score_sm90 {
    pub const KEYS: usize = 256;
    pub const THREADS: u32 = 384;
    pub const SHARED: u32 = 66624;

    /// Blocks a multiprocessor that a launch should have, and what is then the most rows a block keeps its keys for.
    const BLOCKS: usize = 4;
    const MOST_ROWS: usize = 64;

    /// Blocks for a window of rows. The kernel deals its rows out evenly to those that share their keys.
    pub fn blocks(rows: usize, max_keys: usize, multiprocessors: u32) -> u32 {
        let key_tiles = max_keys.div_ceil(KEYS);
        let rows_each = (rows * key_tiles / (BLOCKS * multiprocessors as usize)).clamp(1, MOST_ROWS);
        (key_tiles * rows.div_ceil(rows_each)) as u32
    }
}

/// As in `mla_indexer_fp8_select.cu`.
mod select {
    pub const THREADS: u32 = 512;
    pub const HISTOGRAM_BYTES: usize = 8192;
    pub const SORT_IN_SHARED: usize = 4096;
}

/// Scores of as many rows as this holds, and at least of a tile's, lie in scratch at once; what one launch writes the next one finds in L2.
const WINDOW_BYTES: usize = 64 << 20;

/// Everything that follows from the shapes and the batch's bounds.
struct Plan {
    max_keys: usize,
    score_stride: usize,
    /// Power of two that holds the longest list to sort.
    sort_size: usize,
    /// Rows scored at once.
    window: usize,
    scratch_bytes: usize,
}

impl Plan {
    fn new(a: &Args<'_>) -> Self {
        let max_keys = a.batch.max_seq_length.saturating_add(a.batch.max_cache_length);
        let score_stride = max_keys.next_multiple_of(32);
        let sort_size = a.top_k.min(max_keys).max(1).next_power_of_two();
        let sort_bytes = if sort_size > select::SORT_IN_SHARED { 8 * sort_size } else { 0 };
        let (rows, row_bytes) = (a.q.shape[0], 4 * score_stride + sort_bytes);
        let scratch_bytes = windowed(rows, row_bytes, score::ROWS, WINDOW_BYTES);
        let fit = scratch_bytes / row_bytes.max(1);
        let window = if fit < rows { fit / score::ROWS * score::ROWS } else { rows };
        Plan { max_keys, score_stride, sort_size, window, scratch_bytes }
    }

    fn sorts_in_scratch(&self) -> bool {
        self.sort_size > select::SORT_IN_SHARED
    }
}

/// A window's scores, and behind them its lists to sort where they are too long for shared memory.
fn take_scratch(plan: &Plan, arena: &mut Arena) -> Span<u8> {
    arena.take(plan.scratch_bytes)
}

fn refuse(ctx: &Context, a: &Args<'_>) -> Result<(), String> {
    refuse_without_kernels(ctx)?;
    let max_keys = Plan::new(a).max_keys;
    if max_keys > i32::MAX as usize {
        return Err(format!("max_seq_length + max_cache_length = {max_keys} positions are beyond 32-bit indices"));
    }
    Ok(())
}

fn refuse_sm90(ctx: &Context, a: &Args<'_>) -> Result<(), String> {
    let depth = a.q.shape[2];
    if depth > score::DEPTH {
        return Err(format!("head_size {depth} is beyond {}", score::DEPTH));
    }
    refuse_hopper(ctx, &SCORE_SM90).map_err(|reason| format!("{} {reason}", SCORE_SM90.file))
}

fn run(ctx: &Context, a: &Args<'_>, arena: &mut Arena, stream: Stream, sm90: bool) -> Result<()> {
    let [tokens, num_heads, depth] = a.q.shape;
    let plan = Plan::new(a);
    let scratch = take_scratch(&plan, arena).as_ptr();
    let sorted = scratch.wrapping_add(4 * plan.window * plan.score_stride);
    let tokens = tokens.min(a.q_s.shape[0]).min(a.output_indices.shape[0]);
    let tokens = a.output_scores.map_or(tokens, |scores| tokens.min(scores.shape[0]));
    if tokens == 0 || a.batch.batch_size == 0 || plan.max_keys == 0 {
        return Ok(());
    }
    let batch = BatchParams::new(&a.batch);
    let cache = CacheParams::new(&a.cache);
    let pieces = depth.is_multiple_of(16);
    for first_row in (0..tokens).step_by(plan.window) {
        let rows = plan.window.min(tokens - first_row);
        let params = MlaIndexerScoreParams {
            batch,
            cache,
            q: a.q.as_ptr(),
            q_s: a.q_s.as_ptr().cast(),
            scores: scratch.cast(),
            q_token_stride: a.q.stride[0] as i64,
            q_head_stride: a.q.stride[1] as i64,
            q_s_stride: a.q_s.stride[0] as i64,
            score_stride: plan.score_stride as i64,
            first_row: first_row as u64,
            rows: rows as u64,
            max_keys: plan.max_keys as u64,
            num_heads: num_heads as u32,
            causal: u32::from(a.causal),
            q_vector: u32::from(pieces && rows_aligned(&a.q)),
            k_vector: u32::from(pieces),
        };
        let key_tiles = plan.max_keys.div_ceil(score::KEYS);
        let (kernel, blocks, threads, shared) = match ctx.backend() {
            Backend::Cuda(device) if sm90 => {
                let blocks = score_sm90::blocks(rows, plan.max_keys, device.multiprocessors());
                (&SCORE_SM90, blocks, score_sm90::THREADS, score_sm90::SHARED)
            }
            _ if depth <= score::DEPTH => {
                (&SCORE, (key_tiles * rows.div_ceil(score::ROWS)) as u32, score::THREADS, score::SHARED)
            }
            _ => (&SCORE_PLAIN, (key_tiles * rows) as u32, score::THREADS, 0),
        };
        let shape = Shape { grid: [blocks, 1, 1], threads, shared };
        // SAFETY: the struct describes the checked arguments and the scratch laid out for them.
        unsafe { launch(ctx, kernel, shape, &params, stream)? };

        let params = MlaIndexerSelectParams {
            batch,
            scores: scratch.cast(),
            sorted: if plan.sorts_in_scratch() { sorted.cast() } else { null_mut() },
            output_indices: a.output_indices.as_ptr().cast(),
            output_scores: a.output_scores.map_or(null_mut(), |s| s.as_ptr().cast()),
            score_stride: plan.score_stride as i64,
            indices_stride: a.output_indices.stride[0] as i64,
            output_scores_stride: a.output_scores.map_or(0, |s| s.stride[0] as i64),
            first_row: first_row as u64,
            rows: rows as u64,
            max_keys: plan.max_keys as u64,
            top_k: a.top_k as u32,
            sort_size: plan.sort_size as u32,
            causal: u32::from(a.causal),
            reserved: 0,
        };
        let sort_bytes = if plan.sorts_in_scratch() { 0 } else { 8 * plan.sort_size };
        let shared = (select::HISTOGRAM_BYTES + sort_bytes) as u32;
        let shape = Shape { grid: [rows as u32, 1, 1], threads: select::THREADS, shared };
        // SAFETY: as above.
        unsafe { launch(ctx, &SELECT, shape, &params, stream)? };
    }
    Ok(())
}

// ---- launch structs, as in kernels/mla_indexer_fp8.cuh ----

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct MlaIndexerScoreParams {
    batch: BatchParams,
    cache: CacheParams,
    q: *const u8,
    q_s: *const f32,
    scores: *mut f32,
    q_token_stride: i64,
    q_head_stride: i64,
    q_s_stride: i64,
    score_stride: i64,
    first_row: u64,
    rows: u64,
    max_keys: u64,
    num_heads: u32,
    causal: u32,
    q_vector: u32,
    k_vector: u32,
}
const _: () = assert!(size_of::<MlaIndexerScoreParams>() == 216);
// SAFETY: the layout of the kernel's struct; filled from checked arguments.
unsafe impl LaunchParams for MlaIndexerScoreParams {}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct MlaIndexerSelectParams {
    batch: BatchParams,
    scores: *const f32,
    sorted: *mut u64,
    output_indices: *mut i32,
    output_scores: *mut f32,
    score_stride: i64,
    indices_stride: i64,
    output_scores_stride: i64,
    first_row: u64,
    rows: u64,
    max_keys: u64,
    top_k: u32,
    sort_size: u32,
    causal: u32,
    reserved: u32,
}
const _: () = assert!(size_of::<MlaIndexerSelectParams>() == 136);
// SAFETY: as above.
unsafe impl LaunchParams for MlaIndexerSelectParams {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every block of the kernel for sm_90a finds the number of row tiles that the grid was made for, and no row is left over.
    #[test]
    fn blocks_of_score_sm90() {
        for (rows, keys, multiprocessors, blocks) in [
            (1, 1, 132, 1),
            (64, 8192, 132, 32 * 22),
            (2048, 8192, 132, 32 * 32),
            (2048, 65536, 132, 256 * 32),
            (16, 1 << 20, 132, 4096),
            (100, 300, 1, 2 * 2),
        ] {
            let made = score_sm90::blocks(rows, keys, multiprocessors);
            assert_eq!(made, blocks, "{rows} rows, {keys} keys");
            assert_eq!(made as usize % keys.div_ceil(score_sm90::KEYS), 0);
        }
    }
}

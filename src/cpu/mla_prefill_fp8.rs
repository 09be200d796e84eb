//! MLA prefill on CPU: up-projection of cached latents and flash attention, both in f32 register tiles.
//!
//! What is computed, for each head `h`, sequence `b` and query row `t`:
//!
//! ```text
//! for each cached row r of b:   code, s = quantize(latent(r))             e4m3, a scale per 128 columns
//!                               K, V    = round(sum of code * s * W * Ws) nope keys and v_head_dim values of the head
//! for each key k that t sees:   x[k]    = scale * (q . [K[k], rope(k)]) + slope * (k - position)
//! output = sum of softmax(x)[k] V[k]
//! ```
//!
//! What is done differently:
//! * The cached rows are read, quantised and laid down once, as codes (a byte a column) and scales. Both matmuls' operands are decoded from fp8 into the
//!   caches beside the multiplier: rows of latents ([`ROWS`] at a time) once a head, a panel of weights once for those rows.
//! * K goes down as panels of `NR` keys by column, V as panels of `NR` columns by key: what the two matmuls of attention read in order. Every sequence starts a
//!   panel of its own, so that a row's tiles depend on its own sequence alone.
//! * Attention goes over tiles of [`KEYS`] keys with the running maximum and sum of an online softmax: scores live in a tile and never in memory. A mask is a range of keys for
//!   each row: what no row of a register tile sees is not computed.
//! * When keys and values of all heads are more than [`BUDGET`], heads are taken in groups: memory is bounded, and a head's numbers are the same.
//!
//! Every sum has an order of its own, set by position in the sequence: threads, workspace and whatever else the batch holds change no bit.

mod kernels;

use super::mla_row::{FinishRow, Rotation};
use super::simd::{self, Kernel, Simd, convert};
use super::{cache_row, reference};
use crate::context::Context;
use crate::dtype::E4m3;
use crate::error::Result;
use crate::op::mla_prefill_fp8::{Args, Finish, MlaPrefillFp8, SCALE_BLOCK, ScoreMod, alibi_slope};
use crate::plan::{Impl, Stream};
use crate::view::View;
use crate::with_float;
use crate::workspace::{Arena, Span, windowed};
use kernels::{NR, RowState, ScoreScale, Seen, Stretch, register_tiles};
use std::ops::Range;

/// Best first.
pub static IMPLS: &[Impl<MlaPrefillFp8>] =
    &[Impl { name: "tiled", refuse: |ctx, _| ctx.isa.not_reference(), layout, run }, reference::MLA_PREFILL_FP8];

/// Buffer rows that are up-projected together: their latents and their keys and values fit the second-level cache.
const ROWS: usize = 192;
/// Columns of latents that are decoded together: a panel of so many weights fits the first-level cache.
const COLUMNS: usize = 256;
/// Query rows of an attention task.
const QUERIES: usize = 48;
/// Keys of an attention tile, counted from the first buffered key of the sequence.
const KEYS: usize = 128;
/// Floats of keys and values (64 MiB) above which heads are taken in groups.
const BUDGET: usize = 16 << 20;
/// New tokens of a finishing task.
const TOKENS: usize = 8;

/// Sizes that follow from the shapes alone.
#[derive(Clone, Copy)]
struct Sizes {
    /// Panels of buffer rows: every sequence starts one.
    panels: usize,
    nope: usize,
    rope: usize,
    latent: usize,
    /// Columns of V's panels.
    values: usize,
    /// Floats of one head's keys and values.
    head: usize,
    /// Floats for the keys and values of the heads that are taken together.
    heads: usize,
    /// Floats of a thread's scratch.
    lane: usize,
    lanes: usize,
}

impl Sizes {
    fn new(ctx: &Context, a: &Args<'_>) -> Self {
        let up = |n: usize| n.checked_next_multiple_of(NR).unwrap_or(usize::MAX);
        let panels = a.buffer_length / NR + a.batch.batch_size + 1;
        let (nope, values) = (a.nope_dim, up(a.v_head_dim));
        let head = panels.saturating_mul(NR).saturating_mul(nope.saturating_add(values));
        let project = up(nope).saturating_add(values).saturating_add(COLUMNS + 8).saturating_mul(ROWS);
        let attend = (nope + a.rope_dim + 8).saturating_add(values).saturating_add(KEYS).saturating_mul(QUERIES);
        Sizes {
            panels,
            nope,
            rope: a.rope_dim,
            latent: a.kv_lora_rank,
            values,
            head,
            heads: windowed(a.num_heads, head, 1, BUDGET),
            lane: project.saturating_add(COLUMNS * NR).max(attend).max(a.cache.head_size + 3 * a.rope_dim),
            lanes: ctx.num_threads(),
        }
    }

    fn groups(&self) -> usize {
        self.latent / SCALE_BLOCK
    }

    /// Heads at a time, in groups of equal size as far as possible.
    fn heads_at_a_time(&self, heads: usize) -> usize {
        let most = (self.heads / self.head).clamp(1, heads);
        heads.div_ceil(heads.div_ceil(most))
    }
}

/// The workspace.
struct Scratch {
    /// `[panels * NR, latent]` codes of the latents.
    codes: Span<u8>,
    /// `[panels * NR, groups]`
    scales: Span<f32>,
    /// `[panels, rope, NR]`
    k_rope: Span<f32>,
    /// A head after another: keys `[panels, nope, NR]`, then values `[values / NR, panels * NR, NR]`.
    heads: Span<f32>,
    /// `[heads, panels]`: 1 where all values of a panel are finite.
    finite: Span<u8>,
    lanes: Span<f32>,
    /// The norm's weights as f32.
    gamma: Span<f32>,
}

impl Scratch {
    fn take(z: &Sizes, heads: usize, arena: &mut Arena) -> Self {
        let rows = z.panels.saturating_mul(NR);
        Scratch {
            codes: arena.take(rows.saturating_mul(z.latent)),
            scales: arena.take(rows.saturating_mul(z.groups())),
            k_rope: arena.take(rows.saturating_mul(z.rope)),
            heads: arena.take(z.heads),
            finite: arena.take(z.panels.saturating_mul(heads)),
            lanes: arena.take(z.lane.saturating_mul(z.lanes)),
            gamma: arena.take(z.latent),
        }
    }
}

fn layout(ctx: &Context, a: &Args<'_>, arena: &mut Arena) {
    Scratch::take(&Sizes::new(ctx, a), a.num_heads, arena);
}

fn run(ctx: &Context, a: &Args<'_>, arena: &mut Arena, _: Stream) -> Result<()> {
    let sizes = Sizes::new(ctx, a);
    let scratch = Scratch::take(&sizes, a.num_heads, arena);
    if a.batch.tokens() == 0 {
        return Ok(());
    }
    let call = Prefill { ctx, a, sizes, scratch };
    if let Some(finish) = &a.finish {
        call.finish(finish)?;
    }
    if a.rows.total() > 0 {
        call.gather()?;
    }
    let at_a_time = sizes.heads_at_a_time(a.num_heads);
    for first in (0..a.num_heads).step_by(at_a_time) {
        let heads = first..a.num_heads.min(first + at_a_time);
        if a.rows.total() > 0 {
            call.up_project(heads.clone())?;
        }
        call.attend(heads)?;
    }
    Ok(())
}

/// Where sequences lie when each starts a piece of its own: pieces of `size` rows, sequence `b`'s from `start(b) / size + b` on. What is between two
/// sequences' pieces stays unused.
#[derive(Clone, Copy)]
struct Pieces {
    size: usize,
}

impl Pieces {
    fn first(self, b: usize, start: usize) -> usize {
        start / self.size + b
    }

    /// The sequence whose pieces start at or before `piece`, last of those.
    fn sequence(self, piece: usize, sequences: usize, start: impl Fn(usize) -> usize) -> usize {
        let (mut low, mut high) = (0, sequences);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if self.first(middle, start(middle)) <= piece { low = middle } else { high = middle }
        }
        low
    }
}

const PANELS: Pieces = Pieces { size: NR };
const TILES: Pieces = Pieces { size: QUERIES };

/// A call in progress.
struct Prefill<'c, 'a> {
    ctx: &'c Context,
    a: &'c Args<'a>,
    sizes: Sizes,
    scratch: Scratch,
}

impl Prefill<'_, '_> {
    /// Panel that the buffer rows of sequence `b` start at.
    fn first_panel(&self, b: usize) -> usize {
        PANELS.first(b, self.a.rows.rows(b).start)
    }

    /// Scratch of the thread that runs a task.
    #[allow(clippy::mut_from_ref, reason = "a lane is one task's at a time")]
    fn lane(&self, lane: usize) -> &mut [f32] {
        // SAFETY: no two tasks at once have the same lane.
        unsafe { self.scratch.lanes.slice_mut(lane * self.sizes.lane, self.sizes.lane) }
    }

    /// Rope q and finish the new cache rows.
    fn finish(&self, finish: &Finish) -> Result<()> {
        let tokens = self.a.batch.tokens();
        // SAFETY: no task runs yet.
        let gamma = unsafe { self.scratch.gamma.slice_mut(0, self.sizes.latent) };
        simd::run(self.ctx.isa, LoadRow { view: &finish.gamma, index: [], out: gamma });
        let gamma = &*gamma;
        self.ctx.threads.run_with_lane(tokens.div_ceil(TOKENS), |lane, task| {
            let tokens = task * TOKENS..tokens.min((task + 1) * TOKENS);
            let scratch = self.lane(lane);
            simd::run(self.ctx.isa, FinishTokens { a: self.a, finish, gamma, tokens, scratch });
        })
    }

    /// Read the cached rows, quantise their latents, lay their rope parts down as panels. A panel's rows past its sequence are zeros.
    fn gather(&self) -> Result<()> {
        let (a, z, isa) = (self.a, &self.sizes, self.ctx.isa);
        self.ctx.threads.run_with_lane(self.used_panels(), |lane, panel| {
            let x = &mut self.lane(lane)[..a.cache.head_size];
            let b = PANELS.sequence(panel, a.batch.batch_size, |b| a.rows.rows(b).start);
            let first = (panel - self.first_panel(b)) * NR;
            let row = panel * NR;
            // SAFETY: a panel's rows are its task's alone.
            let (codes, scales, k_rope) = unsafe {
                (
                    self.scratch.codes.slice_mut(row * z.latent, NR * z.latent),
                    self.scratch.scales.slice_mut(row * z.groups(), NR * z.groups()),
                    self.scratch.k_rope.slice_mut(row * z.rope, NR * z.rope),
                )
            };
            for i in 0..NR {
                if first + i < a.rows.rows(b).len() {
                    let (block, slot) = a.batch.locate(b, a.rows.first_position(b) + first + i);
                    // SAFETY: nobody writes the cache any more.
                    unsafe { cache_row::read_row(&a.cache, block, slot, x) };
                    if a.cache.dtype != a.q.dtype {
                        kernels::round_floats(isa, a.q.dtype, x);
                    }
                } else {
                    x.fill(0.0);
                }
                let (latent, roped) = x.split_at(z.latent);
                let groups = latent.chunks(SCALE_BLOCK).zip(codes[i * z.latent..].chunks_mut(SCALE_BLOCK));
                for (scale, (x, codes)) in scales[i * z.groups()..].iter_mut().zip(groups) {
                    *scale = kernels::quantize(isa, x, codes);
                }
                k_rope.chunks_exact_mut(NR).zip(roped).for_each(|(column, x)| column[i] = *x);
            }
        })
    }

    /// One past the last panel that holds a row.
    fn used_panels(&self) -> usize {
        let last = self.a.batch.batch_size - 1;
        self.first_panel(last) + self.a.rows.rows(last).len().div_ceil(NR)
    }

    /// Keys and values of some heads, rounded to dtype.
    fn up_project(&self, heads: Range<usize>) -> Result<()> {
        let panels = self.used_panels();
        let per_block = ROWS / NR;
        let blocks = panels.div_ceil(per_block);
        self.ctx.threads.run_with_lane(blocks * heads.len(), |lane, task| {
            let block = task / heads.len();
            let panels = block * per_block..panels.min((block + 1) * per_block);
            self.project_block(self.lane(lane), panels, heads.start + task % heads.len(), task % heads.len());
        })
    }

    /// Head `h`, the `slot`-th of its group, of a block of panels.
    fn project_block(&self, scratch: &mut [f32], panels: Range<usize>, h: usize, slot: usize) {
        let (a, z, isa) = (self.a, &self.sizes, self.ctx.isa);
        let rows = panels.len() * NR;
        let first_row = panels.start * NR;
        let keys = z.nope.next_multiple_of(NR);
        let features = keys + z.values;
        let lda = COLUMNS + 8;
        let (latents, rest) = scratch.split_at_mut(ROWS * lda);
        let (weights, rest) = rest.split_at_mut(COLUMNS * NR);
        let product = &mut rest[..rows * features];
        // The weight row behind a column of the product: none where a panel is wider than what is left.
        let head_row = h * (z.nope + a.v_head_dim);
        let weight_row = |f: usize| match f {
            f if f < z.nope => Some(head_row + f),
            f if f >= keys && f < keys + a.v_head_dim => Some(head_row + z.nope + f - keys),
            _ => None,
        };
        for k in (0..z.latent).step_by(COLUMNS) {
            let columns = COLUMNS.min(z.latent - k);
            let groups = k / SCALE_BLOCK..(k + columns) / SCALE_BLOCK;
            for r in 0..rows {
                for g in groups.clone() {
                    let row = first_row + r;
                    // SAFETY: `gather` wrote them and nobody writes them now.
                    let (codes, scale) = unsafe {
                        (
                            self.scratch.codes.slice(row * z.latent + g * SCALE_BLOCK, SCALE_BLOCK),
                            self.scratch.scales.slice(row * z.groups() + g, 1)[0],
                        )
                    };
                    kernels::decode_row(
                        isa,
                        codes,
                        scale,
                        &mut latents[r * lda + g * SCALE_BLOCK - k..][..SCALE_BLOCK],
                    );
                }
            }
            for f in (0..features).step_by(NR) {
                for g in groups.clone() {
                    const ZEROS: &[u8] = &[0; SCALE_BLOCK];
                    let mut codes = [ZEROS; NR];
                    let mut scales = [0.0; NR];
                    for (i, n) in (f..f + NR).map(weight_row).enumerate() {
                        let Some(n) = n else { continue };
                        // SAFETY: host memory nobody writes.
                        let (w, ws) = unsafe {
                            (a.kv_b_proj.row::<E4m3, 1>([n]), a.kv_b_proj_scale.row::<f32, 1>([n / SCALE_BLOCK]))
                        };
                        codes[i] = &bytes(w)[g * SCALE_BLOCK..][..SCALE_BLOCK];
                        scales[i] = ws[g];
                    }
                    let at = (g * SCALE_BLOCK - k) * NR;
                    kernels::decode_panel(isa, &codes, &scales, &mut weights[at..][..SCALE_BLOCK * NR]);
                }
                for r in register_tiles(rows) {
                    let stretch = Stretch { a: &latents[r.start * lda..], lda, b: weights, k: columns };
                    kernels::tile(isa, r.len(), &[stretch], &mut product[r.start * features + f..], features, k > 0);
                }
            }
        }
        kernels::round_floats(isa, a.q.dtype, product);
        let head = slot * z.head;
        let value_rows = z.panels * NR;
        for (i, panel) in panels.enumerate() {
            let c = &product[i * NR * features..];
            // SAFETY: a panel of a head is its task's alone.
            unsafe {
                let size = z.nope * NR;
                kernels::turn(isa, c, features, z.nope, self.scratch.heads.slice_mut(head + panel * size, size));
                let values = head + z.panels * size;
                let mut finite = true;
                for v in (0..z.values).step_by(NR) {
                    let at = values + v * value_rows + panel * NR * NR;
                    finite &=
                        kernels::copy_panel(isa, &c[keys + v..], features, self.scratch.heads.slice_mut(at, NR * NR));
                }
                self.scratch.finite.slice_mut(slot * z.panels + panel, 1)[0] = u8::from(finite);
            }
        }
    }

    /// Attention of all new tokens for some heads.
    fn attend(&self, heads: Range<usize>) -> Result<()> {
        let a = self.a;
        let last = a.batch.batch_size - 1;
        let start = |b: usize| a.batch.rows(b).start;
        let count = TILES.first(last, start(last)) + a.batch.new_tokens(last).div_ceil(QUERIES);
        self.ctx.threads.run_with_lane(count * heads.len(), |lane, task| {
            // Under a causal mask the last queries have most keys: they go first, so that no thread is left alone with one at the end.
            let (tile, slot) = (count - 1 - task / heads.len(), task % heads.len());
            let b = TILES.sequence(tile, a.batch.batch_size, start);
            let rows = a.batch.rows(b);
            let from = rows.start + (tile - TILES.first(b, rows.start)) * QUERIES;
            if from < rows.end {
                self.attend_tile(self.lane(lane), b, from..rows.end.min(from + QUERIES), heads.start + slot, slot);
            }
        })
    }

    /// Rows `queries` of sequence `b` for head `h`, the `slot`-th of its group.
    fn attend_tile(&self, scratch: &mut [f32], b: usize, queries: Range<usize>, h: usize, slot: usize) {
        const LOG2_E: f32 = std::f32::consts::LOG2_E;
        let (a, z, isa) = (self.a, &self.sizes, self.ctx.isa);
        let count = queries.len();
        let width = z.nope + z.rope;
        let ldq = width + 8;
        let (q, rest) = scratch.split_at_mut(QUERIES * ldq);
        let (scores, rest) = rest.split_at_mut(QUERIES * KEYS);
        let out = &mut rest[..count * z.values];
        out.fill(0.0);
        let mut state = [RowState { top: f32::NEG_INFINITY, sum: 0.0 }; QUERIES];
        // What each row sees, counted from the sequence's first buffered key.
        let first = a.rows.first_position(b);
        let position = a.batch.position(queries.start).1;
        let end = first + a.rows.rows(b).len();
        let mut seen = [(0, 0); QUERIES];
        for (i, t) in queries.clone().enumerate() {
            simd::run(isa, LoadRow { view: &a.q, index: [t, h], out: &mut q[i * ldq..][..width] });
            let keys = a.mask.visible(position + i, end);
            let from = keys.start.max(first);
            seen[i] = if from < keys.end { (from - first, keys.end - first) } else { (0, 0) };
        }
        let seen = &seen[..count];
        let slope = if a.score_mod == ScoreMod::Alibi { alibi_slope(h, a.num_heads) * LOG2_E } else { 0.0 };
        let panel0 = self.first_panel(b);
        let head = slot * z.head;
        let value_rows = z.panels * NR;
        let values = head + z.nope * value_rows;

        let (low, high) = union(seen.iter().copied());
        for tile in (low / KEYS * KEYS..high).step_by(KEYS) {
            let within = |(from, to): (usize, usize)| {
                let (from, to) = (from.clamp(tile, tile + KEYS) - tile, to.clamp(tile, tile + KEYS) - tile);
                if from < to { (from, to) } else { (0, 0) }
            };
            // Per register tile: the keys that any of its rows sees, and the panels that hold them.
            let tiles = register_tiles(count).map(|r| {
                let (from, to) = union(seen[r.clone()].iter().map(|&range| within(range)));
                (r, (from, to), (from / NR * NR, to.next_multiple_of(NR)))
            });
            let (from, to) = within((low, high));
            for j in (from / NR * NR..to).step_by(NR) {
                let panel = panel0 + (tile + j) / NR;
                // SAFETY: written before, and nobody writes them now.
                let (keys, roped) = unsafe {
                    (
                        self.scratch.heads.slice(head + panel * z.nope * NR, z.nope * NR),
                        self.scratch.k_rope.slice(panel * z.rope * NR, z.rope * NR),
                    )
                };
                for (r, _, computed) in tiles.clone() {
                    if computed.0 <= j && j < computed.1 {
                        let q = &q[r.start * ldq..];
                        let stretches = [
                            Stretch { a: q, lda: ldq, b: keys, k: z.nope },
                            Stretch { a: &q[z.nope..], lda: ldq, b: roped, k: z.rope },
                        ];
                        kernels::tile(isa, r.len(), &stretches, &mut scores[r.start * KEYS + j..], KEYS, false);
                    }
                }
            }
            for (r, union, computed) in tiles.clone() {
                if union.0 == union.1 {
                    continue;
                }
                for i in r {
                    let by = ScoreScale {
                        scale: a.scale * LOG2_E,
                        slope,
                        distance: ((first + tile) as i64 - (position + i) as i64) as f32,
                    };
                    let row = Seen { computed, visible: within(seen[i]) };
                    let shrink = kernels::softmax(isa, &mut scores[i * KEYS..][..KEYS], row, by, &mut state[i]);
                    if shrink != 1.0 {
                        kernels::scale(isa, &mut out[i * z.values..][..z.values], shrink);
                    }
                }
            }
            for v in (0..z.values).step_by(NR) {
                // SAFETY: written before, and nobody writes them now.
                let panel = |from: usize, to: usize| unsafe {
                    let row = panel0 * NR + tile;
                    self.scratch.heads.slice(values + v * value_rows + (row + from) * NR, (to - from) * NR)
                };
                let multiply = |rows: Range<usize>, (from, to): (usize, usize), out: &mut [f32]| {
                    let stretch =
                        Stretch { a: &scores[rows.start * KEYS + from..], lda: KEYS, b: panel(from, to), k: to - from };
                    kernels::tile(isa, rows.len(), &[stretch], &mut out[rows.start * z.values + v..], z.values, true);
                };
                for (r, union, computed) in tiles.clone() {
                    if union.0 == union.1 {
                        continue;
                    }
                    let panels = slot * z.panels + panel0 + (tile + computed.0) / NR;
                    // SAFETY: written before, and nobody writes them now.
                    let finite = unsafe { self.scratch.finite.slice(panels, (computed.1 - computed.0) / NR) };
                    if finite.iter().all(|&f| f == 1) {
                        multiply(r, union, out);
                    } else {
                        // A weight of 0 does not hide a NaN from rows that must not see it.
                        r.for_each(|i| multiply(i..i + 1, within(seen[i]), out));
                    }
                }
            }
        }

        for (i, t) in queries.enumerate() {
            let (row, RowState { top, sum }) = (&mut out[i * z.values..][..z.values], state[i]);
            let empty = seen[i].0 == seen[i].1;
            kernels::scale(isa, row, if empty { 0.0 } else { 1.0 / sum });
            simd::run(isa, StoreRow { view: &a.output, index: [t, h], x: &row[..a.v_head_dim] });
            if let Some(lse) = &a.lse {
                let value =
                    if empty { f64::NEG_INFINITY } else { (top as f64 + (sum as f64).log2()) * std::f64::consts::LN_2 };
                // SAFETY: host memory; element h of the row is this task's alone.
                unsafe { lse.as_ptr().cast::<f32>().add(t * lse.stride[0] + h * lse.stride[1]).write(value as f32) };
            }
        }
    }
}

/// The smallest range that holds all that are not empty; empty if all are.
fn union(ranges: impl Iterator<Item = (usize, usize)>) -> (usize, usize) {
    ranges.filter(|(from, to)| from < to).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or((0, 0))
}

/// Codes as the bytes they are.
fn bytes(codes: &[E4m3]) -> &[u8] {
    // SAFETY: E4m3 is a transparent u8.
    unsafe { std::slice::from_raw_parts(codes.as_ptr().cast(), codes.len()) }
}

/// A float row to f32; nobody else writes it meanwhile.
struct LoadRow<'a, const N: usize, const M: usize> {
    view: &'a View<N>,
    index: [usize; M],
    out: &'a mut [f32],
}

impl<const N: usize, const M: usize> Kernel for LoadRow<'_, N, M> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: host memory that nobody writes meanwhile.
        with_float!(self.view.dtype, T => convert(s, unsafe { self.view.row::<T, M>(self.index) }, self.out))
    }
}

/// A float row rounded from f32; nobody else uses it meanwhile.
struct StoreRow<'a, const N: usize, const M: usize> {
    view: &'a View<N>,
    index: [usize; M],
    x: &'a [f32],
}

impl<const N: usize, const M: usize> Kernel for StoreRow<'_, N, M> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: host memory that nobody else uses meanwhile.
        with_float!(self.view.dtype, T => convert(s, self.x, unsafe { self.view.row_mut::<T, M>(self.index) }))
    }
}

/// Rope q and finish the cache rows of some new tokens.
struct FinishTokens<'a, 'b> {
    a: &'a Args<'b>,
    finish: &'a Finish,
    gamma: &'a [f32],
    tokens: Range<usize>,
    /// At least `head_size + 3 * rope_dim`.
    scratch: &'a mut [f32],
}

impl Kernel for FinishTokens<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let FinishTokens { a, finish: f, gamma, tokens, scratch } = self;
        let (row, scratch) = scratch.split_at_mut(a.cache.head_size);
        let (freqs, scratch) = scratch.split_at_mut(a.rope_dim);
        for t in tokens {
            let (b, p) = a.batch.position(t);
            let (block, slot) = a.batch.locate(b, p);
            LoadRow { view: &f.freqs_cis, index: [p], out: freqs }.run(s);
            let rotation = Rotation::new(freqs, f.rope, scratch);
            with_float!(a.q.dtype, T => {
                for h in 0..a.num_heads {
                    // SAFETY: the row is this task's alone. Only its rope part is written: the rest keeps its bits.
                    unsafe {
                        let x = a.q.row_mut::<T, 2>([t, h])[a.nope_dim..].as_mut_ptr();
                        rotation.apply(s, x, x);
                    }
                }
            });
            match &f.kv {
                Some(kv) => LoadRow { view: kv, index: [t], out: row }.run(s),
                // SAFETY: the slot is this task's alone.
                None => unsafe { cache_row::read_row(&a.cache, block, slot, row) },
            }
            let (rotation, dtype) = (&rotation, a.q.dtype);
            simd::run(a.cache.isa, FinishRow { row, gamma, epsilon: f.epsilon, rotation, dtype });
            // SAFETY: as above.
            unsafe { cache_row::write_row(&a.cache, block, slot, row) };
        }
    }
}

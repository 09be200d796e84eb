//! The indexer on CPU: scores in register tiles, an exact top-k beside them, no row of scores ever stored.
//!
//! In short it is
//! ```text
//! for t in tokens:
//!     for s in 0..visible(t): score[s] = k_scale[s] * sum over h of q_s[t,h] * relu(dot(q[t,h], k[s]))
//!     order = argsort(score)[..top_k]
//! ```
//! and nearly all of its time is the dot products: T x S x H x D multiply-adds. What is done differently:
//!
//! * A block of up to [`TOKENS`] tokens of one sequence shares the walk over the keys. [`KEYS`] keys are fetched from their pages, decoded to f32 and
//!   transposed once a block, `[D][KEYS]` (8 KB at D = 128: the first-level cache); q lies decoded as `[H / HEADS][D][HEADS]`. One tile is HEADS x KEYS sums in 12
//!   registers, per column 2 loads of keys, 6 broadcasts of q, 12 FMAs, and one register to spare: with none, compilers keep a sum in memory, and its
//!   additions then wait for each other there. relu, weight and the sum over heads happen on the registers.
//! * A tile's scores go straight through a filter: what beats the row's k-th best so far is appended to the row's candidates, and when there are twice as
//!   many as asked for, a selection brings them back to k and raises the bar. Candidates are integers whose order is that of the result (score falling, NaN last,
//!   position rising), no two equal: the k smallest of any split of the keys are the same, whoever selects them when.
//! * Where blocks are few and contexts long, a block's keys are split between threads, and the parts' candidates are joined in a second pass.
//!
//! A score is the same bits whatever block, tile or part it is computed in: a product of two e4m3 numbers is exact in f32, each dot product is one chain of
//! additions in the order of columns, the heads' terms are added in the order of heads. So it also is on every instruction set.

use super::reference;
use super::simd::{self, Kernel, LANES, Simd};
use crate::context::Context;
use crate::dtype::{E4m3, Element};
use crate::error::Result;
use crate::op::mla_indexer_fp8::{Args, MlaIndexerFp8};
use crate::plan::{Impl, Stream};
use crate::workspace::{Arena, Span};

pub static IMPLS: &[Impl<MlaIndexerFp8>] = &[
    Impl {
        name: "tiled",
        refuse: |ctx, _| ctx.isa.not_reference(),
        layout: |ctx, args, arena| _ = Scratch::take(ctx, args, arena),
        run,
    },
    reference::MLA_INDEXER_FP8,
];

/// Keys of a tile: two registers of lanes.
const KEYS: usize = 2 * LANES;
/// Heads of a tile: 6 x 2 sums, 2 keys and a broadcast in 16 registers.
const HEADS: usize = 6;
/// Tokens that share decoded keys. 8 make the decoding a hundredth of the work, and their q (256 KB at 64 x 128) stays in the second-level cache.
const TOKENS: usize = 8;
/// A key range given to one thread is at least this long.
const MIN_PART: usize = 24 * KEYS;

/// A column of a key tile.
type Column = [[f32; LANES]; KEYS / LANES];

/// Some keys for a block of tokens.
#[derive(Clone, Copy)]
struct Unit {
    sequence: usize,
    /// First of `tokens` rows of q.
    token: usize,
    tokens: usize,
    /// Key positions.
    start: usize,
    end: usize,
    /// How many units this and the following ones are that share the block; 0 in all but the first.
    parts: usize,
    /// Candidate rows of the unit, `tokens` of them from here, where the block is split.
    row: usize,
}

struct Scratch {
    /// As many candidates as can come out.
    k: usize,
    /// Candidates at which a row is brought back to k.
    limit: usize,
    tokens: usize,
    units: Span<Unit>,
    /// Per lane `[TOKENS][ceil(H / HEADS)][D]`
    q: Span<[f32; HEADS]>,
    q_stride: usize,
    /// Per lane `[D]`
    keys: Span<Column>,
    /// `[row][limit + KEYS]`
    candidates: Span<u64>,
    /// `[row]`, of a split block's rows.
    counts: Span<usize>,
}

/// Key ranges that each thread should find, where blocks are split.
const PARTS_PER_LANE: usize = 4;

impl Scratch {
    fn take(ctx: &Context, a: &Args<'_>, arena: &mut Arena) -> Self {
        let lanes = ctx.num_threads();
        let [total, heads, depth] = a.q.shape;
        let tokens = total.min(TOKENS);
        let k = a.top_k.min(a.batch.max_cache_length.saturating_add(a.batch.max_seq_length));
        let limit = k.saturating_mul(2).max(64);
        let q_stride = heads.div_ceil(HEADS).saturating_mul(depth);
        let parts = PARTS_PER_LANE * lanes;
        // Blocks are split where there are fewer than `parts`. Then sum(tokens * ceil(length / part)) <= sum(tokens) + tokens * sum(length / part), and the
        // part's length is chosen so that the last sum is at most `parts`. Unsplit, a lane has its own rows.
        let rows = total.min(tokens * parts) + tokens * parts;
        Scratch {
            k,
            limit,
            tokens,
            units: arena.take(total + parts),
            q: arena.take(q_stride.saturating_mul(tokens * lanes)),
            q_stride,
            keys: arena.take(depth.saturating_mul(lanes)),
            candidates: arena.take(limit.saturating_add(KEYS).saturating_mul(rows)),
            counts: arena.take(rows),
        }
    }

    /// # Safety
    /// Nobody else uses the row while the slice lives.
    #[allow(clippy::mut_from_ref, reason = "disjoint rows of shared scratch, by contract")]
    unsafe fn row(&self, row: usize) -> &mut [u64] {
        let width = self.limit + KEYS;
        // SAFETY: by contract.
        unsafe { self.candidates.slice_mut(row * width, width) }
    }
}

/// Keys that token `t` of sequence `b` sees.
fn visible(a: &Args<'_>, b: usize, t: usize) -> usize {
    if a.causal { a.batch.cache_length(b) + (t - a.batch.rows(b).start) + 1 } else { a.batch.length(b) }
}

/// The call's blocks, cut into parts where there are too few of them. Returns how many units, and whether any is a part.
fn plan_units(a: &Args<'_>, tokens: usize, parts: usize, units: &mut [Unit]) -> (usize, bool) {
    let mut blocks = 0;
    let mut keys = 0;
    for b in 0..a.batch.batch_size {
        for token in a.batch.rows(b).step_by(tokens) {
            let last = (token + tokens).min(a.batch.rows(b).end) - 1;
            blocks += 1;
            keys += visible(a, b, last);
        }
    }
    let split = blocks < parts;
    let part = if split { keys.div_ceil(parts).max(MIN_PART).next_multiple_of(KEYS) } else { usize::MAX };
    let (mut n, mut row) = (0, 0);
    // The longest blocks of a sequence come first: they end together.
    for b in 0..a.batch.batch_size {
        let rows = a.batch.rows(b);
        for i in (0..rows.len().div_ceil(tokens)).rev() {
            let token = rows.start + i * tokens;
            let count = tokens.min(rows.end - token);
            let length = visible(a, b, token + count - 1);
            let mut start = 0;
            while start < length {
                let end = length.min(start.saturating_add(part));
                let parts = if start == 0 { length.div_ceil(part) } else { 0 };
                units[n] = Unit { sequence: b, token, tokens: count, start, end, parts, row };
                n += 1;
                row += count;
                start = end;
            }
        }
    }
    (n, split)
}

fn run(ctx: &Context, a: &Args<'_>, arena: &mut Arena, _: Stream) -> Result<()> {
    if a.batch.tokens() == 0 {
        return Ok(());
    }
    let scratch = Scratch::take(ctx, a, arena);
    // SAFETY: plain data of this call, and no task runs yet.
    let units = unsafe { scratch.units.slice_mut(0, scratch.units.len()) };
    let (n, split) = plan_units(a, scratch.tokens, PARTS_PER_LANE * ctx.num_threads(), units);
    let units = &units[..n];
    ctx.threads.run_with_lane(n, |lane, i| {
        simd::run(ctx.isa, Score { a, scratch: &scratch, lane, unit: &units[i], split });
    })?;
    if split {
        ctx.threads.run(n, |i| {
            if units[i].parts > 0 {
                join(a, &scratch, &units[i..i + units[i].parts]);
            }
        })?;
    }
    Ok(())
}

/// What orders candidates: the smaller the better. Score falling (-0 as 0, NaN last), position rising.
#[inline(always)]
fn rank(score: f32, position: usize) -> u64 {
    let bits = (score + 0.0).to_bits();
    let rising = if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 };
    let high = if score.is_nan() { u32::MAX } else { !rising };
    (high as u64) << 32 | position as u64
}

#[inline(always)]
fn unrank(rank: u64) -> (f32, u32) {
    let high = (rank >> 32) as u32;
    let rising = !high;
    let bits = if rising >> 31 == 1 { rising & 0x7fff_ffff } else { !rising };
    (if high == u32::MAX { f32::NAN } else { f32::from_bits(bits) }, rank as u32)
}

/// Keep the k best of `candidates[..len]`, in any order but for the worst of them, which comes last.
fn keep_best(candidates: &mut [u64], k: usize) -> usize {
    if candidates.len() > k {
        candidates.select_nth_unstable(k - 1);
    }
    candidates.len().min(k)
}

/// Sort a row's last candidates and write them out.
fn write_row(a: &Args<'_>, t: usize, candidates: &mut [u64], k: usize) {
    let n = keep_best(candidates, k);
    let best = &mut candidates[..n];
    best.sort_unstable();
    // SAFETY: a token's output rows are written by one task.
    let indices = unsafe { a.output_indices.row_mut::<i32, 1>([t]) };
    for (index, &rank) in indices.iter_mut().zip(&*best) {
        *index = unrank(rank).1 as i32;
    }
    indices[n..].fill(-1);
    if let Some(view) = &a.output_scores {
        // SAFETY: as above.
        let scores = unsafe { view.row_mut::<f32, 1>([t]) };
        for (score, &rank) in scores.iter_mut().zip(&*best) {
            *score = unrank(rank).0;
        }
        scores[n..].fill(f32::NEG_INFINITY);
    }
}

/// Join the candidates of a split block, in the first part's rows.
fn join(a: &Args<'_>, scratch: &Scratch, parts: &[Unit]) {
    for i in 0..parts[0].tokens {
        // SAFETY: the first pass is over, and a block's rows are joined by one task.
        let count = |unit: &Unit| unsafe { scratch.counts.slice(unit.row + i, 1)[0] };
        // SAFETY: as above; rows of different parts are different rows.
        let row = unsafe { scratch.row(parts[0].row + i) };
        let mut len = count(&parts[0]);
        let mut bar = u64::MAX;
        for unit in &parts[1..] {
            // SAFETY: as above.
            for &candidate in &unsafe { &*scratch.row(unit.row + i) }[..count(unit)] {
                if candidate < bar {
                    row[len] = candidate;
                    len += 1;
                    if len == scratch.limit {
                        len = keep_best(&mut row[..len], scratch.k);
                        bar = row[len - 1];
                    }
                }
            }
        }
        write_row(a, parts[0].token + i, &mut row[..len], scratch.k);
    }
}

/// One unit: score its keys for its tokens, keep candidates.
struct Score<'a, 'b> {
    a: &'a Args<'b>,
    scratch: &'a Scratch,
    lane: usize,
    unit: &'a Unit,
    split: bool,
}

/// A row's candidates while its keys go by.
#[derive(Clone, Copy)]
struct Filter {
    len: usize,
    visible: usize,
    /// Score of the k-th best. Later keys that only equal it come after it.
    bar: f32,
    /// There is no bar yet, or it is NaN and everything else is above it.
    open: bool,
}

impl Kernel for Score<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Score { a, scratch, lane, unit, split } = self;
        let depth = a.q.shape[2];
        // SAFETY: a lane's scratch is used by one task at a time.
        let (q, keys) = unsafe {
            (
                scratch.q.slice_mut(lane * scratch.tokens * scratch.q_stride, unit.tokens * scratch.q_stride),
                scratch.keys.slice_mut(lane * depth, depth),
            )
        };
        for (i, q) in q.chunks_exact_mut(scratch.q_stride).enumerate() {
            pack_q(a, unit.token + i, q);
        }
        let first_row = if split { unit.row } else { lane * scratch.tokens };
        let mut filters = [Filter { len: 0, visible: 0, bar: 0.0, open: true }; TOKENS];
        for (i, filter) in filters[..unit.tokens].iter_mut().enumerate() {
            filter.visible = visible(a, unit.sequence, unit.token + i);
        }

        let mut start = unit.start;
        while start < unit.end {
            let scales = pack_keys(s, a, unit.sequence, start..unit.end.min(start + KEYS), keys);
            for (i, q) in q.chunks_exact(scratch.q_stride).enumerate() {
                let filter = &mut filters[i];
                if filter.visible <= start {
                    continue;
                }
                // SAFETY: host memory nobody writes.
                let weights = unsafe { a.q_s.row::<f32, 1>([unit.token + i]) };
                let mut sums = [s.splat(0.0); KEYS / LANES];
                for (q, weights) in q.chunks_exact(depth).zip(weights.chunks(HEADS)) {
                    match weights.len() {
                        HEADS => add_heads::<S, HEADS>(s, q, keys, weights, &mut sums),
                        5 => add_heads::<S, 5>(s, q, keys, weights, &mut sums),
                        4 => add_heads::<S, 4>(s, q, keys, weights, &mut sums),
                        3 => add_heads::<S, 3>(s, q, keys, weights, &mut sums),
                        2 => add_heads::<S, 2>(s, q, keys, weights, &mut sums),
                        _ => add_heads::<S, 1>(s, q, keys, weights, &mut sums),
                    }
                }
                // SAFETY: the lane's or the unit's own row.
                let row = unsafe { scratch.row(first_row + i) };
                let bar = s.splat(filter.bar);
                let mut position = start;
                for (sum, scale) in sums.into_iter().zip(&scales) {
                    let score = s.mul(sum, s.load(scale));
                    let mut above = if filter.open { 0xff } else { s.gt_mask(score, bar) };
                    let left = filter.visible.saturating_sub(position);
                    if left < LANES {
                        above &= (1 << left) - 1;
                    }
                    if above != 0 {
                        let score = s.to_array(score);
                        while above != 0 {
                            let lane = above.trailing_zeros() as usize;
                            row[filter.len] = rank(score[lane], position + lane);
                            filter.len += 1;
                            above &= above - 1;
                        }
                    }
                    position += LANES;
                }
                if filter.len >= scratch.limit {
                    filter.len = keep_best(&mut row[..filter.len], scratch.k);
                    filter.bar = unrank(row[filter.len - 1]).0;
                    filter.open = filter.bar.is_nan();
                }
            }
            start += KEYS;
        }

        for (i, filter) in filters[..unit.tokens].iter().enumerate() {
            // SAFETY: the lane's or the unit's own row and count.
            unsafe {
                let row = &mut scratch.row(first_row + i)[..filter.len];
                if split {
                    scratch.counts.slice_mut(first_row + i, 1)[0] = keep_best(row, scratch.k);
                } else {
                    write_row(a, unit.token + i, row, scratch.k);
                }
            }
        }
    }
}

/// Decode a token's q to `[ceil(H / HEADS)][D][HEADS]`.
#[inline(always)]
fn pack_q(a: &Args<'_>, t: usize, out: &mut [[f32; HEADS]]) {
    let [_, heads, depth] = a.q.shape;
    for h in 0..heads {
        // SAFETY: host memory nobody writes.
        let q = unsafe { a.q.row::<E4m3, 2>([t, h]) };
        for (out, q) in out[h / HEADS * depth..][..depth].iter_mut().zip(q) {
            out[h % HEADS] = q.to_f32();
        }
    }
}

/// Fetch keys from their pages, decode, transpose to `[D][KEYS]`. Slots past the range are not looked at: their lanes are 0. Returns the keys' scales.
#[inline(always)]
fn pack_keys<S: Simd>(s: S, a: &Args<'_>, b: usize, range: std::ops::Range<usize>, out: &mut [Column]) -> Column {
    let mut scales = [[0.0; LANES]; KEYS / LANES];
    let (table, page_size) = (a.batch.table_row(b), a.batch.page_size);
    let (mut page, mut slot) = (range.start / page_size, range.start % page_size);
    for v in 0..KEYS / LANES {
        let mut rows: [Option<&[E4m3]>; LANES] = [None; LANES];
        for (lane, row) in rows.iter_mut().enumerate() {
            if range.start + v * LANES + lane >= range.end {
                break;
            }
            let block = table[page] as usize;
            // SAFETY: a slot the sequence owns, written by nobody during the call.
            unsafe {
                *row = Some(a.cache.row(block, slot));
                scales[v][lane] = a.cache.scale(block, slot, 0, 0);
            }
            slot += 1;
            if slot == page_size {
                (page, slot) = (page + 1, 0);
            }
        }
        let (chunks, rest) = out.as_chunks_mut::<LANES>();
        for (c, columns) in chunks.iter_mut().enumerate() {
            let mut x = [s.splat(0.0); LANES];
            for (x, row) in x.iter_mut().zip(rows) {
                if let Some(row) = row {
                    *x = s.load(row[c * LANES..].first_chunk::<LANES>().unwrap());
                }
            }
            for (column, x) in columns.iter_mut().zip(s.transpose(x)) {
                s.store(&mut column[v], x);
            }
        }
        let done = chunks.len() * LANES;
        for (d, column) in rest.iter_mut().enumerate() {
            for (x, row) in column[v].iter_mut().zip(rows) {
                *x = row.map_or(0.0, |row| row[done + d].to_f32());
            }
        }
    }
    scales
}

/// `sums += weight * relu(q . k)` for `M` heads, one after the other.
#[inline(always)]
fn add_heads<S: Simd, const M: usize>(
    s: S,
    q: &[[f32; HEADS]],
    keys: &[Column],
    weights: &[f32],
    sums: &mut [S::F; KEYS / LANES],
) {
    let mut dots = [[s.splat(0.0); KEYS / LANES]; M];
    for (q, column) in q.iter().zip(keys) {
        let k = [s.load(&column[0]), s.load(&column[1])];
        for h in 0..M {
            let x = s.splat(q[h]);
            for v in 0..KEYS / LANES {
                dots[h][v] = s.mul_add(x, k[v], dots[h][v]);
            }
        }
    }
    for h in 0..M {
        let weight = s.splat(weights[h]);
        for v in 0..KEYS / LANES {
            // max gives its second where one is NaN: relu(NaN) = NaN.
            sums[v] = s.add(sums[v], s.mul(weight, s.max(s.splat(0.0), dots[h][v])));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_order_scores_then_positions() {
        let falling = [f32::INFINITY, 3e38, 1.0, 1e-45, 0.0, -1e-45, -1.0, -3e38, f32::NEG_INFINITY, f32::NAN];
        for pair in falling.windows(2) {
            assert!(rank(pair[0], usize::MAX >> 32) < rank(pair[1], 0), "{pair:?}");
        }
        for x in falling {
            let (score, position) = unrank(rank(x, 7));
            assert!(position == 7 && (score == x || x.is_nan() && score.is_nan()));
        }
        assert_eq!(rank(-0.0, 3), rank(0.0, 3));
        assert_eq!(rank(-f32::NAN, 3), rank(f32::NAN, 3));
        assert!(rank(2.0, 3) < rank(2.0, 4));
    }
}

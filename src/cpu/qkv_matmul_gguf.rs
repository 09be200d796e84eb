//! Q, K and V from one set of activations: quantise once, then one parallel region over the row groups of all three weights, each finished
//! tile going straight to the output or the pages.

use super::cache_row;
use super::isa::{Avx2, Avx512, Level};
use super::qgemm::activations::{ByteBlocks, ByteSuper, CHUNK, Family, Layout, WordBlocks, WordSuper};
use super::qgemm::float::{FloatActs, FloatFormat};
use super::qgemm::float_rows::RowActs;
use super::qgemm::formats::Format;
use super::qgemm::pack::RawRows;
use super::qgemm::portable::Portable;
use super::qgemm::{self, Isa, ROWS, Source, TOKENS, Tokens, Work};
use super::reference;
use crate::collection::Cache;
use crate::context::Context;
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::op::qkv_matmul_gguf::{Args, Compute, Projection, QkvMatmulGguf};
use crate::plan::{Impl, Stream};
use crate::view::View;
use crate::weight::Storage;
use crate::workspace::{Arena, Span};
use crate::{with_cache_dtype, with_float, with_gguf_format};
use std::marker::PhantomData;
use std::ops::Range;

pub static IMPLS: &[Impl<QkvMatmulGguf>] = &[
    Impl {
        name: "packed",
        refuse: |ctx, _| ctx.isa.not_reference(),
        layout: |ctx, args, arena| _ = Scratch::carve(ctx, args, arena),
        run: |ctx, args, arena, _: Stream| {
            let scratch = Scratch::carve(ctx, args, arena);
            #[cfg(target_arch = "x86_64")]
            if let Some(avx512) = ctx.isa.avx512() {
                return run::<Avx512>(ctx, avx512, args, &scratch);
            } else if let Some(avx2) = ctx.isa.avx2() {
                return run::<Avx2>(ctx, avx2, args, &scratch);
            }
            debug_assert_eq!(ctx.isa.level(), Level::Scalar);
            run(ctx, Portable, args, &scratch)
        },
    },
    reference::QKV_MATMUL_GGUF,
];

/// What a call keeps in its workspace.
struct Scratch {
    /// Activations in each layout that a weight of the call reads.
    acts: [Span<u8>; Layout::ALL.len()],
    /// Block and slot of each token.
    slots: Span<[usize; 2]>,
    /// Finished rows of K and of V, `[tokens][rows]`, where the cache has scales: a group's scale wants the whole group.
    staged: [Span<f32>; 2],
    /// For each thread.
    lanes: Span<qgemm::Scratch>,
}

impl Scratch {
    fn carve(ctx: &Context, a: &Args<'_>, arena: &mut Arena) -> Self {
        let tokens = a.hidden_state.shape[0].min(a.q_output.shape[0]);
        let cols = a.q.weight.cols;
        let needed = [&a.q, &a.k, &a.v].map(|p| layout(a, p));
        let acts = Layout::ALL.map(|layout| {
            let chunks = tokens.div_ceil(TOKENS).saturating_mul(cols.div_ceil(CHUNK));
            arena.take(if needed.contains(&layout) { chunks.saturating_mul(layout.bytes()) } else { 0 })
        });
        let slots = arena.take(tokens);
        let staged = [&a.k_cache, &a.v_cache]
            .map(|c| arena.take(if c.groups > 0 { tokens.saturating_mul(c.row_elements()) } else { 0 }));
        let lanes = arena.take(ctx.threads.count());
        Scratch { acts, slots, staged, lanes }
    }
}

fn layout(a: &Args<'_>, p: &Projection<'_>) -> Layout {
    let packed = matches!(p.weight.storage, Storage::Packed(_));
    qgemm::layout(p.weight.format.id, a.compute == Compute::F32, packed)
}

/// Where a projection's rows go.
enum Sink<'a> {
    Output(View<2>),
    Cache(&'a Cache),
    Staged(Span<f32>),
}

struct Hidden(View<2>);

impl qgemm::Rows for Hidden {
    #[inline(always)]
    fn load<I: Isa>(&self, isa: I, t: usize, first: usize, out: &mut [f32]) {
        // SAFETY: host memory that validation has seen, only read during the call.
        with_float!(self.0.dtype, T => unsafe { load(isa, &self.0.row::<T, 1>([t])[first..first + out.len()], out) })
    }
}

#[inline(always)]
fn load<I: Isa, T: Element>(isa: I, x: &[T], out: &mut [f32]) {
    if T::DTYPE == DType::F16 {
        let ((x, tail), (wide, wide_tail)) = (x.as_chunks::<16>(), out.as_chunks_mut::<16>());
        for (x, out) in x.iter().zip(wide) {
            // SAFETY: T is f16, whose bits are a u16.
            isa.widen_f16(unsafe { &*(&raw const *x).cast::<[u16; 16]>() }, out);
        }
        tail.iter().zip(wide_tail).for_each(|(x, y)| *y = x.to_f32());
    } else {
        x.iter().zip(out).for_each(|(x, y)| *y = x.to_f32());
    }
}

fn run<I: Isa>(ctx: &Context, isa: I, a: &Args<'_>, scratch: &Scratch) -> Result<()> {
    let count = a.batch.tokens();
    if count == 0 {
        return Ok(());
    }
    let cols = a.q.weight.cols;
    // SAFETY: the span is this call's, and no other slice of it lives.
    let slots = unsafe { scratch.slots.slice_mut(0, count) };
    for (t, slot) in slots.iter_mut().enumerate() {
        let (b, p) = a.batch.position(t);
        *slot = a.batch.locate(b, p).into();
    }
    let slots = &*slots;

    let projections = [&a.q, &a.k, &a.v];
    let needed = projections.map(|p| layout(a, p));
    let layouts: Vec<Layout> = Layout::ALL.into_iter().filter(|l| needed.contains(l)).collect();
    let groups = count.div_ceil(TOKENS);
    let (hidden, narrow) = (Hidden(a.hidden_state), isa.narrow());
    let quantise = |i: usize| {
        let (layout, g) = (layouts[i / groups], i % groups);
        let tokens = Tokens::new(count, cols, layout.bytes());
        narrow.enter(MakeActs {
            isa: narrow,
            layout,
            tokens,
            cols,
            group: g,
            hidden: &hidden,
            out: scratch.acts[layout as usize],
        });
    };
    // A few tokens are quantised sooner than another thread wakes up.
    if groups <= 2 {
        (0..layouts.len() * groups).for_each(quantise);
    } else {
        ctx.threads.run(layouts.len() * groups, quantise)?;
    }

    let jobs = [
        (&a.q, Sink::Output(a.q_output)),
        (&a.k, cache_sink(&a.k_cache, scratch.staged[0])),
        (&a.v, cache_sink(&a.v_cache, scratch.staged[1])),
    ];
    let row_groups = |i: usize| jobs[i].0.weight.rows.div_ceil(ROWS);
    // Split by shapes alone. Enough tasks for any machine's cores, each long enough to be worth claiming, of whole pairs of streams.
    let per_task = 1 << ((0..3).map(row_groups).sum::<usize>() / 32).clamp(1, 4).ilog2();
    let tokens = needed.map(|l| Tokens::new(count, cols, l.bytes()));
    let tasks: [usize; 3] = std::array::from_fn(|i| row_groups(i).div_ceil(per_task) * tokens[i].blocks());
    ctx.threads.run_with_lane(tasks.iter().sum(), |lane, mut i| {
        let mut j = 0;
        while i >= tasks[j] {
            i -= tasks[j];
            j += 1;
        }
        let (projection, sink) = &jobs[j];
        let per_block = row_groups(j).div_ceil(per_task);
        let (block, first) = (i / per_block, i % per_block * per_task);
        let rows = first..row_groups(j).min(first + per_task);
        let acts = scratch.acts[needed[j] as usize];
        let (tokens, groups, lanes) = (tokens[j], rows, scratch.lanes);
        let task = Task { isa, projection, tokens, block, groups, acts, scratch: lanes, lane, sink, slots };
        with_gguf_format!(projection.weight.format.id,
            F => match a.compute {
                Compute::Default => isa.enter(Quantised::<I, F>(task, PhantomData)),
                Compute::F32 => isa.enter(Decoded::<I, F>(task, PhantomData)),
            },
            G => isa.enter(Floats::<I, G>(task, PhantomData)));
    })?;

    for (cache, staged) in [(&a.k_cache, scratch.staged[0]), (&a.v_cache, scratch.staged[1])] {
        if cache.groups > 0 {
            let n = cache.row_elements();
            ctx.threads.run(count, |t| {
                // SAFETY: every row is staged, and nobody writes it any more; the slot is this token's alone.
                unsafe { cache_row::write_row(cache, slots[t][0], slots[t][1], staged.slice(t * n, n)) };
            })?;
        }
    }
    Ok(())
}

fn cache_sink(cache: &Cache, staged: Span<f32>) -> Sink<'_> {
    if cache.groups > 0 { Sink::Staged(staged) } else { Sink::Cache(cache) }
}

/// The activations of one group of tokens in one layout.
struct MakeActs<'a, I> {
    isa: I,
    layout: Layout,
    tokens: Tokens,
    cols: usize,
    group: usize,
    hidden: &'a Hidden,
    out: Span<u8>,
}

impl<I: Isa> Work for MakeActs<'_, I> {
    #[inline(always)]
    fn run(self) {
        let MakeActs { isa, layout, tokens, cols, group: g, hidden, out } = self;
        macro_rules! put {
            () => {
                |index, acts: &_| {
                    // SAFETY: the span holds every chunk of every group, aligned; each is written by one task alone.
                    unsafe { put(out, index, acts) }
                }
            };
        }
        match layout {
            Layout::ByteBlocks => qgemm::quantise_group::<I, ByteBlocks>(isa, tokens, cols, g, hidden, put!()),
            Layout::ByteSuper => qgemm::quantise_group::<I, ByteSuper<16>>(isa, tokens, cols, g, hidden, put!()),
            Layout::WordBlocks => qgemm::quantise_group::<I, WordBlocks>(isa, tokens, cols, g, hidden, put!()),
            Layout::WordSuper => qgemm::quantise_group::<I, WordSuper>(isa, tokens, cols, g, hidden, put!()),
            Layout::Float => qgemm::float_group::<I, FloatActs>(isa, tokens, cols, g, hidden, put!()),
            Layout::FloatRows => qgemm::float_group::<I, RowActs>(isa, tokens, cols, g, hidden, put!()),
        }
    }
}

/// # Safety
/// Item `index` lies in the span, and nobody else uses it meanwhile.
#[inline(always)]
unsafe fn put<T: Copy>(out: Span<u8>, index: usize, value: &T) {
    debug_assert!((index + 1) * size_of::<T>() <= out.len());
    // SAFETY: by contract; spans are aligned to 256 bytes.
    unsafe { out.as_ptr().cast::<T>().add(index).write(*value) }
}

/// Some row groups of one projection for one block of tokens.
struct Task<'a, I> {
    isa: I,
    projection: &'a Projection<'a>,
    tokens: Tokens,
    block: usize,
    groups: Range<usize>,
    acts: Span<u8>,
    /// One for each lane, and this task's.
    scratch: Span<qgemm::Scratch>,
    lane: usize,
    sink: &'a Sink<'a>,
    slots: &'a [[usize; 2]],
}

impl<'a, I: Isa> Task<'a, I> {
    fn source(&self) -> Source<'a> {
        let w = self.projection.weight;
        match &w.storage {
            Storage::Packed(data) => Source::Packed(data.bytes()),
            Storage::Borrowed(rows) => {
                Source::Raw(RawRows { data: rows.span(w.rows), rows: w.rows, row_bytes: rows.stride() })
            }
            Storage::Copied(data) => Source::Raw(RawRows { data, rows: w.rows, row_bytes: data.len() / w.rows }),
        }
    }

    /// The activations of its tokens, in the layout that they were made in.
    fn acts<T: Copy>(&self) -> &'a [T] {
        let range = self.tokens.range(self.block);
        debug_assert!(range.end * size_of::<T>() <= self.acts.len());
        // SAFETY: made before this region began, and only read since; the workspace outlives the call.
        unsafe { std::slice::from_raw_parts(self.acts.as_ptr().cast::<T>().add(range.start), range.len()) }
    }

    #[expect(clippy::mut_from_ref, reason = "a raw span, handed to one thread at a time")]
    fn scratch(&self) -> &mut qgemm::Scratch {
        // SAFETY: the lane is this task's alone while it runs, and what an earlier call returned is no longer used; any bytes are a valid scratch.
        unsafe { &mut self.scratch.slice_mut(self.lane, 1)[0] }
    }

    /// How many tokens it has.
    fn count(&self) -> usize {
        self.tokens.of_block(self.block).len()
    }

    /// Sends finished tiles `[group][token]` on their way.
    fn finish(&self, groups: Range<usize>, out: &mut [[f32; ROWS]]) {
        // SAFETY: host memory nobody writes.
        let bias = self.projection.bias.map(|b| unsafe { b.row::<f32, 0>([]) });
        let tokens = self.tokens.of_block(self.block);
        for (group, tile) in groups.zip(out.chunks_exact_mut(tokens.len())) {
            let rows = self.projection.weight.rows;
            let (tokens, sink, slots) = (tokens.clone(), self.sink, self.slots);
            let isa = self.isa.narrow();
            isa.enter(Finish { isa, bias, group, rows, tokens, tile, sink, slots });
        }
    }
}

// A function of its own for each encoding: together they would be one of a hundred thousand instructions.

/// Codes against 8-bit activations.
struct Quantised<'a, I, F>(Task<'a, I>, PhantomData<F>);

impl<I: Isa, F: Format> Work for Quantised<'_, I, F> {
    #[inline(always)]
    fn run(self) {
        let (task, count) = (&self.0, self.0.count());
        if let (Source::Raw(raw), true) = (task.source(), I::ROWWISE && count <= <F::Family as Family>::ROWWISE) {
            let (groups, cols) = (task.groups.clone(), task.projection.weight.cols);
            let out = task.isa.rowwise::<F>(raw, groups.clone(), cols, task.acts(), count, task.scratch());
            return task.finish(groups, out);
        }
        // Few tokens: the memory is what counts. From memory, blocks of 32 were faster in two streams, super-blocks no slower in one. Many: the
        // activations fill the cache.
        let short = <F::Family as Family>::ELEMENTS < CHUNK;
        let streams =
            if count <= 16 && short && matches!(task.source(), Source::Packed(_)) { qgemm::STREAMS } else { 1 };
        for first in task.groups.clone().step_by(streams) {
            let groups = first..task.groups.end.min(first + streams);
            let (source, cols) = (task.source(), task.projection.weight.cols);
            let scratch = task.scratch();
            let out = qgemm::row_groups::<I, F>(task.isa, source, groups.clone(), cols, task.acts(), count, scratch);
            task.finish(groups, out);
        }
    }
}

/// Codes decoded to f32.
struct Decoded<'a, I, F>(Task<'a, I>, PhantomData<F>);

impl<I: Isa, F: Format> Work for Decoded<'_, I, F> {
    #[inline(always)]
    fn run(self) {
        let task = &self.0;
        for g in task.groups.clone() {
            let (source, cols) = (task.source(), task.projection.weight.cols);
            let out =
                qgemm::row_group_decoded::<I, F>(task.isa, source, g, cols, task.acts(), task.count(), task.scratch());
            task.finish(g..g + 1, out);
        }
    }
}

/// Weights that are floats.
struct Floats<'a, I, G>(Task<'a, I>, PhantomData<G>);

impl<I: Isa, G: FloatFormat> Work for Floats<'_, I, G> {
    #[inline(always)]
    fn run(self) {
        let (task, count) = (&self.0, self.0.count());
        let (isa, groups, cols) = (task.isa, task.groups.clone(), task.projection.weight.cols);
        match task.source() {
            Source::Packed(packed) => {
                // Few tokens: as for codes; and sums are chains of one addition a column, which wait less side by side.
                let streams = if count <= 2 { qgemm::STREAMS } else { 1 };
                for first in groups.clone().step_by(streams) {
                    let (groups, scratch) = (first..groups.end.min(first + streams), task.scratch());
                    let out =
                        qgemm::packed_floats::<I, G>(isa, packed, groups.clone(), cols, task.acts(), count, scratch);
                    task.finish(groups, out);
                }
            }
            Source::Raw(raw) => {
                for g in groups {
                    let out = qgemm::borrowed_floats::<I, G>(isa, raw, g, cols, task.acts(), count, task.scratch());
                    task.finish(g..g + 1, out);
                }
            }
        }
    }
}

/// Adds the bias and stores a finished tile, `[tokens][16]`.
struct Finish<'a, I> {
    isa: I,
    bias: Option<&'a [f32]>,
    group: usize,
    rows: usize,
    tokens: Range<usize>,
    tile: &'a mut [[f32; ROWS]],
    sink: &'a Sink<'a>,
    slots: &'a [[usize; 2]],
}

impl<I: Isa> Work for Finish<'_, I> {
    #[inline(always)]
    fn run(self) {
        let Finish { isa, bias, group, rows, tokens, tile, sink, slots } = self;
        let row = ROWS * group;
        let n = ROWS.min(rows - row);
        if let Some(bias) = bias {
            for y in tile.iter_mut() {
                y.iter_mut().zip(&bias[row..row + n]).for_each(|(y, b)| *y += b);
            }
        }
        match sink {
            Sink::Output(view) => with_float!(view.dtype, T => {
                for (t, y) in tokens.zip(tile) {
                    // SAFETY: columns `row ..+n` of these rows are this task's alone, inside what validation has seen.
                    unsafe { store(isa, y, view.as_ptr().cast::<T>().add(t * view.stride[0] + row), n) }
                }
            }),
            Sink::Cache(cache) => with_cache_dtype!(cache.dtype, T => {
                for (t, y) in tokens.zip(tile) {
                    let [block, slot] = slots[t];
                    // SAFETY: as above; slots of different tokens differ.
                    unsafe { store(isa, y, cache.blocks_ptr().cast::<T>().add(cache.row_offset(block, slot) + row), n) }
                }
            }),
            Sink::Staged(span) => {
                for (t, y) in tokens.zip(tile) {
                    // SAFETY: as above; the span holds `rows` columns of every token.
                    unsafe { store(isa, y, span.as_ptr().add(t * rows + row), n) }
                }
            }
        }
    }
}

/// # Safety
/// `out` has `n` <= 16 elements that nobody else uses.
#[inline(always)]
unsafe fn store<I: Isa, T: Element>(isa: I, x: &[f32; ROWS], out: *mut T, n: usize) {
    // SAFETY: by contract.
    let out = unsafe { std::slice::from_raw_parts_mut(out, n) };
    if T::DTYPE == DType::F16 {
        let mut bits = [0; ROWS];
        isa.to_f16(x, &mut bits);
        // SAFETY: T is f16, whose bits are a u16.
        out.iter_mut().zip(&bits).for_each(|(y, b)| *y = unsafe { std::mem::transmute_copy(b) });
    } else {
        out.iter_mut().zip(x).for_each(|(y, &x)| *y = T::from_f32(x));
    }
}

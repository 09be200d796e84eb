//! Matrix products of GGUF weights with activations: `y[t][n] = sum_k x[t][k] * W[n][k]`.
//!
//! Naively:
//! ```text
//! for t, n: for each block of W[n]: for each k in it: y[t][n] += x[t][k] * decode(block, k)
//! ```
//! Here x is quantised to 8 bits once per call (`activations`), weights lie interleaved in groups of sixteen rows (`formats`,
//! `pack`), and for each group and each 256 columns
//! ```text
//! unpack 16 x 256 weights to bytes in L1                      any encoding: bytes and scales of one of a few families
//! for each four tokens: out[4][16] += tile x activations      one integer kernel a family and instruction set
//! ```
//! so an encoding says where its codes and scales lie, an instruction set is a few kernels, and neither knows of the other. Few tokens
//! ([`Format::FUSED`]) skip the bytes in L1, and one or two of them, where weights are borrowed, the interleaving too (`rowwise`).
//!
//! Order of additions: integer sums are exact within a block (or super-block); the floats of blocks are added in ascending k, one fused
//! multiply-add after the other, for every number of tokens, tile, task and thread count. A row's result is therefore the same
//! bits alone and in any batch, packed or borrowed; of weights that are floats, borrowed ones have an order of their own (`float_rows`).

#![allow(clippy::needless_range_loop, reason = "an index runs over several arrays at once")]

/// An array of what the expression gives for each listed value of the name. Not `map`: a closure may stay a call, compiled without the vectors' instructions.
macro_rules! each {
    ([$($v:expr),*] $name:ident => $e:expr) => { [$({ let $name = $v; $e }),*] };
}

/// Evaluates a call of a fused kernel with the number of tokens as a constant.
#[cfg(target_arch = "x86_64")]
macro_rules! fused {
    ($out:ident, |$nt:ident| $call:expr) => {
        // SAFETY: for methods of the proof of an instruction set, which is all that the kernels want.
        unsafe {
            match $out[0].len() {
                1 => fused!(@ 1, $nt, $call),
                2 => fused!(@ 2, $nt, $call),
                3 => fused!(@ 3, $nt, $call),
                _ => fused!(@ 4, $nt, $call),
            }
        }
    };
    (@ $n:literal, $nt:ident, $call:expr) => {{
        const $nt: usize = $n;
        $call
    }};
}

pub mod activations;
#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
pub mod float;
pub mod float_rows;
pub mod formats;
pub mod lanes;
pub mod pack;
pub mod portable;
pub mod rowwise;

use activations::{ByteActs, CHUNK, Codes, Family, FloatChunk, Layout, SuperActs, WordActs};
use float::{FloatActs, FloatFormat, FloatTile, decode_columns, decode_tile, pack_columns};
use float_rows::{Padded, RowActs, SixteenRows, Sums};
use formats::{Format, Scales, Tile};
use lanes::Lanes;
use pack::{RawRows, blocks_per_row, interleave};
use std::marker::PhantomData;
use std::ops::Range;

/// Tokens that the tile kernels take together.
pub const TOKENS: usize = 4;
/// Weight rows interleaved in a packed group.
pub const ROWS: usize = 16;

/// A piece of work to be compiled for an instruction set. A trait, not a closure: `run` must be `#[inline(always)]`, which closures cannot promise, and
/// what is not inlined into [`Isa::enter`] is compiled without the instructions, every intrinsic a call.
pub trait Work {
    fn run(self);
}

/// An instruction set, as a value that proves it is there.
pub trait Isa: Copy + Send + Sync + 'static {
    type V: Lanes;
    /// An instruction set that this one includes, or itself: for all that wider vectors would gain little, so that it is compiled once for both.
    type Narrow: Isa;
    fn narrow(self) -> Self::Narrow;

    /// Runs work compiled for this instruction set.
    fn enter(self, work: impl Work);

    // The tile kernels: `out[token][row] += ...` for up to four tokens.
    fn byte_blocks<F: Format>(self, tile: &Tile, acts: &ByteActs, blocks: usize, out: &mut [[f32; ROWS]]);
    fn byte_super<F: Format, const SUBS: usize>(self, tile: &Tile, acts: &SuperActs, out: &mut [[f32; ROWS]]);
    fn word_blocks(self, tile: &Tile, acts: &WordActs, blocks: usize, out: &mut [[f32; ROWS]]);

    fn float(self, tile: &FloatTile, acts: &FloatActs, cols: usize, ahead: Ahead, out: &mut [[f32; ROWS]]);
    /// The same for any number of tokens.
    #[inline(always)]
    fn floats(self, tile: &FloatTile, acts: &[FloatActs], cols: usize, ahead: Ahead, out: &mut [[f32; ROWS]]) {
        let parts = acts.len();
        for (i, (acts, out)) in acts.iter().zip(out.chunks_mut(TOKENS)).enumerate() {
            self.float(tile, acts, cols, ahead.part(i, parts, cols), out);
        }
    }

    /// Up to so many tokens (or the encoding's [`Format::FUSED`]), packed blocks are unpacked in registers, without the detour through a tile.
    const FUSED: usize = 0;
    // `out[stream][token][row] += ...` for up to four tokens, the streams advancing together.
    fn fused_byte_blocks<F: Format>(
        self,
        _: &[Stream<'_, F::Block>],
        _: &mut [Scales; STREAMS],
        _: &ByteActs,
        _: &mut [&mut [[f32; ROWS]]],
    ) {
        unreachable!("FUSED is 0")
    }
    fn fused_byte_super<F: Format, const SUBS: usize>(
        self,
        _: &[Stream<'_, F::Block>],
        _: &mut [Scales; STREAMS],
        _: &SuperActs,
        _: &mut [&mut [[f32; ROWS]]],
    ) {
        unreachable!("FUSED is 0")
    }
    fn fused_word_blocks<F: Format>(
        self,
        _: &[Stream<'_, F::Block>],
        _: &mut [Scales; STREAMS],
        _: &WordActs,
        _: &mut [&mut [[f32; ROWS]]],
    ) {
        unreachable!("FUSED is 0")
    }

    /// Whether raw rows can be taken one after the other, as they lie.
    const ROWWISE: bool = false;
    /// `out[group][token][row] = ` product of the row groups with the tokens, whose activations are `acts[chunk]`.
    fn rowwise<'s, F: Format>(
        self,
        _: RawRows<'_>,
        _: Range<usize>,
        _cols: usize,
        _acts: &[<F::Family as Family>::Acts],
        _tokens: usize,
        _: &'s mut Scratch,
    ) -> &'s mut [[f32; ROWS]] {
        unreachable!("ROWWISE is false")
    }

    /// `sums[token][row] += ` the products of sixteen rows of floats with `acts[chunk][group of four]`, of a multiple of [`float_rows::LANES`] columns.
    fn float_rows<F: FloatFormat>(self, rows: SixteenRows<'_>, cols: usize, acts: &[RowActs], sums: &mut [Sums]);
    /// The sum of each row's lanes.
    fn add_lanes(self, sums: &Sums) -> [f32; ROWS];

    #[inline(always)]
    fn quantise(self, x: &[f32; CHUNK], act_block: usize, out: &mut Codes) {
        activations::quantise(x, act_block, out);
    }
    /// Dwords 0 ..4 of eight rows, `stride` bytes apart, to half planes: `planes[i][8 h + r]`.
    ///
    /// # Safety
    /// Each row has 16 bytes to read at its start.
    #[inline(always)]
    unsafe fn transpose(self, src: *const u8, stride: usize, planes: &mut [[u32; ROWS]; 4], h: usize) {
        for r in 0..8 {
            for (i, plane) in planes.iter_mut().enumerate() {
                // SAFETY: by contract.
                plane[8 * h + r] = unsafe { src.add(r * stride + 4 * i).cast::<u32>().read_unaligned().to_le() };
            }
        }
    }
    /// The first two bytes of sixteen rows, `stride` bytes apart.
    ///
    /// # Safety
    /// Each row has two bytes to read at its start.
    #[inline(always)]
    unsafe fn gather_u16(self, src: *const u8, stride: usize, out: &mut [u8; 2 * ROWS]) {
        for (r, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            // SAFETY: by contract.
            *out = unsafe { src.add(r * stride).cast::<[u8; 2]>().read() };
        }
    }
    /// The first byte of sixteen rows, `stride` bytes apart.
    ///
    /// # Safety
    /// Each row has a byte to read at its start.
    #[inline(always)]
    unsafe fn gather_u8(self, src: *const u8, stride: usize, out: &mut [u8; ROWS]) {
        for (r, out) in out.iter_mut().enumerate() {
            // SAFETY: by contract.
            *out = unsafe { src.add(r * stride).read() };
        }
    }
    #[inline(always)]
    fn to_f16(self, x: &[f32; 16], out: &mut [u16; 16]) {
        *out = x.map(|x| half::f16::from_f32(x).to_bits());
    }
    #[inline(always)]
    fn widen_f16(self, x: &[u16; 16], out: &mut [f32; 16]) {
        *out = x.map(|x| half::f16::from_bits(x).to_f32());
    }
    /// Asks for the cache line at `p`, which need not be valid.
    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}
}

/// How the tokens of a call are cut: blocks of groups of four.
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
    pub count: usize,
    pub chunks: usize,
    /// Groups of four in each block but the last.
    pub block: usize,
}

/// A block's activations stay in a core's L2 while all rows of a task pass.
const BLOCK_BYTES: usize = 384 << 10;
/// Most tokens of a block.
pub const MAX_BLOCK: usize = 128;

impl Tokens {
    pub fn new(count: usize, cols: usize, acts_bytes: usize) -> Self {
        let chunks = cols.div_ceil(CHUNK).max(1);
        let groups = count.div_ceil(TOKENS);
        let most = (BLOCK_BYTES / (acts_bytes * chunks)).clamp(4, MAX_BLOCK / TOKENS);
        let blocks = groups.div_ceil(most).max(1);
        Self { count, chunks, block: groups.div_ceil(blocks).max(1) }
    }
    pub fn groups(&self) -> usize {
        self.count.div_ceil(TOKENS)
    }
    pub fn blocks(&self) -> usize {
        self.groups().div_ceil(self.block)
    }
    /// Where group `g`'s chunk lies among the activations: blocks one after the other, `[chunk][group]` in each.
    #[inline(always)]
    pub fn index(&self, g: usize, chunk: usize) -> usize {
        let first = g / self.block * self.block;
        let groups = self.block.min(self.groups() - first);
        first * self.chunks + chunk * groups + (g - first)
    }
    /// The activations of block `b`.
    pub fn range(&self, b: usize) -> std::ops::Range<usize> {
        let groups = self.groups();
        self.chunks * groups.min(self.block * b)..self.chunks * groups.min(self.block * (b + 1))
    }
    /// Tokens of block `b`.
    pub fn of_block(&self, b: usize) -> std::ops::Range<usize> {
        TOKENS * self.block * b..self.count.min(TOKENS * self.block * (b + 1))
    }
}

/// What a call's tokens look like to the kernels: rows of f32, f16 or bf16.
pub trait Rows: Sync {
    /// Columns `first ..first + out.len()` of token `t`.
    fn load<I: Isa>(&self, isa: I, t: usize, first: usize, out: &mut [f32]);
}

/// Quantises group `g` (four tokens, fewer at the end) and puts chunk after chunk into `[block][chunk][group in block]`: `put(index, acts)`.
#[inline(always)]
pub fn quantise_group<I: Isa, Fam: Family>(
    isa: I,
    tokens: Tokens,
    cols: usize,
    g: usize,
    rows: &impl Rows,
    mut put: impl FnMut(usize, &Fam::Acts),
) {
    // SAFETY: plain bytes, any of them valid.
    let mut acts: Fam::Acts = unsafe { std::mem::zeroed() };
    let mut codes = Codes::ZERO;
    let mut x = [0.0; CHUNK];
    for chunk in 0..tokens.chunks {
        let len = CHUNK.min(cols - CHUNK * chunk);
        x[len..].fill(0.0);
        for (i, t) in (TOKENS * g..tokens.count.min(TOKENS * (g + 1))).enumerate() {
            rows.load(isa, t, CHUNK * chunk, &mut x[..len]);
            isa.quantise(&x, Fam::ACT_BLOCK, &mut codes);
            Fam::put::<I::V>(&codes, i, &mut acts);
        }
        put(tokens.index(g, chunk), &acts);
    }
}

/// The same for activations that stay floats.
#[inline(always)]
pub fn float_group<I: Isa, A: FloatChunk>(
    isa: I,
    tokens: Tokens,
    cols: usize,
    g: usize,
    rows: &impl Rows,
    mut put: impl FnMut(usize, &A),
) {
    let (mut acts, mut x) = (A::ZERO, [0.0; CHUNK]);
    for chunk in 0..tokens.chunks {
        let len = CHUNK.min(cols - CHUNK * chunk);
        x[len..].fill(0.0);
        for (i, t) in (TOKENS * g..tokens.count.min(TOKENS * (g + 1))).enumerate() {
            rows.load(isa, t, CHUNK * chunk, &mut x[..len]);
            acts.put(i, &x);
        }
        put(tokens.index(g, chunk), &acts);
    }
}

/// Where a row group's blocks come from.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    Packed(&'a [u8]),
    Raw(RawRows<'a>),
}

/// What a thread needs beside its inputs and outputs. Kept between tasks: to clear it would cost as much as a row of weights.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Scratch {
    pub tile: Tile,
    pub scales: [Scales; STREAMS],
    pub decoded: FloatTile,
    /// Of borrowed rows of floats; the sums `[token]`.
    pub padded: Padded,
    pub sums: [Sums; MAX_BLOCK],
    /// One chunk of raw weights, interleaved.
    pub packed: [Chunk; STREAMS],
    pub rowwise: rowwise::Room,
    /// `[group][token][row]`
    pub out: [[f32; ROWS]; MAX_BLOCK],
}

/// Room for one chunk of any encoding: f32 takes the most.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Chunk([u32; ROWS * CHUNK]);

impl Chunk {
    /// Its first `count` items.
    #[inline(always)]
    fn of<T: Copy>(&mut self, count: usize) -> &mut [T] {
        assert!(count * size_of::<T>() <= size_of::<Self>() && align_of::<T>() <= 64);
        // SAFETY: it fits, as asserted; the types used are blocks and numbers, of which any bytes are valid.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), count) }
    }
}

/// A row group's blocks of one chunk, and where as many lie that will be wanted soon.
#[derive(Clone, Copy)]
pub struct Stream<'a, B> {
    pub blocks: &'a [B],
    pub next: *const B,
    /// Other tokens have met the chunk before: its scales are unpacked, and what follows has been asked for.
    pub again: bool,
}

/// A kernel's rows of the output.
#[inline(always)]
fn tokens_of<const NT: usize>(out: &mut [[f32; ROWS]]) -> &mut [[f32; ROWS]; NT] {
    out.try_into().expect("as many rows as tokens")
}

/// Most row groups that advance together.
pub const STREAMS: usize = 2;

/// Views the packed blocks of a chunk, or interleaves them from raw rows; `skip` row groups lie between this stream's and those it goes on with.
#[inline(always)]
fn stream<'a, I: Isa, F: Format>(
    isa: I,
    source: Source<'a>,
    group: usize,
    nb: usize,
    first: usize,
    skip: usize,
    scratch: &'a mut [F::Block],
) -> Stream<'a, F::Block> {
    match source {
        Source::Packed(bytes) => {
            let (len, count) = (size_of::<F::Block>(), scratch.len());
            let chunk = &bytes[(group * nb + first) * len..][..count * len];
            debug_assert!(chunk.as_ptr().cast::<F::Block>().is_aligned());
            // SAFETY: packed data starts aligned and consists of whole blocks; any bytes are a valid block.
            let blocks: &[F::Block] = unsafe { std::slice::from_raw_parts(chunk.as_ptr().cast(), count) };
            let ahead = if first + count < nb { count } else { count + skip * nb };
            Stream { blocks, next: blocks.as_ptr().wrapping_add(ahead), again: false }
        }
        Source::Raw(raw) => {
            let narrow = isa.narrow();
            narrow.enter(Interleave::<I::Narrow, F> { isa: narrow, raw, group, first, blocks: &mut *scratch });
            Stream { blocks: scratch, next: scratch.as_ptr(), again: false }
        }
    }
}

/// `out[group][token][row] = ` product of the row groups, at most [`STREAMS`], with the tokens of one block, whose activations are
/// `acts[chunk][group of four]`. The row groups advance together: memory is read in as many streams, which is what its bandwidth wants.
#[inline(always)]
pub fn row_groups<'s, I: Isa, F: Format>(
    isa: I,
    source: Source<'_>,
    groups: Range<usize>,
    cols: usize,
    acts: &[<F::Family as Family>::Acts],
    tokens: usize,
    scratch: &'s mut Scratch,
) -> &'s mut [[f32; ROWS]] {
    let nb = blocks_per_row::<F>(cols);
    let per_chunk = CHUNK / <F::Family as Family>::ELEMENTS;
    let is_packed = matches!(source, Source::Packed(_));
    let fused = tokens <= I::FUSED.min(F::FUSED) && (is_packed || F::UNITS_AS_GGUF);
    let Scratch { tile, scales, packed, out, .. } = scratch;
    let out = &mut out[..groups.len() * tokens];
    out.fill([0.0; ROWS]);
    for (chunk, acts) in acts.chunks_exact(tokens.div_ceil(TOKENS)).enumerate() {
        let first = chunk * per_chunk;
        let count = per_chunk.min(nb - first);
        if fused {
            let mut streams = [Stream::<F::Block> { blocks: &[], next: std::ptr::null(), again: false }; STREAMS];
            for ((group, packed), s) in groups.clone().zip(packed.iter_mut()).zip(&mut streams) {
                *s = stream::<I, F>(isa, source, group, nb, first, groups.len() - 1, packed.of(count));
                // The row's last chunk may be shorter than the one that follows.
                for slot in count..per_chunk {
                    prefetch(isa, s.next.wrapping_add(slot), 0, 1);
                }
            }
            for (i, acts) in acts.iter().enumerate() {
                let mut of: [&mut [[f32; ROWS]]; STREAMS] = [&mut [], &mut []];
                for (of, out) in of.iter_mut().zip(out.chunks_exact_mut(tokens)) {
                    *of = &mut out[TOKENS * i..tokens.min(TOKENS * (i + 1))];
                }
                let (streams, of) = (&mut streams[..groups.len()], &mut of[..groups.len()]);
                <F::Family as Family>::fused::<I, F>(isa, streams, scales, acts, of);
                streams.iter_mut().for_each(|s| *s = Stream { next: s.blocks.as_ptr(), again: true, ..*s });
            }
            continue;
        }
        for (group, out) in groups.clone().zip(out.chunks_exact_mut(tokens)) {
            let s = stream::<I, F>(isa, source, group, nb, first, groups.len() - 1, packed[0].of(count));
            unpack_blocks::<I, F>(s.blocks, is_packed, tile);
            let parts = acts.len().min(4);
            for (i, (acts, out)) in acts.iter().zip(out.chunks_mut(TOKENS)).enumerate() {
                // A few lines at a time: a core has room for a dozen or two of misses.
                if i < parts {
                    for slot in 0..count {
                        prefetch(isa, s.next.wrapping_add(slot), i, parts);
                    }
                }
                <F::Family as Family>::apply::<I, F>(isa, tile, acts, count, out);
            }
        }
    }
    out
}

/// Fills the tile from a chunk's blocks, packed or only interleaved.
#[inline(always)]
fn unpack_blocks<I: Isa, F: Format>(blocks: &[F::Block], packed: bool, tile: &mut Tile) {
    for (slot, block) in blocks.iter().enumerate() {
        if packed {
            formats::unpack::<I::V, F, true>(block, slot, tile);
        } else {
            formats::unpack::<I::V, F, false>(block, slot, tile);
        }
    }
}

/// Asks for part `part` of `parts` of a value's cache lines.
#[inline(always)]
pub fn prefetch<I: Isa, T>(isa: I, value: *const T, part: usize, parts: usize) {
    let lines = size_of::<T>().div_ceil(64);
    for line in lines * part / parts..lines * (part + 1) / parts {
        isa.prefetch(value.cast::<u8>().wrapping_add(64 * line));
    }
}

/// Memory that will be wanted soon, asked for in the course of a product: so many bytes a column.
#[derive(Clone, Copy)]
pub struct Ahead {
    at: *const u8,
    step: usize,
}

impl Ahead {
    /// As many values as there are columns.
    pub fn columns<T>(at: *const T) -> Self {
        Self { at: at.cast(), step: size_of::<T>() }
    }
    /// Blocks that hold so many columns.
    pub fn blocks<T>(at: *const T, cols: usize) -> Self {
        Self { at: at.cast(), step: size_of::<T>().div_ceil(cols) }
    }
    /// What the `i`th of `parts` products, each of so many columns, asks for; the first few ask for all.
    #[inline(always)]
    fn part(self, i: usize, parts: usize, cols: usize) -> Self {
        let step = self.step.div_ceil(parts.min(4));
        if i < 4 { Self { at: self.at.wrapping_add(i * cols * step), step } } else { Self { step: 0, ..self } }
    }
    #[inline(always)]
    pub fn ask(self, isa: impl Isa, column: usize) {
        isa.prefetch(self.at.wrapping_add(column * self.step));
    }
}

/// Blocks of one row group to floats.
struct Decode<'a, I, F: Format> {
    packed: bool,
    blocks: &'a [F::Block],
    tile: &'a mut Tile,
    cols: usize,
    decoded: &'a mut FloatTile,
    isa: PhantomData<I>,
}

impl<I: Isa, F: Format> Work for Decode<'_, I, F> {
    #[inline(always)]
    fn run(self) {
        unpack_blocks::<I, F>(self.blocks, self.packed, self.tile);
        decode_tile::<I::V, F>(self.tile, self.cols / 4, self.decoded);
    }
}

/// The same with weights decoded to f32, one row group.
#[inline(always)]
pub fn row_group_decoded<'s, I: Isa, F: Format>(
    isa: I,
    source: Source<'_>,
    group: usize,
    cols: usize,
    acts: &[FloatActs],
    tokens: usize,
    scratch: &'s mut Scratch,
) -> &'s mut [[f32; ROWS]] {
    let nb = blocks_per_row::<F>(cols);
    let per_chunk = CHUNK / <F::Family as Family>::ELEMENTS;
    let Scratch { tile, decoded, packed, out, .. } = scratch;
    let out = &mut out[..tokens];
    out.fill([0.0; ROWS]);
    for (chunk, acts) in acts.chunks_exact(tokens.div_ceil(TOKENS)).enumerate() {
        let first = chunk * per_chunk;
        let count = per_chunk.min(nb - first);
        let s = stream::<I, F>(isa, source, group, nb, first, 0, packed[0].of(count));
        let cols = count * <F::Family as Family>::ELEMENTS;
        let packed = matches!(source, Source::Packed(_));
        isa.narrow().enter(Decode::<I::Narrow, F> { packed, blocks: s.blocks, tile, cols, decoded, isa: PhantomData });
        isa.floats(decoded, acts, cols, Ahead::blocks(s.next, <F::Family as Family>::ELEMENTS), out);
    }
    out
}

/// Columns `first ..first + count` of a packed row group.
fn packed_columns<F: FloatFormat>(
    bytes: &[u8],
    group: usize,
    cols: usize,
    first: usize,
    count: usize,
) -> &[[F::Element; ROWS]] {
    let len = size_of::<[F::Element; ROWS]>();
    let chunk = &bytes[(group * cols + first) * len..][..count * len];
    debug_assert!(chunk.as_ptr().cast::<[F::Element; ROWS]>().is_aligned());
    // SAFETY: packed data starts aligned and consists of whole planes of plain numbers.
    unsafe { std::slice::from_raw_parts(chunk.as_ptr().cast(), count) }
}

/// As [`row_groups`], for packed float weights; two row groups together where there are no more than two tokens.
#[inline(always)]
pub fn packed_floats<'s, I: Isa, F: FloatFormat>(
    isa: I,
    packed: &[u8],
    groups: Range<usize>,
    cols: usize,
    acts: &[FloatActs],
    tokens: usize,
    scratch: &'s mut Scratch,
) -> &'s mut [[f32; ROWS]] {
    let Scratch { decoded, out, .. } = scratch;
    let out = &mut out[..groups.len() * tokens];
    out.fill([0.0; ROWS]);
    for (chunk, acts) in acts.chunks_exact(tokens.div_ceil(TOKENS)).enumerate() {
        let first = chunk * CHUNK;
        let count = CHUNK.min(cols - first);
        if tokens <= I::FUSED.min(TOKENS) {
            let mut streams: [&[[F::Element; ROWS]]; STREAMS] = [&[]; STREAMS];
            for (s, group) in streams.iter_mut().zip(groups.clone()) {
                *s = packed_columns::<F>(packed, group, cols, first, count);
            }
            float::fused::<I, F>(isa, streams, groups.len(), &acts[0], out);
            continue;
        }
        for (group, out) in groups.clone().zip(out.chunks_exact_mut(tokens)) {
            let columns = packed_columns::<F>(packed, group, cols, first, count);
            decode_columns::<I, F>(isa, columns, &mut decoded.w);
            isa.floats(decoded, acts, count, Ahead::columns(columns.as_ptr().wrapping_add(count)), out);
        }
    }
    out
}

/// As [`row_groups`], for one row group of borrowed float weights.
#[inline(always)]
pub fn borrowed_floats<'s, I: Isa, F: FloatFormat>(
    isa: I,
    raw: RawRows<'_>,
    group: usize,
    cols: usize,
    acts: &[RowActs],
    tokens: usize,
    scratch: &'s mut Scratch,
) -> &'s mut [[f32; ROWS]] {
    let Scratch { padded, sums, out, .. } = scratch;
    let (sums, out) = (&mut sums[..tokens], &mut out[..tokens]);
    float_rows::multiply::<I, F>(isa, raw, group, cols, acts, padded, sums);
    for (out, sums) in out.iter_mut().zip(sums) {
        *out = isa.add_lanes(sums);
    }
    out
}

/// Runs `$body` with `$F` the [`Format`] of a GGUF type id, or `$float` with `$G` the [`FloatFormat`].
#[macro_export]
macro_rules! with_gguf_format {
    ($id:expr, $F:ident => $body:expr, $G:ident => $float:expr) => {{
        use $crate::cpu::qgemm::{float, formats};
        macro_rules! quantised {
            ($format:ident) => {{
                type $F = formats::$format;
                $body
            }};
        }
        macro_rules! plain {
            ($format:ident) => {{
                type $G = float::$format;
                $float
            }};
        }
        match $id {
            1 => plain!(F16),
            2 => quantised!(Q4_0),
            3 => quantised!(Q4_1),
            6 => quantised!(Q5_0),
            7 => quantised!(Q5_1),
            8 => quantised!(Q8_0),
            10 => quantised!(Q2K),
            11 => quantised!(Q3K),
            12 => quantised!(Q4K),
            13 => quantised!(Q5K),
            14 => quantised!(Q6K),
            20 => quantised!(Iq4Nl),
            23 => quantised!(Iq4Xs),
            30 => plain!(Bf16),
            39 => quantised!(Mxfp4),
            id => {
                debug_assert_eq!(id, 0);
                plain!(F32)
            }
        }
    }};
}

/// The activation layout a weight reads.
pub fn layout(format: i32, f32_compute: bool, packed: bool) -> Layout {
    with_gguf_format!(format,
        F => if f32_compute { Layout::Float } else { <<F as Format>::Family as Family>::LAYOUT },
        _G => if packed { Layout::Float } else { Layout::FloatRows })
}

/// Bytes of a packed copy.
pub fn packed_bytes(format: i32, rows: usize, cols: usize) -> usize {
    let groups = rows.div_ceil(ROWS);
    with_gguf_format!(format,
        F => groups * blocks_per_row::<F>(cols) * size_of::<<F as Format>::Block>(),
        G => groups * cols * size_of::<[<G as FloatFormat>::Element; ROWS]>())
}

struct Interleave<'a, I, F: Format> {
    isa: I,
    raw: RawRows<'a>,
    group: usize,
    first: usize,
    blocks: &'a mut [F::Block],
}

impl<I: Isa, F: Format> Work for Interleave<'_, I, F> {
    #[inline(always)]
    fn run(self) {
        interleave::<I, F>(self.isa, self.raw, self.group, self.first, self.blocks);
    }
}

struct Pack<'a, I, F: Format> {
    interleave: Interleave<'a, I, F>,
    tile: &'a mut Tile,
}

impl<I: Isa, F: Format> Work for Pack<'_, I, F> {
    #[inline(always)]
    fn run(self) {
        let Interleave { isa, raw, group, first, blocks } = self.interleave;
        // Few at a time, so that they are still in L1.
        for (i, blocks) in blocks.chunks_mut(CHUNK / <F::Family as Family>::ELEMENTS).enumerate() {
            let first = first + CHUNK / <F::Family as Family>::ELEMENTS * i;
            interleave::<I, F>(isa, raw, group, first, blocks);
            for block in blocks {
                formats::pack_codes::<I::V, F>(block, self.tile);
            }
        }
    }
}

/// Packs row group `group` into its part of the packed copy.
pub fn pack_group<I: Isa>(isa: I, format: i32, raw: RawRows<'_>, cols: usize, group: usize, out: &mut [u8]) {
    debug_assert!(out.as_ptr().cast::<u32>().is_aligned());
    with_gguf_format!(format, F => {
        let count = blocks_per_row::<F>(cols);
        assert_eq!(out.len(), count * size_of::<<F as Format>::Block>());
        // SAFETY: aligned (groups are whole dwords) and as long as asserted; any bytes are a valid block.
        let blocks = unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast(), count) };
        isa.enter(Pack { interleave: Interleave::<I, F> { isa, raw, group, first: 0, blocks }, tile: &mut Tile::zeroed() });
    }, G => {
        assert_eq!(out.len(), cols * size_of::<[<G as FloatFormat>::Element; ROWS]>());
        // SAFETY: as above.
        pack_columns::<G>(raw, group, unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast(), cols) });
    })
}

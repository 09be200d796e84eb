//! The plain versions: one loop a definition, sums in f64, one thread. They never refuse and define what the fast ones are tested against.

use crate::collection::Cache;
use crate::context::Context;
use crate::dtype::{DType, E4m3, Element};
use crate::error::Result;
use crate::gguf;
use crate::op::Rope;
use crate::op::kv_gather::{self, KvGather};
use crate::op::kv_store::{self, KvStore};
use crate::op::merge_attention::{self, MergeAttention};
use crate::op::mla_indexer_fp8::{self, MlaIndexerFp8};
use crate::op::mla_prefill_fp8::{self, MlaPrefillFp8, SCALE_BLOCK, ScoreMod, alibi_slope};
use crate::op::mla_rope_rmsnorm_quantize::{self, MlaRopeRmsnormQuantize};
use crate::op::qkv_matmul_gguf::{self, Compute, Projection, QkvMatmulGguf};
use crate::plan::{Impl, Stream};
use crate::view::View;
use crate::workspace::Arena;
use crate::{with_cache_dtype, with_float};

macro_rules! reference {
    ($run:ident) => {
        Impl { name: "reference", refuse: |_, _| Ok(()), layout: |_, _, _| {}, run: $run }
    };
}

pub const KV_STORE: Impl<KvStore> = reference!(kv_store);
pub const KV_GATHER: Impl<KvGather> = reference!(kv_gather);
pub const MERGE_ATTENTION: Impl<MergeAttention> = reference!(merge_attention);
pub const MLA_ROPE_RMSNORM_QUANTIZE: Impl<MlaRopeRmsnormQuantize> = reference!(mla_rope_rmsnorm_quantize);
pub const MLA_PREFILL_FP8: Impl<MlaPrefillFp8> = reference!(mla_prefill_fp8);
pub const MLA_INDEXER_FP8: Impl<MlaIndexerFp8> = reference!(mla_indexer_fp8);
pub const QKV_MATMUL_GGUF: Impl<QkvMatmulGguf> = reference!(qkv_matmul_gguf);

// The whole call runs on the caller's thread over host memory that validation has seen, so each row below is read or written by nobody else.

/// A float row as f32.
fn load<const N: usize, const M: usize>(view: &View<N>, index: [usize; M]) -> Vec<f32> {
    // SAFETY: host memory of one thread.
    with_float!(view.dtype, T => unsafe { view.row::<T, M>(index).iter().map(|x| x.to_f32()).collect() })
}

/// Round f32 to a row's dtype.
fn store<const N: usize, const M: usize>(view: &View<N>, index: [usize; M], x: impl IntoIterator<Item = f32>) {
    // SAFETY: host memory of one thread.
    with_float!(view.dtype, T => unsafe { view.row_mut::<T, M>(index).iter_mut().zip(x).for_each(|(y, x)| *y = T::from_f32(x)) })
}

/// What is left of `x` after it went through `dtype`.
fn round(dtype: DType, x: f32) -> f32 {
    with_float!(dtype, T => T::from_f32(x).to_f32())
}

/// Write one head's row `x [head_size]` as the cache's dtype wants; with scales, quantise each group:
/// `s = amax / FP8_MAX` over the finite elements, 1 where that is below 2^-126; `code = cast(x / s)` with the scale as stored.
///
/// # Safety
/// Host storage; nobody else uses the slot meanwhile.
unsafe fn write_head(cache: &Cache, block: usize, slot: usize, head: usize, x: &[f32]) {
    with_cache_dtype!(cache.dtype, T => {
        // SAFETY: by contract.
        let row = unsafe { &mut cache.row_mut::<T>(block, slot)[head * cache.head_size..][..cache.head_size] };
        if cache.groups == 0 {
            row.iter_mut().zip(x).for_each(|(y, &x)| *y = T::from_f32(x));
            return;
        }
        for (g, (row, x)) in row.chunks_mut(cache.granularity).zip(x.chunks(cache.granularity)).enumerate() {
            let amax = x.iter().map(|x| x.abs()).filter(|x| x.is_finite()).fold(0.0, f32::max);
            let s = amax / cache.dtype.fp8_max();
            let s = if s < f32::MIN_POSITIVE { 1.0 } else { s };
            // SAFETY: by contract.
            let s = unsafe { cache.set_scale(block, slot, head, g, s) };
            row.iter_mut().zip(x).for_each(|(y, &x)| *y = T::from_f32(x / s));
        }
    })
}

/// Write a token's row of all heads, `x [num_heads * head_size]`.
///
/// # Safety
/// As [`write_head`].
unsafe fn write_row(cache: &Cache, block: usize, slot: usize, x: &[f32]) {
    for (head, x) in x.chunks_exact(cache.head_size).enumerate() {
        // SAFETY: by contract.
        unsafe { write_head(cache, block, slot, head, x) };
    }
}

/// Read one head's row to f32, dequantised.
///
/// # Safety
/// Host storage; nobody writes the slot meanwhile.
unsafe fn read_head(cache: &Cache, block: usize, slot: usize, head: usize, out: &mut [f32]) {
    with_cache_dtype!(cache.dtype, T => {
        // SAFETY: by contract.
        let row = unsafe { &cache.row::<T>(block, slot)[head * cache.head_size..][..cache.head_size] };
        out.iter_mut().zip(row).for_each(|(y, x)| *y = x.to_f32());
    });
    if cache.groups > 0 {
        for (g, out) in out.chunks_mut(cache.granularity).enumerate() {
            // SAFETY: by contract.
            let s = unsafe { cache.scale(block, slot, head, g) };
            out.iter_mut().for_each(|y| *y *= s);
        }
    }
}

/// Read a token's row of all heads.
///
/// # Safety
/// As [`read_head`].
unsafe fn read_row(cache: &Cache, block: usize, slot: usize, out: &mut [f32]) {
    for (head, out) in out.chunks_exact_mut(cache.head_size).enumerate() {
        // SAFETY: by contract.
        unsafe { read_head(cache, block, slot, head, out) };
    }
}

fn kv_store(_: &Context, a: &kv_store::Args<'_>, _: &mut Arena, _: Stream) -> Result<()> {
    for t in 0..a.batch.tokens() {
        let (b, p) = a.batch.position(t);
        let (block, slot) = a.batch.locate(b, p);
        for h in 0..a.cache.num_heads {
            // SAFETY: the slot is this token's alone.
            unsafe { write_head(&a.cache, block, slot, h, &load(&a.values, [t, h])) };
        }
    }
    Ok(())
}

fn kv_gather(_: &Context, a: &kv_gather::Args<'_>, _: &mut Arena, _: Stream) -> Result<()> {
    let mut x = vec![0.0; a.cache.head_size];
    for r in 0..a.rows.total() {
        let (b, p) = a.rows.locate(r);
        let (block, slot) = a.batch.locate(b, p);
        for h in 0..a.cache.num_heads {
            // SAFETY: nobody writes the cache during the call.
            unsafe { read_head(&a.cache, block, slot, h, &mut x) };
            store(&a.out, [r, h], x.iter().copied());
        }
    }
    Ok(())
}

fn merge_attention(_: &Context, m: &merge_attention::Args, _: &mut Arena, _: Stream) -> Result<()> {
    let [tokens, heads, _] = m.output.shape;
    for t in 0..tokens {
        for h in 0..heads {
            // SAFETY: host memory of one thread.
            let (a, b) = unsafe { (m.lse_a.row::<f32, 1>([t])[h] as f64, m.lse_b.row::<f32, 1>([t])[h] as f64) };
            let top = a.max(b);
            let (lse, wa, wb) = if a == f64::NEG_INFINITY && b == f64::NEG_INFINITY {
                (top, 0.0, 0.0)
            } else {
                // The smaller side's weight relative to the larger one's: no power overflows, and an infinite lse takes all.
                let e = (-(a - b).abs()).exp();
                let (large, small) = (1.0 / (1.0 + e), e / (1.0 + e));
                let (wa, wb) = if a >= b { (large, small) } else { (small, large) };
                (top + e.ln_1p(), wa, wb)
            };
            // A side without keys weighs nothing, whatever its output holds.
            let part = |w: f64, x: f32| if w == 0.0 { 0.0 } else { w * x as f64 };
            let (xa, xb) = (load(&m.output_a, [t, h]), load(&m.output_b, [t, h]));
            store(&m.output, [t, h], xa.iter().zip(&xb).map(|(&xa, &xb)| (part(wa, xa) + part(wb, xb)) as f32));
            if let Some(out) = &m.lse {
                // SAFETY: host memory of one thread.
                unsafe { out.row_mut::<f32, 1>([t])[h] = lse as f32 };
            }
        }
    }
    Ok(())
}

/// Rotate pairs: `y0 = x0 cos - x1 sin, y1 = x0 sin + x1 cos`, each rounded to `dtype`.
fn rotate(x: &mut [f32], freqs: &[f32], rope: Rope, dtype: DType) {
    let width = x.len();
    for i in 0..width / 2 {
        let (j0, j1) = rope.pair(i, width);
        let (x0, x1, cos, sin) = (x[j0], x[j1], freqs[2 * i], freqs[2 * i + 1]);
        x[j0] = round(dtype, x0 * cos - x1 * sin);
        x[j1] = round(dtype, x0 * sin + x1 * cos);
    }
}

/// A finished MLA row: the latent part normed, rounded to dtype, times gamma, rounded again (MAX's order); the rest roped.
pub fn finish_row(row: &mut [f32], gamma: &[f32], epsilon: f32, freqs: &[f32], rope: Rope, dtype: DType) {
    let (latent, roped) = row.split_at_mut(gamma.len());
    let mean = latent.iter().map(|&x| x as f64 * x as f64).sum::<f64>() / latent.len() as f64;
    let root = (mean as f32 + epsilon).sqrt();
    for (x, gamma) in latent.iter_mut().zip(gamma) {
        *x = round(dtype, round(dtype, *x / root) * gamma);
    }
    rotate(roped, freqs, rope, dtype);
}

fn mla_rope_rmsnorm_quantize(
    _: &Context,
    a: &mla_rope_rmsnorm_quantize::Args<'_>,
    _: &mut Arena,
    _: Stream,
) -> Result<()> {
    let gamma = load(&a.gamma, []);
    for t in 0..a.batch.tokens() {
        let (b, p) = a.batch.position(t);
        let (block, slot) = a.batch.locate(b, p);
        let freqs = load(&a.freqs_cis, [p]);
        for h in 0..a.q_rope.shape[1] {
            let mut q = load(&a.q_rope, [t, h]);
            rotate(&mut q, &freqs, a.rope, a.q_rope.dtype);
            store(&a.q_rope_output, [t, h], q);
        }
        let mut row = load(&a.kv, [t]);
        finish_row(&mut row, &gamma, a.epsilon, &freqs, a.rope, a.kv.dtype);
        // SAFETY: the slot is this token's alone.
        unsafe { write_row(&a.cache, block, slot, &row) };
    }
    Ok(())
}

fn mla_prefill_fp8(_: &Context, a: &mla_prefill_fp8::Args<'_>, _: &mut Arena, _: Stream) -> Result<()> {
    let dtype = a.q.dtype;
    let (heads, latent, nope, v_dim) = (a.num_heads, a.kv_lora_rank, a.nope_dim, a.v_head_dim);
    if let Some(f) = &a.finish {
        let gamma = load(&f.gamma, []);
        for t in 0..a.batch.tokens() {
            let (b, p) = a.batch.position(t);
            let (block, slot) = a.batch.locate(b, p);
            let freqs = load(&f.freqs_cis, [p]);
            for h in 0..heads {
                let mut q = load(&a.q, [t, h]);
                rotate(&mut q[nope..], &freqs, f.rope, dtype);
                // SAFETY: host memory of one thread. Only the rope part is written: the rest keeps its bits, NaN payloads too.
                with_float!(dtype, T => unsafe {
                    let row = a.q.row_mut::<T, 2>([t, h]);
                    row[nope..].iter_mut().zip(&q[nope..]).for_each(|(y, &x)| *y = T::from_f32(x));
                });
            }
            let mut row = match &f.kv {
                Some(kv) => load(kv, [t]),
                None => {
                    let mut row = vec![0.0; a.cache.head_size];
                    // SAFETY: host memory of one thread.
                    unsafe { read_row(&a.cache, block, slot, &mut row) };
                    row
                }
            };
            finish_row(&mut row, &gamma, f.epsilon, &freqs, f.rope, dtype);
            // SAFETY: the slot is this token's alone.
            unsafe { write_row(&a.cache, block, slot, &row) };
        }
    }

    // Gather, quantise, up-project: per buffer row the keys' nope part and the values of all heads, and the shared rope part.
    let features = heads * (nope + v_dim);
    let total = a.rows.total();
    let mut kv = vec![0.0f32; total * features];
    let mut k_rope = vec![0.0f32; total * a.rope_dim];
    for r in 0..total {
        let (b, p) = a.rows.locate(r);
        let (block, slot) = a.batch.locate(b, p);
        let mut row = vec![0.0; a.cache.head_size];
        // SAFETY: nobody writes the cache any more.
        unsafe { read_row(&a.cache, block, slot, &mut row) };
        row.iter_mut().for_each(|x| *x = round(dtype, *x));
        k_rope[r * a.rope_dim..][..a.rope_dim].copy_from_slice(&row[latent..]);
        let groups: Vec<(f32, Vec<f32>)> = row[..latent].chunks(SCALE_BLOCK).map(quantize_group).collect();
        for n in 0..features {
            // SAFETY: host memory nobody writes.
            let (w, ws) =
                unsafe { (a.kv_b_proj.row::<E4m3, 1>([n]), a.kv_b_proj_scale.row::<f32, 1>([n / SCALE_BLOCK])) };
            let sum: f64 = groups
                .iter()
                .zip(w.chunks(SCALE_BLOCK))
                .zip(ws)
                .map(|(((s, codes), w), ws)| {
                    let dot: f64 = codes.iter().zip(w).map(|(c, w)| *c as f64 * w.to_f32() as f64).sum();
                    dot * *s as f64 * *ws as f64
                })
                .sum();
            kv[r * features + n] = round(dtype, sum as f32);
        }
    }

    for b in 0..a.batch.batch_size {
        let rows = a.rows.rows(b);
        let first = a.rows.first_position(b);
        for t in a.batch.rows(b) {
            let p = a.batch.position(t).1;
            let seen = a.mask.visible(p, first + rows.len());
            for h in 0..heads {
                let q = load(&a.q, [t, h]);
                let slope = if a.score_mod == ScoreMod::Alibi { alibi_slope(h, heads) as f64 } else { 0.0 };
                let keys: Vec<usize> = seen.clone().filter(|&k| k >= first).collect();
                let scores: Vec<f64> = keys
                    .iter()
                    .map(|&k| {
                        let r = rows.start + k - first;
                        let key = kv[r * features + h * (nope + v_dim)..][..nope]
                            .iter()
                            .chain(&k_rope[r * a.rope_dim..][..a.rope_dim]);
                        let dot: f64 = q.iter().zip(key).map(|(q, k)| *q as f64 * *k as f64).sum();
                        dot * a.scale as f64 + slope * (k as f64 - p as f64)
                    })
                    .collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                let mut out = vec![0.0f64; v_dim];
                for (&k, s) in keys.iter().zip(&scores) {
                    let weight = (s - top).exp() / total;
                    let v = &kv[(rows.start + k - first) * features + h * (nope + v_dim) + nope..][..v_dim];
                    out.iter_mut().zip(v).for_each(|(o, v)| *o += weight * *v as f64);
                }
                store(&a.output, [t, h], out.into_iter().map(|x| x as f32));
                if let Some(lse) = &a.lse {
                    let value = if keys.is_empty() { f64::NEG_INFINITY } else { top + total.ln() };
                    // SAFETY: host memory of one thread.
                    unsafe { lse.row_mut::<f32, 1>([t])[h] = value as f32 };
                }
            }
        }
    }
    Ok(())
}

/// `s = min(amax, 1200) / 448`, codes `sat(x * (1/s))`; zero codes where s is 0 or 1/s not finite.
fn quantize_group(x: &[f32]) -> (f32, Vec<f32>) {
    let amax = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let s = amax.min(1200.0) / 448.0;
    let inverse = 1.0 / s;
    let code = |&x: &f32| if s == 0.0 || !inverse.is_finite() { 0.0 } else { E4m3::from_f32(x * inverse).to_f32() };
    (s, x.iter().map(code).collect())
}

fn mla_indexer_fp8(_: &Context, a: &mla_indexer_fp8::Args<'_>, _: &mut Arena, _: Stream) -> Result<()> {
    for t in 0..a.batch.tokens() {
        let (b, p) = a.batch.position(t);
        let visible = if a.causal { p + 1 } else { a.batch.length(b) };
        let scores: Vec<f32> = (0..visible)
            .map(|s| {
                let (block, slot) = a.batch.locate(b, s);
                // SAFETY: host memory nobody writes.
                let (k, k_scale, q_s) = unsafe {
                    (a.cache.row::<E4m3>(block, slot), a.cache.scale(block, slot, 0, 0), a.q_s.row::<f32, 1>([t]))
                };
                let mut sum = 0.0f64;
                for (h, weight) in q_s.iter().enumerate() {
                    // SAFETY: host memory nobody writes.
                    let q = unsafe { a.q.row::<E4m3, 2>([t, h]) };
                    let dot: f64 = q.iter().zip(k).map(|(q, k)| q.to_f32() as f64 * k.to_f32() as f64).sum();
                    let relu = if dot.is_nan() || dot > 0.0 { dot } else { 0.0 };
                    sum += *weight as f64 * relu;
                }
                (sum * k_scale as f64) as f32
            })
            .collect();
        let mut order: Vec<usize> = (0..visible).collect();
        // Best first; -0 equals +0; NaN after all others; a stable sort keeps the lower position first.
        order.sort_by(|&i, &j| {
            let (x, y) = (scores[i], scores[j]);
            x.is_nan().cmp(&y.is_nan()).then(y.partial_cmp(&x).unwrap_or(std::cmp::Ordering::Equal))
        });
        // SAFETY: host memory of one thread.
        let indices = unsafe { a.output_indices.row_mut::<i32, 1>([t]) };
        for (i, out) in indices.iter_mut().enumerate() {
            *out = order.get(i).map_or(-1, |&s| s as i32);
        }
        if let Some(view) = &a.output_scores {
            // SAFETY: host memory of one thread.
            let out = unsafe { view.row_mut::<f32, 1>([t]) };
            for (i, out) in out.iter_mut().enumerate() {
                *out = order.get(i).map_or(f32::NEG_INFINITY, |&s| scores[s]);
            }
        }
    }
    Ok(())
}

/// Symmetric round-to-nearest 8-bit activations, per block of `block` columns, as the numbers they stand for.
pub fn quantize_activations(x: &mut [f32], block: usize) {
    for x in x.chunks_mut(block) {
        let amax = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let d = amax / 127.0;
        let inverse = if d > 0.0 { 1.0 / d } else { 0.0 };
        x.iter_mut().for_each(|x| *x = (*x * inverse).round_ties_even().clamp(-127.0, 127.0) * d);
    }
}

fn qkv_matmul_gguf(_: &Context, a: &qkv_matmul_gguf::Args<'_>, _: &mut Arena, _: Stream) -> Result<()> {
    for t in 0..a.batch.tokens() {
        let x = load(&a.hidden_state, [t]);
        let (b, p) = a.batch.position(t);
        let (block, slot) = a.batch.locate(b, p);
        store(&a.q_output, [t], project(&a.q, a.compute, &x));
        for (projection, cache) in [(&a.k, &a.k_cache), (&a.v, &a.v_cache)] {
            // SAFETY: the slot is this token's alone.
            unsafe { write_row(cache, block, slot, &project(projection, a.compute, &x)) };
        }
    }
    Ok(())
}

fn project(p: &Projection<'_>, compute: Compute, x: &[f32]) -> Vec<f32> {
    let mut x = x.to_vec();
    if compute == Compute::Default && p.weight.format.activation_block > 0 {
        quantize_activations(&mut x, p.weight.format.activation_block);
    }
    let mut w = vec![0.0; p.weight.cols];
    // SAFETY: host memory nobody writes.
    let bias = p.bias.map(|b| unsafe { b.row::<f32, 0>([]) });
    (0..p.weight.rows)
        .map(|n| {
            gguf::decode_row(p.weight.format, p.weight.row(n), &mut w);
            let sum: f64 = w.iter().zip(&x).map(|(w, x)| *w as f64 * *x as f64).sum();
            (sum + bias.map_or(0.0, |b| b[n] as f64)) as f32
        })
        .collect()
}

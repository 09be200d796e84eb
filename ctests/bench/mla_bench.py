"""The FP8 MLA kernels and the cache's own kernels beside PyTorch on the same CPU, in one process, by ctypes.

    python3 ctests/run.py bench mla [--only prefill,indexer,...] [--threads 2,1] [--rounds 9] [--no-scaling] [--no-record]

PyTorch has none of these functions: its side is the same steps with its best operators (dequantise, matmul, scaled_dot_product_attention, topk, rms_norm,
index_copy), each written in the ways that could be fastest; the fastest of them counts. Every answer, theirs too, is checked against float64 before
anything is timed. Rounds are interleaved (limits, pagedkv, PyTorch, and again), figures are medians, a ratio is the median of the rounds' ratios with their
quartiles. What the machine can do (f32 multiply-adds, bytes read, bytes copied) is measured in the same rounds.
"""

import argparse
import ctypes
import datetime
import gc
import json
import os
import platform
import resource
import statistics
import sys
import time
from pathlib import Path

import torch

import pkv

F = torch.nn.functional
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int32: "I32"}
SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
PAGE = 64


def constant(name):
    return pkv.CONSTANTS["PKV_" + name]


def tensor(x):
    view = pkv.struct("tensor", data=x.data_ptr(), dtype=constant(DTYPES[x.dtype]), ndim=x.dim())
    for i in range(x.dim()):
        view.shape[i], view.stride[i] = x.shape[i], x.stride(i)
    return view


def settle():
    """Until no thread of this process computes any more: a pool's threads spin for a while after its last call."""
    used = lambda: (lambda u: u.ru_utime + u.ru_stime)(resource.getrusage(resource.RUSAGE_SELF))
    before = used()
    for _ in range(200):
        time.sleep(0.004)
        after = used()
        if after - before < 4e-4:
            return
        before = after


class Machine:
    """The library, a context and the limits for a number of threads."""

    def __init__(self, library, limits, threads):
        self.library, self.threads = library, threads
        self.context = library.context(threads)
        self.limits = {}
        for name in ("fma", "read", "copy"):
            function = getattr(limits, "limit_" + name)
            function.restype = ctypes.c_double
            self.limits[name] = lambda function=function: function(threads)


class Cache:
    """One layer of an MLA-like collection in torch's memory, its pages in a shuffled order, and a batch of one sequence on it."""

    def __init__(self, m, cached, new, dtype, width, heads=1, scales=None, page=PAGE):
        self.length, self.new = cached + new, new
        pages = -(-self.length // page)
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randperm(pages, generator=generator).to(torch.int32)
        self.blocks = torch.zeros(pages * page, heads, width, dtype=dtype)
        self.scales = torch.ones(pages * page, heads) if scales else None
        buffer = lambda x: pkv.STRUCTS["pkv_buffer"](x.data_ptr(), x.nbytes) if x is not None else pkv.STRUCTS["pkv_buffer"]()
        self.collection = m.library.collection(
            m.context, dtype=constant(DTYPES[dtype]), scale_dtype=constant("F32") if scales else 0, num_blocks=pages, num_layers=1, page_size=page,
            num_heads=heads, head_size=width, is_mla=1, blocks=buffer(self.blocks), scales=buffer(self.scales))
        self.row_offsets = torch.tensor([0, new], dtype=torch.int32)
        self.cached = torch.tensor([cached], dtype=torch.int32)
        self.batch = pkv.struct(
            "batch", input_row_offsets=self.row_offsets.data_ptr(), cache_lengths=self.cached.data_ptr(), lookup_table=self.table.data_ptr(),
            batch_size=1, max_pages=pages, max_seq_length=new, max_cache_length=cached)
        # Row of `blocks` where a position lies.
        positions = torch.arange(self.length)
        self.rows = self.table.long()[positions // page] * page + positions % page

    def params(self, name, **fields):
        made = pkv.struct(name + "_params", collection=self.collection, batch=self.batch, **fields)
        made.keep = (self, fields)
        return made


def randn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def off(x, truth):
    """‖x - truth‖ / ‖truth‖"""
    return float((x.double() - truth).norm() / truth.norm())


def seconds(function, least=0.004):
    """Seconds of a call: of as many as last `least` seconds, where one is shorter."""
    start = time.perf_counter()
    calls = 0
    while True:
        function()
        calls += 1
        spent = time.perf_counter() - start
        if spent >= least:
            return spent / calls


def spread(values):
    values = sorted(values)
    if len(values) < 3:
        return {"median": statistics.median(values), "low": values[0], "high": values[-1]}
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": statistics.median(values), "low": low, "high": high}


def race(m, rounds, ours, peers, limits=()):
    """Interleaved rounds of limits, our functions and PyTorch's. name -> its times, limit -> its rates."""
    torch.set_num_threads(m.threads)
    contenders = {**ours, **peers}
    for function in contenders.values():
        function()
    times = {name: [] for name in contenders}
    rates = {name: [] for name in limits}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name in limits:
            settle()
            rates[name].append(m.limits[name]())
        for name, function in contenders.items():
            settle()
            times[name].append(seconds(function))
    gc.enable()
    return times, rates


def ratios(above, below):
    return spread([a / b for a, b in zip(above, below)])


def against(times, ours, peers):
    """The fastest peer and how many times as long it takes as we do."""
    best = min(peers, key=lambda name: statistics.median(times[name]))
    return {"peer": best, "ratio": ratios(times[best], times[ours]), "peers_ms": {name: spread([1e3 * t for t in times[name]]) for name in peers}}


# Indexer

def indexer(m, tokens, keys, heads, depth, top_k, peers=True):
    e4m3 = torch.float8_e4m3fn
    cache = Cache(m, keys - tokens, tokens, e4m3, depth, scales=True)
    q, k = randn(tokens, heads, depth, seed=1).mul(60).to(e4m3), randn(len(cache.blocks), 1, depth, seed=2).mul(60).to(e4m3)
    cache.blocks.copy_(k)
    cache.scales.copy_(torch.rand(cache.scales.shape, generator=torch.Generator().manual_seed(4)) * 0.01 + 0.001)
    weights = randn(tokens, heads, seed=5) * 0.01
    indices, scores = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, top_k)
    params = cache.params(
        "mla_indexer_fp8", mask=constant("MASK_CAUSAL"), top_k=top_k, q=tensor(q), q_s=tensor(weights), output_indices=tensor(indices), output_scores=tensor(scores))
    ours = m.library.kernel(m.context, "mla_indexer_fp8", params)
    ours.keep = (params, q, weights)
    pages, table = cache.blocks.view(-1, PAGE, depth), cache.table.long()
    hidden = torch.full((tokens, keys), float("-inf")).triu_(keys - tokens + 1)

    def gathered(dtype=torch.float32):
        k = pages[table].view(-1, depth)[:keys].to(torch.float32).to(dtype)
        return k, cache.scales.view(-1, PAGE)[table].view(-1)[:keys]

    def whole():
        k, scale = gathered()
        dots = torch.mm(q.float().view(-1, depth), k.t()).relu_().view(tokens, heads, keys)
        return (torch.bmm(weights.unsqueeze(1), dots).squeeze(1) * scale).add_(hidden).topk(min(top_k, keys), dim=1)

    def by_head():
        k, scale = gathered()
        kt, qf, sums = k.t(), q.float(), torch.zeros(tokens, keys)
        for h in range(heads):
            sums.addcmul_(torch.mm(qf[:, h], kt).relu_(), weights[:, h : h + 1])
        return (sums * scale).add_(hidden).topk(min(top_k, keys), dim=1)

    def by_token():
        k, scale = gathered()
        kt, qf, sums = k.t().contiguous(), q.float(), torch.empty(tokens, keys)
        dots = torch.empty(heads, keys)
        for t in range(tokens):
            torch.mm(qf[t], kt, out=dots)
            torch.mm(weights[t : t + 1], dots.relu_(), out=sums[t : t + 1])
        return sums.mul_(scale).add_(hidden).topk(min(top_k, keys), dim=1)

    def by_tile():
        k, scale = gathered()
        kt, qf, sums = k.t().contiguous(), q.float().view(-1, depth), torch.empty(tokens, keys)
        for t in range(0, tokens, 8):
            n = min(8, tokens - t)
            for s in range(0, keys, 512):
                dots = torch.mm(qf[t * heads : (t + n) * heads], kt[:, s : s + 512]).relu_().view(n, heads, -1)
                sums[t : t + n, s : s + 512] = torch.bmm(weights[t : t + n].unsqueeze(1), dots).squeeze(1)
        return sums.mul_(scale).add_(hidden).topk(min(top_k, keys), dim=1)

    variants = {"whole": whole, "by_head": by_head, "by_token": by_token, "by_tile": by_tile} if peers else {}

    def check():
        k, scale = gathered(torch.float64)
        some = sorted({0, tokens // 2, tokens - 1})
        truth = torch.stack([(torch.mm(q[t].double(), k.t()).relu_() * weights[t].double().unsqueeze(1)).sum(0) * scale.double() for t in some]) + hidden[some]
        wanted = truth.topk(min(top_k, keys), dim=1).values
        ours()
        found = {"pagedkv": (scores, indices)} | {name: function() for name, function in variants.items()}
        worst = {}
        for name, (values, at) in found.items():
            shown = torch.isfinite(wanted)
            picked = torch.gather(truth, 1, at[some].long().clamp_min(0))
            same = torch.where(shown, picked - wanted, 0.0).abs().max() / wanted[shown].abs().max()
            error = torch.where(shown, values[some].double() - wanted, 0.0).abs().max() / wanted[shown].abs().max()
            assert same < 1e-5 and error < 1e-5, f"indexer {name}: keys {same:.1e}, scores {error:.1e} off"
            assert torch.equal(at[some] < 0, ~shown) or name != "pagedkv"
            worst[name] = float(error)
        return worst

    return ours, variants, check, 2 * tokens * keys * heads * depth


def indexer_section(m, o):
    shape = (128, 8192, 64, 128, 2048)
    ours, variants, check, flop = indexer(m, *shape)
    error = check()
    times, rates = race(m, o.rounds, {"pagedkv": ours}, variants, ["fma"])
    out = [{"shape": "T 128, 8192 keys, H 64, D 128, top-k 2048", "ms": spread([1e3 * t for t in times["pagedkv"]]), "error": error,
            "of_fma": ratios([flop / t for t in times["pagedkv"]], rates["fma"]), "workspace_bytes": ours.workspace, **against(times, "pagedkv", variants)}]
    scaling = []
    if not o.no_scaling:
        for name, shapes in {
            "tokens": [(t, 8192, 64, 128, 2048) for t in (1, 8, 32, 128)],
            "keys": [(32, s, 64, 128, 2048) for s in (2048, 8192, 32768)],
            "heads": [(32, 8192, h, 128, 2048) for h in (16, 32, 64)],
        }.items():
            scaling += scale(m, o, name, shapes, lambda s: indexer(m, *s, peers=False), "T {}, {} keys, H {}, D {}, top-k {}")
    return out, scaling


def scale(m, o, name, shapes, make, text):
    """Times over one extent, with the arithmetic's share of what the machine can do."""
    rows = []
    for shape in shapes:
        ours, _, check, flop = make(shape)
        check()
        times, rates = race(m, max(3, o.rounds // 2), {"pagedkv": ours}, {}, ["fma"])
        rows.append({"over": name, "shape": text.format(*shape), "ms": spread([1e3 * t for t in times["pagedkv"]]),
                     "of_fma": ratios([flop / t for t in times["pagedkv"]], rates["fma"]), "workspace_bytes": ours.workspace})
    return rows


# Prefill

NOPE, ROPE, VALUE, LATENT = 128, 64, 128, 512


def prefill(m, tokens, cached, heads, dtype=torch.bfloat16, cache_dtype=torch.bfloat16, scales=False, peers=True):
    """The last `tokens` of cached + tokens rows, all of which lie finished in the cache but for the new ones."""
    keys, e4m3 = cached + tokens, torch.float8_e4m3fn
    width, features = NOPE + ROPE, heads * (NOPE + VALUE)
    cache = Cache(m, cached, tokens, cache_dtype, LATENT + ROPE, scales=scales)
    latent = randn(cached, 1, LATENT + ROPE, seed=1)
    cache.blocks[cache.rows[:cached]] = latent.to(dtype).to(torch.float32).to(cache_dtype)
    q, kv = randn(tokens, heads, width, seed=2, dtype=dtype), randn(tokens, LATENT + ROPE, seed=3, dtype=dtype)
    angle = torch.arange(keys).unsqueeze(1) * 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
    freqs = torch.stack([angle.cos(), angle.sin()], -1).flatten(1)
    gamma = 1 + 0.1 * randn(LATENT, seed=4)
    weight = randn(features, LATENT, seed=5).mul(40).to(e4m3)
    weight_scale = (torch.rand(-(-features // 128), LATENT // 128, generator=torch.Generator().manual_seed(6)) + 0.5) * 1e-3
    output, lse = torch.zeros(tokens, heads, VALUE, dtype=dtype), torch.zeros(tokens, heads)
    softmax_scale = width**-0.5
    working, buffer_rows = q.clone(), torch.tensor([0, keys], dtype=torch.int32)

    def params(flags, n=tokens, q=working, output=output, lse=lse):
        fields = dict(
            rope=constant("ROPE_INTERLEAVED"), mask=constant("MASK_CAUSAL"), scale=softmax_scale, epsilon=1e-6, flags=flags, buffer_length=keys,
            buffer_row_offsets=buffer_rows.data_ptr(), q=tensor(q), kv_b_proj=tensor(weight), kv_b_proj_scale=tensor(weight_scale),
            output=tensor(output), lse=tensor(lse), freqs_cis=tensor(freqs), kv_norm_gamma=tensor(gamma))
        if not flags:
            fields |= dict(kv=tensor(kv))
        made = cache.params("mla_prefill_fp8", **fields)
        if n != tokens:
            one = pkv.struct("batch")
            ctypes.pointer(one)[0] = cache.batch
            made.rows = torch.tensor([0, n], dtype=torch.int32), torch.tensor([keys - n], dtype=torch.int32)
            one.input_row_offsets, one.cache_lengths, one.max_seq_length, one.max_cache_length = made.rows[0].data_ptr(), made.rows[1].data_ptr(), n, keys - n
            made.one, made.batch = one, ctypes.addressof(one)
        made.tensors = (q, kv, weight, weight_scale, freqs, gamma, output, lse, buffer_rows)
        return made

    finished = constant("PREFILL_FINISHED")
    full = m.library.kernel(m.context, "mla_prefill_fp8", params(0))
    later = m.library.kernel(m.context, "mla_prefill_fp8", params(finished))
    one_row = (working[:1].clone(), output[:1].clone(), lse[:1].clone())
    single = m.library.kernel(m.context, "mla_prefill_fp8", params(finished, 1, *one_row))

    def ours():
        # q is roped in place: the copy makes every call the same. It is a hundredth of the time, and not PyTorch's, whose threads would spin on for a while.
        ctypes.memmove(working.data_ptr(), q.data_ptr(), q.nbytes)
        full()

    spot = cache.rows[cached:]
    cos, sin = freqs[cached:, 0::2], freqs[cached:, 1::2]

    def rotate(x, cos, sin):
        x = x.float()
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def finish():
        """q roped; new rows normed, roped and put into the cache."""
        roped = q.clone()
        roped[..., NOPE:] = rotate(q[..., NOPE:], cos.unsqueeze(1), sin.unsqueeze(1)).to(dtype)
        normed = (F.rms_norm(kv[:, :LATENT].float(), (LATENT,), eps=1e-6).to(dtype).float() * gamma).to(dtype)
        row = torch.cat([normed, rotate(kv[:, LATENT:], cos, sin).to(dtype)], 1)
        cache_rows.index_copy_(0, spot, row.to(cache_dtype).view(cache_rows.dtype))
        return roped

    flat = cache.blocks.view(len(cache.blocks), -1)
    cache_rows = flat if cache_dtype.itemsize > 1 else flat.view(torch.uint8)

    def project(compute):
        """Gather, quantise, dequantise, multiply."""
        rows = cache_rows.index_select(0, cache.rows).view(cache_dtype).to(dtype)
        x = rows[:, :LATENT].float().view(keys, -1, 128)
        s = x.abs().amax(-1, keepdim=True).clamp_(max=1200) / 448
        x = ((x * (1 / s)).clamp_(-448, 448).to(e4m3).float() * s).view(keys, LATENT)
        w = weight.float().view(-1, 128, LATENT // 128, 128).mul_(weight_scale[:, None, :, None]).view(features, LATENT)
        return rows[:, LATENT:], torch.mm(x.to(compute), w.to(compute).t()).to(dtype).view(keys, heads, NOPE + VALUE)

    visible = None if cached == 0 else torch.ones(tokens, keys, dtype=torch.bool).tril_(cached)

    def attend(roped, rope_keys, up, compute):
        k = torch.cat([up[..., :NOPE], rope_keys.unsqueeze(1).expand(keys, heads, ROPE)], -1)
        parts = [x.transpose(0, 1).unsqueeze(0).to(compute) for x in (roped, k, up[..., NOPE:])]
        out = F.scaled_dot_product_attention(*parts, attn_mask=visible, is_causal=cached == 0, scale=softmax_scale)
        return out.squeeze(0).transpose(0, 1).to(dtype)

    def variant(compute_project, compute_attend):
        return lambda: attend(finish(), *project(compute_project), compute_attend)

    kinds = {"f32": (torch.float32, torch.float32)}
    if dtype != torch.float32:
        kinds |= {f"f32, {SHORT[dtype]} attention": (torch.float32, dtype), SHORT[dtype]: (dtype, dtype)}
    variants = {name: variant(*kind) for name, kind in kinds.items()} if peers else {}
    prepared = {}

    def phases():
        """PyTorch's two large parts by themselves."""
        roped = finish()
        for name, (compute_project, compute_attend) in kinds.items():
            rope_keys, up = project(compute_project)
            prepared[name] = (lambda c=compute_project: project(c)), (lambda r=rope_keys, u=up, c=compute_attend: attend(roped, r, u, c))
        return prepared

    def check():
        ours()
        mine = output.clone()
        later()
        assert torch.equal(mine, output), "prefill: FINISHED gives other bits"
        roped = finish()
        rows = cache_rows.index_select(0, cache.rows).view(cache_dtype).to(dtype)
        if scales:
            rows = (flat[cache.rows].float() * cache.scales[cache.rows]).to(dtype)
        x = rows[:, :LATENT].float().view(keys, -1, 128)
        s = x.abs().amax(-1, keepdim=True).clamp_(max=1200) / 448
        x = (((x * (1 / s)).clamp_(-448, 448).to(e4m3)).double() * s).view(keys, LATENT)
        w = (weight.double().view(-1, 128, LATENT // 128, 128) * weight_scale[:, None, :, None].double()).view(features, LATENT)
        up = torch.mm(x, w.t()).view(keys, heads, -1)
        some = sorted({0, tokens // 2, tokens - 1})
        truth = torch.zeros(len(some), heads, VALUE, dtype=torch.float64)
        for i, t in enumerate(some):
            seen = cached + t + 1
            score = torch.einsum("hd,khd->hk", roped[t, :, :NOPE].double(), up[:seen, :, :NOPE]) + roped[t, :, NOPE:].double() @ rows[:seen, LATENT:].double().t()
            truth[i] = torch.einsum("hk,khd->hd", (score * softmax_scale).softmax(-1), up[:seen, :, NOPE:])
        errors = {"pagedkv": off(mine[some], truth)} | {name: off(function()[some], truth) for name, function in variants.items()}
        most = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}[dtype]
        assert all(e < 3 * most if name != "pagedkv" else e < most for name, e in errors.items()), f"prefill: {errors}"
        return errors

    flop_project = 2 * keys * features * LATENT
    flop_attend = 2 * heads * (NOPE + ROPE + VALUE) * sum(cached + t + 1 for t in range(tokens))
    ours.workspace = full.workspace
    return ours, variants, check, flop_project + flop_attend, {"later": later, "single": single, "phases": phases, "project": flop_project, "attend": flop_attend}


def prefill_section(m, o):
    out, scaling = [], []
    for dtype, cache_dtype in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn), (torch.float32, torch.float32)):
        ours, variants, check, flop, more = prefill(m, 512, 0, 16, dtype, cache_dtype)
        error = check()
        parts = more["phases"]()
        pieces = {f"project {n}": p for n, (p, _) in parts.items()} | {f"attend {n}": a for n, (_, a) in parts.items()}
        times, rates = race(m, o.rounds, {"pagedkv": ours, "finished": more["later"], "one token": more["single"]}, variants | pieces, ["fma"])
        # One new token over the same rows: nearly all of it is gathering and up-projection, so the rest of the longer call is attention.
        projecting = times["one token"]
        attending = [a - b for a, b in zip(times["finished"], projecting)]
        finishing = [a - b for a, b in zip(times["pagedkv"], times["finished"])]
        phases = {
            "gather and up-projection": (projecting, more["project"], [n for n in pieces if n.startswith("project")]),
            "attention": (attending, more["attend"], [n for n in pieces if n.startswith("attend")]),
        }
        times |= {name: part for name, (part, _, _) in phases.items()}
        out.append({
            "shape": f"T 512, H 16, 128/64/128, latent 512, {SHORT[dtype]}, {SHORT[cache_dtype]} cache", "ms": spread([1e3 * t for t in times["pagedkv"]]), "error": error,
            "of_fma": ratios([flop / t for t in times["pagedkv"]], rates["fma"]), "workspace_bytes": ours.workspace, **against(times, "pagedkv", variants),
            "phases": {name: {"ms": spread([1e3 * t for t in part]), "of_fma": ratios([f / t for t in part], rates["fma"]), **against(times, name, names)}
                       for name, (part, f, names) in phases.items()} | {"rope, norm and store": {"ms": spread([1e3 * t for t in finishing])}}})
    if not o.no_scaling:
        for name, shapes in {
            "tokens": [(t, 0, 16) for t in (128, 256, 512, 1024, 2048)],
            "cached keys": [(128, s, 16) for s in (0, 1024, 4096)],
            "heads": [(512, 0, h) for h in (4, 8, 16, 32)],
        }.items():
            scaling += scale(m, o, name, shapes, lambda s: prefill(m, *s, peers=False)[:4], "T {}, {} cached, H {}, 128/64/128, latent 512, bf16")
    return out, scaling


# Rope, norm, quantise

def rope(m, tokens, heads, dtype, cache_dtype, scales, in_place, peers=True):
    cache = Cache(m, 0, tokens, cache_dtype, LATENT + ROPE, scales=scales)
    wide = randn(tokens, heads, NOPE + ROPE, seed=1, dtype=dtype)
    q, kv = wide[..., NOPE:], randn(tokens, LATENT + ROPE, seed=2, dtype=dtype)
    angle = torch.arange(tokens).unsqueeze(1) * 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
    freqs = torch.stack([angle.cos(), angle.sin()], -1).flatten(1)
    gamma = 1 + 0.1 * randn(LATENT, seed=3)
    q_in = q if in_place else q.contiguous()
    out = q_in if in_place else torch.zeros_like(q_in)
    original = q_in.clone()
    params = cache.params(
        "mla_rope_rmsnorm_quantize", rope=constant("ROPE_INTERLEAVED"), q_rope=tensor(q_in), q_rope_output=tensor(out), kv=tensor(kv), freqs_cis=tensor(freqs),
        gamma=tensor(gamma), epsilon=1e-6)
    ours = m.library.kernel(m.context, "mla_rope_rmsnorm_quantize", params)
    ours.keep = (params, wide, q_in, kv, freqs, gamma)
    cos, sin, spot = freqs[:, 0::2], freqs[:, 1::2], cache.rows
    theirs, their_scales = torch.zeros_like(cache.blocks).view(len(cache.blocks), -1), torch.ones(len(cache.blocks))
    target = theirs.view(torch.uint8) if cache_dtype.itemsize == 1 else theirs
    complex_freqs = torch.view_as_complex(freqs.view(tokens, -1, 2))

    def by_parts(x, cos, sin):
        x = x.float()
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def by_complex(x, freqs):
        return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * freqs).flatten(-2)

    def store(roped_key):
        normed = (F.rms_norm(kv[:, :LATENT].float(), (LATENT,), eps=1e-6).to(dtype).float() * gamma).to(dtype)
        row = torch.cat([normed, roped_key.to(dtype)], 1)
        if scales:
            row = row.float()
            s = row.abs().amax(1) / 448
            their_scales.index_copy_(0, spot, s)
            row = row / s.unsqueeze(1)
        target.index_copy_(0, spot, row.to(cache_dtype).view(target.dtype))

    def parts():
        store(by_parts(kv[:, LATENT:], cos, sin))
        return by_parts(original, cos.unsqueeze(1), sin.unsqueeze(1)).to(dtype)

    def complex_():
        store(by_complex(kv[:, LATENT:], complex_freqs))
        return by_complex(original, complex_freqs.unsqueeze(1)).to(dtype)

    variants = {"by parts": parts, "complex": complex_} if peers else {}

    def check():
        q_in.copy_(original)
        ours()
        assert all(torch.equal(function(), out) for function in variants.values()) or not in_place
        errors = {}
        x = kv.double()
        normed = x[:, :LATENT] / (x[:, :LATENT].square().mean(1, keepdim=True) + 1e-6).sqrt() * gamma.double()
        truth = torch.cat([normed, by_parts(kv[:, LATENT:], cos, sin).double()], 1)
        got = {"pagedkv": (cache.blocks.view(len(theirs), -1), cache.scales, out)} | {name: (theirs, their_scales.unsqueeze(1), f()) for name, f in variants.items()}
        for name, (rows, s, roped) in got.items():
            rows = rows[spot].double() * (s[spot].double() if scales else 1.0)
            errors[name] = max(off(rows, truth), off(roped, by_parts(original.double(), cos.unsqueeze(1), sin.unsqueeze(1)).double()))
        assert all(e < (0.04 if cache_dtype.itemsize == 1 else 5e-3) for e in errors.values()), f"rope: {errors}"
        return errors

    moved = 2 * q.numel() * dtype.itemsize + kv.nbytes + tokens * (LATENT + ROPE) * cache_dtype.itemsize + freqs.nbytes + (4 * tokens if scales else 0)
    return ours, variants, check, moved


def rope_section(m, o):
    out, scaling = [], []
    bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    for tokens, heads, dtype, cache_dtype, scales, in_place in (
        (16384, 16, bf16, bf16, False, False), (16384, 16, bf16, e4m3, True, False), (16384, 16, bf16, e4m3, False, True), (8192, 128, bf16, e4m3, True, False),
        (16384, 16, torch.float32, torch.float32, False, False),
    ):
        ours, variants, check, moved = rope(m, tokens, heads, dtype, cache_dtype, scales, in_place)
        error = check()
        times, rates = race(m, o.rounds, {"pagedkv": ours}, variants, ["read", "copy"])
        speed = [moved / t for t in times["pagedkv"]]
        out.append({"shape": f"T {tokens}, H {heads}, {SHORT[dtype]}, {SHORT[cache_dtype]} cache{' with scales' if scales else ''}{', in place' if in_place else ''}",
                    "ms": spread([1e3 * t for t in times["pagedkv"]]), "gb_s": spread([x / 1e9 for x in speed]), "of_read": ratios(speed, rates["read"]),
                    "of_copy": ratios(speed, rates["copy"]), "error": error, **against(times, "pagedkv", variants)})
    if not o.no_scaling:
        for tokens in (1, 16, 256, 4096, 16384):
            ours, _, check, moved = rope(m, tokens, 16, bf16, e4m3, True, False, peers=False)
            check()
            times, rates = race(m, max(3, o.rounds // 2), {"pagedkv": ours}, {}, ["read"])
            speed = [moved / t for t in times["pagedkv"]]
            scaling.append({"over": "tokens", "shape": f"T {tokens}, H 16, bf16, e4m3 cache with scales", "ms": spread([1e3 * t for t in times["pagedkv"]]),
                            "gb_s": spread([x / 1e9 for x in speed]), "of_read": ratios(speed, rates["read"])})
    return out, scaling


# Store, gather, merge

def quantised(x):
    """Rows and scales as kv_store defines them."""
    s = x.float().abs().amax(-1) / 448
    s = torch.where(s < torch.finfo(torch.float32).tiny, torch.ones_like(s), s)
    return (x.float() / s.unsqueeze(-1)).to(torch.float8_e4m3fn), s


def store_and_gather(m, o):
    tokens, heads, width = 16384, 8, 128
    f32, f16, bf16, e4m3, e5m2 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
    out = []
    for dtype, cache_dtype, scales in ((bf16, bf16, False), (f32, f32, False), (f32, f16, False), (f32, bf16, False), (bf16, e4m3, False), (f32, e4m3, False),
                                       (f32, e5m2, False), (bf16, e4m3, True)):
        cache = Cache(m, 0, tokens, cache_dtype, width, heads=heads, scales=scales)
        values, back = randn(tokens, heads, width, seed=1, dtype=dtype), torch.zeros(tokens, heads, width, dtype=dtype)
        rows = torch.tensor([0, tokens], dtype=torch.int32)
        store = m.library.kernel(m.context, "kv_store", cache.params("kv_store", values=tensor(values)))
        gather = m.library.kernel(m.context, "kv_gather", cache.params("kv_gather", buffer_row_offsets=rows.data_ptr(), out=tensor(back)))
        theirs, their_scales = torch.zeros_like(cache.blocks), torch.ones_like(cache.scales) if scales else None
        raw = theirs.view(torch.uint8) if cache_dtype.itemsize == 1 else theirs
        spot = cache.rows

        def torch_store():
            x, s = quantised(values) if scales else (values.to(cache_dtype), None)
            raw.index_copy_(0, spot, x.view(raw.dtype))
            if scales:
                their_scales.index_copy_(0, spot, s)

        def torch_gather():
            x = raw.index_select(0, spot).view(cache_dtype)
            return (x.float() * their_scales.index_select(0, spot).unsqueeze(-1)).to(dtype) if scales else x.to(dtype)

        store(), gather(), torch_store()
        assert torch.equal(cache.blocks.view(torch.uint8), theirs.view(torch.uint8)), f"store {dtype} {cache_dtype}: other bytes than PyTorch's"
        assert not scales or torch.equal(cache.scales, their_scales)
        assert torch.equal(back, torch_gather()), f"gather {cache_dtype} {dtype}: other values than PyTorch's"
        moved = values.nbytes + tokens * heads * width * cache_dtype.itemsize + (4 * tokens * heads if scales else 0)
        for name, ours, peer in (("store", store, torch_store), ("gather", gather, torch_gather)):
            times, rates = race(m, o.rounds, {"pagedkv": ours}, {"torch": peer}, ["read", "copy"])
            speed = [moved / t for t in times["pagedkv"]]
            kinds = (SHORT[dtype], SHORT[cache_dtype] + (" with scales" if scales else ""))
            out.append({"shape": f"{name}, T {tokens}, {heads} heads of {width}, {' to '.join(kinds if name == 'store' else kinds[::-1])}",
                        "ms": spread([1e3 * t for t in times["pagedkv"]]), "gb_s": spread([x / 1e9 for x in speed]), "of_read": ratios(speed, rates["read"]),
                        "of_copy": ratios(speed, rates["copy"]), "error": {"pagedkv": 0.0, "torch": 0.0}, **against(times, "pagedkv", ["torch"])})
    return out, []


def merge(m, o):
    tokens, heads, width = 4096, 16, 128
    out = []
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (randn(tokens, heads, width, seed=s, dtype=dtype) for s in (1, 2))
        la, lb = (randn(tokens, heads, seed=s) * 3 for s in (3, 4))
        y, ly = torch.zeros_like(a), torch.zeros_like(la)
        params = pkv.struct("merge_attention_params", output_a=tensor(a), lse_a=tensor(la), output_b=tensor(b), lse_b=tensor(lb), output=tensor(y), lse=tensor(ly))
        ours = m.library.kernel(m.context, "merge_attention", params)

        def lerp():
            lse = torch.logaddexp(la, lb)
            return torch.lerp(a, b, torch.sigmoid(lb - la).unsqueeze(-1).to(dtype)), lse

        def exact():
            lse = torch.logaddexp(la, lb)
            return (a * (la - lse).exp().unsqueeze(-1) + b * (lb - lse).exp().unsqueeze(-1)).to(dtype), lse

        ours()
        da, db = la.double(), lb.double()
        lse = torch.logaddexp(da, db)
        truth = a.double() * (da - lse).exp().unsqueeze(-1) + b.double() * (db - lse).exp().unsqueeze(-1)
        errors = {name: off(x, truth) for name, x in (("pagedkv", y), ("lerp", lerp()[0]), ("exact", exact()[0]))}
        assert off(ly, lse) < 1e-6 and all(e < 1e-2 for e in errors.values()) and errors["pagedkv"] < (4e-3 if dtype != torch.float32 else 1e-6), f"merge: {errors}"
        moved = 3 * a.nbytes + 3 * la.nbytes
        times, rates = race(m, o.rounds, {"pagedkv": ours}, {"lerp": lerp, "exact": exact}, ["read", "copy"])
        speed = [moved / t for t in times["pagedkv"]]
        out.append({"shape": f"merge, T {tokens}, H {heads}, D {width}, {SHORT[dtype]}", "ms": spread([1e3 * t for t in times["pagedkv"]]),
                    "gb_s": spread([x / 1e9 for x in speed]), "of_read": ratios(speed, rates["read"]), "of_copy": ratios(speed, rates["copy"]), "error": errors,
                    **against(times, "pagedkv", ["lerp", "exact"])})
    return out, []


SECTIONS = {"prefill": prefill_section, "indexer": indexer_section, "rope": rope_section, "store": store_and_gather, "merge": merge}


# Record

def shown(x, unit="", digits=2):
    return f"{x['median']:.{digits}f} ({x['low']:.{digits}f}..{x['high']:.{digits}f}){unit}" if x else ""


def table(record):
    """The record for people."""
    lines = ["FP8 MLA and cache kernels beside PyTorch: medians, quartiles in brackets. Ratio: PyTorch's time / pagedkv's. Of FMA, of read, of copy: speed / what the",
             "machine does in f32 multiply-adds, in bytes read, in bytes copied (read + written) in the same rounds.", ""]
    for name, part in record["sections"].items():
        lines += [f"{name}, {part['threads']} thread{'s' if part['threads'] != 1 else ''} ({part['machine']}; {part['build']}; PyTorch {part['torch']}; {part['date']})"]
        for row in part["results"] + part["scaling"]:
            text = f"  {row['shape']:<78} {shown(row['ms'], ' ms')}"
            for key, label in (("ratio", "ratio"), ("of_fma", "of FMA"), ("gb_s", "GB/s"), ("of_read", "of read"), ("of_copy", "of copy")):
                text += f"  {label} {shown(row[key])}" if key in row else ""
            lines += [text + (f"  [{row['peer']}]" if "peer" in row else "")]
            for phase, p in row.get("phases", {}).items():
                more = f"  ratio {shown(p['ratio'])}  of FMA {shown(p['of_fma'])}  [{p['peer']}]" if "ratio" in p else ""
                lines += [f"    {phase:<76} {shown(p['ms'], ' ms')}{more}"]
        lines += [""]
    return "\n".join(lines)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--library", required=True)
    options.add_argument("--limits", required=True)
    options.add_argument("--record")
    options.add_argument("--machine", default=platform.processor())
    options.add_argument("--only", default=",".join(SECTIONS))
    options.add_argument("--threads", default="2,1")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--no-scaling", action="store_true")
    o = options.parse_args()
    library, limits = pkv.Library(o.library), ctypes.CDLL(o.limits)
    record = json.loads(Path(o.record).read_text()) if o.record and Path(o.record).exists() else {"sections": {}}
    torch.set_grad_enabled(False)
    for threads in map(int, o.threads.split(",")):
        m = Machine(library, limits, threads)
        for name in o.only.split(","):
            torch.set_num_threads(threads)
            results, scaling = SECTIONS[name](m, o)
            part = {"threads": threads, "machine": o.machine, "cores": len(os.sched_getaffinity(0)), "build": library.build_info(), "torch": torch.__version__,
                    "python": platform.python_version(), "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"), "rounds": o.rounds,
                    "results": results, "scaling": scaling}
            record["sections"][f"{name} x{threads}"] = part
            print(table({"sections": {name: part}}).split("\n", 3)[3], flush=True)
    if o.record:
        path = Path(o.record)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        path.with_suffix(".txt").write_text(table(record))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Times what others give for the same work on this GPU, with CUDA events, and writes it as JSON.

    peers.py OUT.json

PyTorch: attention of MLA's head sizes (scaled_dot_product_attention), the up-projection in fp8 (_scaled_mm), rope's and norm's floor (a copy).
FlashInfer: ragged prefill attention of the same head sizes. What is not installed, or refuses, is named and left out.
"""

import json
import statistics
import sys


def main():
    result = {"left_out": [], "times": []}
    try:
        import torch
    except ImportError as missing:
        return finish(result, f"PyTorch: {missing}")
    if not torch.cuda.is_available():
        return finish(result, "PyTorch sees no CUDA device")
    result["torch"] = torch.__version__
    device = torch.device("cuda")

    def time(peer, shape, flops, call):
        """The median of 50 launches after warm-up; `call(i)` rotates its inputs by i."""
        try:
            for i in range(5):
                call(i)
            torch.cuda.synchronize()
            times = []
            for i in range(50):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                call(i)
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 1000)
            median = statistics.median(times)
            row = {"peer": peer, "shape": shape, "median_us": median, "tflop_per_s": flops / median / 1e6}
            result["times"].append(row)
            print(f"{peer:36} {shape:44} {median:10.1f} us {row['tflop_per_s']:8.1f} TFLOP/s")
        except Exception as refused:  # noqa: BLE001 -- a peer that cannot do it is no failure of ours
            left_out(result, f"{peer}, {shape}: {refused}")

    heads, nope_rope, value, latent = 128, 192, 128, 512
    for tokens in (512, 4096):
        q, k = ([torch.randn(1, heads, tokens, nope_rope, device=device, dtype=torch.bfloat16) for _ in range(2)] for _ in range(2))
        v = [torch.randn(1, heads, tokens, value, device=device, dtype=torch.bfloat16) for _ in range(2)]
        flops = heads * tokens * (tokens + 1) * (nope_rope + value)
        time("torch sdpa", f"T {tokens}, H {heads}, 192 / 128, causal", flops,
             lambda i: torch.nn.functional.scaled_dot_product_attention(q[i % 2], k[i % 2], v[i % 2], is_causal=True))
        a = [torch.randn(tokens, latent, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
        b = [torch.randn(heads * 256, latent, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
        one = torch.ones((), device=device)
        time("torch _scaled_mm, one scale", f"{tokens} x {heads * 256} x {latent}", 2 * tokens * heads * 256 * latent,
             lambda i: torch._scaled_mm(a[i % 2], b[i % 2].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
        try:
            import flashinfer
        except ImportError as missing:
            left_out(result, f"FlashInfer: {missing}")
            continue
        try:
            wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD")
            offsets = torch.tensor([0, tokens], dtype=torch.int32, device=device)
            wrapper.plan(offsets, offsets, heads, heads, nope_rope, head_dim_vo=value, causal=True, q_data_type=torch.bfloat16)
            ragged = [[x[0].transpose(0, 1).contiguous() for x in tensors] for tensors in (q, k, v)]
            time("flashinfer ragged prefill", f"T {tokens}, H {heads}, 192 / 128, causal", flops, lambda i: wrapper.run(ragged[0][i % 2], ragged[1][i % 2], ragged[2][i % 2]))
        except Exception as refused:  # noqa: BLE001
            left_out(result, f"flashinfer, T {tokens}: {refused}")
    return finish(result)


def left_out(result, why):
    print(f"left out: {why}")
    result["left_out"].append(str(why)[:300])


def finish(result, why=None):
    if why:
        left_out(result, why)
    with open(sys.argv[1], "w") as out:
        json.dump(result, out, indent=1)
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main())

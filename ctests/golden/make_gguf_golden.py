#!/usr/bin/env python3
"""Writes gguf.safetensors: blocks of every GGUF format the library reads and what the public `gguf` package decodes them to.

    python3 -m venv venv && venv/bin/pip install gguf==0.19.0 numpy==2.4.6
    venv/bin/python ctests/golden/make_gguf_golden.py

For a format NAME the file holds `NAME.blocks`, U8 [blocks, block bytes], and `NAME.values`, F32 [blocks, elements]. The blocks of a format are
* sane: random codes under random scales of the size real weights have;
* arbitrary: random bytes, then all 00, all ff, and every float field made NaN, inf, -inf, the largest, the smallest subnormal and -0 in turn;
* quantised: normal data with outliers, where the package can quantise to the format.
The same versions give the same bytes.
"""
import json
import pathlib
import struct
from importlib.metadata import version

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

VERSIONS = {"gguf": "0.19.0", "numpy": "2.4.6"}
# Where a block's float fields lie: (offset, type). The formats here are those of src/gguf.
FLOATS = {
    "F32": [(0, "f32")], "F16": [(0, "f16")], "BF16": [(0, "bf16")],
    "Q4_0": [(0, "f16")], "Q4_1": [(0, "f16"), (2, "f16")], "Q5_0": [(0, "f16")], "Q5_1": [(0, "f16"), (2, "f16")], "Q8_0": [(0, "f16")],
    "Q2_K": [(80, "f16"), (82, "f16")], "Q3_K": [(108, "f16")], "Q4_K": [(0, "f16"), (2, "f16")], "Q5_K": [(0, "f16"), (2, "f16")],
    "Q6_K": [(208, "f16")], "IQ4_NL": [(0, "f16")], "IQ4_XS": [(0, "f16")], "MXFP4": [(0, "e8m0")],
}
# Bit patterns that arithmetic treats specially.
SPECIAL = {
    "f32": (4, [0x7FC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00000001, 0x80000000]),
    "bf16": (2, [0x7FC0, 0x7F80, 0xFF80, 0x7F7F, 0x0001, 0x8000]),
    "f16": (2, [0x7E00, 0x7C00, 0xFC00, 0x7BFF, 0x0001, 0x8000]),
    "e8m0": (1, [255, 254, 0, 1, 2, 127]),
}


def encoded(kind, x):
    """The float `x` as bytes of a field."""
    if kind == "e8m0":
        return bytes([int(np.clip(round(np.log2(abs(x))) + 127, 0, 254))])
    if kind == "bf16":
        return np.float32(x).tobytes()[2:]
    return np.array(x, {"f16": "<f2", "f32": "<f4"}[kind]).tobytes()


def put(block, offset, data):
    block[offset:offset + len(data)] = np.frombuffer(data, np.uint8)


def blocks_of(name, rng):
    qtype = GGMLQuantizationType[name]
    elements, size = GGML_QUANT_SIZES[qtype]
    plain = elements == 1
    sane = rng.integers(0, 256, (2 if elements == 256 else 256 if plain else 12, size), dtype=np.uint8)
    for block in sane:
        for offset, kind in FLOATS[name]:
            put(block, offset, encoded(kind, rng.normal() if plain else rng.uniform(0.002, 0.02) * rng.choice([-1, 1])))
    arbitrary = rng.integers(0, 256, (2 if elements == 256 else 256 if plain else 12, size), dtype=np.uint8)
    flat = np.stack([np.full(size, 0, np.uint8), np.full(size, 255, np.uint8)])
    special = []
    for offset, kind in FLOATS[name]:
        width, patterns = SPECIAL[kind]
        # For a K-quant a block is a kilobyte of results: two special blocks a field there.
        for pattern in patterns[:2] if elements == 256 else patterns:
            block = sane[0].copy()
            put(block, offset, pattern.to_bytes(width, "little"))
            special.append(block)
    parts = [sane, arbitrary, flat, np.stack(special)]
    if elements == 256 or name == "IQ4_NL":  # the package decodes these only
        return np.concatenate(parts), qtype
    normal = rng.normal(size=(2, 256)).astype(np.float32)
    normal[1, ::29] *= 30
    normal[1, 32:64] = 0
    parts.append(np.ascontiguousarray(quantize(normal, qtype)).view(np.uint8).reshape(-1, size))
    return np.concatenate(parts), qtype


def main():
    for package, want in VERSIONS.items():
        assert version(package) == want, f"{package} {version(package)}, want {want}"
    tensors = {}
    for i, name in enumerate(FLOATS):
        blocks, qtype = blocks_of(name, np.random.default_rng([20240, i]))
        with np.errstate(all="ignore"):
            values = dequantize(blocks, qtype).reshape(len(blocks), -1)
        tensors[f"{name}.blocks"], tensors[f"{name}.values"] = blocks, values.astype("<f4", copy=False)
    header, data = {"__metadata__": {f"{k}_version": v for k, v in VERSIONS.items()}}, b""
    for key, value in sorted(tensors.items(), key=lambda item: (item[1].dtype == np.uint8, item[0])):
        raw = value.tobytes()
        header[key] = {"dtype": "U8" if value.dtype == np.uint8 else "F32", "shape": value.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = pathlib.Path(__file__).with_name("gguf.safetensors")
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    print(f"{path}: {path.stat().st_size} bytes, {len(FLOATS)} formats")


if __name__ == "__main__":
    main()

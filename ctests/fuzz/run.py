#!/usr/bin/env python3
"""Builds the fuzz targets with AddressSanitizer and coverage, and runs each for a bounded time.

    python3 ctests/fuzz/run.py SECONDS [TARGET ...]

Needs Rust (stable) and g++ only. The folder has cargo-fuzz's layout, so `cargo fuzz run TARGET` in it works as well where cargo-fuzz is installed.
The corpus grows in target/fuzz/corpus/TARGET; an input that fails is kept in target/fuzz/artifacts/TARGET, its path is printed, and the exit status is 1.
To run one input again: target/fuzz/TRIPLE/release/TARGET PATH.
"""
import concurrent.futures
import os
import pathlib
import random
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE.parent.parent / "target" / "fuzz"
# What cargo-fuzz passes; RUSTC_BOOTSTRAP lets a stable compiler take the -Z flag.
RUSTFLAGS = [
    "--cfg=fuzzing", "-Zsanitizer=address", "-Cpasses=sancov-module", "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters", "-Cllvm-args=-sanitizer-coverage-pc-table", "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
]


def targets():
    return sorted(path.stem for path in (HERE / "fuzz_targets").glob("*.rs"))


def build():
    """Builds all targets; returns the folder of the binaries. --target keeps the flags off build scripts and proc macros."""
    host = re.search(r"^host: (\S+)", subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout, re.M)[1]
    env = {**os.environ, "RUSTC_BOOTSTRAP": "1", "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(RUSTFLAGS)}
    subprocess.run(
        ["cargo", "build", "--locked", "--release", "--manifest-path", str(HERE / "Cargo.toml"), "--target", host, "--target-dir", str(OUT)],
        check=True, env=env)
    return OUT / host / "release"


def fuzz(binary, seconds):
    """Runs one target; returns whether it found nothing."""
    corpus, artifacts = OUT / "corpus" / binary.name, OUT / "artifacts" / binary.name
    for folder in (corpus, artifacts):
        folder.mkdir(parents=True, exist_ok=True)
    if not any(corpus.iterdir()):
        # Random inputs to start from: libFuzzer's own start with a few bytes, where every choice is the plain one.
        for i in range(256):
            (corpus / f"seed-{i}").write_bytes(random.Random(i).randbytes(40 * (1 + i % 12)))
    log = OUT / f"{binary.name}.log"
    with open(log, "w") as stderr:
        status = subprocess.run(
            [binary, f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=4096", "-max_len=2048", "-len_control=0", "-print_final_stats=1",
             f"-artifact_prefix={artifacts}/", corpus],
            stderr=stderr, stdout=stderr).returncode
    text = log.read_text(errors="replace")
    runs = re.findall(r"number_of_executed_units: (\d+)", text)
    coverage = re.findall(r"cov: (\d+)", text)
    print(f"{binary.name}: {'passed' if status == 0 else 'FAILED'}, {runs[-1] if runs else '?'} runs, {coverage[-1] if coverage else '?'} edges, {len(list(corpus.iterdir()))} inputs kept")
    if status != 0:
        print("\n".join(text.splitlines()[-60:]))
    return status == 0


def main():
    if len(sys.argv) < 2 or not sys.argv[1].isdecimal() or int(sys.argv[1]) == 0 or set(sys.argv[2:]) - set(targets()):
        sys.exit(f"usage: {sys.argv[0]} SECONDS [TARGET ...]    targets: {', '.join(targets())}")
    folder = build()
    with concurrent.futures.ThreadPoolExecutor() as side_by_side:
        results = list(side_by_side.map(lambda name: fuzz(folder / name, sys.argv[1]), sys.argv[2:] or targets()))
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()

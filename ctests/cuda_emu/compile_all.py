#!/usr/bin/env python3
"""Compiles every kernels/*.cu with nvcc for every architecture, no GPU needed; fails on register spills and stack frames.

    compile_all.py [--outdir target/cubin] [--arch 90a ...] [KERNEL.cu ...]

nvcc: $CUDA_HOME, else a pinned toolkit from PyPI in target/tools/cuda (installed there if missing).
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ARCHS = ["80", "89", "90a", "100a", "120a"]
TOOLKIT = "cuda-toolkit[nvcc,nvrtc,cudart,cccl,crt,nvvm]==13.0.2"
FLAGS = ["-std=c++17", "--fmad=false", "-Xptxas", "-v", "-lineinfo"]


def cuda_home():
    if os.environ.get("CUDA_HOME"):
        return pathlib.Path(os.environ["CUDA_HOME"])
    venv = ROOT / "target/tools/cuda"
    found = list(venv.glob("lib/python*/site-packages/nvidia/cu13"))
    if not found:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([venv / "bin/pip", "install", "-q", TOOLKIT], check=True)
        found = list(venv.glob("lib/python*/site-packages/nvidia/cu13"))
    return found[0]


def compile_one(home, source, arch, outdir):
    cubin = outdir / f"{source.stem}.sm_{arch}.cubin"
    command = [home / "bin/nvcc", *FLAGS, f"-I{ROOT / 'kernels'}", f"-arch=sm_{arch}", "-cubin", "-o", cubin, source]
    result = subprocess.run(command, capture_output=True, text=True)
    text = result.stdout + result.stderr
    rows, bad = [], result.returncode != 0
    for name, rest in re.findall(
        r"Compiling entry function '(\w+)' for[^\n]*\n(.*?)(?=Compiling entry|\Z)", text, re.S
    ):
        stack, store, load = map(
            int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", rest).groups()
        )
        registers = int(re.search(r"Used (\d+) registers", rest).group(1))
        shared = re.search(r"(\d+) bytes smem", rest)
        fault = stack or store or load
        bad |= bool(fault)
        rows.append(
            (
                name,
                arch,
                registers,
                int(shared.group(1)) if shared else 0,
                f"stack {stack}, spills {store}/{load}" if fault else "",
            )
        )
    if re.search(r"warning", text):
        bad = True
    return rows, text if result.returncode or "warning" in text else "", bad


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outdir", type=pathlib.Path, default=ROOT / "target/cubin")
    parser.add_argument("--arch", nargs="*", default=ARCHS)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("sources", nargs="*", type=pathlib.Path)
    args = parser.parse_args()
    home = cuda_home()
    args.outdir.mkdir(parents=True, exist_ok=True)
    sources = args.sources or sorted((ROOT / "kernels").glob("*.cu"))
    failed = False
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(compile_one, home, s, a, args.outdir) for s in sources for a in args.arch]
        for job in jobs:
            rows, text, bad = job.result()
            failed |= bad
            for name, arch, registers, shared, fault in rows:
                print(f"{name:44} sm_{arch:5} {registers:4} registers {shared:6} B static shared {fault}")
            if text:
                print(text)
    if failed:
        raise SystemExit("spills, stack frames, warnings or errors")


if __name__ == "__main__":
    main()

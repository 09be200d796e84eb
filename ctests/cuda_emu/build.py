#!/usr/bin/env python3
"""Builds the CUDA emulation with g++ alone, incrementally.

    build.py OUTDIR [--sanitize address|thread] [--check] [--gpu-tests LIBDIR] [--arch 90] [--jobs N]

OUTDIR gets
    libcuda.so.1, libnvrtc.so.13    a fake driver and a fake NVRTC that run kernels/*.cu on the CPU (see fake_cuda.cpp);
                                    found through LD_LIBRARY_PATH=OUTDIR by a process that opens them at run time
    old/libcuda.so.1                the same as an old driver: without cuLibraryLoadData
--check also builds one program for each ctests/cuda_emu/*test.cpp (direct launches, no driver), runs them in both orders,
and plants the faults that a sanitizer must see. With --sanitize it is the self-test and, for AddressSanitizer, prefill,
whose scratch is exact there: the rest of the kernels are run by --gpu-tests, which builds ctests/gpu/gpu_tests.cpp, on
the libpagedkv.so in LIBDIR. Of that program AddressSanitizer watches everything but libpagedkv.so, ThreadSanitizer
nothing but the kernels: only their threads are to be judged.
"""

import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KERNELS = ROOT / "kernels"

# fault -> (sanitizer that must see it, or None for any build)
PLANTED = {
    "nothing": (),
    "race": ("thread",),
    "bounds": ("address",),
    "shared-bounds": ("address",),
    "mixed-meetings": ("", "address", "thread"),
    "missing-lane": ("", "address", "thread"),
    "bank-conflict": ("", "address", "thread"),
    "wgmma-without-fence": ("", "address", "thread"),
    "tile-without-proxy-fence": ("", "address", "thread"),
    "warpgroup-differs": ("", "address", "thread"),
    "tile-overwritten": ("thread",),
    "ring-not-waited-for": ("thread",),
    "mbarrier-not-initialised": ("", "address", "thread"),
}


def stale(target, depfile, command):
    stamp = target.with_suffix(target.suffix + ".cmd")
    if not target.exists() or not depfile.exists() or not stamp.exists() or stamp.read_text() != command:
        return True
    deps = depfile.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    built = target.stat().st_mtime
    return any(not os.path.exists(d) or os.path.getmtime(d) > built for d in deps)


def run(command):
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode or result.stderr:
        sys.stderr.write(result.stderr)
    if result.returncode:
        raise SystemExit("failed: " + " ".join(map(str, command)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outdir", type=pathlib.Path)
    parser.add_argument("--sanitize", choices=["address", "thread"])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--gpu-tests", type=pathlib.Path, metavar="LIBDIR")
    parser.add_argument("--arch", type=int, default=90, help="compute capability that the kernels are compiled for")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    out = args.outdir.resolve()
    objects = out / "obj"
    objects.mkdir(parents=True, exist_ok=True)

    cxx = os.environ.get("CXX", "g++")
    sanitize = [f"-fsanitize={args.sanitize}"] if args.sanitize else []
    define = {"address": ["-DPKV_EMU_ASAN"], "thread": ["-DPKV_EMU_TSAN"], None: []}[args.sanitize]
    flags = [
        "-std=c++20",
        "-O2",
        "-g",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Wno-unknown-pragmas",
        "-Wno-tsan",
        "-ffp-contract=off",
        "-DPKV_EMULATE",
        f"-DPKV_EMU_ARCH={args.arch}",
        f"-I{KERNELS}",
        f"-I{HERE}",
        *define,
    ]

    def compile_one(source, own=()):
        target = objects / (source.name + ".o")
        depfile = target.with_suffix(".d")
        command = [cxx, *flags, *own, "-MMD", "-MF", str(depfile), "-x", "c++", "-c", str(source), "-o", str(target)]
        if stale(target, depfile, " ".join(command)):
            run(command)
            target.with_suffix(".o.cmd").write_text(" ".join(command))
        return target

    # emu.cpp orders its own accesses by construction and must not be judged by the race detector.
    core_sanitize = [] if args.sanitize == "thread" else sanitize
    kernels = sorted(KERNELS.glob("*.cu"))
    tests = sorted(HERE.glob("selftest.cpp" if args.sanitize == "thread" else "*test.cpp")) if args.check else []
    yardstick = ROOT / "ctests/gpu/matrix_rate.cu"
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        core = [
            pool.submit(compile_one, HERE / "emu.cpp", core_sanitize),
            pool.submit(compile_one, HERE / "async_copy.cpp", sanitize),
        ]
        kernel_objects = [pool.submit(compile_one, k, sanitize) for k in [*kernels, yardstick]]
        test_objects = {t: pool.submit(compile_one, t, sanitize) for t in tests}
        fake = (
            [pool.submit(compile_one, HERE / "fake_cuda.cpp", core_sanitize)]
            if (HERE / "fake_cuda.cpp").exists()
            else []
        )
        nvrtc = [pool.submit(compile_one, HERE / "fake_nvrtc.cpp")] if (HERE / "fake_nvrtc.cpp").exists() else []
    core, kernel_objects, fake, nvrtc = ([f.result() for f in group] for group in (core, kernel_objects, fake, nvrtc))

    def link(target, inputs, extra=()):
        if not target.exists() or any(i.stat().st_mtime > target.stat().st_mtime for i in inputs):
            partial = target.with_name(target.name + f".{os.getpid()}")
            run([cxx, *sanitize, *map(str, inputs), *extra, "-lpthread", "-o", str(partial)])
            os.replace(partial, target)
        return target

    if fake:
        link(
            out / "libcuda.so.1",
            fake + core + kernel_objects,
            ["-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic"],
        )
        # The names that are tried first, so that a real driver on the machine is not found.
        for name in (out / "libcuda.so", out / "libnvrtc.so"):
            if not name.is_symlink():
                name.symlink_to("libcuda.so.1" if name.stem == "libcuda" else "libnvrtc.so.13")
        script = objects / "old.map"
        script.write_text("{ local: cuLibraryLoadData; };\n")
        (out / "old").mkdir(exist_ok=True)
        hide = ["-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", f"-Wl,--version-script={script}"]
        link(out / "old" / "libcuda.so.1", fake + core + kernel_objects, hide)
        if not (out / "old/libcuda.so").is_symlink():
            (out / "old/libcuda.so").symlink_to("libcuda.so.1")
    if nvrtc:
        link(out / "libnvrtc.so.13", nvrtc, ["-shared", "-Wl,-soname,libnvrtc.so.13"])
    programs = [link(out / t.stem, [test_objects[t].result()] + core + kernel_objects) for t in tests]
    if args.gpu_tests:
        source, program, library = ROOT / "ctests/gpu/gpu_tests.cpp", out / "gpu_tests", args.gpu_tests.resolve()
        inputs = [source, source.with_name("gpu.hpp"), library / "libpagedkv.so"]
        if not program.exists() or any(i.stat().st_mtime > program.stat().st_mtime for i in inputs):
            linked = [f"-L{library}", "-lpagedkv", f"-Wl,-rpath,{library}", "-lpthread", "-ldl"]
            test = objects / "gpu_tests.o"
            run([cxx, "-std=c++17", "-O1", "-g", *core_sanitize, f"-I{ROOT}/include", "-c", str(source), "-o", str(test)])
            run([cxx, *sanitize, str(test), *linked, "-o", str(program)])
    if not args.check:
        return

    for program in programs:
        once = ["prefill"] if args.sanitize and program.name != "selftest" else []
        for reverse in ("0", "1")[: 1 if once else None]:
            subprocess.run([program, *once], check=True, env={**os.environ, "PKV_EMU_REVERSE": reverse})
    for fault, seen_by in PLANTED.items():
        code = subprocess.run([out / "selftest", "plant-" + fault], capture_output=True).returncode
        if (args.sanitize or "") in seen_by and code == 0:
            raise SystemExit(f"planted fault not seen: {fault}")
        if fault == "nothing" and code != 0:
            raise SystemExit("a fault was seen where there is none")
    print(f"emulation checked ({args.sanitize or 'plain'})")


if __name__ == "__main__":
    main()

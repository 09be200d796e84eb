#!/usr/bin/env python3
"""Projects that use pagedkv as their authors would: find_package (shared, static) from an install tree that has been moved and from the build tree,
FetchContent, pkg-config, and a plain compiler command line.

    check.py CMAKE BUILD_TREE SCRATCH     BUILD_TREE: a finished build of cmake/ (here: the one inside the C tests)
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CMAKE, BUILD, SCRATCH = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
COMPILER = os.environ.get("CC", "cc")


def run(*command, **options):
    command = [str(part) for part in command]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if result.returncode:
        sys.exit(f"{' '.join(command)}\n{result.stdout}")
    return result.stdout


def expect(condition, text):
    if not condition:
        sys.exit(f"failed: {text}")


def consume(name, project, *options):
    """Configures, builds and runs a consuming project; it prints the version it was linked with."""
    build = SCRATCH / name
    run(CMAKE, "-S", HERE / project, "-B", build, *options)
    run(CMAKE, "--build", build)
    expect("pagedkv 0." in run(build / "consumer"), f"{name}: the program's output")
    print(f"ok: {name}")
    return build / "consumer"


def needed(program):
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", program))


def install():
    """An install tree made in one place and used from another."""
    staged, prefix = SCRATCH / "staged", SCRATCH / "prefix with a space"
    build = SCRATCH / "pagedkv"
    run(CMAKE, "-S", ROOT / "cmake", "-B", build, f"-DPAGEDKV_CARGO_TARGET_DIR={ROOT}/target", "-DCMAKE_INSTALL_LIBDIR=lib")
    run(CMAKE, "--build", build)
    run(CMAKE, "--install", build, "--prefix", staged)
    staged.rename(prefix)
    lib = prefix / "lib"
    links = {"libpagedkv.so": "libpagedkv.so.0", "libpagedkv.so.0": next(path.name for path in lib.glob("libpagedkv.so.0.*"))}
    for link, to in links.items():
        expect(os.readlink(lib / link) == to, f"{link} -> {to}")
    for path in ("include/pagedkv.h", "lib/libpagedkv.a", "lib/cmake/pagedkv/pagedkvConfig.cmake", "lib/cmake/pagedkv/pagedkvConfigVersion.cmake", "lib/pkgconfig/pagedkv.pc"):
        expect((prefix / path).exists(), path)
    for text in (lib / "cmake").rglob("*.cmake"):
        expect(str(SCRATCH) not in text.read_text() and str(ROOT) not in text.read_text(), f"{text.name} names a build path")
    expect(str(SCRATCH) not in (lib / "pkgconfig/pagedkv.pc").read_text(), "pagedkv.pc names a build path")
    return prefix


def pkg_config_flags(prefix, static):
    """What pkg-config prints for pagedkv; where there is no pkg-config, the .pc file is read here."""
    if shutil.which("pkg-config"):
        shown = run("pkg-config", "--cflags", "--libs", *(["--static"] if static else []), "pagedkv", env={**os.environ, "PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")})
        return [re.sub(r"\\(.)", r"\1", flag) for flag in re.findall(r"(?:\\.|\S)+", shown)]
    values = {"pcfiledir": str(prefix / "lib/pkgconfig")}
    for line in (prefix / "lib/pkgconfig/pagedkv.pc").read_text().splitlines():
        if match := re.match(r"([\w.]+)\s*[=:]\s*(.*)", line):
            values[match[1]] = re.sub(r"\$\{(\w+)\}", lambda name: values[name[1]], match[2])
    return [flag for key in ("Cflags", "Libs", *(["Libs.private"] if static else [])) for flag in re.split(r" (?=-)", values[key])]


def main():
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(parents=True)
    prefix = install()

    shared = consume("find_package, shared", "find_package", f"-DCMAKE_PREFIX_PATH={prefix}", "-DLIBRARY=pagedkv::pagedkv")
    expect("libpagedkv.so.0" in needed(shared), "the program asks for libpagedkv.so.0")
    static = consume("find_package, static", "find_package", f"-DCMAKE_PREFIX_PATH={prefix}", "-DLIBRARY=pagedkv::static")
    expect(not any("pagedkv" in name for name in needed(static)), "the static program needs no libpagedkv.so")
    consume("build tree, shared", "find_package", f"-Dpagedkv_DIR={BUILD}", "-DLIBRARY=pagedkv::pagedkv")
    consume("build tree, static", "find_package", f"-Dpagedkv_DIR={BUILD}", "-DLIBRARY=pagedkv::static")
    consume("FetchContent", "fetch_content", f"-DPAGEDKV_SOURCE={ROOT}", f"-DPAGEDKV_CARGO_TARGET_DIR={ROOT}/target")

    # The C++ example is a project of its own, as an engine's author would start one.
    build = SCRATCH / "example"
    run(CMAKE, "-S", ROOT / "ctests/examples/cpp", "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}")
    run(CMAKE, "--build", build)
    run(build / "gguf_qkv", "--synthetic")
    print("ok: the C++ example against the install tree")

    refused = subprocess.run([CMAKE, "-S", HERE / "find_package", "-B", SCRATCH / "newer", f"-DCMAKE_PREFIX_PATH={prefix}", "-DWANTED=99.0", "-DLIBRARY=pagedkv::pagedkv"],
                             capture_output=True, text=True)
    expect(refused.returncode != 0 and "99.0" in refused.stderr, "a version that is not there is refused")
    print("ok: version file")

    source = HERE / "find_package/main.c"
    for name, static in (("pkg-config, shared", False), ("pkg-config, static", True)):
        program = SCRATCH / f"pc-{'static' if static else 'shared'}"
        flags = pkg_config_flags(prefix, static)
        if static:
            flags = [str(prefix / "lib/libpagedkv.a") if flag == "-lpagedkv" else flag for flag in flags]
        run(COMPILER, "-std=c99", "-o", program, source, *flags)
        expect("pagedkv 0." in run(program, env={**os.environ, "LD_LIBRARY_PATH": str(prefix / "lib")}), name)
        expect(static != ("libpagedkv.so.0" in needed(program)), f"{name}: {needed(program)}")
        print(f"ok: {name}")


main()

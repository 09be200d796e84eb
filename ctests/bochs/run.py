#!/usr/bin/env python3
"""Runs the AVX-512 kernels' test on an emulated CPU that has AVX-512 VNNI, for machines that have not.

    python3 ctests/bochs/run.py [NAME=VALUE...]   the test, with these variables in its environment

Bochs emulates an Ice Lake, which boots a Debian kernel whose /init is the Rust test, linked statically. The test compares AVX-512's results with AVX2's bit by bit on
the same CPU and fails where AVX-512 is missing. Everything comes from Debian's archive: bochs itself is installed by apt (as root) unless it is there, the kernel and the boot
loader are only unpacked into target/bochs, the kernel in the version that Debian has now (superseded ones leave the archive).
"""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = ROOT / "target/bochs"
TRIPLE = "x86_64-unknown-linux-gnu"
TEST = "avx512_has_the_bits_of_avx2"
LIMIT = 3600  # seconds, for a busy machine: two and a half minutes of CPU are usual

# Bochs 2.7 and Linux do not agree on some features: the size of XSAVES' compact format (321, 323: XSAVEC, XSAVES; 515: PKU), and fast short memory moves, which Linux
# takes to mean fast long ones (580: FSRM). What Linux would do against speculation costs emulated time.
KERNEL = "console=ttyS0,115200 loglevel=3 mitigations=off nokaslr clearcpuid=515,321,323,580 nopcid nogbpages lsm=none tsc=reliable random.trust_cpu=on panic=0"

BOCHS = """\
cpu: model=corei7_icelake_u, count=1, ips=15000000
memory: guest=1024, host=1024
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path=boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=serial.txt
display_library: term
clock: sync=none
log: bochs.log
panic: action=fatal
"""

BOOT = """\
DEFAULT test
PROMPT 0
LABEL test
 KERNEL /boot/vmlinuz
 INITRD /boot/initrd
 APPEND {} {} {}
"""


def run(*command, **more):
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}\nexit status {done.returncode}")
    return done.stdout


def debian(package):
    """A package's files, unpacked, not installed."""
    folder = WORK / "debian" / package
    if not folder.exists():
        download = WORK / "debian/download"
        shutil.rmtree(download, ignore_errors=True)
        download.mkdir(parents=True)
        run("apt-get", "-q", "download", package, cwd=download)
        unpacked = folder.with_name(package + ".unpacked")
        shutil.rmtree(unpacked, ignore_errors=True)
        run("dpkg", "-x", next(download.glob("*.deb")), unpacked)
        unpacked.rename(folder)
    return folder


def static_test():
    """The test program, without a byte of shared library, as nothing else will be on the emulated machine."""
    built = subprocess.run(["cargo", "test", "--locked", "--no-default-features", "--test", "qkv_matmul", "--no-run", "--target", TRIPLE, "--target-dir", WORK / "build",
                            "--message-format=json-render-diagnostics"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                           env={**os.environ, "RUSTFLAGS": "-Ctarget-feature=+crt-static -Cstrip=symbols"})
    if built.returncode:
        sys.exit(built.returncode)
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    return Path(next(m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == "qkv_matmul"))


def archive(files):
    """An initramfs: cpio in the "newc" format. `files`: (name, mode, bytes, device)."""
    out = b""
    for i, (name, mode, data, (major, minor)) in enumerate([*files, ("TRAILER!!!", 0, b"", (0, 0))]):
        fields = (i, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name) + 1, 0)
        for part in (b"070701" + b"".join(b"%08X" % f for f in fields) + name.encode() + b"\0", data):
            out += part + b"\0" * (-len(part) % 4)
    return out


def image(test, variables):
    """A bootable CD."""
    cd = WORK / "cd"
    shutil.rmtree(cd, ignore_errors=True)
    for folder in ("boot", "isolinux"):
        (cd / folder).mkdir(parents=True)
    kernel = re.search(r"Depends: (linux-image-\S+)", run("apt-cache", "depends", "linux-image-cloud-amd64"))[1]
    print(f"kernel: {kernel}", flush=True)
    shutil.copy(next((debian(kernel) / "boot").glob("vmlinuz-*")), cd / "boot/vmlinuz")
    (cd / "boot/initrd").write_bytes(archive([("dev", 0o40755, b"", (0, 0)), ("dev/console", 0o20600, b"", (5, 1)), ("init", 0o100755, test.read_bytes(), (0, 0))]))
    shutil.copy(debian("isolinux") / "usr/lib/ISOLINUX/isolinux.bin", cd / "isolinux")
    shutil.copy(debian("syslinux-common") / "usr/lib/syslinux/modules/bios/ldlinux.c32", cd / "isolinux")
    # What Linux does not know goes to /init: NAME=VALUE to its environment, other words to its arguments.
    environment = " ".join(["PAGEDKV_TEST_AVX512=1", "RUST_TEST_THREADS=1", "RUST_TEST_NOCAPTURE=1", *variables])
    (cd / "isolinux/isolinux.cfg").write_text(BOOT.format(KERNEL, environment, TEST))
    make = shutil.which("genisoimage") or debian("genisoimage") / "usr/bin/genisoimage"
    run(make, "-quiet", "-o", WORK / "boot.iso", "-b", "isolinux/isolinux.bin", "-c", "isolinux/boot.cat", "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table", cd)


def emulate():
    """What the emulated machine printed until /init ended, which is where Linux panics."""
    if not shutil.which("bochs-bin"):
        if os.geteuid() or not shutil.which("apt-get"):
            sys.exit("needs bochs and its text display (Debian: bochs, bochs-term, bochsbios, vgabios)")
        run("apt-get", "update", "-q")
        run("apt-get", "install", "-q", "-y", "--no-install-recommends", "bochs", "bochs-term", "bochsbios", "vgabios")
    (WORK / "bochsrc").write_text(BOCHS)
    (WORK / "commands").write_text("c\n")  # Debian's bochs starts in its debugger: continue
    serial = WORK / "serial.txt"
    serial.unlink(missing_ok=True)
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    text, shown = "", 0
    with open(WORK / "errors.txt", "w") as errors:
        bochs = subprocess.Popen(["bochs-bin", "-q", "-f", "bochsrc", "-rc", "commands"], cwd=WORK, stdin=terminal, stdout=terminal, stderr=errors, env={**os.environ, "TERM": "xterm"})
    os.close(terminal)
    try:
        end = time.monotonic() + LIMIT
        while bochs.poll() is None and time.monotonic() < end and "end Kernel panic" not in text:
            if select.select([screen], [], [], 1)[0]:
                os.read(screen, 1 << 16)
            text = serial.read_text(errors="replace") if serial.exists() else ""
            for line in text[shown:].splitlines(keepends=True):
                if line.endswith("\n"):
                    shown += len(line)
                    print("   " + line.rstrip(), flush=True) if "have the bits" in line or "panicked" in line else None
    except OSError:
        pass  # its terminal is closed: it has ended
    finally:
        bochs.kill()
        bochs.wait()
    return text


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # not without ending the emulator
    WORK.mkdir(parents=True, exist_ok=True)
    image(static_test(), sys.argv[1:])
    start = time.monotonic()
    text = emulate()
    # The test's own status, and the last encoding's line, without which no test was run; Linux's last words cut into what is printed after it.
    if "exitcode=0x00000000" not in text or not re.search(r"^MXFP4: .* have the bits", text, re.M):
        sys.exit(f"{text[-6000:]}\nthe test did not pass on the emulated CPU (see {WORK}/bochs.log)")
    print(f"AVX-512 has the bits of AVX2 on the emulated CPU ({time.monotonic() - start:.0f} s)")


main()

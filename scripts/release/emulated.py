# SPDX-License-Identifier: Apache-2.0
"""Tries the wheel for Linux on Arm without such a processor: QEMU runs Debian's Python for Arm, in user mode.

With each of three emulated processors, one for each set of kernels, it runs tests of the CPU's operators, and generates
a text, which must be the one that this machine's FlowNPU generates. A processor also runs the kernels of lesser ones:
on the best one all tests run, with every set of kernels; on the others tests of products show that no better
instructions are used. Run it by hand after `make wheels`: `python -m scripts.release.emulated`. It needs Debian 12, its
package qemu-user-static, and binfmt_misc with QEMU in it, as systemd sets it up, since programs start others. It shows
that results are right, and nothing about speed.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.debian_packages import Apt, UnavailableError
from scripts.release import aarch64, building, old_system
from scripts.release.building import ROOT
from scripts.release.zig import Zig

FOLDER = ROOT / "build" / "release" / "emulated"
WHEELS = ROOT / "build" / "release" / "wheels"
# Tests of the kernels that exist for each instruction set.
PRODUCTS = tuple(f"tests/ops/cpu/test_{stem}.py" for stem in ("q4nx_matmul", "int8_rows", "dense_matmul"))
# By the kernels' name: QEMU's processor without better instructions, Linux's names of its features for them, the tests.
PROCESSORS = {
    "i8mm": ("max", "asimddp i8mm", ("tests/ops/cpu",)),
    "dotprod": ("neoverse-n1", "asimddp", PRODUCTS),
    "generic": ("cortex-a57", "", PRODUCTS),
}
# /proc/cpuinfo of a Neoverse N1, with a place for these features.
CPUINFO = """BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop {features}
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1
"""
# Debian 12's Python.
PYTHON = "3.11"
# numpy and ONNX Runtime need the C++ run-time library.
PACKAGES = (f"python{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", "libstdc++6")
PYTEST = ("-p", "no:cacheprovider", "-p", "no:randomly", "-q")


def main() -> None:
    """Tries the wheel; the exit code is 1 if it finds a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processors", default=",".join(PROCESSORS), help="kernels to try [all]")
    arguments = parser.parse_args()
    (wheel,) = (ROOT / "dist").glob("flownpu-*-cp311-*_aarch64.whl")
    try:
        emulator = find_emulator()
        root = python()
    except UnavailableError as error:
        sys.exit(f"error: {error}")
    site = installed(wheel)
    modules = build_tests()
    fixture = ROOT / old_system.FIXTURE
    expected = old_system.generated(["flownpu"], fixture, FOLDER / "model")
    failed = False
    for kernels in arguments.processors.split(","):
        processor, features, tests = PROCESSORS[kernels]
        show(root, features)
        command = [emulator, "-cpu", processor, "-L", str(root), str(root / "usr/bin" / f"python{PYTHON}")]
        variables = (f"PYTHONPATH={site}:{ROOT}", f"FLOWNPU_TESTING_DIR={modules}", "ORT_DISABLE_TELEMETRY=1")
        wrong = faults(["env", *variables, *command], kernels, tests, expected)
        failed = failed or bool(wrong)
        sys.stdout.write(f"{kernels}, emulated: {'; '.join(wrong) or 'tests passed, the same text'}\n")
        sys.stdout.flush()
    sys.exit(failed)


def faults(python: list[str], kernels: str, tests: tuple[str, ...], expected: str) -> list[str]:
    """The faults on a processor; empty if there are none.

    Args:
        python: the command that runs Python on the emulated processor.
        kernels: the kernels that must be chosen for it.
        tests: files and folders of tests.
        expected: the text that must be generated.
    """
    ask = "from flownpu import _native; print(_native.instruction_sets()[0])"
    said = subprocess.run([*python, "-c", ask], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    found = [] if said == kernels else [f"expected the kernels {kernels}, found {said}"]
    if subprocess.run([*python, "-m", "pytest", *PYTEST, *tests], cwd=ROOT, check=False).returncode:
        found.append("tests failed")
    flownpu = [*python, "-c", "import sys; from flownpu.cli import main; sys.exit(main())"]
    text = old_system.generated(flownpu, ROOT / old_system.FIXTURE, FOLDER / f"model-{kernels}")
    return found if text == expected else [*found, f"expected the text\n{expected}\ngot\n{text}"]


def find_emulator() -> str:
    """The path of QEMU for programs of Arm.

    Raises:
        UnavailableError: there is none.
    """
    program = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if program is None:
        raise UnavailableError("there is no QEMU for Arm's programs: apt install qemu-user-static")
    return program


def python() -> Path:
    """A folder with Debian's Python for Arm, which is made if it is not there."""
    root = FOLDER / "debian" / "root"
    if not (root / "usr/bin" / f"python{PYTHON}").is_file():
        apt = Apt(FOLDER / "debian", "Python for Arm", "arm64")
        apt.run("apt-get", "update", "-q")
        apt.unpack(*apt.libraries(*PACKAGES))
        apt.finish()
    return root


def show(root: Path, features: str) -> None:
    """Shows programs a processor with these features, in /proc/cpuinfo below `root`, where QEMU (-L) looks first.

    Otherwise QEMU 7 shows them this machine's /proc/cpuinfo, and ONNX Runtime ends if that is not Arm's.
    """
    (root / "proc").mkdir(exist_ok=True)
    one = CPUINFO.format(features=features)
    (root / "proc/cpuinfo").write_text(f"processor\t: 0\n{one}\nprocessor\t: 1\n{one}\n", encoding="utf-8")


def installed(wheel: Path) -> Path:
    """A folder with the wheel, its requirements, and those of its tests."""
    site = FOLDER / "site"
    shutil.rmtree(site, ignore_errors=True)
    pinned = [name for name in building.tools("test") if name.startswith(("onnxruntime==", "onnxruntime-genai=="))]
    platforms = [f"--platform={platform}" for platform in building.glibc_platforms("aarch64")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:", "--python-version", PYTHON]
    wanted = [f"{wheel}[{old_system.EXTRAS}]", "pytest", "hypothesis", *pinned]
    subprocess.run([*pip, *platforms, "--target", str(site), *wanted], check=True)
    return site


def build_tests() -> Path:
    """Compiles the module through which tests call C++, from the same sources as the wheel.

    Returns:
        A folder with this module alone. In CMake's folder there is also flownpu._native of each Python, and tests would
        use it instead of the wheel's.
    """
    build = WHEELS / aarch64.FOLDER
    builder = building.environment(WHEELS, building.pythons()[0], "release", "zig")
    environment = os.environ | Zig.of(builder, WHEELS, aarch64.TARGET).variables()
    cmake = str(builder.with_name("cmake"))
    (source,) = (WHEELS / "source").iterdir()
    subprocess.run([cmake, "-S", source, "-B", build, "-DFLOWNPU_TESTING=ON"], env=environment, check=True)
    subprocess.run([cmake, "--build", build, "--target", "flownpu_testing"], env=environment, check=True)
    folder = FOLDER / "testing"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (module,) = build.glob("flownpu_testing*.so")
    shutil.copy(module, folder)
    return folder


if __name__ == "__main__":
    main()

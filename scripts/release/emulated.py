# SPDX-License-Identifier: Apache-2.0
"""Tries the wheel for Linux on Arm where there is no such processor: QEMU runs Debian's Python for it, in user mode.

With each of three processors, one for each set of kernels: the tests of the CPU's operators, and the text that is
generated, which must be the one that this machine's FlowNPU generates. Run it by hand after `make wheels`:
`python -m scripts.release.emulated`. It needs Debian 12 and its package qemu-user-static. It shows that all is
computed rightly, and nothing of how fast.
"""

from __future__ import annotations

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

__all__ = ["main"]

FOLDER = ROOT / "build" / "release" / "emulated"
WHEELS = ROOT / "build" / "release" / "wheels"
# Kernels, and a processor of QEMU's that has no better ones.
PROCESSORS = {"i8mm": "max", "dotprod": "neoverse-n1", "generic": "cortex-a57"}
# Debian 12's.
PYTHON = "3.11"
# numpy and ONNX Runtime ask for the C++ run time.
PACKAGES = (f"python{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", "libstdc++6")
TESTS = ("tests/ops/cpu",)
PYTEST = ("-p", "no:cacheprovider", "-p", "no:randomly", "-q")


def main() -> None:
    """Tries the wheel; the exit code is 1 if it does not do what it is to do."""
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
    build_tests()
    fixture = ROOT / old_system.FIXTURE
    expected = old_system.generated(["flownpu"], fixture, FOLDER / "model")
    failed = False
    for kernels in arguments.processors.split(","):
        processor = [*emulator, "-cpu", PROCESSORS[kernels], "-L", str(root), str(root / "usr/bin" / f"python{PYTHON}")]
        environment = os.environ | {
            "PYTHONPATH": f"{site}:{ROOT}",
            "FLOWNPU_TESTING_DIR": str(WHEELS / aarch64.FOLDER),
            "ORT_DISABLE_TELEMETRY": "1",
        }
        tests = subprocess.run([*processor, "-m", "pytest", *PYTEST, *TESTS], cwd=ROOT, env=environment, check=False)
        del environment["FLOWNPU_TESTING_DIR"]
        command = [*processor, "-c", "import sys; from flownpu.cli import main; sys.exit(main())"]
        said = subprocess.run([*command, "doctor"], env=environment, check=False, stdout=subprocess.PIPE, text=True)
        sys.stdout.write(said.stdout)
        os.environ.update(environment)
        text = old_system.generated(command, fixture, FOLDER / f"model-{kernels}")
        verdict = "the same text" if text == expected else f"OTHER TEXT: {text}"
        failed = failed or tests.returncode != 0 or text != expected or f", {kernels}," not in said.stdout
        sys.stdout.write(f"{kernels}, emulated: tests {'failed' if tests.returncode else 'passed'}, {verdict}\n")
    sys.exit(failed)


def find_emulator() -> list[str]:
    """The command that runs a program of another processor.

    Raises:
        UnavailableError: there is none.
    """
    program = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if program is None:
        raise UnavailableError("there is no QEMU for Arm's programs: apt install qemu-user-static")
    return [program]


def python() -> Path:
    """A folder with Debian's Python for Arm, which is made if it is not there."""
    root = FOLDER / "debian" / "root"
    if not (root / "usr/bin" / f"python{PYTHON}").is_file():
        apt = Apt(FOLDER / "debian", "Python for Arm", "arm64")
        apt.run("apt-get", "update", "-q")
        apt.unpack(*apt.libraries(*PACKAGES))
        apt.finish()
    return root


def installed(wheel: Path) -> Path:
    """A folder with the wheel, what it requires, and what its tests do."""
    site = FOLDER / "site"
    shutil.rmtree(site, ignore_errors=True)
    pinned = [name for name in building.tools("test") if name.startswith(("onnxruntime==", "onnxruntime-genai=="))]
    platforms = [f"--platform={platform}" for platform in building.glibc_platforms("aarch64")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:", "--python-version", PYTHON]
    wanted = [f"{wheel}[{old_system.EXTRAS}]", "pytest", "hypothesis", *pinned]
    subprocess.run([*pip, *platforms, "--target", str(site), *wanted], check=True)
    return site


def build_tests() -> None:
    """Compiles the module through which tests call C++ with what the wheel was made of."""
    build = WHEELS / aarch64.FOLDER
    builder = building.environment(WHEELS, building.pythons()[0], "release", "zig")
    environment = os.environ | Zig.of(builder, WHEELS, aarch64.TARGET).variables()
    cmake = str(builder.with_name("cmake"))
    (source,) = (WHEELS / "source").iterdir()
    subprocess.run([cmake, "-S", source, "-B", build, "-DFLOWNPU_TESTING=ON"], env=environment, check=True)
    subprocess.run([cmake, "--build", build, "--target", "flownpu_testing"], env=environment, check=True)


if __name__ == "__main__":
    main()

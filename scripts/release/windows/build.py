# SPDX-License-Identifier: Apache-2.0
"""Compiles for Windows x64, with the clang in Zig's package on PyPI."""

from pathlib import Path

from scripts.release.building import ROOT, commit, pip_wheel
from scripts.release.windows.python import Python
from scripts.release.zig import TOOLCHAIN, Zig

LIBRARIES = ("flownpu_ep.dll", "flownpu_aie_xdna.dll", "flownpu_aie_xdna2.dll")
TARGET = "x86_64-windows-gnu"
TAG = "win_amd64"


def build_wheel(environment: Path, python: Python, zig: Zig, work: Path, dist: Path) -> Path:
    """Builds the wheel of one Python, in one folder for all, so that only code that calls Python is compiled again.

    Args:
        environment: the Python that builds, with all build requirements.
        python: the Python for which the wheel is.
        zig: the compiler.
        work: `cmake` in it gets what is compiled, also the programs of tests/windows.
        dist: gets the wheel.

    Raises:
        subprocess.CalledProcessError: a step failed; it has printed why.
    """
    defines: dict[str, object] = {
        "CMAKE_TOOLCHAIN_FILE": TOOLCHAIN,
        "FLOWNPU_COMMIT": commit()[0],
        "FLOWNPU_PLATFORM": TAG,
        "FLOWNPU_TESTING": "ON",
        "FLOWNPU_WERROR": "ON",
        "Python_INCLUDE_DIR": python.headers(),
        "Python_LIBRARY": python.import_library(),
        "Python_SABI_LIBRARY": python.stable_import_library(),
    }
    return pip_wheel(environment, ROOT, work / "cmake", dist, platform=TAG, defines=defines, **zig.variables())

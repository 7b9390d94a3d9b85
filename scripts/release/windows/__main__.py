# SPDX-License-Identifier: Apache-2.0
"""Builds for Windows x64 into dist/windows/: `python -m scripts.release.windows`.

It builds a wheel for Python 3.11 and one for all later ones, as far as this machine has these Pythons; and the
libraries by themselves. If there is Wine, the files that tests/windows run are laid out in build/release/windows.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.debian_packages import UnavailableError
from scripts.release import building
from scripts.release.windows import DIST, WORK
from scripts.release.windows.wine import Wine
from scripts.release.zig import Zig

EXTRAS = ("windows", "zig")


def main() -> None:
    """Builds, and prints each file with its size and SHA-256."""
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *building.tools(*EXTRAS)], check=True)
    from scripts.release.windows import build, layout  # noqa: PLC0415 of what was installed just now
    from scripts.release.windows.python import Python  # noqa: PLC0415 likewise

    try:
        pythons = building.pythons()
    except UnavailableError as error:
        sys.stdout.write(f"only the wheel for this Python: {error}\n")
        pythons = [Path(sys.executable)]
    zig = Zig.of(Path(sys.executable), WORK, build.TARGET)
    wine = Wine.find(WORK / "prefix")
    if wine is not None:
        wine.run(Path("wineboot"))  # also makes Wine's system folder, from which a library is laid out
    for found in pythons:
        environment = building.environment(WORK, found, *EXTRAS)
        python = Python.of(environment, WORK, zig)
        wheel = build.build_wheel(environment, python, zig, WORK, DIST)
        for file in [wheel, *(Path(shutil.copy(WORK / "cmake" / name, DIST)) for name in build.LIBRARIES)]:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            sys.stdout.write(f"{digest}  {file.stat().st_size / 2**20:5.2f} MiB  {file.name}\n")
        if wine is not None:
            layout.install(python, wheel, WORK)
    if wine is not None:
        layout.lay_out_program(WORK)


if __name__ == "__main__":
    main()

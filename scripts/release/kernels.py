# SPDX-License-Identifier: Apache-2.0
"""Compares the instructions of two builds' CPU kernels, object by object.

Equal instructions take equal time, which a benchmark cannot show to a few percent on a machine that does other things,
too. `python -m scripts.release.kernels build/testing` compares that build with the wheels'.
"""

import subprocess
import sys
from pathlib import Path

WHEELS = Path("build/release/wheels/cmake")


def differing(one: Path, other: Path) -> tuple[list[str], int]:
    """The kernels' objects whose instructions differ between two CMake builds, and the number of compared instructions.

    Raises:
        RuntimeError: a build has no kernels, or other ones than the other build.
    """
    names = [
        sorted(file.relative_to(build) for file in build.glob("CMakeFiles/kernels_*.dir/**/*.o"))
        for build in (one, other)
    ]
    if not names[0] or names[0] != names[1]:
        raise RuntimeError(f"expected the same kernels in {one} and {other}, found {len(names[0])} and {len(names[1])}")
    found, count = [], 0
    for name in names[0]:
        first, second = instructions(one / name), instructions(other / name)
        count += len(first)
        if first != second:
            found.append(str(name))
    return found, count


def instructions(file: Path) -> list[str]:
    """An object's instructions, and the names of its functions, as objdump writes them."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", "--wide", str(file)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [line for line in said if not line.startswith(str(file))]


def main() -> None:
    """Compares two builds; the exit code is 1 if something differs."""
    found, count = differing(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else WHEELS)
    sys.stdout.write("".join(f"{name} differs\n" for name in found) or f"the same {count} instructions\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

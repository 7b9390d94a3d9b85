# SPDX-License-Identifier: Apache-2.0
"""The two checks of `.pre-commit-config.yaml` that need more than a command: types with mypy, and clang-tidy.

python -m scripts.lint types
python -m scripts.lint tidy FILE...
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "lint"
KERNELS = ROOT / "ops" / "cpu" / "kernels"
# A finding of clang-tidy: its line, and the notes and code below it.
FINDING = re.compile(r"^/\S+ (?:error|warning): .*\n(?:(?!/\S+ (?:error|warning): |\[\d|Error while).*\n)*", re.M)
# From this number of files on, clang-tidy reads the units of a folder as one, as the tests' build compiles them.
MANY = 60


def main() -> int:
    """Runs one check; the exit code is 1 if it finds something."""
    check, *names = sys.argv[1:]
    text = types() if check == "types" else tidy([ROOT / name for name in names])
    print(text, end="")
    return 1 if text else 0


def complaints(name: str, *arguments: str | Path, **environment: str) -> str:
    """The output of a tool of this Python's environment if it fails; "" if it succeeds."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    tool = shutil.which(name, path=path)
    if tool is None:
        return f'{name} is not installed: pip install "flownpu[dev]"\n'
    variables = os.environ | {"PATH": path} | environment
    done = subprocess.run([tool, *arguments], cwd=ROOT, check=False, capture_output=True, text=True, env=variables)
    return (done.stdout + done.stderr or f"{name} failed\n") if done.returncode else ""


def types() -> str:
    """The findings of mypy in the package and the scripts; `python/` has links to the parts that are elsewhere."""
    source = ROOT / "python"
    # The native module's types, which the build has written: `make lint` installs the package first.
    stub = Path(sysconfig.get_path("platlib")) / "flownpu" / "_native.pyi"
    if stub.exists():
        shutil.copy(stub, source / "flownpu" / "_native.pyi")
    text = complaints("mypy", "--strict", "-p", "flownpu", "-p", "scripts", MYPYPATH=str(source))
    # The files' real names, not those of links to them.
    return re.sub(r"python/flownpu/(aie|graph_rewrites|ops)/", r"\1/", text)


def tidy(files: list[Path]) -> str:
    """The findings of clang-tidy in units and headers, as many at a time as there are cores.

    Of a kernel that is compiled for several instruction sets, few files are read for the last, which has most code.
    """
    # A header of the CPU's kernels is for an instruction set: it is read with the units of the nearest folder.
    kernels = {file for file in files if file.suffix == ".h" and KERNELS in file.parents}
    units = {unit for header in kernels for unit in next(filter(None, map(_units, header.parents)))}
    files = sorted({*files} - kernels | units)
    together = len(files) >= MANY
    settings = ("-G", "Ninja", "-DFLOWNPU_TESTING=ON", f"-DFLOWNPU_QUICK={'ON' if together else 'OFF'}")
    if text := complaints("cmake", "-S", ".", "-B", BUILD, *settings, f"-DPython_EXECUTABLE={sys.executable}"):
        return text
    if together:
        entries = json.loads((BUILD / "compile_commands.json").read_text(encoding="utf-8"))
        sources = dict.fromkeys(Path(entry["file"]) for entry in entries if "nanobind" not in entry["file"])
        files = [file for file in sources if file.suffix in (".cc", ".cxx") and not file.name.startswith("cmake_pch")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outputs = list(
            pool.map(lambda file: complaints("clang-tidy", "-p", BUILD, "--quiet", *rules(file), file), files)
        )
    # A finding in a header is reported for each unit that includes it; it is printed once.
    found = dict.fromkeys(finding for output in outputs for finding in FINDING.findall(output))
    return "".join(found) or next((output for output in outputs if output), "")


def _units(folder: Path) -> list[Path]:
    return list(folder.glob("*.cc"))


def rules(file: Path) -> list[str]:
    """The options by which clang-tidy reads a unity file of CMake with the rules of its files' folder."""
    if file.suffix != ".cxx":
        return []
    # A unity file includes units, which count as headers there.
    checks = "-bugprone-suspicious-include,-google-global-names-in-headers"
    unit = Path(re.findall(r'#include "(.+)"', file.read_text(encoding="utf-8"))[0])
    nearest = next(folder for folder in unit.parents if (folder / ".clang-tidy").is_file())
    if nearest != ROOT:
        checks += "," + re.findall(r'^Checks: "(.+)"', (nearest / ".clang-tidy").read_text(encoding="utf-8"), re.M)[0]
    return [f"--checks={checks}"]


if __name__ == "__main__":
    sys.exit(main())

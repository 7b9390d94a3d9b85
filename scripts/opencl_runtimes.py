# SPDX-License-Identifier: Apache-2.0
"""Tries the GPU's kernels on other implementations of OpenCL that compute on the CPU, and prints a table.

    python -m scripts.opencl_runtimes pocl rusticl intel

`pocl` is that of this Python's environment; `rusticl` is Mesa's, from Debian's packages (some 150 MB, unpacked into
build/opencl/rusticl/, except libclc, which must be installed); `intel` comes by pip (some 270 MB, unpacked into
build/opencl/intel/). With each, `flownpu selftest --device gpu` is run; its report is
build/opencl/NAME/selftest/gpu/report.json. Runs on a CPU say nothing about a GPU's speed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

from flownpu.ops.opencl_loader import installed_packages
from scripts.debian_packages import Apt, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).resolve().parent.parent / "build" / "opencl"
# Mesa looks for libclc in this folder only, so it cannot be unpacked elsewhere.
LIBCLC = Path("/usr/lib/clc")
# The first package depends on the second, though its metadata does not say so; pip finds the other dependencies.
INTEL = ("intel-opencl-rt", "intel-cmplr-lib-rt")


def _first(folder: Path, pattern: str) -> Path:
    """The first file below a folder that matches a pattern; raises UnavailableError if there is none."""
    found = sorted(folder.rglob(pattern))
    if not found:
        raise UnavailableError(f"{folder}: expected {pattern}, found none")
    return found[0]


def _pocl() -> dict[str, str]:
    if "OCL_ICD_VENDORS" not in installed_packages():
        raise UnavailableError("PoCL is not installed: pip install pocl-binary-distribution")
    return {}


def _rusticl() -> dict[str, str]:
    folder = FOLDER / "rusticl"
    if not (folder / "root").is_dir():
        apt = Apt(folder, "mesa-opencl-icd")
        apt.run("apt-get", "update", "-q")
        apt.unpack(*apt.missing("mesa-opencl-icd"))
        apt.finish()
    if not any(LIBCLC.glob("*.spv")):
        raise UnavailableError(f"rusticl reads its library of functions in {LIBCLC}: sudo apt install libclc-15")
    library = _first(folder / "root", "libRusticlOpenCL.so.1")
    folders = {file.parent for file in (folder / "root").rglob("*.so*")}
    return {
        "OCL_ICD_VENDORS": str(library),
        "LD_LIBRARY_PATH": ":".join(sorted(map(str, folders))),
        "RUSTICL_ENABLE": "llvmpipe,swrast",
    }


def _intel() -> dict[str, str]:
    folder = FOLDER / "intel"
    if not (folder / "root").is_dir():
        # `pip install --target` leaves out files that go into an environment's lib/, and these wheels have only such.
        wheels = folder / "wheels"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", str(wheels)]
        if subprocess.run([*pip, *INTEL], check=False).returncode:
            raise UnavailableError(f"pip download {' '.join(INTEL)} failed")
        for wheel in sorted(wheels.glob("*.whl")):
            with ZipFile(wheel) as archive:
                archive.extractall(folder / "root")
        shutil.rmtree(wheels)
    library = _first(folder / "root", "libintelocl.so")
    folders = {file.parent for file in (folder / "root").rglob("*.so*")}
    return {"OCL_ICD_VENDORS": str(library), "LD_LIBRARY_PATH": ":".join(sorted(map(str, folders)))}


RUNTIMES: dict[str, Callable[[], dict[str, str]]] = {"pocl": _pocl, "rusticl": _rusticl, "intel": _intel}


def try_one(name: str) -> dict[str, Any]:
    """Runs the self-test with an implementation; returns its report.

    Raises:
        UnavailableError: the implementation cannot be had, or the self-test wrote no report.
    """
    folder = FOLDER / name
    variables = installed_packages() | RUNTIMES[name]() | {"FLOWNPU_GPU_CACHE": ""}
    report = folder / "selftest" / "gpu" / "report.json"
    report.unlink(missing_ok=True)
    command = [
        str(Path(sys.executable).with_name("flownpu")),
        "selftest",
        "--device",
        "gpu",
        "-o",
        str(folder / "selftest"),
    ]
    done = subprocess.run(command, env=os.environ | variables, check=False, stdout=subprocess.DEVNULL)
    if not report.is_file():
        raise UnavailableError(f"{name}: the self-test ended with {done.returncode} and wrote no report")
    return json.loads(report.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def row(name: str, report: dict[str, Any]) -> str:
    """A line of the table: the implementation, its features, and how many variants are right."""
    facts, variants = report["opencl"], report["variants"]
    passed = [variant for variant in variants if variant["outcome"] == "passed"]
    largest = max((variant["share"] or 0 for variant in passed), default=0)
    has = [
        word
        for word, key in (("fp16", "half"), ("dots", "integer_dot"), ("subgroups", "subgroups"))
        if facts[f"has_{key}"]
    ]
    wrong = ", ".join(variant["variant"] for variant in variants if variant["outcome"] != "passed") or "–"
    cells = [
        name,
        f"{facts['version']}, driver {facts['driver']}",
        ", ".join(has) or "–",
        f"{len(passed)} of {len(variants)}",
        f"{largest:.0%}",
        wrong,
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Prints the table; the exit code is 0 if all variants were right on all implementations."""
    names = sys.argv[1:] or list(RUNTIMES)
    print("| implementation | version | has | variants right | largest error, of its bound | wrong |")
    print("|---|---|---|---|---|---|")
    failed = False
    for name in names:
        if name not in RUNTIMES:
            print(f"expected some of {', '.join(RUNTIMES)}, got {name}", file=sys.stderr)
            return 2
        try:
            report = try_one(name)
        except UnavailableError as error:
            print(f"| {name} | {error} | | | | |")
            failed = True
            continue
        print(row(name, report))
        failed = failed or not report["passed"]
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Runs the steps of a release; goes on after a step that failed, and says at the end which ones did.

Run it by hand on an idle machine: `python -m scripts.release.checklist --model MODEL`, or only some steps:
`--only changelog,wheels`. It publishes nothing.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.release import building, kernels

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["changelog", "main", "version"]

ROOT = building.ROOT
DIST = ROOT / "dist"
WORK = ROOT / "build" / "release"
# Tests that are run with a wheel: those of the commands, and of the provider in ONNX Runtime.
TESTS = ("tests/cli", "tests/convert", "tests/end_to_end", "tests/ep", "tests/serve")
BENCHMARK = ("--prompt", "1024", "--generate", "64", "--repeats", "5")


class FailedError(RuntimeError):
    """A step failed; the message says why, and what to do."""


def version(project: str) -> str:
    """The version in the text of a pyproject.toml."""
    return str(tomllib.loads(project)["project"]["version"])


def changelog(text: str, released: str) -> None:
    """Checks that the first heading of the changelog is this version's, with its date: `## 0.2.0 (2026-12-01)`.

    Raises:
        FailedError: it is not.
    """
    heading = next(iter(re.findall(r"^## (.*)$", text, re.MULTILINE)), "none")
    if not re.fullmatch(rf"{re.escape(released)} \(\d{{4}}-\d\d-\d\d\)", heading):
        raise FailedError(
            f"expected the first heading of CHANGELOG.md to be `{released} (YEAR-MONTH-DAY)`, found `{heading}`"
        )


def _check_tree() -> None:
    said = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    if said:
        raise FailedError(f"expected a tree in which all is committed, found\n{said}")


def _check_changelog() -> None:
    project, changes = ((ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CHANGELOG.md"))
    changelog(changes, version(project))


def _build() -> None:
    _run(sys.executable, "-m", "scripts.release.wheels")


def _build_again() -> None:
    """Clones the commit into another folder, builds it there, and compares all bytes."""
    clone = WORK / "again" / "elsewhere"
    shutil.rmtree(clone, ignore_errors=True)
    _run("git", "clone", "--quiet", ROOT, clone)
    _run(sys.executable, "-m", "scripts.release.wheels", folder=clone)
    names = sorted(file.name for file in DIST.glob("flownpu-*"))
    same, mismatched, missing = filecmp.cmpfiles(DIST, clone / "dist", names, shallow=False)
    if sorted(same) != names:
        raise FailedError(f"expected the same bytes of two builds, found others in {', '.join(mismatched + missing)}")


def _compare_kernels() -> None:
    found, _ = kernels.differing(ROOT / "build" / "testing", ROOT / kernels.WHEELS)
    if found:
        raise FailedError(f"expected the instructions that the tests ran with, found others in {', '.join(found)}")


def _test() -> None:
    """Runs tests on each wheel, in an environment of its own."""
    for python in building.pythons():
        own = python.resolve().name.endswith(building.OWN_ABI)
        (wheel,) = DIST.glob(f"flownpu-*-{'cp311' if own else 'abi3'}-*_x86_64.whl")
        folder = WORK / f"tests-{python.name}"
        _run(python, "-m", "venv", "--clear", folder)
        _run(folder / "bin" / "pip", "install", "--quiet", f"{wheel}[test]")
        parallel = ("--numprocesses", "auto", "--dist", "loadfile", "--max-worker-restart", "0")
        _run(folder / "bin" / "python", "-m", "pytest", "-q", *parallel, *TESTS)


def _try_old_system() -> None:
    _run(sys.executable, "-m", "scripts.release.old_system", *sorted(DIST.glob("*_x86_64.whl")))


def _measure(model: Path | None) -> None:
    """Writes the benchmark table of the release, measured with the wheel."""
    if model is None:
        raise FailedError("expected a converted model to measure with, found none: --model FOLDER")
    flownpu = next(iter(sorted(WORK.glob("tests-*/bin/flownpu"))), None)
    if flownpu is None:
        raise FailedError("expected an environment with the wheel, found none: the step `tests` makes it")
    _run(flownpu, "bench", model, *BENCHMARK, "--markdown", DIST / "benchmark.md")


def _run(*command: str | Path, folder: Path = ROOT) -> None:
    subprocess.run(command, cwd=folder, check=True)


def main() -> None:
    """Runs the steps; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of the model of the benchmark table")
    parser.add_argument("--only", help="steps to take, with commas between them [all]")
    arguments = parser.parse_args()
    steps: dict[str, Callable[[], None]] = {
        "tree": _check_tree,
        "changelog": _check_changelog,
        "wheels": _build,
        "again": _build_again,
        "kernels": _compare_kernels,
        "tests": _test,
        "old-system": _try_old_system,
        "emulated": lambda: _run(sys.executable, "-m", "scripts.release.emulated"),
        "benchmark": lambda: _measure(arguments.model),
    }
    chosen = arguments.only.split(",") if arguments.only else list(steps)
    if unknown := set(chosen) - set(steps):
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(steps)}")
    failed = []
    for name in chosen:
        began = time.monotonic()
        try:
            steps[name]()
            verdict = "ok"
        except (FailedError, RuntimeError, subprocess.CalledProcessError) as error:
            failed.append(name)
            verdict = f"FAILED: {error}"
        sys.stdout.write(f"{name}, {time.monotonic() - began:.0f} s: {verdict}\n")
    sys.stdout.write(f"failed: {', '.join(failed)}\n" if failed else "all is well\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

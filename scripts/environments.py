# SPDX-License-Identifier: Apache-2.0
"""Installs other projects' packages for tests and benchmarks, each set into a separate environment.

    python -m scripts.environments [compatcanary] [clients] [npm-clients] [lm-eval] [ray]

Without names it installs compatcanary, which is small enough for every run of the tests. lm-eval and Ray take some
770 MB each. The environments are kept in the cache folder ($XDG_CACHE_HOME/flownpu/environments).
"""

import fcntl
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flownpu.errors import FlowNPUError
from flownpu.hub import store

# This file is written last, so it marks a complete folder. It contains the folder's ingredients.
MARKER = "complete.json"


ENVIRONMENTS = {
    "clients": (
        "langchain-openai==1.7.4",
        "litellm==1.110.2",
        "ollama==0.6.3",
        "openai==3.57.0",
    ),
    "lm-eval": ("lm-eval[api]==0.4.13",),
    "ray": ("ray[data,serve]==2.60.0", "openai==3.57.0"),
}
PACKAGES = {
    "compatcanary": ("compatcanary@0.2.2",),
    "npm-clients": (
        "@ai-sdk/openai-compatible@3.0.92",
        "@anthropic-ai/sdk@1.10.0",
        "ai@7.0.173",
        "ollama@0.6.4",
        "openai@7.59.0",
        "zod@4.6.7",
    ),
}


def cache_folder() -> Path:
    """`flownpu/environments` in $XDG_CACHE_HOME, or in ~/.cache."""
    return store.cache_folder() / "environments"


@contextmanager
def finished_folder(folder: Path, contents: object) -> Iterator[Path | None]:
    """Yields an empty folder to be filled, or None if a complete one with the same `contents` is there.

    Other processes that want the folder wait until it is filled.

    Args:
        folder: its path; what an incomplete or outdated one holds is removed.
        contents: what the folder is made of, serialisable as JSON; if it differs from before, the folder is made anew.
    """
    marker = folder / MARKER
    wanted = json.dumps(contents, sort_keys=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
            yield None
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
        marker.write_text(wanted, encoding="utf-8")


def make_environment(name: str, requirements: tuple[str, ...], *, say: Callable[[str], None] = lambda _: None) -> Path:
    """The Python interpreter of an environment with these packages, which is made if there is none.

    Args:
        name: name of the environment.
        requirements: the packages for pip.
        say: called with a line about the packages before they are installed.

    Raises:
        FlowNPUError: pip failed; the message has its error lines and the path of its whole output.
    """
    root = cache_folder() / name
    base = str(root / "environment")
    python = Path(sysconfig.get_path("scripts", "venv", {"base": base, "platbase": base}), "python")
    with finished_folder(root / "environment", [sys.version, *requirements]) as folder:
        if folder is not None:
            say(f"installing {', '.join(requirements)}")
            run([sys.executable, "-m", "venv", folder], root / "pip.log")
            run([python, "-m", "pip", "install", "--disable-pip-version-check", *requirements], root / "pip.log")
    return python


def run(command: Sequence[str | Path], log: Path) -> None:
    """Runs a command, whose output goes to the file `log`.

    Raises:
        FlowNPUError: it failed; the message has its error lines or its last line, and the path of `log`.
    """
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, stdout=output, stderr=output, check=False)
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise FlowNPUError(f"{' '.join(map(str, command))} failed: {' '.join(errors)} (all it said is in {log})")


def modules_of(name: str) -> Path | None:
    """The folder node_modules of one of PACKAGES; None: it or node is not installed."""
    folder = cache_folder() / name
    if not (folder / MARKER).is_file() or shutil.which("node") is None:
        return None
    return folder / "node_modules"


def python_of(name: str) -> Path | None:
    """The Python interpreter of one of ENVIRONMENTS; None: it is not installed."""
    folder = cache_folder() / name / "environment"
    return folder / "bin" / "python" if (folder / MARKER).is_file() else None


def reason(name: str) -> str:
    """The message that a suite is not installed, and how to install it."""
    return f"{name} is not installed: python -m scripts.environments {name} does it"


def install(name: str) -> None:
    """Installs a suite, unless it is there.

    Raises:
        FlowNPUError: that cannot be done here; the message says why.
    """
    if name in ENVIRONMENTS:
        make_environment(name, ENVIRONMENTS[name], say=print)
        return
    if name not in PACKAGES:
        raise FlowNPUError(f"expected some of {', '.join([*PACKAGES, *ENVIRONMENTS])}, got {name!r}")
    npm = shutil.which("npm")
    if npm is None:
        raise FlowNPUError(f"{name} needs Node.js and npm (Debian: apt install npm)")
    with finished_folder(cache_folder() / name, PACKAGES[name]) as folder:
        if folder is not None:
            quiet = ["--no-audit", "--no-fund", "--no-update-notifier", "--no-package-lock", "--ignore-scripts"]
            run([npm, "install", "--prefix", folder, *quiet, *PACKAGES[name]], folder.with_suffix(".log"))


def main() -> int:
    """Installs the named suites; prints those that are not available, whose tests will be skipped."""
    for name in sys.argv[1:] or ["compatcanary"]:
        try:
            install(name)
        except FlowNPUError as error:
            print(f"{name}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

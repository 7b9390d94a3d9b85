# SPDX-License-Identifier: Apache-2.0
"""Installs third-party clients and suites that test servers, and Ray, for the tests; each into a folder of its own.

    python -m scripts.client_suites [compatcanary] [clients] [instructor] [npm-clients] [lm-eval] [ray]

Without names it installs compatcanary, which is small enough for every run of the tests. lm-eval and Ray take some
770 MB each. They are put into the cache folder of `flownpu bench --against` ($XDG_CACHE_HOME/flownpu/peers).
"""

import shutil
import sys
from pathlib import Path

from flownpu.errors import FlowNPUError
from flownpu.peers.environment import MARKER, cache_folder, finished_folder, make_environment, run

ENVIRONMENTS = {
    "clients": (
        "langchain-openai==1.7.4",
        "litellm==1.110.2",
        "llm==0.36",
        "ollama==0.6.3",
        "openai==3.57.0",
        "pydantic-ai-slim[openai]==2.38.0",
    ),
    # It wants an openai below 3.4.
    "instructor": ("instructor==1.17.0", "openai==3.3.0"),
    "lm-eval": ("lm-eval[api]==0.4.13",),
    "ray": ("ray[data,serve]==2.60.0", "openai==3.57.0"),
}
PACKAGES = {
    "compatcanary": ("compatcanary@0.2.2",),
    "npm-clients": (
        "@ai-sdk/openai-compatible@3.0.92",
        "ai@7.0.173",
        "ollama@0.6.4",
        "openai@7.59.0",
        "zod@4.6.7",
    ),
}


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
    return f"{name} is not installed: python -m scripts.client_suites {name} does it"


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
    """Installs the suites that are named; prints which cannot be had, and their tests will be skipped."""
    for name in sys.argv[1:] or ["compatcanary"]:
        try:
            install(name)
        except FlowNPUError as error:
            print(f"{name}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Installs third-party suites that test servers, and Ray, for the tests; each into an environment of its own.

    python -m scripts.client_suites [compatcanary] [lm-eval] [ray]

Without names it installs compatcanary, which is small enough for every run of the tests. lm-eval and Ray take some
770 MB each. They are put into the cache folder of `flownpu bench --against` ($XDG_CACHE_HOME/flownpu/peers).
"""

import shutil
import sys
from pathlib import Path

from flownpu.errors import FlowNPUError
from flownpu.peers.environment import MARKER, cache_folder, finished_folder, make_environment, run

ENVIRONMENTS = {
    "lm-eval": ("lm-eval[api]==0.4.13",),
    "ray": ("ray[data,serve]==2.60.0", "openai==3.57.0"),
}
COMPATCANARY = "compatcanary@0.2.2"


def compatcanary() -> Path | None:
    """The script of compatcanary's command line, for node; None: it or node is not installed."""
    folder = cache_folder() / "compatcanary"
    if not (folder / MARKER).is_file() or shutil.which("node") is None:
        return None
    return folder / "node_modules" / "compatcanary" / "src" / "cli.js"


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
    if name != "compatcanary":
        raise FlowNPUError(f"expected some of compatcanary, {', '.join(ENVIRONMENTS)}, got {name!r}")
    npm = shutil.which("npm")
    if npm is None:
        raise FlowNPUError("compatcanary needs Node.js and npm (Debian: apt install npm)")
    with finished_folder(cache_folder() / "compatcanary", COMPATCANARY) as folder:
        if folder is not None:
            quiet = ["--no-audit", "--no-fund", "--no-update-notifier", "--no-package-lock", "--ignore-scripts"]
            run([npm, "install", "--prefix", folder, *quiet, COMPATCANARY], folder.with_suffix(".log"))


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

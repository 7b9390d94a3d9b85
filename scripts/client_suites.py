# SPDX-License-Identifier: Apache-2.0
"""Installs what others have written to try servers and to spread work, in environments of their own, for the tests.

    python -m scripts.client_suites [compatcanary] [lm-eval] [ray]

Without names, what is small enough for every run of the tests: compatcanary. lm-eval and Ray are of some 770 MB each.
They lie in the cache folder of `flownpu bench --against` ($XDG_CACHE_HOME/flownpu/peers).
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
    """The command line of compatcanary, for node; None: it is not installed, or node is not."""
    folder = cache_folder() / "compatcanary"
    if not (folder / MARKER).is_file() or shutil.which("node") is None:
        return None
    return folder / "node_modules" / "compatcanary" / "src" / "cli.js"


def python_of(name: str) -> Path | None:
    """The interpreter of one of ENVIRONMENTS; None: it is not installed."""
    folder = cache_folder() / name / "environment"
    return folder / "bin" / "python" if (folder / MARKER).is_file() else None


def reason(name: str) -> str:
    """What to say where one is not installed."""
    return f"{name} is not installed: python -m scripts.client_suites {name} does it"


def install(name: str) -> None:
    """Installs one, unless it is there.

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
    """Installs those that are named; what cannot be had is told, and its tests are skipped with a reason."""
    for name in sys.argv[1:] or ["compatcanary"]:
        try:
            install(name)
        except FlowNPUError as error:
            print(f"{name}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

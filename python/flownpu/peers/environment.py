# SPDX-License-Identifier: Apache-2.0
"""The peers' environments and models, kept in the user's cache folder."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from flownpu.errors import FlowNPUError

__all__ = ["MARKER", "cache_folder", "finished_folder", "make_environment", "model_key", "run"]

# This file is written last, so it marks a complete folder; it says what the folder was made of.
MARKER = "complete.json"


def cache_folder() -> Path:
    """`flownpu/peers` in $XDG_CACHE_HOME, or in ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    base = Path(given) if given and Path(given).is_absolute() else Path.home() / ".cache"
    return base / "flownpu" / "peers"


@contextmanager
def finished_folder(folder: Path, contents: object) -> Iterator[Path | None]:
    """Yields an empty folder to be filled, or None if a complete one with the same `contents` is there.

    Args:
        folder: its path; what an incomplete or outdated one holds is removed.
        contents: what the folder is made of, serialisable as JSON; if it differs from before, the folder is made anew.
    """
    marker = folder / MARKER
    wanted = json.dumps(contents, sort_keys=True)
    if marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
        yield None
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    marker.write_text(wanted, encoding="utf-8")


def make_environment(
    name: str,
    requirements: tuple[str, ...],
    *,
    from_source: tuple[str, ...] = (),
    build_environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """The Python interpreter of an environment with these packages, which is made if there is none.

    Args:
        name: name of the environment.
        requirements: what pip installs.
        from_source: packages that are built here, for this processor, rather than installed ready-made.
        build_environment: environment variables of the build.
        say: called with a line about what is being done.

    Raises:
        FlowNPUError: pip failed; the message has its error lines and the path of its whole output.
    """
    root = cache_folder() / name
    base = str(root / "environment")
    python = Path(sysconfig.get_path("scripts", "venv", {"base": base, "platbase": base}), "python")
    contents = [sys.version, list(requirements), list(from_source), dict(build_environment or {})]
    with finished_folder(root / "environment", contents) as folder:
        if folder is not None:
            say(f"installing {', '.join(requirements)}" + (" (builds from source, minutes)" if from_source else ""))
            log = root / "pip.log"
            install: list[str | Path] = [python, "-m", "pip", "install", "--disable-pip-version-check"]
            if from_source:
                # Without --no-cache-dir pip might take a wheel that was built with other flags.
                install += ["--no-cache-dir", *(f"--no-binary={package}" for package in from_source)]
            run([sys.executable, "-m", "venv", folder], log)
            run([*install, *requirements], log, build_environment or {})
    return python


def model_key(model: Path) -> str:
    """A key that tells models apart: a hash of genai_config.json and of the ONNX files' names, sizes and times."""
    digest = hashlib.sha256((model / "genai_config.json").read_bytes())
    for path in sorted(model.glob("*.onnx*")):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def run(command: Sequence[str | Path], log: Path, variables: Mapping[str, str] | None = None) -> None:
    """Runs a command, whose output goes to the file `log`; `variables` are added to its environment.

    Raises:
        FlowNPUError: it failed; the message has its error lines or its last line, and the path of `log`.
    """
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command, stdout=output, stderr=output, env={**os.environ, **(variables or {})}, check=False
        )
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise FlowNPUError(f"{' '.join(map(str, command))} failed: {' '.join(errors)} (all it said is in {log})")

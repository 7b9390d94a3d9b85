# SPDX-License-Identifier: Apache-2.0
"""Runs programs for Windows under Wine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

# Microsoft's C++ run-time library. Newer libraries expect another layout of std::mutex than Wine 8's own, with which
# they wait forever.
RUN_TIME = ("msvcp140", "msvcp140_1", "msvcp140_atomic_wait", "vcruntime140", "vcruntime140_1")
# Debian's folder of wine64; the `wine` on its path needs 32-bit programs.
DEBIAN = "/usr/lib/wine"
SECONDS = 600  # at most, for one run


class Wine:
    """Wine with a separate prefix (its Windows drive and settings).

    Args:
        program: wine64 or wine.
        prefix: folder of the prefix.
    """

    def __init__(self, program: str, prefix: Path) -> None:
        self._program = program
        self._own = {
            "WINEPREFIX": str(prefix),
            "WINEDEBUG": "-all",
            # The last two suppress questions about .NET and a browser.
            "WINEDLLOVERRIDES": f"{','.join(RUN_TIME)}=n;ucrtbase=n,b;mscoree,mshtml=",
            "ORT_DISABLE_TELEMETRY": "1",
        }
        self._variables = os.environ | self._own
        for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONIOENCODING", "PYTHONUTF8", "VIRTUAL_ENV"):
            self._variables.pop(name, None)

    @classmethod
    def find(cls, prefix: Path) -> Wine | None:
        """This machine's Wine; None if it has none."""
        program = shutil.which("wine64") or shutil.which("wine64", path=DEBIAN) or shutil.which("wine")
        return None if program is None else cls(program, prefix)

    def script(self, program: Path, script: Path) -> Path:
        """Writes a script that runs a program, for callers that start programs by a path alone.

        stderr goes through a pipe, because under Wine 8 Python ends if stderr is a file.
        """
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self._own.items())
        command = f"exec env {variables} {self._program} {shlex.quote(str(program))}"
        script.write_text(f'#!/bin/bash\n{command} "$@" 2> >(exec cat >&2)\n', encoding="utf-8")
        script.chmod(0o755)
        return script

    def start(self, program: Path, *arguments: str | Path) -> subprocess.Popen[str]:
        """Starts a program."""
        return subprocess.Popen(
            [self._program, program, *arguments],
            env=self._variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )

    def run(self, program: Path, *arguments: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
        """Runs a program to its end; `given` is its stdin, stdout and stderr are in the result.

        Raises:
            subprocess.TimeoutExpired: it did not end within SECONDS, and was killed.
        """
        with self.start(program, *arguments) as process:
            try:
                said, complained = process.communicate(given, SECONDS)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, said, complained)

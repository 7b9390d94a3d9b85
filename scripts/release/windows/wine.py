# SPDX-License-Identifier: Apache-2.0
"""Runs programs for Windows where there is none."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RUN_TIME", "Wine"]

# Microsoft's C++ run time. Wine 8's own knows a std::mutex of another form than what newer libraries are made for, and
# waits for ever.
RUN_TIME = ("msvcp140", "msvcp140_1", "msvcp140_atomic_wait", "vcruntime140", "vcruntime140_1")
# Where Debian has it, beside a `wine` that asks for programs of 32 bits.
DEBIAN = "/usr/lib/wine"
SECONDS = 600  # at most, for one run


class Wine:
    """Wine with a Windows of its own.

    Args:
        program: wine64 or wine.
        prefix: gets that Windows.
    """

    def __init__(self, program: str, prefix: Path) -> None:
        self._program = program
        self._own = {
            "WINEPREFIX": str(prefix),
            "WINEDEBUG": "-all",
            # No questions about .NET and a browser.
            "WINEDLLOVERRIDES": f"{','.join(RUN_TIME)}=n;ucrtbase=n,b;mscoree,mshtml=",
            "ORT_DISABLE_TELEMETRY": "1",
        }
        self._variables = os.environ | self._own
        for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONIOENCODING", "PYTHONUTF8", "VIRTUAL_ENV"):
            self._variables.pop(name, None)

    @classmethod
    def find(cls, prefix: Path) -> Wine | None:
        """The one of this machine; None if it has none."""
        program = shutil.which("wine64") or shutil.which("wine64", path=DEBIAN) or shutil.which("wine")
        return None if program is None else cls(program, prefix)

    def script(self, program: Path, script: Path) -> Path:
        """Writes a script that runs a program, for what starts it by one path.

        What goes to stderr passes through a pipe: Python, under Wine 8, ends where that is a file.
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
        """Runs a program to its end; `given` is its stdin, its stdout and stderr are kept.

        Raises:
            subprocess.TimeoutExpired: it did not end; it is killed.
        """
        with self.start(program, *arguments) as process:
            try:
                said, complained = process.communicate(given, SECONDS)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, said, complained)

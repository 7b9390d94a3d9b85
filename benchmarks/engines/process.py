# SPDX-License-Identifier: Apache-2.0
"""An engine in a separate process, which answers each line on its stdin with one JSON object."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class EngineProcess:
    """A running worker: its stdin and stdout have one JSON object per line."""

    def __init__(self, name: str, command: Sequence[str | Path]) -> None:
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> dict[str, Any]:
        """The next object that the engine writes.

        Raises:
            RuntimeError: the engine ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self.name} ended without an answer (exit code {self._process.wait()}): see what it said above"
            )
        return dict(json.loads(line))

    def ask(self, **request: Any) -> dict[str, Any]:
        """Asks for one measurement and waits for its result.

        Raises:
            RuntimeError: the engine ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def finish(self) -> dict[str, Any]:
        """Ends the engine; returns the last object that it writes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        last = self.answer()
        self._process.wait()
        return last

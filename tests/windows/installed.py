# SPDX-License-Identifier: Apache-2.0
"""A Python for Windows with FlowNPU's wheel in it, which `make windows` has laid out."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.release.windows.wine import Wine

FIXTURE = Path(__file__).parents[1] / "fixtures" / "gemma3-topics"
# The code of flownpu.exe, which pip writes on Windows.
COMMAND = "import sys; from flownpu.cli import main; sys.exit(main())"


@dataclass(frozen=True)
class Installed:
    """Runs that Python under Wine."""

    wine: Wine
    folder: Path

    def python(self, *arguments: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
        return self.wine.run(self.folder / "python.exe", *arguments, given=given)

    def flownpu(self, *arguments: str | Path, given: str = "") -> str:
        """The output of a command, which must succeed."""
        done = self.python("-c", COMMAND, *arguments, given=given)
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        return done.stdout.replace("\r\n", "\n")


def here(*arguments: str | Path) -> str:
    """The output of a command of `flownpu` on this system; it must succeed."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout

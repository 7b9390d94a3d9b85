# SPDX-License-Identifier: Apache-2.0
"""The small model of this repository, converted once, and ways to call the command line."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from flownpu.aie.artifacts import toolchain
from flownpu.cli import main
from tests.cli.npu.stand_ins import Tools

CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "gemma3-topics"


@dataclass(frozen=True)
class Outcome:
    """The result of a command line."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return CHECKPOINT


@pytest.fixture(scope="session")
def model(converted: Callable[..., Path]) -> Path:
    """A model folder; tests that change it take `model_copy`."""
    return converted()


@pytest.fixture
def model_copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


@pytest.fixture
def flownpu(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs a command line in this process, in a window so wide that rich breaks no expected line."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command line in a separate process, for tests of signals or pipes."""
    started = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        script = "import sys; from flownpu.cli import main; sys.exit(main())"
        process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "300"},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """A toolchain that records its commands."""
    return Tools(tmp_path / "tools", monkeypatch)


@pytest.fixture
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this machine appear to have no toolchain."""
    for variable in ("AIECC_PATH", "PEANO_INSTALL_DIR", "AIE_XCLBINUTIL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(toolchain, "sysconfig", SimpleNamespace(get_paths=lambda: {"purelib": "/nowhere"}))
    monkeypatch.setattr(toolchain, "shutil", SimpleNamespace(which=lambda _name: None))

# SPDX-License-Identifier: Apache-2.0
"""The build of `make windows`, and Wine to run it; without either, the tests that need it are skipped."""

import os
import shutil
from pathlib import Path

import pytest

from flownpu.convert import convert
from scripts.release.windows import WORK
from scripts.release.windows.wine import Wine
from tests.windows.installed import FIXTURE, Installed


@pytest.fixture(scope="session")
def built() -> Path:
    """The folder of the files that run under Wine."""
    if "FLOWNPU_WINDOWS" not in os.environ:
        pytest.skip("compiling for Windows takes minutes: `make windows` does it, and runs these tests")
    return WORK


@pytest.fixture(scope="session")
def wine(built: Path) -> Wine:
    found = Wine.find(built / "prefix")
    if found is None:
        pytest.skip("there is no Wine here (Debian, Ubuntu: apt install wine64)")
    return found


@pytest.fixture(scope="session")
def model(built: Path) -> Path:
    """The trained model, as this system converts it; in a folder whose name no single-byte code page can encode."""
    folder = built / "models" / "模型"
    shutil.rmtree(folder, ignore_errors=True)
    convert(FIXTURE, folder)
    return folder


@pytest.fixture(scope="session", params=["3.11", "3.12", "3.13", "3.14"])
def installed(request: pytest.FixtureRequest, wine: Wine, built: Path) -> Installed:
    """A Python for Windows with FlowNPU's wheel in it."""
    folder = built / f"python{request.param}"
    if not folder.is_dir():
        pytest.skip(f"`make windows` has laid out no Python {request.param}: this machine has none, or an older one")
    return Installed(wine, folder)

# SPDX-License-Identifier: Apache-2.0
"""Environments and models in the cache folder: made once, made again when their key changes, complete or missing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pip
import pytest

from flownpu.errors import FlowNPUError
from scripts.environments import cache_folder, finished_folder, make_environment, run


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_finished_folder_is_made_once_for_its_contents(tmp_path: Path):
    folder = tmp_path / "folder"
    with finished_folder(folder, [1]) as made:
        assert made == folder
        (made / "file").touch()
    with finished_folder(folder, [1]) as made:
        assert made is None
    assert (folder / "file").exists()
    with finished_folder(folder, [2]) as made:
        assert made == folder
        assert not (folder / "file").exists()


def test_finished_folder_interrupted_is_made_anew(tmp_path: Path):
    folder = tmp_path / "folder"
    with pytest.raises(KeyboardInterrupt), finished_folder(folder, [1]):
        raise KeyboardInterrupt
    with finished_folder(folder, [1]) as made:
        assert made == folder


def test_make_environment_shows_the_error_of_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Uses this environment's pip, because installing pip into the made environment takes seconds."""

    def without_own_pip(command: Sequence[str | Path], *others: Any) -> None:
        run([*command, "--without-pip"] if "venv" in command else command, *others)

    monkeypatch.setattr("scripts.environments.run", without_own_pip)
    monkeypatch.setenv("PYTHONPATH", str(Path(pip.__file__).parents[1]))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FlowNPUError, match=r"ERROR: .*no-such-package.*all it said is in .*pip\.log"):
        make_environment("peer", ("no-such-package==1",))
    # A failed environment is not taken for a finished one.
    assert not (cache_folder() / "peer" / "environment" / "complete.json").exists()

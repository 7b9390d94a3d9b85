# SPDX-License-Identifier: Apache-2.0
"""Environments and models in the cache folder: made once, made again when their key changes, complete or missing."""

import sys
import threading
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


def test_finished_folder_that_another_makes_is_awaited(tmp_path: Path):
    folder, found = tmp_path / "folder", list[Path | None]()

    def want() -> None:
        with finished_folder(folder, [1]) as made:
            found.append(made)

    other = threading.Thread(target=want)
    with finished_folder(folder, [1]):
        other.start()
        other.join(0.1)  # it would have its folder by then
        assert not found
    other.join()
    assert found == [None]


def test_make_environment_installs_once_for_its_requirements(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    commands = []
    monkeypatch.setattr(
        "scripts.environments.run", lambda command, *_: commands.append([str(part) for part in command])
    )
    python = make_environment("peer", ("a==1", "b==2"), say=said.append)
    venv, install = commands
    assert venv == [sys.executable, "-m", "venv", str(python.parents[1])]
    assert install[-2:] == ["a==1", "b==2"]
    assert "installing a==1, b==2" in said[0]
    assert make_environment("peer", ("a==1", "b==2")) == python
    assert len(commands) == 2
    make_environment("peer", ("a==1", "b==3"))
    assert len(commands) == 4


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

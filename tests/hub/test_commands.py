# SPDX-License-Identifier: Apache-2.0
"""Commands that take names of models, and processes that end in the middle of a download or a conversion."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import huggingface_hub.constants
import pytest

from flownpu.cli import main, options
from flownpu.doctor.checks import Status
from flownpu.doctor.hub import diagnose_hub
from flownpu.hub import store
from flownpu.hub.reference import Reference
from tests.hub.conftest import CHECKPOINT
from tests.hub.server import Repository, files_of

pytestmark = pytest.mark.usefixtures("hub")
PROMPT = ["--no-chat-template", "-p", 'The "for" statement', "--max-new-tokens", "4", "--temperature", "0", "--json"]


def test_names_stand_for_folders(hub, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The first command pulls the model.
    assert main(["run", "someone/topics", *PROMPT]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    hub.asked.clear()
    assert main(["convert", str(CHECKPOINT), "own"]) == 0
    assert main(["run", "own", *PROMPT]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == text
    assert main(["inspect", "someone/topics", "--check"]) == 0
    assert "Made of: someone/topics@" in capsys.readouterr().out
    assert hub.asked == []
    served = options.served_models(
        ["someone/topics", "own", "mine=someone/topics"], 64, 1, options.SessionOptions(), options.DecodingOptions()
    )
    assert {name: settings.folder for name, settings in served.items()} == {
        "someone/topics": store.folder_of(Reference("someone/topics")),
        "own": Path("own"),
        "mine": store.folder_of(Reference("someone/topics")),
    }
    assert main(["list", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["models"]] == ["someone/topics"]
    assert main(["remove", "someone/topics"]) == 0
    assert capsys.readouterr().err.endswith("`hf cache rm model/someone/topics` removes its download\n")
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"models": [], "unfinished": []}
    assert main(["list"]) == 0
    assert "`flownpu pull NAME`" in capsys.readouterr().err


def test_convert_takes_a_name_and_its_own_options(hub, capsys, tmp_path):
    output = tmp_path / "out"
    assert main(["convert", "someone/topics", str(output), "--kv-dtype", "fp32"]) == 0
    manifest = json.loads((output / "flownpu_manifest.json").read_text())
    assert manifest["source"]["name"].startswith("someone/topics@")
    assert manifest["settings"]["kv_dtype"] == "fp32"
    assert store.stored_models() == []
    hub.asked.clear()
    assert main(["convert", "someone/topics", str(output)]) == 1  # it is there, and nothing is downloaded for it
    assert "--force" in capsys.readouterr().err
    assert hub.asked == []


def test_pull_says_what_comes_next(capsys):
    assert main(["pull", "someone/topics"]) == 0
    assert capsys.readouterr().err.endswith('Next: flownpu run someone/topics -p "some text"\n')
    assert main(["pull", "a/b/c"]) == 1
    assert "expected a short name, or a repository" in capsys.readouterr().err


def test_doctor_says_what_hinders_pulls(hub, tmp_path, monkeypatch):
    def remedies():
        return {check.found: check.remedy for check in diagnose_hub() if check.status is Status.NOTE}

    free = namedtuple("usage", "free")(2 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    assert remedies() == {}
    assert hub.asked == []
    free = free._replace(free=10**8)
    assert f"0.1 GB are free for {store.models_folder()}: make room" in remedies()
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    assert remedies()[f"{tmp_path} cannot be written, so no model can be pulled"].startswith("export XDG_CACHE_HOME=")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "unset HF_HUB_OFFLINE" in remedies().values()


def unfinished(capsys):
    """The pulls that `list` and `doctor` say to continue."""
    capsys.readouterr()
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["unfinished"]
    assert main(["list"]) == 0
    assert [f"flownpu pull {name}" in capsys.readouterr().err for name in listed] == [True] * len(listed)
    remedies = [check.remedy for check in diagnose_hub() if check.name == "pull"]
    assert remedies == [f"flownpu pull {name}" for name in listed]
    return listed


def started(*arguments):
    script = "import sys; from flownpu.cli import main; sys.exit(main())"
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stderr=subprocess.PIPE, text=True)


def test_warning_of_broken_download_is_printed_once(hub):
    hub.cuts = [1000]
    process = started("pull", "someone/topics")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert " ".join(err.split()).count("Trying to resume download") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_download_leaves_no_model(hub, capsys, tmp_path, number):
    hub.hold = threading.Event()
    process = started("pull", "someone/topics")
    assert hub.held.wait(120)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number)
    hub.hold.set()
    hub.hold = None
    assert [path.name for path in store.models_folder().iterdir()] == [".locks"]
    assert len(list((tmp_path / "hf").rglob("*.incomplete"))) == 1
    assert unfinished(capsys) == ["someone/topics"]
    assert main(["pull", "someone/topics"]) == 0
    assert unfinished(capsys) == list((tmp_path / "hf").rglob("*.incomplete")) == []
    assert [model.name for model in store.stored_models()] == ["someone/topics"]


def test_killed_conversion_leaves_no_model(hub, capsys):
    # Its conversion takes long enough for the kill to come before the end.
    hub.repositories["someone/topics"] = Repository(files_of(CHECKPOINT.parent / "gemma3-topics"))
    process = started("pull", "someone/topics")
    while not (partial := list(store.models_folder().glob(".someone--topics.*.partial"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert store.stored_models() == []
    assert unfinished(capsys) == ["someone/topics"]
    assert main(["pull", "someone/topics"]) == 0
    assert [model.name for model in store.stored_models()] == ["someone/topics"]
    assert not partial[0].exists()

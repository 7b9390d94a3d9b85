# SPDX-License-Identifier: Apache-2.0
"""Models by name, downloaded by the stock huggingface_hub from a hub on this machine, and converted."""

import errno
import json
import random
import shutil
import threading
import time
from collections import namedtuple

import huggingface_hub.constants
import pytest

import flownpu.convert
from flownpu.convert.progress import silent
from flownpu.errors import FlowNPUError
from flownpu.hub import store
from flownpu.hub.reference import Reference, expect
from tests.hub.conftest import CHECKPOINT
from tests.hub.server import TOKEN, Repository, files_of

pytestmark = pytest.mark.usefixtures("hub")
TOPICS = Reference("someone/topics")
NEEDED = ["config.json", "gemma4.jinja", "generation_config.json", "harmony.jinja", "metadata.json"]
NEEDED += ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "xml.jinja"]


def pull(reference=TOPICS, report=silent, **options):
    return store.pull(reference, report, pytest.fail, **options)


def test_pulled_model_equals_converted_checkpoint(hub, tmp_path):
    folder = pull()
    flownpu.convert.convert(CHECKPOINT, tmp_path / "own")
    pulled, own = files_of(folder), files_of(tmp_path / "own")
    manifest = json.loads(pulled.pop("flownpu_manifest.json"))
    del own["flownpu_manifest.json"]
    assert pulled == own
    commit = hub.repositories["someone/topics"].commit
    assert manifest["source"]["name"] == f"someone/topics@{commit}"
    assert sorted(hub.downloaded()) == NEEDED
    (model,) = store.stored_models()
    assert (model.name, model.source, model.folder) == ("someone/topics", f"someone/topics@{commit}", folder)


def test_nothing_is_asked_of_the_hub_for_a_model_that_is_there(hub):
    folder = pull()
    hub.asked.clear()
    assert pull(renew=False) == folder
    assert hub.asked == []


def test_unchanged_model_is_not_converted_again_and_changed_one_is(hub):
    folder = pull()
    before = folder.stat().st_mtime_ns
    pull()
    assert folder.stat().st_mtime_ns == before
    files = hub.repositories["someone/topics"].files
    files["generation_config.json"] = b'{"temperature": 0.5}'
    pull()
    assert json.loads((folder / "genai_config.json").read_text())["search"]["temperature"] == 0.5


def test_revision_is_a_model_of_its_own():
    assert pull(Reference("someone/topics", "v1")) != pull()
    assert [model.name for model in store.stored_models()] == ["someone/topics", "someone/topics@v1"]
    with pytest.raises(FlowNPUError, match="has no revision v2"):
        pull(Reference("someone/topics", "v2"))


def test_broken_connection_resumes_where_it_broke(hub, monkeypatch):
    # huggingface_hub keeps whole pieces, of 10 MB.
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.cuts = [100_000, 50_000]
    pull()
    ranges = [bytes_ for method, path, bytes_ in hub.asked if method == "GET" and path.startswith("/apart/")]
    assert ranges == ["", "bytes=100000-", "bytes=150000-"]


def test_ended_download_goes_on_where_it_ended(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)

    def interrupt(progress):
        if progress.stage == "download" and progress.done > progress.total - weights + 50_000:
            raise KeyboardInterrupt

    # They come last, in pieces of 10 kB.
    weights = len(hub.repositories["someone/topics"].files["model.safetensors"])
    with pytest.raises(KeyboardInterrupt):
        pull(report=interrupt)
    progress = []
    pull(report=progress.append)
    ranges = [bytes_ for method, path, bytes_ in hub.asked if method == "GET" and path.startswith("/apart/")]
    assert ranges == ["", "bytes=50000-"]
    last = [step for step in progress if step.stage == "download"][-1]
    assert last.done == last.total


def test_damaged_file_is_refused_and_downloaded_again(hub):
    hub.damages = True
    with pytest.raises(FlowNPUError, match=r"model.safetensors was damaged .* run the command again"):
        pull()
    assert store.stored_models() == []
    hub.damages = False
    assert pull().is_dir()


def test_gated_model_says_how_to_log_in_and_takes_a_token(hub, monkeypatch):
    hub.repositories["someone/topics"].gated = True
    with pytest.raises(FlowNPUError, match=f"{hub.address}/someone/topics is gated: accept .*hf auth login.* HF_TOKEN"):
        pull()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pull().is_dir()


def test_unknown_repository_names_short_names_that_are_near():
    with pytest.raises(
        FlowNPUError,
        match=r"someone/gemma3: no such folder, and no such repository at .*hf auth login.*one of gemma3, gemma3:270m",
    ):
        pull(Reference("someone/gemma3"))
    with pytest.raises(FlowNPUError, match=r"got 'gema3:1b'. Is it one of gemma3:1b"):
        expect("gema3:1b")


def test_offline_mode_converts_cached_files_without_requests(hub, monkeypatch):
    store.remove(TOPICS) if pull() else None
    hub.asked.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert pull().is_dir()
    assert hub.asked == []


def test_offline_mode_reports_model_that_is_not_cached(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FlowNPUError, match=r"someone/other is not, or not as a whole, in .* HF_HUB_OFFLINE is set"):
        pull(Reference("someone/other"))
    assert hub.asked == []


def test_offline_mode_reports_model_of_which_cache_has_a_part(hub, monkeypatch):
    hub.damages = True
    with pytest.raises(FlowNPUError, match="was damaged"):
        pull()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FlowNPUError, match=r"someone/topics is not, or not as a whole, in .* HF_HUB_OFFLINE is set"):
        pull()


def test_hub_that_cannot_be_reached_is_reported(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FlowNPUError, match=r"http://127.0.0.1:9 cannot be reached.*ConnectError"):
        pull()


@pytest.mark.parametrize("free", [0, 700_000])  # of 640,000 bytes to download, and 200,000 to write
def test_full_disk_is_reported_before_the_download(hub, monkeypatch, free):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free))
    with pytest.raises(FlowNPUError, match=rf"takes about \d MB on the disk of .* which has {free / 1e6:.0f} MB free"):
        pull()
    assert hub.downloaded() == []


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "the disk of .* became full; make room"), (errno.EROFS, "cannot be written .* HF_HOME")],
)
def test_disk_that_takes_no_more_is_reported(monkeypatch, number, remedy):
    def fail(*_, **__):
        raise OSError(number, "no")

    monkeypatch.setattr("flownpu.hub.download.hf_hub_download", fail)
    with pytest.raises(FlowNPUError, match=f"someone/topics: .*{remedy}"):
        pull()


def test_cache_that_cannot_be_made_is_reported(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(FlowNPUError, match=r"file/flownpu/models cannot be made .* XDG_CACHE_HOME"):
        pull()


def test_interruption_leaves_nothing_half_there():
    calls = []
    pull(report=lambda progress: calls.append(progress.stage))
    assert {"download", "compare", "quantise", "sum"} <= set(calls)
    # The first call of each stage, and some at random.
    moments = [calls.index(stage) for stage in dict.fromkeys(calls)] + random.Random(7).sample(range(len(calls)), 3)
    store.remove(TOPICS)
    for moment in moments:
        shutil.rmtree(huggingface_hub.constants.HF_HUB_CACHE)
        left = iter(range(moment))

        def interrupt(_, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pull(report=interrupt)
        assert [path.name for path in store.models_folder().iterdir()] == [".locks"]
    assert pull().is_dir()


def test_family_that_cannot_be_converted_is_refused_before_its_weights(hub):
    files = {"config.json": b'{"model_type": "t5"}', "model.safetensors": b"0" * 1000}
    hub.repositories["someone/t5"] = Repository(files)
    with pytest.raises(flownpu.convert.ConversionError, match=r'someone/t5: config.json: expected model_type .*"t5"'):
        pull(Reference("someone/t5"))
    assert hub.downloaded() == ["config.json"]


def test_name_pulled_twice_at_once_converts_once(monkeypatch):
    made, said = [], []
    convert = flownpu.convert.convert

    def slowly(*arguments, **options):
        made.append(arguments)
        time.sleep(0.2)
        convert(*arguments, **options)

    monkeypatch.setattr(flownpu.convert, "convert", slowly)
    threads = [threading.Thread(target=store.pull, args=(TOPICS, silent, said.append)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert said == ["waiting for another process, which works on someone--topics"] * 2


def test_gguf_file_is_chosen_by_its_type(hub):
    hub.repositories["someone/files"] = Repository({"a-Q8_0.gguf": b"8", "a-Q4_K_M.gguf": b"4"})
    with pytest.raises(flownpu.convert.ConversionError, match=r"a-Q8_0.gguf"):
        pull(Reference("someone/files", "", "q8_0"))
    assert hub.downloaded() == ["a-Q8_0.gguf"]


def test_removed_model_is_gone_and_others_are_named():
    pull()
    with pytest.raises(FlowNPUError, match="a/b was not pulled; these models were: someone/topics"):
        store.remove(Reference("a/b"))
    store.remove(TOPICS)
    assert store.stored_models() == []
    assert [path.name for path in store.models_folder().iterdir()] == [".locks"]


def test_existing_path_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone").mkdir()
    # A folder that is there counts, and so do its parents: a mistyped path is not asked of the hub.
    assert store.locate(type(tmp_path)("someone/topics")) == type(tmp_path)("someone/topics")
    (tmp_path / "someone").rmdir()
    assert store.locate(type(tmp_path)("someone/topics")) == TOPICS
    (tmp_path / "gemma3").mkdir()
    assert store.locate(type(tmp_path)("gemma3")) == type(tmp_path)("gemma3")

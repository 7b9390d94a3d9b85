# SPDX-License-Identifier: Apache-2.0
"""`flownpu imagine`, in diffusers' environment, and its error without diffusers."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flownpu.cli import main
from flownpu.errors import FlowNPUError
from flownpu.imagine.request import read_size
from tests.fixtures.shapes_drawings import GUIDANCE, read
from tests.imagine import pipelines


@pytest.fixture(scope="module")
def results(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all commands, which run in one process; "folder" has their pictures."""
    folder = tmp_path_factory.mktemp("made")

    def task(name: str, prompt: str, *more: object, **around: Any) -> dict[str, Any]:
        device = () if "--provider" in more else ("--device", "cpu")
        options = ["--guidance", GUIDANCE, *device, *more]
        arguments = ["imagine", exported, "-p", prompt, "-o", folder / f"{name}.png", *options]
        return {"task": "command", "arguments": [str(each) for each in arguments], **around}

    few = "--steps", 4  # where the picture need not show anything
    tasks = {
        "seven": task("seven", "a green square", "--seed", 7),
        "few": task("few", "a green square", "--seed", 7, *few),
        "again": task("again", "a green square", "--seed", 7, *few),
        "eight": task("eight", "a green square", "--seed", 8, "--scheduler", "euler-a", "--steps", 12),
        "negative": task("negative", "a green square", "--seed", 7, "--negative", "a circle", "--size", "40x32", *few),
        "stock": task("stock", "a green square", "--seed", 7, "--provider", "cpu", *few),
        "interrupted": task("interrupted", "a red star", event="interrupt"),
        "full": task("full", "a red star", event="full disk"),
        "long": task("long", "a red star " * 6),
        "odd": task("odd", "a red star", "--size", "33"),
    }
    return dict(zip(tasks, pipelines.run(*tasks.values()), strict=True)) | {"folder": folder}


def picture(results: dict[str, Any], name: str) -> Image.Image:
    assert results[name]["code"] == 0, results[name]
    return Image.open(results["folder"] / f"{name}.png")


def test_picture_shows_the_text(results: dict[str, Any]) -> None:
    for name in ("seven", "eight"):
        assert read(picture(results, name)) == ("green", "square")
    said = results["seven"]["err"]
    assert "seven.png: 32x32, seed 7, " in said
    assert all(f"{part}: FlowNPU" in said for part in ("text_encoder", "unet", "vae_decoder"))


def test_seed_repeats_the_picture(results: dict[str, Any]) -> None:
    few, again, eight = (np.asarray(picture(results, name)) for name in ("few", "again", "eight"))
    np.testing.assert_array_equal(few, again)
    assert (few != eight).any()


def test_negative_prompt_and_size_are_used(results: dict[str, Any]) -> None:
    assert picture(results, "negative").size == (40, 32)


def test_provider_changes_no_picture(results: dict[str, Any]) -> None:
    ours, stock = (np.asarray(picture(results, name), float) for name in ("few", "stock"))
    assert np.sqrt(np.square(ours - stock).mean()) < 255 / 100  # 40 dB


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("interrupted", 130, ""),
        ("full", 1, "full.png: cannot be written: File too large; --seed "),
        ("long", 1, "20 tokens, and the model reads 16 at most: shorten it"),
        ("odd", 1, "multiples of 8, got 33x33"),
    ],
)
def test_failure_leaves_no_file(name: str, code: int, reason: str, results: dict[str, Any]) -> None:
    assert results[name]["code"] == code, results[name]
    assert reason in results[name]["err"]
    assert "Traceback" not in results[name]["err"]
    assert not [file for file in results["folder"].iterdir() if name in file.name]


def test_missing_package_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unet").mkdir()
    for file in ("model_index.json", "unet/model.onnx"):
        (tmp_path / file).write_text("{}")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert main(["imagine", str(tmp_path), "-p", "x", "-o", "x.png"]) == 1
    assert 'the Python package diffusers: pip install "flownpu[imagine]"' in capsys.readouterr().err


def test_other_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["imagine", str(tmp_path), "-p", "x", "-o", "x.png"]) == 1
    assert "expected a pipeline of diffusers, with model_index.json" in capsys.readouterr().err
    assert main(["imagine", str(pipelines.CHECKPOINT), "-p", "x", "-o", "x.png"]) == 1
    assert "`optimum-cli export onnx --task text-to-image --model" in capsys.readouterr().err
    assert main(["run", str(pipelines.CHECKPOINT), "-p", "x"]) == 1
    assert "`flownpu imagine` runs it" in capsys.readouterr().err
    assert main(["imagine", str(tmp_path), "-p", "x", "-o", "x.jpg"]) == 2


def test_size_is_read() -> None:
    assert (read_size("512"), read_size("512x768")) == ((512, 512), (512, 768))
    for text in ("", "0", "512x", "-8", "1.5", "512 x 512", "100000", "auto"):
        with pytest.raises(FlowNPUError, match="expected a size in pixels, WIDTHxHEIGHT or one number"):
            read_size(text)

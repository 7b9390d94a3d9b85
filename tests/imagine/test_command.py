# SPDX-License-Identifier: Apache-2.0
"""`flownpu imagine`, in diffusers' environment, and its error without diffusers."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flownpu.cli import main
from flownpu.convert import ConversionError, convert
from flownpu.errors import FlowNPUError
from flownpu.imagine.request import read_size
from tests.fixtures.shapes_drawings import GUIDANCE, read
from tests.imagine import pipelines


@pytest.fixture(scope="module")
def narrow(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pipeline in both forms that `flownpu convert` writes."""
    folder = tmp_path_factory.mktemp("narrow")
    for weights in ("bf16", "q8"):
        convert(exported, folder / weights, weights=weights)
    return {weights: folder / weights for weights in ("bf16", "q8")}


@pytest.fixture(scope="module")
def results(
    exported: Path, narrow: dict[str, Path], pocl: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The results of all commands, which run in one process; "folder" has their pictures."""
    del pocl  # it has set the variables
    folder = tmp_path_factory.mktemp("made")

    def task(name: str, prompt: str, *more: object, model: Path = exported, **around: Any) -> dict[str, Any]:
        device = () if {"--provider", "--device"} & {*more} else ("--device", "cpu")
        options = ["--guidance", GUIDANCE, *device, *more]
        arguments = ["imagine", model, "-p", prompt, "-o", folder / f"{name}.png", *options]
        return {"task": "command", "arguments": [str(each) for each in arguments], **around}

    few = "--steps", 4  # where the picture need not show anything
    tasks = {
        "seven": task("seven", "a green square", "--seed", 7),
        "few": task("few", "a green square", "--seed", 7, *few),
        "again": task("again", "a green square", "--seed", 7, *few),
        "eight": task("eight", "a green square", "--seed", 8, "--scheduler", "euler-a", "--steps", 12),
        "negative": task("negative", "a green square", "--seed", 7, "--negative", "a circle", "--size", "40x32", *few),
        "stock": task("stock", "a green square", "--seed", 7, "--provider", "cpu"),
        "stock-few": task("stock-few", "a green square", "--seed", 7, "--provider", "cpu", *few),
        **{weights: task(weights, "a green square", "--seed", 7, model=narrow[weights]) for weights in narrow},
        "gpu": task("gpu", "a green square", "--seed", 7, "--device", "gpu", "--option", "on_unsupported=error", *few),
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


def test_provider_and_device_change_no_picture(results: dict[str, Any]) -> None:
    # 40 dB; float32 rounds no more than to a level of 255.
    for name, of_stock, peak_to_error in (("seven", "stock", 100), ("gpu", "stock-few", 255)):
        found, expected = (np.asarray(picture(results, each), float) for each in (name, of_stock))
        assert np.sqrt(np.square(found - expected).mean()) < 255 / peak_to_error


def test_networks_run_whole_on_the_gpu(results: dict[str, Any]) -> None:
    assert results["gpu"]["err"].count("steps on the device") == 4  # with the encoder of pictures


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


def test_narrow_pipelines_are_smaller(exported: Path, narrow: dict[str, Path]) -> None:
    """The weights are most of the 4.4 MB; the rest is the graphs' text."""

    def size(folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.rglob("*.onnx*"))

    assert size(narrow["q8"]) < size(narrow["bf16"]) < 0.7 * size(exported)


@pytest.mark.parametrize("weights", ["bf16", "q8"])
def test_narrow_weights_change_no_picture(weights: str, results: dict[str, Any]) -> None:
    """A rounding to bf16 errs by 2^-9 at most, to 8 bits by 1 / 254 of a result's largest weight."""
    stock, found = (np.asarray(picture(results, name), float) for name in ("stock", weights))
    assert read(picture(results, weights)) == ("green", "square")
    assert np.sqrt(np.square(found - stock).mean()) < 255 / 100  # 40 dB, after all steps


def test_other_weights_of_a_pipeline_are_refused(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="a pipeline's --weights are bf16 or q8, got q4"):
        convert(exported, tmp_path / "out", weights="q4")
    assert not (tmp_path / "out").exists()

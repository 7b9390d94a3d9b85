# SPDX-License-Identifier: Apache-2.0
"""The small vision model in GenAI on device=gpu, on each API: its tower, operator by operator, and its decoder."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.test_emulated_images import CPU, QUESTIONS, Opened, pictures_of

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("gpu_api")]


@pytest.fixture(scope="module")
def folder(converted: Callable[..., Path]) -> Path:
    return converted("gemma3-shapes")


@pytest.fixture(scope="module")
def on_gpu(genai: Any, folder: Path, gpu_api: str, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    options = {"device": "gpu", "activations": "bf16", "gpu_api": gpu_api}
    return Opened(genai, folder, tmp_path_factory.mktemp("gpu") / "model", options)


@pytest.fixture(scope="module")
def on_cpu(genai: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(genai, folder, tmp_path_factory.mktemp("cpu") / "model", CPU)


def test_image_answers_equal_cpu(on_gpu: Opened, on_cpu: Opened) -> None:
    """This model is sure of its answer, so that the CPU's roundings do not change it."""
    question, count = QUESTIONS[0]
    shown = pictures_of(0, count)
    ours, theirs = (opened.reply(question, shown) for opened in (on_gpu, on_cpu))
    assert ours.tokens == theirs.tokens
    # The CPU device rounds to bf16; logits differ by a few hundredths of their spread.
    assert np.abs(ours.logits - theirs.logits).max() < theirs.logits.std() / 4


def test_tower_and_decoder_are_on_gpu(on_gpu: Opened) -> None:
    told = [json.loads(file.read_text()) for file in on_gpu.placements.iterdir()]
    assert all(placement["on_host"] == placement["left"] == [] for placement in told)
    lowered = " / ".join(line for placement in told for line in placement["lowered"])
    assert re.search(r"\d+ of \d+ steps on the device", lowered)
    assert "4 layers and the LM head in 22 kernels a token, prompts in chunks of 256" in lowered

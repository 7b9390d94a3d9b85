# SPDX-License-Identifier: Apache-2.0
"""The small vision model in GenAI, tower and decoder on the emulated array, compared with the CPU device."""

from __future__ import annotations

import io
import json
import random
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from flownpu.npu.artifacts import build_artifacts
from tests.convert.picture_models import reference
from tests.fixtures.shapes_pictures import draw, random_scene
from tests.npu.rounding import decoder_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from PIL import Image

CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "gemma3-shapes"
MARK = "<start_of_image>"
# Questions, and the number of pictures of each.
QUESTIONS = [(f"{MARK}What do you see?", 1), (f"{MARK}{MARK}How many circles are there?", 2)]
CPU = {"device": "cpu", "activations": "bf16"}


@dataclass
class Reply:
    """The tokens of an answer, the logits [V] after the prompt, and the model's inputs."""

    tokens: list[int]
    logits: NDArray[np.float32]
    ids: NDArray[np.int64]
    pixels: NDArray[np.float32]


class Opened:
    """A copy of a model in GenAI, whose graphs have these options of the provider; the tower has others if given."""

    def __init__(
        self, genai: Any, source: Path, folder: Path, options: dict[str, str], tower: dict[str, str] | None = None
    ) -> None:
        shutil.copytree(source, folder)
        self.placements = folder / "placements"
        self.placements.mkdir()
        config = json.loads((folder / "genai_config.json").read_text())
        given = options | {"placement": f"{self.placements}/"}
        config["model"]["decoder"]["session_options"]["provider_options"] = [{"FlowNPUExecutionProvider": given}]
        if tower is not None:
            config["model"]["vision"]["session_options"] = {"provider_options": [{"FlowNPUExecutionProvider": tower}]}
        (folder / "genai_config.json").write_text(json.dumps(config))
        self._genai, self._model = genai, genai.Model(str(folder))
        self._tokenizer, self._processor = genai.Tokenizer(self._model), self._model.create_multimodal_processor()

    def reply(self, question: str, pictures: list[Image.Image], **search: Any) -> Reply:
        """The greedy answer to a question, which has a MARK for each picture."""
        files = [io.BytesIO() for _ in pictures]
        for picture, file in zip(pictures, files, strict=True):
            picture.save(file, "png")
        turn = json.dumps([{"role": "user", "content": question}])
        prompt = self._tokenizer.apply_chat_template(turn, add_generation_prompt=True)
        images = self._genai.Images.open_bytes(*(file.getvalue() for file in files))
        inputs = self._processor(prompt, images=images)
        ids, pixels = (np.array(inputs[name].as_numpy()) for name in ("input_ids", "pixel_values"))
        parameters = self._genai.GeneratorParams(self._model)
        parameters.set_search_options(do_sample=False, max_length=ids.shape[1] + 24, **search)
        generator = self._genai.Generator(self._model, parameters)
        generator.set_inputs(inputs)
        logits = generator.get_logits()[0, -1].copy()
        while not generator.is_done():
            generator.generate_next_token()
        return Reply(generator.get_sequence(0).tolist()[ids.shape[1] :], logits, ids, pixels)


@pytest.fixture(scope="module")
def folder(converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted model, with its artifacts beside it."""
    folder = shutil.copytree(converted("gemma3-shapes"), tmp_path_factory.mktemp("shapes") / "model")
    left_out = build_artifacts(folder, context=640).left_out
    assert not any(left.on_host for left in left_out)
    return folder


@pytest.fixture(scope="module")
def emulated(genai: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(genai, folder, tmp_path_factory.mktemp("emulated") / "model", {"device": "emulate"})


@pytest.fixture(scope="module")
def on_cpu(genai: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(genai, folder, tmp_path_factory.mktemp("cpu") / "model", CPU)


def pictures_of(seed: int, count: int) -> list[Image.Image]:
    generator = random.Random(seed)
    return [draw(random_scene(generator), 200) for _ in range(count)]


@pytest.mark.parametrize(("question", "count"), QUESTIONS)
def test_image_answers_equal_cpu(question: str, count: int, emulated: Opened, on_cpu: Opened) -> None:
    """With tower and decoder on the array, the model is so sure of its answers that roundings do not change them."""
    shown = pictures_of(0, count)
    assert emulated.reply(question, shown).tokens == on_cpu.reply(question, shown).tokens


def test_image_logits_are_near_cpu(genai: Any, folder: Path, on_cpu: Opened, tmp_path: Path) -> None:
    """Both decoders get image features from the CPU device; both round to bf16, the array more.

    Logits differ by less than twice the error that the array's roundings explain (tests/npu/rounding.py); if images'
    tokens saw only earlier ones, they would differ by more.
    """
    model = reference(CHECKPOINT, folder)
    emulated = Opened(genai, folder, tmp_path / "model", {"device": "emulate"}, tower=CPU)
    squares = np.zeros(3)  # the errors, the explained errors, and the effect of causal attention
    for number, (question, count) in enumerate(QUESTIONS):
        shown = pictures_of(number, count)
        ours, theirs = (opened.reply(question, shown) for opened in (emulated, on_cpu))
        run = partial(logits_of, model, ours)
        with torch.no_grad():
            causal = np.square((run(causal=True) - run()).numpy()).mean()
        squares += np.square(ours.logits - theirs.logits).mean(), decoder_error(model, run, prompt=True) ** 2, causal
    error, explained, causal = np.sqrt(squares / len(QUESTIONS))
    print(f"{error:.3f}, at most {2 * explained:.3f}; causal: {causal:.3f}")
    assert error < 2 * explained < min(causal, theirs.logits.std() / 4)


def logits_of(model: Any, given: Reply, *, causal: bool = False) -> torch.Tensor:
    """transformers' logits [V] after a prompt; causal: as if an image's tokens saw only earlier ones."""
    ids = torch.from_numpy(given.ids)
    types = None if causal else (ids == model.config.image_token_id).long()
    return model(ids, pixel_values=torch.from_numpy(given.pixels), token_type_ids=types).logits[0, -1]  # type: ignore[no-any-return]


def test_tower_and_decoder_are_on_array(emulated: Opened) -> None:
    told = [json.loads(file.read_text()) for file in emulated.placements.iterdir()]
    assert all(placement["on_host"] == placement["left"] == [] for placement in told)
    assert {line for placement in told for line in placement["lowered"]} == {
        "an encoder's 2 layers in 11 dispatches an image",
        "4 layers and the LM head in 1 dispatch a token, prompts in chunks of 256 or 512, images of 256 tokens",
    }


def test_cut_image_is_refused_or_runs_on_cpu(
    genai: Any, folder: Path, emulated: Opened, on_cpu: Opened, tmp_path: Path
) -> None:
    """GenAI's chunk_size cuts prompts anywhere, and images with them."""
    question, count = QUESTIONS[0]
    shown, cut = pictures_of(7, count), {"chunk_size": 100}
    with pytest.raises(RuntimeError, match=r"expected images of 256 tokens, .*: give each image whole"):
        emulated.reply(question, shown, **cut)
    falling_back = Opened(
        genai, folder, tmp_path / "model", {"device": "emulate", "on_unsupported": "cpu", "activations": "bf16"}
    )
    assert falling_back.reply(question, shown, **cut).tokens == on_cpu.reply(question, shown, **cut).tokens

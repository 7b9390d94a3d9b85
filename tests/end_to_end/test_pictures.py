# SPDX-License-Identifier: Apache-2.0
"""Pictures in GenAI's multimodal loop: the answers are those of transformers with the same weights."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import onnxruntime_genai as og
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image

from flownpu.convert import convert
from tests.convert.picture_models import VISION, draw_pictures, reference, write_pictures_checkpoint
from tests.end_to_end.test_numbers import ROUNDING, logit_error

MARK = "<start_of_image>"
TEXTS = (
    f"{MARK}What is this?",
    f"Look at {MARK} and tell me what the statement means.",
    f"The class {MARK} defines an attribute; is it a string or a list of numbers?",
    f"{MARK}{MARK}",
    f"First {MARK}, then a text between the pictures, then {MARK} again. Which is larger?",
)
NEW_TOKENS = 10
ACTIVATIONS = ("bf16", "int8")
# How many prompts each provider answers: all twenty (of other pictures), or each text once.
PROMPTS = {"stock": len(TEXTS), "bf16": 20, "int8": len(TEXTS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, the model made of it, and pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures_checkpoint(folder / "checkpoint")
    convert(folder / "checkpoint", folder / "model", kv_dtype="fp32")
    return folder


@pytest.fixture(scope="module")
def paths(folder: Path) -> list[Path]:
    return draw_pictures(folder, 6)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> "Reference":
    return Reference(reference(folder / "checkpoint", folder / "model"))


@dataclass
class Opened:
    """A model in GenAI, and the processor of its inputs."""

    model: og.Model
    processor: og.MultiModalProcessor

    def inputs(self, text: str, pictures: Sequence[Path]) -> og.NamedTensors:
        return self.processor(text, images=og.Images.open(*map(str, pictures)) if pictures else None)

    def generator(self, capacity: int, **options: Any) -> og.Generator:
        parameters = og.GeneratorParams(self.model)
        parameters.set_search_options(do_sample=False, max_length=capacity, min_length=capacity, **options)
        return og.Generator(self.model, parameters)


@pytest.fixture(scope="module")
def open_model(genai: Any, folder: Path) -> Callable[[str], Opened]:
    """The model on ONNX Runtime's own provider ("stock"), or on ours with a type of activations."""
    opened: dict[str, Opened] = {}

    def model(provider: str) -> Opened:
        if provider not in opened:
            copied = shutil.copytree(folder / "model", folder / provider)
            config = json.loads((copied / "genai_config.json").read_text())
            ours = [{"FlowNPUExecutionProvider": {"activations": provider, "on_unsupported": "error"}}]
            config["model"]["decoder"]["session_options"]["provider_options"] = [] if provider == "stock" else ours
            (copied / "genai_config.json").write_text(json.dumps(config))
            made = genai.Model(str(copied))
            opened[provider] = Opened(made, made.create_multimodal_processor())
        return opened[provider]

    return model


def array(inputs: og.NamedTensors, name: str) -> NDArray[Any]:
    return np.array(inputs[name].as_numpy())


class Reference:
    """transformers' model, whose logits are kept, because the tests of all providers mostly ask for the same."""

    def __init__(self, model: transformers.Gemma3ForConditionalGeneration) -> None:
        self.model = model
        self.layers = model.config.text_config.num_hidden_layers
        self._known: dict[Any, NDArray[np.float64]] = {}

    def logits(
        self, ids: Sequence[int], pixels: NDArray[np.float32] | None, *, causal: bool = False
    ) -> NDArray[np.float64]:
        """Logits [tokens, vocabulary] of a sequence with its pictures.

        causal: as if a picture's tokens saw only earlier ones.
        """
        key = (tuple(ids), None if pixels is None else pixels.tobytes(), causal)
        if key not in self._known:
            tokens = torch.tensor([list(ids)])
            pictures: dict[str, torch.Tensor] = {}
            if pixels is not None:
                pictures["pixel_values"] = torch.from_numpy(pixels)
                if not causal:
                    pictures["token_type_ids"] = (tokens == self.model.config.image_token_id).long()
            with torch.no_grad():
                self._known[key] = self.model(tokens, **pictures).logits[0].double().numpy()
        return self._known[key].copy()


def tower_error(activations: str) -> float:
    """The relative error of features that rounding causes, as `logit_error` estimates it for a decoder.

    The products of the patches and of the projector round too.
    """
    layers = VISION["num_hidden_layers"]
    share = 4 * layers / (2 * layers + 1)
    return math.sqrt((share + 2) * ROUNDING[activations] ** 2 + share * ROUNDING["bf16"] ** 2)


@pytest.mark.parametrize("provider", ["stock", *ACTIVATIONS])
def test_answers_equal_transformers(
    provider: str, open_model: Callable[[str], Opened], paths: list[Path], theirs: Reference
) -> None:
    """Greedy tokens after one or two pictures, transformers fed with the pixels of GenAI's processor.

    On ONNX Runtime's provider both compute in float32, and are the same. Ours rounds: a token may be another where
    the two likeliest are too close to tell, by 4 sigma of the gap of two logits (see test_numbers).
    """
    opened = open_model(provider)
    for index in range(PROMPTS[provider]):
        text = TEXTS[index % len(TEXTS)]
        count = text.count(MARK)
        inputs = opened.inputs(text, [paths[(index + 2 * i) % len(paths)] for i in range(count)])
        ids, pixels = array(inputs, "input_ids"), array(inputs, "pixel_values")
        prompt = ids.shape[1]
        assert (ids == theirs.model.config.image_token_id).sum() == 256 * count
        generator = opened.generator(prompt + NEW_TOKENS)
        generator.set_inputs(inputs)
        while not generator.is_done():
            generator.generate_next_token()
        sequence = generator.get_sequence(0).tolist()
        logits = theirs.logits(sequence, pixels)[prompt - 1 : -1]
        logits[:, theirs.model.config.text_config.eos_token_id] = -np.inf  # min_length forbids them
        chosen = np.take_along_axis(logits, np.array(sequence[prompt:])[:, None], axis=-1)[:, 0]
        gaps = logits.max(-1) - chosen
        if provider == "stock":
            assert gaps.max() == 0
        else:
            spread = np.where(np.isfinite(logits), logits, 0)
            of_decoder = logit_error(provider, theirs.layers, spread)
            # Many tokens see features: at most, the whole residual stream comes from them.
            of_tower = tower_error(provider) * float(spread.std(-1).mean())
            assert gaps.max() <= 4 * math.sqrt(2) * math.hypot(of_decoder, of_tower)


def test_picture_tokens_see_one_another(
    open_model: Callable[[str], Opened], paths: list[Path], theirs: Reference
) -> None:
    """The logits after two pictures with text between; those of causal attention are far from them."""
    opened = open_model("stock")
    inputs = opened.inputs(TEXTS[4], paths[:2])
    ids, pixels = array(inputs, "input_ids")[0], array(inputs, "pixel_values")
    generator = opened.generator(len(ids) + 1)
    generator.set_inputs(inputs)
    found = generator.get_logits()[0, -1]
    expected = theirs.logits(ids, pixels)[-1]
    # Two float32 computations (tests/convert/test_numbers.py): 8 sums a decoder layer, 6 a tower layer, of at most
    # P = 1024 terms.
    sums = 2 * (8 * theirs.layers + 1 + 6 * VISION["num_hidden_layers"] + 2)
    tolerance = 4 * math.sqrt(sums * 1024) * 2**-24 * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    assert np.abs(theirs.logits(ids, pixels, causal=True)[-1] - expected).max() > 100 * tolerance


@pytest.mark.parametrize("provider", ["stock", "bf16"])
def test_second_turn_continues_from_cache(
    provider: str, open_model: Callable[[str], Opened], paths: list[Path], theirs: Reference
) -> None:
    opened = open_model(provider)
    inputs = opened.inputs(TEXTS[3], paths[2:4])
    generator = opened.generator(700)
    generator.set_inputs(inputs)
    for _ in range(4):
        generator.generate_next_token()
    generator.get_logits()  # GenAI 0.18 would leave the last token's place in the cache unwritten
    generator.append_tokens(np.array([[40, 50, 60, 70, 80]], np.int32))
    found = generator.get_logits()[0, -1]
    expected = theirs.logits(generator.get_sequence(0).tolist(), array(inputs, "pixel_values"))[-1]
    if provider == "stock":
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    else:
        of_decoder = logit_error(provider, theirs.layers, expected[None])
        error = math.hypot(of_decoder, tower_error(provider) * float(expected.std()))
        assert np.sqrt(np.square(found - expected).mean()) < error


def test_pictures_of_later_turn_are_error(open_model: Callable[[str], Opened], paths: list[Path]) -> None:
    """GenAI 0.18 takes the pictures of the first inputs only; later tokens without features would mean nothing."""
    opened = open_model("stock")
    generator = opened.generator(700)
    generator.set_inputs(opened.inputs(TEXTS[0], paths[:1]))
    generator.generate_next_token()
    with pytest.raises(RuntimeError, match="out of data bounds"):
        generator.set_inputs(opened.inputs(TEXTS[0], paths[1:2]))


def text_error(rounding: float, layers: int, embedding: float) -> float:
    """The relative error of a logit that rounding of activations causes in a random decoder with a cache of f32.

    As `logit_error`, with what that leaves out; errors are variances in units of `rounding`^2. Attention makes four:
    those of queries, keys and values are independent (after QK-norm scores have a variance of at most 1, so that a
    relative error of queries or keys is one of the weights), and the output product makes the fourth. The gated
    feed-forward network makes three: both factors, and the product with the down projection. An error of the incoming
    residual stream is passed on three times by attention, and twice by the network. What a block adds has variance 1,
    by the norm after it; the embedding has a variance of its own. The LM head rounds once.
    """
    stream, error = embedding**2, 0.0
    for rounded, passed_on in ((4, 3), (3, 2)) * layers:
        error += rounded + passed_on * error / stream
        stream += 1
    return rounding * math.sqrt(error / stream + 1)


@pytest.mark.parametrize("provider", ["stock", *ACTIVATIONS])
def test_text_without_pictures_equals_transformers(
    provider: str, open_model: Callable[[str], Opened], theirs: Reference
) -> None:
    opened = open_model(provider)
    ids = [2, 100, 200, 300, 400]
    generator = opened.generator(20)
    generator.append_tokens(np.array([ids], np.int32))
    found = generator.get_logits()[0, -1]
    expected = theirs.logits(ids, None)[-1]
    embedding = theirs.model.get_input_embeddings()(torch.tensor(ids[-1:])).square().mean().sqrt().item()
    # The rms of the hidden state's D = 128 errors is within 4 / sqrt(2 D) of what it should be, relative (4 sigma).
    strays = 1 + 4 / math.sqrt(2 * theirs.model.config.text_config.hidden_size)
    error = 1e-4
    if provider != "stock":
        error = strays * text_error(ROUNDING[provider], theirs.layers, embedding) * float(expected.std())
    print(f"{provider}: {np.sqrt(np.square(found - expected).mean()):.2e}, at most {error:.2e}")
    assert np.sqrt(np.square(found - expected).mean()) < error


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("vision_weights", ["bf16", "int8", "q4nx"])
def test_provider_features_equal_transformers(
    vision_weights: str, activations: str, folder: Path, ep_devices: list[Any], tmp_path: Path
) -> None:
    model = folder / "model"
    if vision_weights != "bf16":
        convert(folder / "checkpoint", model := tmp_path / "model", vision_weights=vision_weights)
    pixels = np.random.default_rng(1).uniform(-1, 1, (2, 3, 128, 128)).astype(np.float32)
    with torch.no_grad():
        tower = reference(folder / "checkpoint", model).model
        expected = tower.get_image_features(torch.from_numpy(pixels)).pooler_output.numpy()
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    devices = [device for device in ep_devices if device.device.type.name == "CPU"]
    options.add_provider_for_devices(devices[:1], {"activations": activations})
    session = onnxruntime.InferenceSession(model / "vision.onnx", options)
    (features,) = session.run(None, {"pixel_values": pixels})
    error = np.linalg.norm(features - expected) / np.linalg.norm(expected)
    print(f"{vision_weights} weights, {activations} activations: {error:.2e}, {tower_error(activations):.2e} expected")
    # Twice, because the estimate is rough: what layers add is not equally large, and values are not normal.
    assert error < 2 * tower_error(activations)


@pytest.mark.parametrize("resample", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC])
def test_prepared_pictures_equal_transformers(
    resample: Image.Resampling, genai: Any, folder: Path, tmp_path: Path
) -> None:
    """PNG of several sizes, resized with antialiasing by both, to whole levels of 255.

    GenAI's resize (onnxruntime-extensions' image_resample.c) always shrinks rows first, and rounds and clips to whole
    levels before it shrinks columns. Pillow 13.0 shrinks columns first in some tall pictures, here 300 x 200 and
    400 x 130, and so rounds to other levels in between. Therefore, transformers gets those with their rows already
    shrunk by the same Pillow.
    """
    source, side = shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint"), VISION["image_size"]
    settings = json.loads((source / "preprocessor_config.json").read_text())
    (source / "preprocessor_config.json").write_text(json.dumps(settings | {"resample": int(resample)}))
    convert(source, tmp_path / "model")
    config = genai.Config(str(tmp_path / "model"))
    config.clear_providers()
    processor = genai.Model(config).create_multimodal_processor()
    prepare = transformers.Gemma3ImageProcessorPil.from_pretrained(source)
    random = np.random.default_rng(0)
    for height, width in ((side, side), (500, 400), (200, 300), (300, 200), (400, 130), (37, 90), (1, 1), (128, 300)):
        picture = Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
        picture.save(tmp_path / "picture.png")
        inputs = processor(MARK, images=genai.Images.open(str(tmp_path / "picture.png")))
        rows_first = picture.resize((side, height), resample) if height > 4 / 3 * width else picture
        expected = prepare(rows_first, return_tensors="np")["pixel_values"]
        # Rescaling and normalising are three float32 operations on at most 1: a level is 2/255 and shows.
        np.testing.assert_allclose(
            array(inputs, "pixel_values"), expected, rtol=0, atol=4 * 2**-24, err_msg=f"{height} x {width}"
        )

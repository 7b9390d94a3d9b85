# SPDX-License-Identifier: Apache-2.0
"""Layers that keep a state, on the emulated array and its host: trained models against transformers."""

import functools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from flownpu.aie.programs import prefill
from flownpu.aie.programs.decode import decode_program
from flownpu.generate.cached_sequence import CachedSequence
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.npu.artifacts import build_artifacts
from flownpu.npu.layers import read_decoder
from tests.decoding import DecoderSession
from tests.generate.test_trained_states import NAMES, held_out, logits_of, reference
from tests.npu.match.verdicts import told_by_build, told_by_session
from tests.npu.rounding import BLOCK_ROUNDING, _error, _Noise

CONTEXT = 512
LATER = 4  # tokens of each answer


@pytest.fixture(scope="module")
def model_of(
    converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], LanguageModel]:
    """Opens a trained model on the emulated array; `on_array`: whether prompts have the delta rule there, too."""

    @functools.cache
    def opened(name: str, on_array: bool = True) -> LanguageModel:
        folder = Path(shutil.copytree(converted(name), tmp_path_factory.mktemp("states") / name))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefill, "fastest", lambda programs, _prices: programs[-1 if on_array else 0])
            build_artifacts(folder, context=CONTEXT)
        return LanguageModel(folder, options={"device": "emulate", "activations": "bf16"})

    return opened


def array_error(name: str, tokens: np.ndarray, rows: slice, *, prompt: bool) -> float:
    """The rms error of logits, as tests/npu/rounding.py estimates it: every product and norm is rounded to bf16.

    In a prompt's products, both factors also share an exponent among 8 neighbours. The host's mixers have what they
    read and what they give rounded, which are products, too, or inputs of products.
    """
    model: Any = reference(name)
    ids = torch.from_numpy(tokens[None].astype(np.int64))

    def hooks(noise: _Noise) -> list[Any]:
        found = [layer.register_forward_hook(noise.after) for layer in model.model.layers for _ in range(2)]
        for part, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and part != "lm_head":
                found.append(module.register_forward_hook(noise.product(part, BLOCK_ROUNDING * prompt)))
                found.append(module.register_forward_pre_hook(noise.before))
            elif "norm" in part or part == "lm_head":
                found.append(module.register_forward_hook(noise.after))
        return found

    return _error(lambda: model(ids).logits[0, rows], hooks, 0)


@pytest.mark.parametrize(
    ("name", "prompt", "on_array"),
    [
        ("qwen3.5-topics", 120, True),  # a chunk
        pytest.param("qwen3.5-topics", 120, False, marks=pytest.mark.slow),
        ("lfm2-topics", 5, True),  # token by token, as later prompts
        pytest.param("lfm2-topics", 120, True, marks=pytest.mark.slow),
    ],
)
def test_logits_through_turns_and_a_rewind_are_near_transformers(
    name: str, prompt: int, on_array: bool, model_of: Callable[[str, bool], LanguageModel]
) -> None:
    """A prompt, one behind its answer, and one that goes back into the first.

    The bound is twice the estimate, which takes roundings for independent and evenly spread, though they are not quite.
    A state that is lost, or a gate that is left out, changes logits by about their own spread.
    """
    model = model_of(name, on_array)
    cached, text = CachedSequence(model, CONTEXT, Sampling(temperature=0)), held_out(name)

    def answer(asked: np.ndarray, *, chunk: bool) -> np.ndarray:
        generator, new, _ = cached.resume(asked, ())
        model.append(generator, new)
        found = []
        for _ in range(LATER):
            found.append(np.array(generator.get_logits(), np.float64).reshape(-1))
            generator.generate_next_token()
        sequence = np.array(generator.get_sequence(0))
        rows = slice(len(asked) - 1, len(sequence) - 1)
        expected = logits_of(reference(name), sequence)[rows]
        error = math.sqrt(np.square(np.array(found) - expected).mean())
        bound = 2 * array_error(name, sequence, rows, prompt=chunk)
        assert error < bound < expected.std() / 3
        return sequence

    first = answer(text[:prompt], chunk=prompt > LATER)
    answer(np.concatenate([first, text[200:202]]), chunk=prompt > LATER)
    answer(np.concatenate([first[:3], text[300:302]]), chunk=False)


@pytest.mark.parametrize("name", NAMES)
def test_token_calls_array_once_more_than_host_has_states(
    name: str, model_of: Callable[[str, bool], LanguageModel]
) -> None:
    """Both models have two layers of eight with attention, which are on the array as a whole."""
    manifest = json.loads((model_of(name, True).folder / "artifacts" / "emulate" / "manifest.json").read_text())
    dispatches = manifest["programs"][0]["dispatches"]
    assert [dispatch["array"] == "host" for dispatch in dispatches] == [False, True] * 6 + [False]
    array, *others = {dispatch["array"] for dispatch in dispatches} - {"host"}
    assert not others
    assert ("-gate" in array) == (name == "qwen3.5-topics")
    mixers = [step for dispatch in dispatches[1::2] for step in dispatch["steps"] if "mixer" in step]
    assert len(mixers) == 6


def test_mixers_read_their_own_layers_norm_and_products(model_of: Callable[[str, bool], LanguageModel]) -> None:
    """Norms of the trained model are so alike that its logits hardly tell one from another; places in buffers do."""
    decoder = read_decoder(model_of("qwen3.5-topics", True).folder)
    program, shape = decode_program(decoder, "npu2", CONTEXT).program, decoder.shape
    steps = [step for step in program.steps if step.call.operator in ("add_rms_norm", "mixer")]
    layers = [layer for layer in range(8) if layer % 4 != 3]  # every fourth has attention
    for norm, mixer, layer in zip(steps[::2], steps[1::2], layers, strict=True):
        assert norm.views[2] == ("vectors", layer * shape.vector_size * 2)
        assert norm.views[-1] == mixer.views[0]
        assert dict(mixer.call.parameters)["layer"] == layer
    # Weights of a call begin behind the first projection of its first layer.
    before = sum(shape.weight_bytes(keeps_state=layer in layers) for layer in range(6))
    calls = [step for step in program.steps if step.call.operator == "decode_layer"]
    assert calls[-1].views[0] == ("weights", before + shape.state_projections[0].bytes)


def test_mask_hiding_a_token_is_refused(
    model_of: Callable[[str, bool], LanguageModel], ep_devices: list[onnxruntime.OrtEpDevice]
) -> None:
    """The array's programs take all tokens up to the last one; a mask on the right only makes the prompt shorter."""
    decoder = DecoderSession(model_of("qwen3.5-topics", True).folder, ep_devices[:1], {"device": "emulate"})
    ids = np.array([[5, 6, 7]])
    with pytest.raises(RuntimeError, match="expected 2 tokens before all padding"):
        decoder(ids, np.array([[1, 0, 1]]))


def test_build_and_session_agree_that_the_array_takes_a_model_with_states(
    model_of: Callable[[str, bool], LanguageModel], ep_devices: list[onnxruntime.OrtEpDevice]
) -> None:
    for name in NAMES:
        folder = model_of(name, True).folder
        assert not told_by_build(folder, read_decoder)
        assert not told_by_session(folder / "model.onnx", ep_devices[:1])

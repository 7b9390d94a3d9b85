# SPDX-License-Identifier: Apache-2.0
"""Paged models compute what transformers computes, in stock ONNX Runtime and on FlowNPU's CPU device."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flownpu.convert import ConversionError, convert
from flownpu.convert.model_writer import ModelOptions
from tests.convert.conftest import write_tiny
from tests.convert.test_numbers import random_ids, tolerance
from tests.decoding import DecoderSession, PagedSession
from tests.end_to_end.test_numbers import logit_error

IDS = random_ids(3, 40)
# Tokens of each sequence in each call: a prompt alone, a second prompt beside a token of the first, parts of two
# prompts beside a token, a long part beside tokens, and single tokens of all.
CALLS: list[dict[str, int]] = [
    {"a": 20},
    {"a": 1, "b": 25},
    {"c": 9, "a": 4, "b": 1},
    {"a": 1, "b": 1, "c": 13},
    *[{"a": 1, "b": 1, "c": 1}] * 4,
]

# Families that differ in the inputs of attention: softcaps, norms, windows, kinds of RoPE, projections apart; and a
# mixture. test_other_families.py compares the other parts of layers.
FAMILIES = ("gemma2", "gemma3_text", "llama", "mistral", "olmo2", "phi3", "qwen3", "qwen3_moe", "smollm3")
# Their RoPE frequencies change with a sequence's length, and a paged model has one table only.
LONG_ROPE = ("phi3 with longrope", "phi3 as phi4-mini")


def run(session: PagedSession, calls: list[dict[str, int]]) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
    """The logits of all calls' sequences, and the place in IDS (row, token) that each belongs to."""
    rows, logits, places = {"a": 0, "b": 1, "c": 2}, [], []
    for call in calls:
        work = {}
        for name, count in call.items():
            start = session.tokens.get(name, 0)
            work[name] = IDS[rows[name], start : start + count]
        for name, found in session(work).items():
            logits.append(found)
            places.append((rows[name], session.tokens[name] - 1))
    return logits, places


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_together_equal_transformers(
    family: str, tiny_models: Callable[[str], Any], ep_devices: list[Any], tmp_path: Path
) -> None:
    """Calls mix prompts, parts of prompts and single tokens, beyond the window of 8."""
    tiny = tiny_models(family) if family != "gemma2" else write_tiny(family, tmp_path / "checkpoint")
    convert(tiny.folder, tmp_path / "model", kv_dtype="fp32", paged=True)
    all_logits = tiny.logits(IDS)
    stock, places = run(PagedSession(tmp_path / "model"), CALLS)
    expected = np.array([all_logits[place] for place in places])
    np.testing.assert_allclose(np.array(stock), expected, rtol=0, atol=tolerance(expected, tiny.reference.config))
    devices = [device for device in ep_devices if device.device.type.name == "CPU"][:1]
    options = {"activations": "bf16", "on_unsupported": "error"}
    ours, _ = run(PagedSession(tmp_path / "model", devices, options), CALLS)
    errors = np.square(np.array(ours, np.float64) - expected).mean(axis=-1)
    # Rounding makes a few of a mixture's tokens choose another, nearly equal expert; the median does not see them.
    error = np.sqrt(np.median(errors) if family == "qwen3_moe" else errors.mean())
    # tests/convert/running.py says why the factor is 6.
    assert error < 6 * logit_error("bf16", tiny.reference.config.num_hidden_layers, expected)


@pytest.mark.parametrize("family", LONG_ROPE)
def test_frequencies_changing_with_length_are_refused(
    family: str, tiny_models: Callable[[str], Any], tmp_path: Path
) -> None:
    with pytest.raises(ConversionError, match=r"change behind \d+ tokens \(LongRoPE\): leave --paged out"):
        convert(tiny_models(family).folder, tmp_path / "model", paged=True)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp32"])
def test_sequence_has_same_bits_alone_and_beside_others(
    kv_dtype: str, tiny_models: Callable[[str], Any], ep_devices: list[Any], tmp_path: Path
) -> None:
    """A sequence's logits depend neither on other sequences nor on the split of its prompt into calls."""
    convert(tiny_models("gemma3_text").folder, tmp_path / "model", kv_dtype=kv_dtype, paged=True)
    devices = [device for device in ep_devices if device.device.type.name == "CPU"][:1]
    options = {"activations": "bf16"}
    together, places = run(PagedSession(tmp_path / "model", devices, options), CALLS)
    for row, name in enumerate("abc"):
        lasts = [place[1] for place in places if place[0] == row]
        # The whole prompt at once, then token by token.
        session = PagedSession(tmp_path / "model", devices, options)
        alone = {}
        for count in [lasts[-4] + 1, 1, 1, 1]:
            logits, place = run(session, [{name: count}])
            alone[place[0]] = logits[0]
        for place, logits in zip(places, together, strict=True):
            if place in alone:
                np.testing.assert_array_equal(logits, alone[place])
        assert len(alone) == 4


def test_paged_configuration_names_inputs_and_blocks(tiny_models: Callable[[str], Any], tmp_path: Path) -> None:
    convert(tiny_models("llama").folder, tmp_path / "model", paged=True)
    config = json.loads((tmp_path / "model" / "genai_config.json").read_text())
    inputs = {value.name for value in DecoderSession(tmp_path / "model").session.get_inputs()}
    named = {name for key, name in config["model"]["decoder"]["inputs"].items() if not key.startswith("past_key")}
    assert named - {"past_key_values.%d.value"} <= inputs
    batching = config["engine"]["dynamic_batching"]
    assert batching["block_size"] * batching["num_blocks"] >= config["search"]["max_length"]


def test_contradicting_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="leave --logits and --sliding-window-cache out, or --paged"):
        ModelOptions(logits="all", paged=True)
    with pytest.raises(ConversionError, match="leave --logits and --sliding-window-cache out, or --paged"):
        ModelOptions(sliding_window_cache=True, paged=True)
    (tmp_path / "genai_config.json").write_text("{}")
    with pytest.raises(ConversionError, match="--paged takes Hugging Face checkpoints and GGUF files"):
        convert(tmp_path, tmp_path / "model", paged=True)
    shapes = Path(__file__).parents[1] / "fixtures" / "gemma3-shapes"
    with pytest.raises(ConversionError, match="add --vision-weights none"):
        convert(shapes, tmp_path / "model", paged=True)

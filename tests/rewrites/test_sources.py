# SPDX-License-Identifier: Apache-2.0
"""Every family out of every exporter gives the export's tokens, with all attention folded and all nodes on FlowNPU.

Checkpoints and GGUF files are compared with transformers in tests/convert.
"""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from flownpu.convert import convert
from flownpu.explain.overview import explain
from flownpu.graph_rewrites.testing import Array
from tests.decoding import DecoderSession, float32_tolerance
from tests.end_to_end.test_numbers import logit_error
from tests.rewrites.genai_export import SIZES as GENAI_SIZES
from tests.rewrites.optimum_export import DECODER as OPTIMUM_SIZES
from tests.rewrites.optimum_export import DECODERS, ENCODER, TASKS
from tests.rewrites.optimum_reference import (
    BFLOAT16_TOLERANCE,
    FLOAT32_TOLERANCE,
    calls,
    check_close,
    feeds_of,
    open_session,
    valid,
)

# on_unsupported is `error`: a session that starts has left no node to another provider.
OPTIONS = {"device": "cpu", "activations": "bf16"}

# A prompt longer than every window, read in two parts, and NEW tokens after it, each of them the reference's likeliest.
PROMPT, PARTS, NEW = 30, ((0, 19), (19, 30)), 20
# Tokens that all tiny models have, and that are not special.
IDS = np.random.default_rng(5).integers(4, 260, (1, PROMPT))


def check_placement(placement: Path) -> None:
    """Asserts that all nodes are FlowNPU's, in one partition."""
    report = json.loads(placement.read_text())
    assert (report["left"], report["partitions"]) == ([], 1)


def check_folded(folder: Path, attentions: int) -> None:
    """Asserts that the model has `attentions` attentions, each of which folds into one call on the NPU."""
    found = explain(folder, {"device": "cpu"}, bandwidth=1e10).attentions
    assert [attention.prompt_level for attention in found] == [3] * attentions, found


def run(*steps: DecoderSession) -> list[Array]:
    """Logits [calls, V] of the last token of each call: those of the first, the reference, then the others'."""
    found: list[list[Array]] = [[] for _ in steps]
    for start, stop in (*PARTS, *((i, i + 1) for i in range(PROMPT, PROMPT + NEW))):
        # Every decoder continues with the reference's token, so that one near tie does not make the texts differ.
        ids = IDS[:, start:stop] if stop <= PROMPT else found[0][-1].argmax()[None, None]
        for step, logits in zip(steps, found, strict=True):
            logits.append(step(ids)[0, -1])
    return [np.array(logits) for logits in found]


@pytest.mark.parametrize(
    ("exporter", "name"),
    [
        *itertools.product(["genai as it is", "genai", "optimum"], ["gemma2", "gemma3", "llama", "qwen3"]),
        ("genai as it is", "qwen3 in rtn_last"),
        ("genai as it is", "qwen3 in k_quant_mixed"),
    ],
)
def test_decoder_export_is_folded_and_placed(
    exporter: str, name: str, request: pytest.FixtureRequest, tmp_path: Path, ep_devices: list[ort.OrtEpDevice]
) -> None:
    """The reference is the export in ONNX Runtime's CPU provider; optimum's has weights that went through Q4NX."""
    sizes = OPTIMUM_SIZES if exporter == "optimum" else GENAI_SIZES
    layers, placement = sizes["num_hidden_layers"], tmp_path / "placement.json"
    if exporter == "optimum":
        folder, export = (request.getfixturevalue(which)[name] for which in ("folded", "references"))
    else:
        folder = export = request.getfixturevalue("exports")[name]
    if exporter == "genai":
        folder = tmp_path / "model"
        convert(export, folder, kv_dtype="fp32")
    decoders = [DecoderSession(folder, ep_devices[:1], OPTIONS | {"placement": str(placement)})]
    if folder != export:  # without FlowNPU an unconverted folder is its own reference
        decoders.append(DecoderSession(folder))
    expected, found, *stock = run(DecoderSession(export), *decoders)
    for logits in stock:
        atol = float32_tolerance(expected, layers, sizes["intermediate_size"])
        np.testing.assert_allclose(logits, expected, rtol=0, atol=atol)
    check_tokens(found, expected, layers)
    check_folded(folder, layers)
    check_placement(placement)


def check_tokens(found: Array, expected: Array, layers: int) -> None:
    """Asserts that logits are off by what rounding activations costs, and that likeliest tokens are the same.

    tests/convert/running.py says why the factor is 6. The gap of two logits has sqrt(2) times the error of
    one, and the largest of all errors is within 4 sigma: tokens that are further apart must be told apart.
    """
    error = 6 * logit_error("bf16", layers, expected)
    assert np.sqrt(np.square(found.astype(np.float64) - expected).mean()) < error
    second, first = np.sort(expected, axis=-1)[:, -2:].T
    clear = first - second > 4 * math.sqrt(2) * error
    assert clear.mean() > 1 / 4, "the likeliest tokens are too close to be told apart"
    np.testing.assert_array_equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])


@pytest.mark.parametrize("name", [name for name in TASKS if name not in DECODERS])
def test_encoder_export_is_folded_and_placed(
    name: str, folded: dict[str, Path], references: dict[str, Path], tmp_path: Path, ep_devices: list[Any]
) -> None:
    placement = tmp_path / "placement.json"
    options = ort.SessionOptions()
    options.add_provider_for_devices(ep_devices[:1], OPTIONS | {"placement": str(placement)})
    expected = open_session(references[name])
    # In stock ONNX Runtime too, because the CPU device's roundings would hide a wrong GELU or a wrong epsilon.
    others = [
        (open_session(folded[name]), FLOAT32_TOLERANCE),
        (open_session(folded[name], options), BFLOAT16_TOLERANCE),
    ]
    for arguments in calls(name):
        feeds = feeds_of(expected, **arguments)
        reference = valid(expected, expected.run(None, feeds), feeds)
        for session, tolerance in others:
            check_close(reference, valid(expected, session.run(None, feeds), feeds), tolerance)
    towers = 2 if name == "clip" else 1
    check_folded(folded[name], towers * ENCODER["num_hidden_layers"])
    check_placement(placement)

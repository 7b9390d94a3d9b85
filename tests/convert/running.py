# SPDX-License-Identifier: Apache-2.0
"""Compares converted models, on stock ONNX Runtime and on FlowNPU's CPU device, with transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from tests.convert.conftest import TinyModel
from tests.convert.test_numbers import random_ids, tolerance
from tests.decoding import DecoderSession
from tests.end_to_end.test_numbers import logit_error

IDS = random_ids(1, 40)
# The starts and ends of calls: a prompt longer than the window of 8, a second part of several tokens, then single
# tokens.
CALLS = ((0, 20), (20, 33), *((i, i + 1) for i in range(33, 40)))
LASTS = [stop - 1 for _, stop in CALLS]


def logits_of(folder: Path, devices: Sequence[onnxruntime.OrtEpDevice] = ()) -> NDArray[np.float32]:
    """Logits of the last token of each call, [calls, V]: by stock ONNX Runtime, or by FlowNPU if devices are given."""
    chosen = [device for device in devices if device.device.type.name == "CPU"]
    decoder = DecoderSession(folder, chosen[:1], {"activations": "bf16", "on_unsupported": "error"})
    return np.array([decoder(IDS[:, start:stop])[0, 0] for start, stop in CALLS])


def check_logits(folder: Path, tiny: TinyModel, devices: Sequence[onnxruntime.OrtEpDevice]) -> None:
    """Asserts that a model with a float32 KV cache computes what transformers computes with the reference's weights."""
    expected = tiny.logits(IDS)[0, LASTS]
    config = tiny.reference.config
    stock = logits_of(folder)
    np.testing.assert_allclose(stock, expected, rtol=0, atol=tolerance(expected, config))
    assert_near(logits_of(folder, devices), expected, config)


def assert_near(
    ours: NDArray[np.float32], expected: NDArray[np.float32], config: Any, activations: str = "bf16"
) -> None:
    """Asserts that logits differ from transformers' by roundings of activations only.

    The bound is a fiftieth of the logits' spread in bf16 and a twelfth in int8; a wrong angle, scale or norm changes
    logits by the spread itself.
    """
    error = np.sqrt(np.square(ours.astype(np.float64) - expected).mean())
    assert error < rounding_factor(config) * logit_error(activations, config.num_hidden_layers, expected)


def rounding_factor(config: Any) -> int:
    """How many times the error of one rounding of each layer's activations logits may be off.

    Where no norm follows attention and feed-forward, a layer may add several times what it was given, and with it the
    error of its products counts several times: 6 stands for that. By the delta rule two more numbers that are rounded
    are multiplied, the key again and the norm's gate, and the norm divides by what may be a small part of the state:
    10. Single tokens are off more than others: so they are, and as far, in transformers if the inputs of its linear
    layers are rounded to bf16 (six prompts of 31 calls; the logarithms of both errors correlate by 0.81 to 0.98).
    Gemma 4 does not divide its scores by the root of the head's size: 10, for transformers with rounded inputs is off
    by 5.8 times the error of one rounding, as FlowNPU is.
    """
    if config.model_type.startswith("gemma4"):
        return 10
    return 10 if "linear_attention" in (getattr(config, "layer_types", None) or ()) else 6

# SPDX-License-Identifier: Apache-2.0
"""Compares converted models, on stock ONNX Runtime and on FlowNPU's CPU device, with transformers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
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
    return np.array([decoder(IDS[:, start:stop])[0, -1] for start, stop in CALLS])


def check_logits(folder: Path, tiny: TinyModel, devices: Sequence[onnxruntime.OrtEpDevice]) -> None:
    """Asserts that a model with a float32 KV cache computes what transformers computes with the reference's weights."""
    expected = tiny.logits(IDS)[0, LASTS]
    stock = logits_of(folder)
    np.testing.assert_allclose(stock, expected, rtol=0, atol=tolerance(expected, tiny.reference.config))
    assert_near(logits_of(folder, devices), expected, tiny)


def assert_near(
    ours: NDArray[np.float32],
    expected: NDArray[np.float32],
    tiny: TinyModel,
    activations: str = "bf16",
    *,
    ids: NDArray[np.int64] = IDS,
    lasts: Sequence[int] = LASTS,
) -> None:
    """Asserts that logits of ids at the places `lasts` differ from transformers' by roundings of activations only.

    Without the delta rule the bound is a fiftieth of the logits' spread in bf16 and a twelfth in int8; a wrong angle,
    scale or norm changes logits by the spread itself.
    """
    error = np.sqrt(np.square(ours.astype(np.float64) - expected).mean())
    assert error < error_bound(tiny, ids, lasts, expected, activations)


def error_bound(
    tiny: TinyModel,
    ids: NDArray[np.int64],
    lasts: Sequence[int],
    expected: NDArray[np.float32],
    activations: str = "bf16",
) -> float:
    """The largest rms error, by roundings of activations, of the logits `expected` of ids at the places `lasts`.

    Where no norm follows attention and feed-forward, a layer may add several times what it was given, and with it the
    error of its products counts several times: 6 times the error of one rounding of each layer's activations stands for
    that.

    By the delta rule a norm divides by what may be a small part of the state, and how small depends on the token; Gemma
    4 does not divide its scores by the root of a head's size. So there transformers' model with rounded inputs of its
    products shows how much the roundings of these tokens count. Its errors are another draw from the distribution of
    ours: with at least 9 independent directions among tokens and logits, the quotient of two variances exceeds 10.1
    once in a thousand draws (F distribution of 9 and 9 degrees of freedom). Measured with bf16, 12 prompts of each of
    the three families: quotients of the errors have the median 0.91 to 1.04, and are at most 1.8; with two forms of
    Gemma 4 1.0.
    """
    config = tiny.reference.config
    has_delta_rule = "linear_attention" in (getattr(config, "layer_types", None) or ())
    if not has_delta_rule and not config.model_type.startswith("gemma4"):
        return 6 * logit_error(activations, config.num_hidden_layers, expected)
    with torch.no_grad(), RoundedProducts(activations):
        rounded = tiny.reference(input_ids=torch.from_numpy(ids)).logits[0, list(lasts)].numpy()
    return math.sqrt(10.1) * float(np.sqrt(np.square(rounded.astype(np.float64) - expected).mean()))


class RoundedProducts(torch.overrides.TorchFunctionMode):
    """In it, the inputs of linear layers are rounded to bf16, or to int8 with a scale for each 256 columns."""

    def __init__(self, activations: str) -> None:
        super().__init__()
        self._activations = activations

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            args = (self._rounded(args[0]), *args[1:])
        return function(*args, **(kwargs or {}))

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        if self._activations == "bf16":
            return x.bfloat16().float()
        parts = []
        for part in x.split(256, -1):
            scale = part.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
            parts.append((part / scale).round() * scale)
        return torch.cat(parts, -1)

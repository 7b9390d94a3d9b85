# SPDX-License-Identifier: Apache-2.0
"""Runs decoders call by call, and says how far two computations of the same logits may be apart."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

PAST = "past_key_values."
# GenAI's own slack of a cache that is as large as a window, for single tokens.
SLACK = 16
STORED = {
    "tensor(float)": (np.float32, onnx.TensorProto.FLOAT),
    "tensor(float16)": (np.uint16, onnx.TensorProto.FLOAT16),
    "tensor(bfloat16)": (np.uint16, onnx.TensorProto.BFLOAT16),
}


class DecoderSession:
    """A decoder's ONNX file in ONNX Runtime's CPU provider, or on other devices, with a cache that grows.

    Where the folder's genai_config.json says that layers keep a cache of their window's size, they do.
    """

    def __init__(
        self,
        folder: Path,
        devices: Sequence[onnxruntime.OrtEpDevice] = (),
        provider_options: Mapping[str, str] | None = None,
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1  # tiny models: a second thread would only wait
        if devices:
            options.add_provider_for_devices(devices, dict(provider_options or {}))
        providers = None if devices else ["CPUExecutionProvider"]
        settings = folder / "genai_config.json"
        config = json.loads(settings.read_text())["model"]["decoder"] if settings.is_file() else {}
        self.session = onnxruntime.InferenceSession(folder / config.get("filename", "model.onnx"), options, providers)
        self._inputs = {value.name for value in self.session.get_inputs()}
        self.cache_inputs = [value for value in self.session.get_inputs() if value.name.startswith(PAST)]
        window = config.get("sliding_window") or {"layers": []}
        # An export's graph may have names of sizes there; optimum's has numbers, and no such file.
        self._heads = config.get("num_key_value_heads"), config.get("head_size")
        self._capacity = {str(layer): window["window_size"] + SLACK for layer in window["layers"]}
        self.cache: list[onnxruntime.OrtValue] = []
        self._tokens = 0

    def __call__(self, ids: NDArray[np.int64], mask: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Logits [B, S or 1, V] of the next tokens, ids [B, S]; mask [B, tokens so far]: of ones, if none is given."""
        self._tokens += ids.shape[1]
        mask = np.ones((len(ids), self._tokens), np.int64) if mask is None else mask
        self.cache = self.cache or [self._empty(len(ids), value) for value in self.cache_inputs]
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(ids))
        binding.bind_cpu_input("attention_mask", mask)
        if "position_ids" in self._inputs:
            positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, -ids.shape[1] :]
            binding.bind_cpu_input("position_ids", np.ascontiguousarray(positions))
        for value, past in zip(self.cache_inputs, self.cache, strict=True):
            binding.bind_ortvalue_input(value.name, past)
        for output in self.session.get_outputs():
            binding.bind_output(output.name)
        self.session.run_with_iobinding(binding)
        logits, *self.cache = binding.get_outputs()
        return logits.numpy()

    def _empty(self, batch: int, value: Any) -> onnxruntime.OrtValue:
        heads, size = (said or value.shape[axis] for said, axis in zip(self._heads, (1, 3), strict=True))
        storage, kind = STORED[value.type]
        capacity = self._capacity.get(value.name.removeprefix(PAST).partition(".")[0], 0)
        empty = np.zeros((batch, heads, capacity, size), storage)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(empty, kind)


def float32_tolerance(logits: NDArray[np.float32], layers: int, widest: int) -> float:
    """How far two float32 computations of the same logits may be apart.

    A sum of K rounded products is off by about sqrt(K) u of its size, u = 2^-24. A token's path to the logits has at
    most 8 such sums a layer (norms before and after, QKV, attention, gate/up, down), of at most `widest` terms. Their
    errors are independent, and so are those of the two computations: they add up in quadrature. Measured against the
    largest logit, a factor of 4 stands for what the nonlinear functions between them amplify, and for the largest of
    many errors.
    """
    sums = 2 * (8 * layers + 1)
    return 4 * math.sqrt(sums * widest) * 2**-24 * float(np.abs(logits).max())

# SPDX-License-Identifier: Apache-2.0
"""Functions for workers: run a decoder step by step, with a KV cache that grows or is updated in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from tests.decoding import PAST
from tests.fuzz.arrays import numpy_type
from tests.fuzz.decoders.models import DecoderModel
from tests.fuzz.sessions import Outcome, _devices, _from_ort, _session_options, _text, _to_ort


@dataclass(frozen=True)
class Turn:
    """A call. `ids` int64 [B, S]; `mask` int64 [B, tokens so far]; `past`: tokens of the cache that it continues."""

    ids: NDArray[np.int64]
    mask: NDArray[np.int64]
    past: int


def run_decoder(
    decoder: DecoderModel,
    steps: Sequence[Turn],
    capacity: int,
    provider: dict[str, str] | None = None,
    optimise: str = "none",
) -> Outcome:
    """The logits of each step, up to the first that raises.

    `capacity`: positions of a KV cache that is updated in place; 0: it grows. `provider`: FlowNPU's options; None: ONNX
    Runtime's CPU provider runs it.
    """
    try:
        options = _session_options(optimise)
        if provider is None:
            session = onnxruntime.InferenceSession(decoder.model, options, providers=["CPUExecutionProvider"])
        else:
            options.add_provider_for_devices(_devices(), provider)
            session = onnxruntime.InferenceSession(decoder.model, options)
    except Exception as error:  # noqa: BLE001  (any error is a refusal)
        return Outcome(refusal=_text(error))
    outcome = Outcome()
    try:
        cache = _Cache(decoder, len(steps[0].ids), capacity)
        for step in steps:
            outcome.runs.append({"logits": cache.run(session, step)})
    except Exception as error:  # noqa: BLE001
        outcome.runs.append(_text(error))
    return outcome


class _Cache:
    """Keys and values of all layers."""

    def __init__(self, decoder: DecoderModel, batch: int, capacity: int) -> None:
        self._shared = capacity > 0
        shape = (batch, decoder.kv_heads, capacity, decoder.head_size)
        self._names = [f"{layer}.{part}" for layer in range(decoder.layers) for part in ("key", "value")]
        self._arrays: dict[str, Any] = {name: np.zeros(shape, numpy_type(decoder.cache)) for name in self._names}
        if self._shared:
            self._values = {name: _to_ort(array) for name, array in self._arrays.items()}

    def run(self, session: onnxruntime.InferenceSession, step: Turn) -> NDArray[Any]:
        binding = session.io_binding()
        binding.bind_cpu_input("input_ids", step.ids)
        binding.bind_cpu_input("attention_mask", step.mask)
        for name in self._names:
            if self._shared:
                value = self._values[name]
                binding.bind_ortvalue_output(f"present.{name}", value)
            else:
                value = _to_ort(self._arrays[name][:, :, : step.past])
            binding.bind_ortvalue_input(PAST + name, value)
            if not self._shared:
                binding.bind_output(f"present.{name}")
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        names = [output.name for output in session.get_outputs()]
        outputs = dict(zip(_bound(self._names), binding.get_outputs(), strict=True))
        assert set(outputs) == set(names)
        if not self._shared:
            self._arrays = {name: _from_ort(outputs[f"present.{name}"]) for name in self._names}
        return _from_ort(outputs["logits"])


def _bound(names: list[str]) -> list[str]:
    """The outputs' names in the order in which they were bound."""
    return [*(f"present.{name}" for name in names), "logits"]

# SPDX-License-Identifier: Apache-2.0
"""Candidates from the model's own head for multi-token prediction."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flownpu.errors import FlowNPUError, require
from flownpu.generate.speculative.candidates import HIDDEN_STATES
from flownpu.model.folder import PREDICTION_HEAD
from flownpu.model.session import open_session

_CACHE = ("key", "value")
_ELEMENT_TYPES = {"tensor(float)": 1, "tensor(int8)": 3, "tensor(float16)": 10, "tensor(bfloat16)": 16}
"""ONNX's numbers of the types that a KV cache may have."""


class PredictionHead:
    """A model's head, open in ONNX Runtime; it proposes the token behind the next one.

    Args:
        folder: the model's folder.
        provider: "flownpu", or "cpu" for ONNX Runtime's own CPU provider.
        options: options of FlowNPU's provider by key.
        threads: threads of the CPU kernels; None leaves the number to the provider.

    Raises:
        FlowNPUError: the folder has no head.
    """

    def __init__(self, folder: Path, provider: str, options: dict[str, str], threads: int | None) -> None:
        path = folder / PREDICTION_HEAD
        if not path.is_file():
            raise FlowNPUError(
                f"{folder} has no {PREDICTION_HEAD}, the head of a model for multi-token prediction: convert a "
                "checkpoint with tensors mtp.*, such as Qwen 3.5's own, or leave --draft mtp out"
            )
        self._onnxruntime = require("onnxruntime", extra="genai", purpose="Multi-token prediction")
        self._session, _ = open_session(self._onnxruntime, path, provider, options, threads)
        inputs = {port.name: port for port in self._session.get_inputs()}
        cache = inputs["past_key_values.0.key"]
        self._cache_shape: list[Any] = cache.shape
        self._cache_type = _ELEMENT_TYPES[cache.type]
        self.hidden_size = int(inputs["hidden_states"].shape[2])

    def caches(self, capacity: int) -> list[Any]:
        """Keys and values for `capacity` tokens."""
        shape = [size if isinstance(size, int) else capacity for size in self._cache_shape]
        make = self._onnxruntime.OrtValue.ortvalue_from_shape_and_type
        return [make(shape, self._cache_type, "cpu") for _ in _CACHE]

    def run(
        self, tokens: Sequence[int], hidden: npt.NDArray[np.float32], before: int, caches: Sequence[Any]
    ) -> tuple[int, npt.NDArray[np.float32]]:
        """Computes tokens behind `before` others; the caches get their keys and values.

        Args:
            tokens: S tokens.
            hidden: float32 [S, D], the hidden states before each.
            before: how many tokens the caches hold.
            caches: of `caches`.

        Returns:
            The likeliest token behind the last, and the head's hidden state of that last, float32 [1, D].
        """
        binding = self._session.io_binding()
        binding.bind_cpu_input("input_ids", np.array([tokens], np.int64))
        binding.bind_cpu_input("hidden_states", np.ascontiguousarray(hidden[None]))
        binding.bind_cpu_input("attention_mask", np.ones((1, before + len(tokens)), np.int64))
        for part, cache in zip(_CACHE, caches, strict=True):
            binding.bind_ortvalue_input(f"past_key_values.0.{part}", cache)
            binding.bind_ortvalue_output(f"present.0.{part}", cache)
        for name in ("logits", "hidden_states_out"):
            binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        *_, logits, state = binding.get_outputs()  # in the order in which they were bound
        return int(logits.numpy().argmax()), state.numpy()[0]


class HeadCandidates:
    """Candidates of a head for one sequence: the likeliest token each, from the model's hidden states.

    Place t of the head's KV cache is of the model's hidden state at token t and the embedding of token t + 1. Places of
    candidates behind the first have the head's own hidden states; they are computed anew once the model has computed
    these tokens.

    Args:
        head: the head.
        context: most tokens of the sequence.
    """

    def __init__(self, head: PredictionHead, context: int) -> None:
        self._head = head
        self._context = context
        self._caches: list[Any] = []
        self._held = 0
        """Places of the KV cache that are of the model's hidden states."""
        self._first = 0
        """The token of the first row of `_states`."""
        self._states = np.empty((0, head.hidden_size), np.float32)
        """The model's hidden states of tokens whose places are not computed, and of the one before them."""

    def computed(self, length: int, output: Callable[[str], npt.NDArray[Any]]) -> None:
        """See `FollowsModel.computed`."""
        states = output(HIDDEN_STATES)[0]
        first = length - len(states)
        self._states = np.concatenate([self._states[: max(0, first - self._first)], states])
        self._first = min(self._first, first)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """See `Candidates.propose`."""
        last = len(tokens) - 1
        new, states = list(tokens[self._held + 1 :]), self._states[self._held - self._first : last - self._first]
        count = min(count, self._context - last)
        if count < 1 or not new or len(states) < len(new):
            return []
        if not self._caches:
            self._caches = self._head.caches(self._context)
        before, found = self._held, list[int]()
        self._held, self._states, self._first = last, self._states[last - 1 - self._first :], last - 1
        while True:
            token, states = self._head.run(new, states, before, self._caches)
            found.append(token)
            if len(found) == count:
                return found
            before, new = before + len(new), [token]

    def rewound(self, length: int) -> None:
        """See `Candidates.rewound`."""
        self._states = self._states[: max(0, length - self._first)]
        self._held = max(0, min(self._held, length - 1))
        if self._first > self._held:
            # The state of the last token that is left is not known any more: the head guesses worse there, no more.
            self._first, self._states = self._held, np.zeros((length - self._held, self._head.hidden_size), np.float32)

# SPDX-License-Identifier: Apache-2.0
"""Candidates from a small model that reads the keys and values of the one it drafts for (Gemma 4's)."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flownpu.errors import FlowNPUError, require
from flownpu.generate.speculative.candidates import HIDDEN_STATES
from flownpu.model.folder import DRAFTER
from flownpu.model.onnx_file import reading
from flownpu.model.session import open_session

_TYPES = {
    "tensor(float)": ("float32", 1),
    "tensor(int8)": ("int8", 3),
    "tensor(float16)": ("float16", 10),
    "tensor(bfloat16)": ("bfloat16", 16),
}
"""numpy's names of the types that a KV cache may have, and ONNX's numbers of them."""


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of a model's tokens, out of its own table."""

    blocks: npt.NDArray[np.uint8]
    """In the model's file, of which only the blocks of a token are read."""
    rows: int
    columns: int
    scale: float

    @staticmethod
    def of(model: Any, path: Path, size: int) -> "Embeddings | None":
        """Those of `size` elements in a graph of onnx_ir, the file `path`; None if it has no such table in Q4NX."""
        with reading(path):
            tokens = next(value for value in model.graph.inputs if value.name == "input_ids")
            for node in tokens.consumers():
                # An embedding for each layer has another size.
                if node.op_type == "Q4NXGather" and node.attributes.get_int("K") == size:
                    factor = next((use for use in node.outputs[0].consumers() if use.op_type == "Mul"), None)
                    scale = 1.0 if factor is None else float(factor.inputs[1].const_value.numpy())
                    return Embeddings(node.inputs[0].const_value.numpy(), node.attributes.get_int("M"), size, scale)
        return None

    def of_token(self, token: int) -> npt.NDArray[np.float32]:
        """A token's embedding, float32 [1, 1, D]."""
        from flownpu.ops import q4nx  # noqa: PLC0415 the operators take 30 ms to import, also without a drafter

        found = q4nx.gather(self.blocks, np.array([[token]]), self.rows, self.columns)
        return np.asarray(found * np.float32(self.scale), np.float32)


class Drafter:
    """A drafter, open in ONNX Runtime.

    Args:
        folder: its folder, which has DRAFTER.
        target: the graph of the model that it drafts for, of onnx_ir, with the outputs of `newest_keys`.
        path: that graph's file.
        provider: "flownpu", or "cpu" for ONNX Runtime's own CPU provider.
        options: options of FlowNPU's provider by key.
        threads: threads of the CPU kernels; None leaves the number to the provider.

    Raises:
        FlowNPUError: it drafts for a model of another form.
    """

    def __init__(
        self, folder: Path, target: Any, path: Path, provider: str, options: dict[str, str], threads: int | None
    ) -> None:
        self._onnxruntime = require("onnxruntime", extra="genai", purpose="A drafter")
        # ONNX Runtime's own provider chooses clusters of tokens (TopK).
        given = {"on_unsupported": "cpu", **options} if provider == "flownpu" else options
        self._session, _ = open_session(self._onnxruntime, folder / DRAFTER, provider, given, threads)
        ports = {port.name: port for port in self._session.get_inputs()}
        embeddings = Embeddings.of(target, path, int(ports["hidden_states"].shape[2]))
        if embeddings is None:
            raise FlowNPUError(
                f"{folder} drafts for a model with embeddings of {ports['hidden_states'].shape[2]} in a table of Q4NX, "
                f"and {path.parent} is none: take the drafter of that model, and convert both"
            )
        self.embeddings = embeddings
        output_name = importlib.import_module("flownpu.graph_rewrites.newest_keys").output_name
        outputs = {value.name: value for value in target.graph.outputs}
        self.caches: dict[str, Any] = {}
        """Inputs with keys and values, by the model's output whose rows they have."""
        for name, port in ports.items():
            if not name.startswith("past_key_values."):
                continue
            _, kind, part = name.split(".")
            rows = outputs.get(output_name(int(kind), part))
            # Rows of one type of floats become those of another; a row of int8 has its scale, and is longer.
            shape = [] if rows is None else [rows.shape[1], rows.shape[3]]
            if rows is None or shape != [port.shape[1], port.shape[3]]:
                raise FlowNPUError(
                    f"{folder} reads keys and values of {port.shape[1]} heads of {port.shape[3]} elements in "
                    f"{port.type}, and {path.parent} has {shape or 'none'}: take the drafter of that model, and "
                    "convert both with the same --kv-dtype"
                )
            self.caches[rows.name] = port

    def empty_caches(self, capacity: int) -> dict[str, npt.NDArray[Any]]:
        """Keys and values for `capacity` tokens, by the model's output whose rows they have; [1, G, capacity, d]."""
        # Gives numpy bfloat16; it takes up to a second to import, also without a drafter.
        importlib.import_module("ml_dtypes")
        return {
            name: np.empty((1, port.shape[1], capacity, port.shape[3]), _TYPES[port.type][0])
            for name, port in self.caches.items()
        }

    def propose(
        self, token: int, state: npt.NDArray[np.float32], before: int, caches: dict[str, npt.NDArray[Any]], count: int
    ) -> list[int]:
        """Proposes tokens.

        Args:
            token: the last token.
            state: float32 [D], what the model's LM head took to choose it.
            before: how many tokens are before it, whose keys and values the caches have.
            caches: of `empty_caches`.
            count: how many to propose.
        """
        binding = self._session.io_binding()
        binding.bind_cpu_input("attention_mask", np.ones((1, before), np.int64))
        make = self._onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
        for name, port in self.caches.items():
            dtype, number = _TYPES[port.type]
            values = caches[name].view(np.uint16) if dtype == "bfloat16" else caches[name]
            binding.bind_ortvalue_input(port.name, make(values, number))
        found: list[int] = []
        states = np.ascontiguousarray(state.reshape(1, 1, -1))
        while len(found) < count:
            binding.bind_cpu_input("embeddings", self.embeddings.of_token(token))
            binding.bind_cpu_input("hidden_states", states)
            binding.clear_binding_outputs()
            for name in ("next_token", "hidden_states_out"):
                binding.bind_output(name)
            self._session.run_with_iobinding(binding)
            tokens, output = binding.get_outputs()
            token, states = int(tokens.numpy()[0, 0]), output.numpy()
            found.append(token)
        return found


class DrafterCandidates:
    """Candidates of a drafter for one sequence.

    Args:
        drafter: the drafter.
        context: most tokens of the sequence.
        vocabulary: the size of the verifying model's vocabulary.
    """

    def __init__(self, drafter: Drafter, context: int, vocabulary: int) -> None:
        self._drafter, self._context, self._vocabulary = drafter, context, vocabulary
        self._caches: dict[str, npt.NDArray[Any]] = {}
        self._first = 0
        """The token of the first row of `_states`."""
        self._states = np.empty((0, drafter.embeddings.columns), np.float32)
        """The hidden states of the tokens that the model computed last."""

    def computed(self, length: int, output: Callable[[str], npt.NDArray[Any]]) -> None:
        """See `FollowsModel.computed`."""
        if not self._caches:
            self._caches = self._drafter.empty_caches(self._context)
        for name, cache in self._caches.items():
            rows = output(name)
            cache[:, :, length - rows.shape[2] : length] = rows
        self._states = output(HIDDEN_STATES)[0]
        self._first = length - len(self._states)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """See `Candidates.propose`."""
        before = len(tokens) - 1
        row = before - 1 - self._first
        if not 0 <= row < len(self._states) or tokens[-1] >= self._drafter.embeddings.rows:
            return []
        found = self._drafter.propose(tokens[-1], self._states[row], before, self._caches, count)
        return found if max(found) < self._vocabulary else []

    def rewound(self, length: int) -> None:
        """See `Candidates.rewound`; the state of the last token that is left may be gone, and none is proposed then."""
        self._states = self._states[: max(0, length - self._first)]

# SPDX-License-Identifier: Apache-2.0
"""Runs decoders call by call; and the tolerance between two float32 computations of the same logits."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

PAST, STATES = "past_key_values.", "past."
# GenAI's default slack of a window-sized cache, for single tokens.
SLACK = 16
STORED = {
    "tensor(float)": (np.float32, onnx.TensorProto.FLOAT),
    "tensor(float16)": (np.uint16, onnx.TensorProto.FLOAT16),
    "tensor(bfloat16)": (np.uint16, onnx.TensorProto.BFLOAT16),
    "tensor(int8)": (np.int8, onnx.TensorProto.INT8),
}


class DecoderSession:
    """A decoder's ONNX file on ONNX Runtime's CPU provider, or on other devices, with a KV cache that grows.

    Layers for which the folder's genai_config.json says so have a window-sized cache.
    """

    def __init__(
        self,
        folder: Path,
        devices: Sequence[onnxruntime.OrtEpDevice] = (),
        provider_options: Mapping[str, str] | None = None,
        profile: Path | None = None,
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1  # the models are too small for a second thread
        if profile is not None:  # for `dispatches_of`
            options.enable_profiling = True
            options.profile_file_prefix = str(profile)
        if devices:
            options.add_provider_for_devices(devices, dict(provider_options or {}))
        providers = None if devices else ["CPUExecutionProvider"]
        settings = folder / "genai_config.json"
        config = json.loads(settings.read_text())["model"]["decoder"] if settings.is_file() else {}
        self.session = onnxruntime.InferenceSession(folder / config.get("filename", "model.onnx"), options, providers)
        self._inputs = {value.name for value in self.session.get_inputs()}
        self.cache_inputs = [value for value in self.session.get_inputs() if value.name.startswith((PAST, STATES))]
        window = config.get("sliding_window") or {"layers": []}
        # For sizes that are symbolic in a graph, which those of converted models and optimum's exports are not.
        self._heads = config.get("num_key_value_heads"), config.get("head_size")
        self._capacity = {str(layer): window["window_size"] + SLACK for layer in window["layers"]}
        self.cache: list[onnxruntime.OrtValue] = []
        self._tokens = 0

    def __call__(self, ids: NDArray[np.int64], mask: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Computes the next tokens, ids [B, S]; returns logits [B, S or 1, V]. mask [B, all tokens]; None: all ones."""
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
        if value.name.startswith(STATES):
            return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((batch, *value.shape[1:]), np.float32))
        heads, size = (
            value.shape[axis] if isinstance(value.shape[axis], int) else said
            for said, axis in zip(self._heads, (1, 3), strict=True)
        )
        storage, kind = STORED[value.type]
        capacity = self._capacity.get(value.name.removeprefix(PAST).partition(".")[0], 0)
        empty = np.zeros((batch, heads, capacity, size), storage)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(empty, kind)


def dispatches_of(session: onnxruntime.InferenceSession) -> list[str]:
    """Ends a session's profiling; returns the names of its dispatches to an array."""
    events = json.loads(Path(session.end_profiling()).read_text())
    return [event["name"] for event in events if event.get("args", {}).get("op_name") == "dispatch"]


class PagedSession:
    """A paged decoder's ONNX file, with a KV cache in blocks of 4 tokens, fed like by GenAI's engine.

    On FlowNPU's devices the output caches are the input caches, updated in place; on ONNX Runtime's CPU provider they
    are new arrays.
    """

    BLOCK = 4

    def __init__(
        self,
        folder: Path,
        devices: Sequence[onnxruntime.OrtEpDevice] = (),
        provider_options: Mapping[str, str] | None = None,
        blocks: int = 64,
    ) -> None:
        plain = DecoderSession(folder, devices, provider_options)
        self.session, self._inputs, self._in_place = plain.session, plain.cache_inputs, bool(devices)
        self.cache, self._memory = [], []
        for value in self._inputs:
            storage, kind = STORED[value.type]
            self._memory.append(np.zeros((blocks, self.BLOCK, value.shape[2], value.shape[3]), storage))
            self.cache.append(onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(self._memory[-1], kind))
        # Blocks are taken in an order in which those of a sequence are not neighbours.
        self.free = [block * 37 % blocks for block in range(blocks)]
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, int] = {}

    def __call__(self, work: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[np.float32]]:
        """Computes new tokens of some sequences (`work`: ids by sequence name); returns each one's last logits, [V]."""
        for name, ids in work.items():
            table = self.tables.setdefault(name, [])
            while len(table) * self.BLOCK < self.tokens.get(name, 0) + len(ids):
                table.append(self.free.pop())
        columns = max(len(self.tables[name]) for name in work)
        feeds = {
            "input_ids": np.concatenate(list(work.values())),
            "cumulative_sequence_lengths": np.cumsum([0, *map(len, work.values())]).astype(np.int32),
            "past_sequence_lengths": np.array([self.tokens.get(name, 0) for name in work], np.int32),
            "block_table": np.array(
                [self.tables[name] + [-1] * (columns - len(self.tables[name])) for name in work], np.int32
            ),
        }
        binding = self.session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for value, cache in zip(self._inputs, self.cache, strict=True):
            binding.bind_ortvalue_input(value.name, cache)
        first, *presents = self.session.get_outputs()
        binding.bind_output(first.name)
        for output, cache in zip(presents, self.cache, strict=True):
            if self._in_place:
                binding.bind_ortvalue_output(output.name, cache)
            else:
                binding.bind_output(output.name)
        self.session.run_with_iobinding(binding)
        logits, *self.cache = binding.get_outputs()
        for name, ids in work.items():
            self.tokens[name] = self.tokens.get(name, 0) + len(ids)
        return dict(zip(work, logits.numpy(), strict=True))


def float32_tolerance(logits: NDArray[np.float32], layers: int, widest: int) -> float:
    """How far two float32 computations of the same logits may be apart.

    A sum of K rounded products has a relative error of about sqrt(K) u, u = 2^-24. A token's path to the logits has at
    most 8 such sums per layer (norms before and after, QKV, attention, gate/up, down), of at most `widest` terms. Their
    errors are independent, and so are those of the two computations: they add up in quadrature. The result is relative
    to the largest logit; a factor of 4 covers amplification by the nonlinear functions between the sums, and that the
    largest of many errors counts.
    """
    sums = 2 * (8 * layers + 1)
    return 4 * math.sqrt(sums * widest) * 2**-24 * float(np.abs(logits).max())

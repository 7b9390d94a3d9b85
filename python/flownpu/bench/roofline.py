# SPDX-License-Identifier: Apache-2.0
"""What bounds a decode step: the bytes that it must read, and how fast this machine reads memory."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from flownpu import _native
from flownpu.model.folder import onnx_path, read_genai_config
from flownpu.model.onnx_file import load_model, reading
from flownpu.ops.contracts import input_position
from flownpu.system import keep_on

__all__ = ["DecodeTraffic", "decode_traffic", "graph_traffic", "read_bandwidth"]

# Large against any cache (16 times 32 MiB of L3), small against memory.
_BUFFER_BYTES = 512 << 20
# How long it is read, each way: about as long as a measurement of decode, so that no short burst is taken for the
# memory's speed.
_SECONDS = 0.5
# Tables, of which a step reads a row.
_GATHERS = {"Gather", "Q4NXGather", "GatherBlockQuantized"}
# Inputs that hold the weights of all experts.
_EXPERTS = tuple(input_position("Q4NXMoE", name) for name in ("gate_up", "down"))
# Where operators of attention have the keys of the past, which an encoder's do not have, and the two tables of RoPE.
_PLACES = {"PagedAttention": tuple(input_position("PagedAttention", name) for name in ("key_cache", "cos_cache"))}
for _name in ("FlowQKVAttention", "FlowKVAttention", "GroupQueryAttention"):
    _PLACES[_name] = tuple(input_position("FlowQKVAttention", name) for name in ("past_key", "cos_cache"))


@dataclass(frozen=True)
class DecodeTraffic:
    """The bytes that one decode step cannot but read.

    Attributes:
        weights: all weights that products and norms read, each once; of experts, as many as a token chooses.
        kv_layers: bytes of a token's keys and values, and the window (-1: none), of each layer.
        node_weights: bytes of the weights of each node that has any.
        attentions: the nodes of the layers.
    """

    weights: int
    kv_layers: tuple[tuple[int, int], ...]
    node_weights: dict[str, int]
    attentions: tuple[str, ...]

    def bytes_at(self, tokens: int) -> int:
        """The bytes of a step with that many tokens in the KV cache."""
        return self.weights + sum(_seen(layer, tokens) for layer in self.kv_layers)

    def node_bytes_at(self, node: str, tokens: int) -> int:
        """The bytes that one node of the step reads; 0 for one that reads neither weights nor cache."""
        seen = [_seen(self.kv_layers[self.attentions.index(node)], tokens)] if node in self.attentions else []
        return self.node_weights.get(node, 0) + sum(seen)


def _seen(layer: tuple[int, int], tokens: int) -> int:
    size, window = layer
    return size * (tokens if window < 0 else min(tokens, window))


def decode_traffic(folder: Path) -> DecodeTraffic:
    """Reads from a model folder's graph what its decode steps read.

    Raises:
        FlowNPUError: the folder is no model of GenAI.
        MissingDependencyError: onnx_ir is not installed.
    """
    settings = read_genai_config(folder)
    path = onnx_path(folder, settings)
    model = load_model(path, purpose="The roof of flownpu bench")
    with reading(path):
        return graph_traffic(model.graph, settings["model"]["decoder"].get("head_size") or 0)


def graph_traffic(graph: Any, head_size: int = 0) -> DecodeTraffic:
    """What decode steps of a graph (onnx_ir's) read.

    Args:
        graph: of FlowNPU's operators, or as GenAI's builder writes it.
        head_size: of attentions that do not say it.
    """
    weights: dict[str, int] = {}
    node_weights: dict[str, int] = {}
    layers: dict[str, tuple[int, int]] = {}
    for node in graph:
        inputs = list(node.inputs)
        if node.op_type in _GATHERS:
            continue
        if node.op_type in _PLACES:
            past, tables = _PLACES[node.op_type]
            if len(inputs) > past and inputs[past] is not None:
                layers[node.name] = _layer(node, inputs[past], head_size)
                del inputs[tables : tables + 2]
        own = {
            value.name: value.const_value.nbytes // _parts(node, place)
            for place, value in enumerate(inputs)
            if value is not None and _constant(value)
        }
        weights |= own
        node_weights[node.name] = sum(own.values())
    return DecodeTraffic(sum(weights.values()), tuple(layers.values()), node_weights, tuple(layers))


def _parts(node: Any, place: int) -> Fraction | int:
    """How many equal parts a constant input has, of which a step reads one."""
    if node.op_type != "Q4NXMoE" or place not in _EXPERTS:
        return 1
    return Fraction(*(node.attributes[name].as_int() for name in ("num_experts", "experts_per_token")))


def _constant(value: Any) -> bool:
    return value.is_initializer() and value.const_value is not None


def _layer(node: Any, past_key: Any, head_size: int) -> tuple[int, int]:
    heads = node.attributes["kv_num_heads"].as_int()
    size = node.attributes["head_size"].as_int() if "head_size" in node.attributes else head_size
    window = node.attributes.get("local_window_size")
    # A row of an int8 cache has its scale behind the head's elements: what the graph says of it is its size.
    last = size if past_key.shape is None or len(past_key.shape) != 4 else past_key.shape[3]
    size = last if isinstance(last, int) else size
    # Keys and values.
    return 2 * heads * size * past_key.dtype.itemsize, -1 if window is None else window.as_int()


def read_bandwidth(threads: int | None = None) -> float:
    """Bytes a second at which this many threads (default: one a core) read memory together: the median of many reads.

    numpy's maximum of int32 is a loop of vector loads. It needs far fewer cycles than memory takes, and gives the rates
    of a loop of AVX-512 loads in C++. It is measured with each thread on a core of its own, since a scheduler may leave
    several on one core for the first tenth of a second, and with threads that go where the scheduler puts them, since a
    core of this machine may be busy with something else. The better of the two is the roof.
    """
    cores = [processor.number for processor in _native.computing_processors(_native.processors())]
    parts = np.array_split(np.ones(_BUFFER_BYTES // 4, np.int32), threads or len(cores))
    return max(_median_rate(parts, cores), _median_rate(parts, None))


def _median_rate(parts: list[np.ndarray], cores: list[int] | None) -> float:
    """Bytes a second with a thread for each part; thread i stays on core i (modulo their number), if they are given."""

    def bind(number: Iterator[int]) -> None:
        if cores is not None:
            keep_on(cores[next(number) % len(cores)])

    times: list[float] = []
    with ThreadPoolExecutor(len(parts), initializer=bind, initargs=(count(),)) as pool:
        list(pool.map(np.max, parts))  # starts the threads
        while sum(times) < _SECONDS:
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            times.append(time.perf_counter() - started)
    return _BUFFER_BYTES / median(times)

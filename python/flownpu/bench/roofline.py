# SPDX-License-Identifier: Apache-2.0
"""The memory roof of a decode step: the bytes that it must read, and how fast this machine reads memory."""

import math
import time
from collections.abc import Iterator, Sequence
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

# Much larger than any cache (16 times 32 MiB of L3), small compared with memory.
_BUFFER_BYTES = 512 << 20
# Seconds of reading, with bound threads and with free ones. They are about as long as a measurement of decode, so that
# a short burst does not count as the memory's speed.
_SECONDS = 0.5
# Look-ups in tables, of which a step reads one row.
_GATHERS = {"Gather", "Q4NXGather", "GatherBlockQuantized"}
# Inputs that hold the weights of all experts.
_EXPERTS = tuple(input_position("Q4NXMoE", name) for name in ("gate_up", "down"))
# Positions of two inputs of attention operators: the past keys (an encoder's attention has none), and the first of the
# two RoPE tables.
_PLACES = {"PagedAttention": tuple(input_position("PagedAttention", name) for name in ("key_cache", "cos_cache"))}
for _name in ("FlowQKVAttention", "FlowKVAttention", "GroupQueryAttention"):
    _PLACES[_name] = tuple(input_position("FlowQKVAttention", name) for name in ("past_key", "cos_cache"))
# Operators whose past state, of the same size whatever the context, is their fourth input.
_STATES = {"CausalConvWithState", "LinearAttention"}
_PAST_STATE = 3


@dataclass(frozen=True)
class DecodeTraffic:
    """The bytes that one decode step must read.

    Attributes:
        weights: bytes of all weights that products and norms read, each once; of experts, as many as a token chooses.
        kv_layers: for each layer the bytes of one token's keys and values, and the window (-1: none).
        node_weights: bytes of the weights and the state of each node, by its name.
        attentions: names of the attention nodes, in the order of `kv_layers`.
        states: bytes of the states of layers that have one in the place of keys and values.
    """

    weights: int
    kv_layers: tuple[tuple[int, int], ...]
    node_weights: dict[str, int]
    attentions: tuple[str, ...]
    states: int = 0

    def bytes_at(self, tokens: int) -> int:
        """The bytes of a step with `tokens` tokens in the KV cache."""
        return self.weights + self.states + sum(_seen(layer, tokens) for layer in self.kv_layers)

    def node_bytes_at(self, node: str, tokens: int) -> int:
        """The bytes that one node of the step reads; 0 for one that reads neither weights nor cache."""
        seen = [_seen(self.kv_layers[self.attentions.index(node)], tokens)] if node in self.attentions else []
        return self.node_weights.get(node, 0) + sum(seen)


def _seen(layer: tuple[int, int], tokens: int) -> int:
    size, window = layer
    return size * (tokens if window < 0 else min(tokens, window))


def decode_traffic(folder: Path) -> DecodeTraffic:
    """The bytes that decode steps of a model folder read, from its graph.

    Raises:
        FlowNPUError: the folder holds no GenAI model.
        MissingDependencyError: onnx_ir is not installed.
    """
    settings = read_genai_config(folder)
    path = onnx_path(folder, settings)
    model = load_model(path, purpose="The roof of flownpu bench")
    with reading(path):
        return graph_traffic(model.graph, settings["model"]["decoder"].get("head_size") or 0)


def graph_traffic(graph: Any, head_size: int = 0) -> DecodeTraffic:
    """The bytes that decode steps of a graph (onnx_ir's) read.

    Args:
        graph: a graph of FlowNPU's operators, or one that GenAI's model builder wrote.
        head_size: head size of attention nodes that have no such attribute.
    """
    weights: dict[str, int] = {}
    node_weights: dict[str, int] = {}
    layers: dict[str, tuple[int, int]] = {}
    states = 0
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
        state = _state_bytes(node, inputs)
        node_weights[node.name] = sum(own.values()) + state
        states += state
    return DecodeTraffic(sum(weights.values()), tuple(layers.values()), node_weights, tuple(layers), states)


def _state_bytes(node: Any, inputs: Sequence[Any]) -> int:
    """The bytes of one sequence's state that a node goes on from; 0 if it has none."""
    past = inputs[_PAST_STATE] if node.op_type in _STATES and len(inputs) > _PAST_STATE else None
    if past is None or past.shape is None or past.dtype is None:
        return 0
    sizes = [size for size in past.shape[1:] if isinstance(size, int)]
    return math.prod(sizes) * int(past.dtype.itemsize) if len(sizes) == len(past.shape) - 1 else 0


def _parts(node: Any, place: int) -> Fraction | int:
    """The number of equal parts of a constant input, of which a step reads one."""
    if node.op_type != "Q4NXMoE" or place not in _EXPERTS:
        return 1
    return Fraction(*(node.attributes[name].as_int() for name in ("num_experts", "experts_per_token")))


def _constant(value: Any) -> bool:
    return value.is_initializer() and value.const_value is not None


def _layer(node: Any, past_key: Any, head_size: int) -> tuple[int, int]:
    heads = node.attributes["kv_num_heads"].as_int()
    size = node.attributes["head_size"].as_int() if "head_size" in node.attributes else head_size
    window = node.attributes.get("local_window_size")
    # In an int8 cache a row has a scale behind the head's elements, so its size is the one that the graph declares.
    last = size if past_key.shape is None or len(past_key.shape) != 4 else past_key.shape[3]
    size = last if isinstance(last, int) else size
    # Keys and values.
    return 2 * heads * size * past_key.dtype.itemsize, -1 if window is None else window.as_int()


def read_bandwidth(threads: int | None = None) -> float:
    """Bytes per second that `threads` threads (None: one per core) read from memory together, median of many reads.

    Each thread reads in four places at once, which memory answers faster than one. It is measured with each thread
    bound to a core of its own, since a scheduler may leave several on one core for the first tenth of a second, and
    with unbound threads, since a core of this machine may be busy with something else. The faster of the two counts.
    """
    cores = [processor.number for processor in _native.computing_processors(_native.processors())]
    parts = np.array_split(np.ones(_BUFFER_BYTES // 8, np.uint64), threads or len(cores))
    return max(_median_rate(parts, cores), _median_rate(parts, None))


def _median_rate(parts: list[np.ndarray], cores: list[int] | None) -> float:
    """Bytes per second with a thread for each part; thread i is bound to core i (modulo their number), if given."""

    def bind(number: Iterator[int]) -> None:
        if cores is not None:
            keep_on(cores[next(number) % len(cores)])

    times: list[float] = []
    with ThreadPoolExecutor(len(parts), initializer=bind, initargs=(count(),)) as pool:
        list(pool.map(_native.read_memory, parts))  # starts the threads
        while sum(times) < _SECONDS:
            started = time.perf_counter()
            list(pool.map(_native.read_memory, parts))
            times.append(time.perf_counter() - started)
    return _BUFFER_BYTES / median(times)

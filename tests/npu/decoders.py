# SPDX-License-Identifier: Apache-2.0
"""Decoders for the tests of the NPU's device: graphs as the device gets them, and a session of its step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import onnx.shape_inference

from flownpu.ops import q4nx
from flownpu.ops.definitions.int8_cache import SCALE_BYTES
from tests.ops.device import _argument, testing

npu = testing.npu
BFLOAT16 = ml_dtypes.bfloat16
BFLOAT16_KIND = 16  # ONNX's number

# ONNX's numbers of element types, and what the device calls them.
_TYPES = {1: "float", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 16: "bfloat16"}


@dataclass
class GivenNode:
    """A node as the execution provider reads it. Values: name, type, shape or None, initializer or None."""

    name: str
    op_type: str
    domain: str
    attributes: dict[str, Any]
    inputs: list[list[Any]]
    outputs: list[list[Any]] = field(default_factory=list)

    def given(self) -> tuple[Any, ...]:
        """For `npu.Partition`."""
        values = ([tuple(value) for value in of] for of in (self.inputs, self.outputs))
        return (self.name, self.op_type, self.domain, self.attributes, *values)


def read_nodes(folder: Path, file: str = "model.onnx") -> tuple[list[GivenNode], list[str]]:
    """The nodes of a model, in order, and the names of its outputs. Constant nodes are initializers, as in ORT."""
    # ONNX Runtime, too, infers the types of values between nodes.
    model = onnx.shape_inference.infer_shapes(onnx.load(folder / file))
    graph = model.graph
    arrays = {tensor.name: (tensor.data_type, onnx.numpy_helper.to_array(tensor)) for tensor in graph.initializer}
    types: dict[str, tuple[int, list[int]]] = {}
    for value in (*graph.input, *graph.output, *graph.value_info):
        tensor = value.type.tensor_type
        types[value.name] = (tensor.elem_type, [dim.dim_value or -1 for dim in tensor.shape.dim])
    nodes = []
    for node in graph.node:
        attributes = {a.name: _attribute(onnx.helper.get_attribute_value(a)) for a in node.attribute}
        if node.op_type == "Constant":
            ((key, value),) = attributes.items()
            array = onnx.numpy_helper.to_array(value) if key == "value" else np.array(value)
            arrays[node.output[0]] = (onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array)
            continue

        def value_of(name: str) -> list[Any]:
            if name in arrays:
                kind, array = arrays[name]
                array = np.array(array)  # a copy, which may be written to
                # numpy's exchange protocol does not know bfloat16.
                return [
                    name,
                    _TYPES[kind],
                    list(array.shape),
                    array.view(np.uint16) if kind == BFLOAT16_KIND else array,
                ]
            kind, shape = types.get(name, (1, None))
            return [name, _TYPES[kind], shape, None]

        inputs, outputs = ([value_of(name) for name in names] for names in (node.input, node.output))
        name = node.name or node.output[0]
        nodes.append(GivenNode(name, node.op_type, node.domain, attributes, inputs, outputs))
    return nodes, [value.name for value in graph.output]


def _attribute(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def in_layout(nodes: list[GivenNode], layout: q4nx.Layout, *, symmetric: bool) -> list[GivenNode]:
    """The nodes with their Q4NX weights in blocks of this layout.

    Args:
        nodes: the nodes of a model; those without Q4NX weights stay as they are.
        layout: of the new blocks.
        symmetric: take -8 times the scales for minima, so that any layout can hold the weights.
    """
    return [_node_in_layout(node, layout, symmetric=symmetric) for node in nodes]


def _node_in_layout(node: GivenNode, layout: q4nx.Layout, *, symmetric: bool) -> GivenNode:
    place = {"Q4NXGather": 0, "Q4NXMatMul": 1}.get(node.op_type)
    if place is None:
        return node
    name, kind, _, blocks = node.inputs[place]
    gated = node.attributes.get("gating", "none") != "none"
    halves = []
    for half in np.split(blocks, 1 + gated):
        quantized = q4nx.unpack(half, node.attributes["M"], node.attributes["K"])
        if symmetric:
            quantized = quantized._replace(minimum=quantized.scale * BFLOAT16(-8))
        if layout.table:  # of the values -8 to 7
            codes = quantized.codes.astype(np.int8) - np.int8(8)
            quantized = quantized._replace(codes=codes, minimum=np.zeros_like(quantized.scale))
        halves.append(q4nx.pack(*quantized, layout))
    inputs = list(node.inputs)
    inputs[place] = [name, kind, [sum(map(len, halves)), *halves[0].shape[1:]], np.concatenate(halves)]
    return replace(node, inputs=inputs)


def in_eight_bits(nodes: list[GivenNode]) -> list[GivenNode]:
    """The nodes with the same weights of products, in codes of 8 bits: eight times those of 4, of an eighth scale."""
    found = []
    for node in nodes:
        inputs = [list(value) for value in node.inputs]
        for place in {"Q4NXMatMul": [1], "Q4NXMoE": [2, 3]}.get(node.op_type, []):
            name, kind, _, blocks = inputs[place]
            columns = blocks.shape[1] * q4nx.layout_of(blocks).block_columns
            codes, scale, minimum = q4nx.unpack(blocks, len(blocks) * q4nx.BLOCK_ROWS, columns)
            eighth = (scale.astype(np.float32) / 8).astype(BFLOAT16)
            packed = q4nx.pack((8 * codes).astype(np.int8), eighth, minimum, q4nx.EIGHT_BITS_WITH_MINIMA)
            inputs[place] = [name, kind, list(packed.shape), packed]
        found.append(replace(node, inputs=inputs))
    return found


COS_CACHE, POSITION_IDS, ATTENTION_BIAS = 7, 9, 10  # inputs of attention


def with_input(nodes: list[GivenNode], place: int, name: str, kind: str) -> list[GivenNode]:
    """The nodes, in which a value is made an input of all attention."""
    for node in nodes:
        if node.op_type == "FlowQKVAttention":
            node.inputs.extend([["", "", None, None] for _ in range(place + 1 - len(node.inputs))])
            node.inputs[place] = [name, kind, None, None]
    return nodes


def with_position_ids(nodes: list[GivenNode]) -> list[GivenNode]:
    """The nodes, in which position_ids are an input of all attention."""
    return with_input(nodes, POSITION_IDS, "position_ids", "int64")


def partition(nodes: list[GivenNode]) -> Any:
    """For `npu.lower_layers` and `NpuDevice.lower`."""
    return npu.Partition([node.given() for node in nodes])


class Session:
    """A model's node DecoderLayers, prepared on a device; `nodes`, `outputs`: as `read_nodes` returns them."""

    def __init__(self, device: Any, nodes: list[GivenNode], outputs: list[str]) -> None:
        self.device = device
        self._partition = partition(nodes)
        self.lowered = device.lower(self._partition, outputs=outputs)
        assert self.lowered.on_host == [], self.lowered.on_host
        self.node = next(node for node in self.lowered.nodes if node.op_type == "DecoderLayers")
        self.attributes = self.node.attributes
        arrays = {
            name: array.view(BFLOAT16) if kind == "bfloat16" else array
            for node in nodes
            for name, kind, _, array in node.inputs
            if array is not None
        }
        # Absent inputs of experts have places among the constants.
        names = [*dropwhile(lambda name: name not in arrays, self.node.inputs)]
        names = [name for name in names if name in arrays or not name]
        self._constants = [_argument(arrays.get(name)) for name in names]
        self.step = device.prepare(self.node)

    def past(self, capacity: int, dtype: Any = BFLOAT16) -> list[np.ndarray]:
        """Zeros as keys and values of each layer; rows of int8 have room for their scales."""
        columns = self.attributes["attention.head_size"] + (SCALE_BYTES if dtype == np.int8 else 0)
        sizes = (1, self.attributes["attention.kv_heads"], capacity, columns)
        return [np.zeros(sizes, dtype) for _ in range(2 * self.attributes["layers"])]

    def run(
        self,
        hidden: np.ndarray,
        total: int,
        past: list[np.ndarray],
        *,
        share: bool = True,
        length: int | None = None,
        blocks: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
        bias: np.ndarray | list[np.ndarray] | None = None,
        tables: Sequence[np.ndarray] = (),
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits [V] of the last of the tokens `hidden` [S, D], or [S, V] if the model has all, and the presents.

        Args:
            hidden: float32.
            total: tokens so far, these included.
            past: key and value of each layer.
            share: whether the presents have the memory of the past, as GenAI binds them.
            length: seqlens_k + 1, if it is not the total.
            blocks: the number of each token's block; None: the model has no such input.
            positions: position_ids; None: the model has no such input.
            bias: attention_bias, float32, one or in the order of the layers; None: the model has no such input.
            tables: cos_cache and sin_cache of each rotary table, if the model has them as inputs.
        """
        rows = np.ascontiguousarray(hidden[None], np.float32)
        lengths = np.array(total, np.int32), np.array([(length or total) - 1], np.int32)
        numbers: list[np.ndarray] = [] if blocks is None else [np.array([blocks], np.int32)]
        numbers += [] if positions is None else [np.array([positions], np.int64)]
        numbers += [] if bias is None else bias if isinstance(bias, list) else [bias]
        given = [_argument(array) for array in (rows, *lengths, *past, *numbers, *tables)]
        given += self._constants
        logits_shape, *shapes = self.step.infer(given, 1 + len(past))
        logits = np.full(logits_shape, np.nan, np.float32)
        presents = past if share else [np.zeros(shape, past[0].dtype) for shape in shapes]
        assert [list(array.shape) for array in presents] == shapes
        self.step.run(given, [_argument(array) for array in (logits, *presents)])
        return logits[0] if self.attributes["all_logits"] else logits[0, 0], presents

# SPDX-License-Identifier: Apache-2.0
"""Passes onnx_ir models to the graph library in C++, which applies rules and predicts an NPU's part."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from flownpu import _native
from flownpu.graph_rewrites.q4nx_tensor import Q4NXTensor
from flownpu.graph_rewrites.report import Miss

# The types that the graph library knows, with its names; rules do not look at values of other types.
_TYPES = {
    ir.DataType.FLOAT: "float",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.INT64: "int64",
    ir.DataType.INT32: "int32",
    ir.DataType.INT8: "int8",
    ir.DataType.UINT8: "uint8",
    ir.DataType.BOOL: "bool",
    ir.DataType.INT4: "int4",
    ir.DataType.UINT4: "uint4",
    ir.DataType.FLOAT8E8M0: "float8e8m0",
}
_DATA_TYPES = {name: kind for kind, name in _TYPES.items()}
_ATTRIBUTES = (
    ir.AttributeType.INT,
    ir.AttributeType.FLOAT,
    ir.AttributeType.STRING,
    ir.AttributeType.INTS,
    ir.AttributeType.FLOATS,
)
# The operator type and domain that replace those of a node that no rule may look at.
_OPAQUE = "opaque"


def native_graph(model: ir.Model) -> tuple[list[_native.Node], list[str]]:
    """A model's graph for the graph library.

    Returns:
        The nodes, without Constant nodes; and the names of values that are read from elsewhere: the graph's outputs,
        and what subgraphs read.
    """
    graph = model.graph
    values: dict[ir.Value | None, _native.Value] = {}  # each converted once: reading a constant may compute it
    nodes = [_node(node, model, values) for node in graph if node.op_type != "Constant"]
    read = [value.name or "" for value in graph.outputs]
    for node in graph:
        for value in node.outputs:
            # Used by the body of a control flow node.
            read += [value.name or "" for use in value.uses() if use.node.graph is not graph]
    return nodes, read


def apply_rules(model: ir.Model, report: Any, rules: Sequence[str] = tuple(_native.CONVERSION_RULES)) -> None:
    """Applies rules of the graph library to a model, and adds to a report how often, and what they left and why.

    Args:
        model: changed in place. Weights are packed when they are read.
        report: the `Report` to add to.
        rules: the rules' names, by default all that conversion applies; the library knows their order.

    Raises:
        ValueError: there is no such rule, or a node that a rule matches is damaged.
    """
    graph = model.graph
    _name_values(graph)
    nodes, read = native_graph(model)
    rewriting = _native.Rewriting(nodes, read, list(graph.initializers), list(rules), _weights(graph))
    if rewriting.damage:
        raise ValueError(rewriting.damage[0])
    makers = {value.name: node for node in graph for value in node.outputs if value.name}
    known = [value for node in graph for value in (*node.inputs, *node.outputs) if value is not None]
    values = {value.name: value for value in known if value.name}
    count = len(graph)
    for changed in rewriting.changed:
        node = makers.get(changed.outputs[0].name) or _inserted(changed, values, graph)
        _change(node, changed, values, rewriting, graph)
    if len(graph) > count:
        graph.sort()
    for rule in rules:
        report.applied[rule] = rewriting.applied.get(rule, 0)
    reported = {(miss.rule, miss.node) for miss in report.misses}
    misses = [Miss(miss.rule, miss.node, miss.reason) for miss in rewriting.misses]
    report.misses += [miss for miss in misses if (miss.rule, miss.node) not in reported]


def describe_decoder(model: ir.Model) -> _native.Decoder:
    """The layers of a model's decoder, exported or converted, as an NPU would compute them.

    Raises:
        ValueError: a session would not give the decoder to an NPU; the reason is the one that a session gives.
    """
    return _native.describe_decoder(*native_graph(model), _weights(model.graph))


def describe_encoder(model: ir.Model) -> _native.EncoderShape:
    """The sizes of a model's image encoder.

    Raises:
        ValueError: a session would not give the encoder to an NPU; the reason is the one that a session gives.
    """
    return _native.describe_encoder(*native_graph(model), _weights(model.graph))


def find_decoder(model: ir.Model) -> _native.Decoder:
    """The layers of a converted model's decoder, whichever device computes them.

    Raises:
        ValueError: there are none, or they have biases, no RoPE, or a choice of two RoPE tables.
    """
    return _native.find_decoder(*native_graph(model))


def describe_operators(model: ir.Model) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """(stem, sizes) of each single operator that a session gives to an NPU, and the reasons for leaving others.

    Raises:
        ValueError: the graph is damaged.
    """
    return _native.describe_operators(*native_graph(model), _weights(model.graph))


def _weights(graph: ir.Graph) -> dict[str, _native.Q4NXConstant]:
    """The graph's constants that are packed when they are read, by name."""
    return {
        name: value.const_value.weight
        for name, value in graph.initializers.items()
        if isinstance(value.const_value, Q4NXTensor)
    }


def _name_values(graph: ir.Graph) -> None:
    """Gives names to values without one, which rules for plain graphs make."""
    unnamed = [value for node in graph for value in node.outputs if value.name is None]
    taken = {value.name for node in graph for value in (*node.inputs, *node.outputs) if value is not None}
    names = (name for i in itertools.count() if (name := f"value_{i}") not in taken)
    for value, name in zip(unnamed, names, strict=False):
        value.name = name


def _node(node: ir.Node, model: ir.Model, values: dict[ir.Value | None, _native.Value]) -> _native.Node:
    """The node for the graph library; an opaque one if it has types or attributes that the library does not know."""
    for name in (node.name, *(value.name for value in (*node.inputs, *node.outputs) if value is not None)):
        if name is not None and not isinstance(name, str):
            raise ValueError(f"expected names that are text, got {name!r}")  # the file is damaged
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    types = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None}
    for value in (*node.inputs, *node.outputs):
        if value not in values:
            values[value] = _value(value)
    inputs, outputs = ([values[value] for value in side] for side in (node.inputs, node.outputs))
    version = node.version or model.opset_imports.get(node.domain, 1)
    if types - {None, *_TYPES} or any(attribute.type not in _ATTRIBUTES for attribute in node.attributes.values()):
        return _native.Node(node.name or "", _OPAQUE, _OPAQUE, version, {}, inputs, outputs)
    return _native.Node(node.name or "", node.op_type, node.domain, version, attributes, inputs, outputs)


def _value(value: ir.Value | None) -> _native.Value:
    if value is None or not value.name:
        return _native.Value("")
    constant = None if value.is_graph_input() else ir.convenience.get_const_tensor(value)
    kind = _TYPES.get(_data_type(constant or value))
    if kind is None:
        return _native.Value(value.name)  # only opaque nodes use it
    if constant is not None:
        content = None if isinstance(constant, Q4NXTensor) else _bytes(constant)
        return _native.Value(value.name, kind, list(constant.shape.numpy()), content)
    shape = None if value.shape is None else [size if isinstance(size, int) else -1 for size in value.shape]
    return _native.Value(value.name, kind, shape)


def _data_type(value: ir.Value | ir.TensorProtocol) -> ir.DataType:
    """The value's type. If the file does not say it, a Reshape has its operand's type, and any other value is float."""
    producer = value.producer() if isinstance(value, ir.Value) and value.dtype is None else None
    if producer is not None and producer.op_type == "Reshape" and producer.inputs and producer.inputs[0] is not None:
        return _data_type(producer.inputs[0])
    return value.dtype or ir.DataType.FLOAT


def _bytes(tensor: ir.TensorProtocol) -> Any:
    if tensor.dtype.bitwidth < 8:  # NumPy has an element in a byte
        return np.frombuffer(tensor.tobytes(), np.uint8)
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)


def _change(
    node: ir.Node, changed: _native.Node, values: dict[str, ir.Value], rewriting: _native.Rewriting, graph: ir.Graph
) -> None:
    """Changes a node to the rules' result."""
    node.name, node.op_type, node.domain = changed.name or None, changed.op_type, changed.domain
    node.version, node.overload = changed.version, ""
    node.attributes.clear()
    for attribute in ir.convenience.convert_attributes(changed.attributes):
        node.attributes.add(attribute)
    node.resize_inputs(len(changed.inputs))
    for place, value in enumerate(changed.inputs):
        if value.name and value.name not in values:
            values[value.name] = _initializer(value, rewriting)
            graph.register_initializer(values[value.name])
        node.replace_input_with(place, values[value.name] if value.name else None)
    node.resize_outputs(len(changed.outputs))
    for old, new in zip(node.outputs, changed.outputs, strict=True):
        if old.shape is not None and new.shape and new.shape[-1] >= 0:
            old.shape = ir.Shape([*old.shape[:-1], new.shape[-1]])


def _inserted(made: _native.Node, values: dict[str, ir.Value], graph: ir.Graph) -> ir.Node:
    """A node that rules made: now the graph's last, with its new values, and as yet without inputs."""
    outputs = [ir.Value(name=value.name, type=ir.TensorType(_DATA_TYPES[value.type])) for value in made.outputs]
    values.update({value.name: value for value in outputs if value.name})
    node = ir.Node(made.domain, made.op_type, [], outputs=outputs)
    graph.append(node)
    return node


def _initializer(value: _native.Value, rewriting: _native.Rewriting) -> ir.Value:
    """The initializer for a constant that a rule made."""
    kind, weight, shape = _DATA_TYPES[value.type], rewriting.weight(value), value.shape or []
    if weight is not None:
        tensor: ir.TensorProtocol = Q4NXTensor(weight, value.name)
    else:
        tensor = ir.Tensor(value.bytes().view(kind.numpy()).reshape(shape), dtype=kind, name=value.name)
    return ir.Value(name=value.name, const_value=tensor, type=ir.TensorType(kind), shape=ir.Shape(shape))

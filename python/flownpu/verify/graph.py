# SPDX-License-Identifier: Apache-2.0
"""A copy of a decoder's graph, in memory, whose layers can be looked at: the residual stream between them goes out.

*Exposed*, the stream before each layer and after the last is an output. *Forced*, it is an input too: each layer then
starts from what it is given, so that its output shows its own error and not those before it.

The stream is found by the graph's form, not by names: it is what the norm before an attention normalises, and the norm
before the LM head. A SkipSimplifiedLayerNormalization yields it as the sum that it normalises.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from flownpu.errors import FlowNPUError, require
from flownpu.model.onnx_file import load_model, reading

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DecoderGraph", "hidden_input"]

_ATTENTIONS = {"FlowQKVAttention", "GroupQueryAttention"}
_SKIP = "SkipSimplifiedLayerNormalization"
# Norms, and which of their inputs is the weight.
_NORMS = {"SimplifiedLayerNormalization": 1, "RMSNormalization": 1, "LayerNormalization": 1, _SKIP: 2}
_SUM = 3  # output of _SKIP that is the sum
# Between the last norm and the LM head: what selects the last token, and gives it its axis back.
_SELECTIONS = {"Gather", "GatherND", "Slice", "Unsqueeze"}
_QUANTISED = {"MatMulNBits", "Q4NXMatMul", "FusedDQP", "Q4NXMoE"}


def hidden_input(layer: int) -> str:
    """The name of the input that the layer starts from, in a forced graph."""
    return f"flownpu.hidden.{layer}"


class DecoderGraph:
    """A decoder's graph that yields the logits of all tokens and the residual stream.

    Attributes:
        model: onnx_ir's, in memory; its weights stay in their file.
        path: that file's graph.
        layers: how many it has.
        quantised: whether its products have 4-bit weights.
        hidden: the outputs' names: before layer 0, .., after the last.
    """

    def __init__(self, path: Path) -> None:
        """Reads the graph.

        Raises:
            FlowNPUError: it is no ONNX model, or not a decoder whose layers can be told apart.
            MissingDependencyError: onnx_ir is not installed.
        """
        self._ir = require("onnx_ir", extra="convert", purpose="flownpu verify")
        self.path = path
        self.model = load_model(path, purpose="flownpu verify")
        with reading(path):
            self._find_norms()

    def _find_norms(self) -> None:
        """Finds the norms between the layers, and makes what they normalise outputs."""
        path, graph = self.path, self.model.graph
        attentions = [node for node in graph if node.op_type in _ATTENTIONS]
        if not attentions or graph.outputs[0].name != "logits":
            raise FlowNPUError(
                f"{path}: expected a decoder with FlowQKVAttention or GroupQueryAttention in each layer and logits as "
                f"its first output, got {len(attentions)} of them and {graph.outputs[0].name}"
            )
        if any(_is_norm(node.inputs[0]) for node in attentions):
            raise FlowNPUError(
                f"{path}: queries of all heads are normalised at once, and layers have no norm before their attention, "
                "by which they are told apart: they cannot be compared"
            )
        self.layers = len(attentions)
        self.quantised = any(node.op_type in _QUANTISED for node in graph)
        last = self._norm_before(graph.outputs[0].producer(), None)
        size = _weight_size(last)
        self._norms = [*(self._norm_before(node.inputs[0].producer(), size) for node in attentions), last]
        for node in graph:
            if node.op_type == "MatMulNBits":  # in float32, which nothing is compared with that is less exact
                node.attributes["accuracy_level"] = self._ir.AttrInt64("accuracy_level", 1)
            elif node in attentions:  # a cache that begins empty grows
                node.attributes["sliding_window_cache"] = self._ir.AttrInt64("sliding_window_cache", 0)
        # ONNX Runtime takes equal names of capacities for equal sizes, and would write a grown cache over an empty one.
        for value in (*graph.inputs, *graph.outputs):
            if value.shape is not None and len(value.shape) == 4:
                value.shape = self._ir.Shape([*value.shape[:2], None, value.shape[3]])
        self._keep_all_tokens(last)
        self.hidden = [self._expose(norm, size) for norm in self._norms]

    def _norm_before(self, start: Any, size: int | None) -> Any:
        """The nearest norm before a node, with a weight of that size."""
        waiting, seen = deque([start]), set()
        while waiting:
            node = waiting.popleft()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node.op_type in _NORMS and size in (None, _weight_size(node)):
                return node
            waiting.extend(value.producer() for value in node.inputs if value is not None)
        raise FlowNPUError(f"{self.path}: no norm before {start.name if start else 'the logits'}: no layers to compare")

    def _keep_all_tokens(self, last: Any) -> None:
        """Takes out what selects the last token's hidden state before the LM head."""
        value = self.model.graph.outputs[0]
        waiting = deque([value.producer()])
        while waiting:
            node = waiting.popleft()
            if node is None or node is last:
                continue
            if node.op_type in _SELECTIONS:
                node.outputs[0].replace_all_uses_with(node.inputs[0])
            if node.inputs and node.inputs[0] is not None:
                waiting.append(node.inputs[0].producer())
        if value.shape is not None:
            value.shape = self._ir.Shape([value.shape[0], None, value.shape[2]])

    def _expose(self, norm: Any, size: int) -> str:
        """Makes what a norm normalises an output."""
        if norm.op_type == _SKIP:
            if len(norm.outputs) <= _SUM:
                norm.resize_outputs(_SUM + 1)
                for output in norm.outputs[1:_SUM]:
                    output.name = ""
            value = norm.outputs[_SUM]
            value.name = value.name or f"{norm.name}/sum"
        else:
            value = norm.inputs[0]
        value.type = self._ir.TensorType(self._ir.DataType.FLOAT)
        value.shape = self._ir.Shape([None, None, size])
        self.model.graph.outputs.append(value)
        return str(value.name)

    def force(self) -> None:
        """Makes each layer, and the LM head, start from an input of its own."""
        for layer, norm in enumerate(self._norms):
            exposed = norm.outputs[_SUM] if norm.op_type == _SKIP else norm.inputs[0]
            given = self._ir.Value(name=hidden_input(layer), type=exposed.type, shape=exposed.shape)
            self.model.graph.inputs.append(given)
            if norm.op_type == _SKIP:
                self._normalise(norm, given)
            for use in list(exposed.uses()):
                use.node.replace_input_with(use.idx, given)

    def _normalise(self, skip: Any, given: Any) -> None:
        """Puts a norm of what is given in the place of a norm of a sum, which stays to yield the sum."""
        attributes = {"epsilon": skip.attributes["epsilon"].as_float(), "axis": -1, "stash_type": 1}
        norm = self._ir.node("SimplifiedLayerNormalization", [given, skip.inputs[2]], attributes)
        norm.name = f"{skip.name}/forced"
        norm.outputs[0].name = f"{norm.name}/output"
        skip.outputs[0].replace_all_uses_with(norm.outputs[0])
        self.model.graph.insert_after(skip, norm)

    def proto(self) -> bytes:
        """The model, with its weights where they were."""
        return bytes(self._ir.to_proto(self.model).SerializeToString())


def _is_norm(value: Any) -> bool:
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type in _NORMS


def _weight_size(norm: Any) -> int:
    weight = norm.inputs[_NORMS[norm.op_type]]
    return int(weight.shape[0])

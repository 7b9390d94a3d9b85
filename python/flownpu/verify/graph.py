# SPDX-License-Identifier: Apache-2.0
"""Changes a copy of a decoder's graph, in memory, so that the residual stream between its layers can be read and set.

*Exposed*, the stream before each layer and after the last is an output. *Forced*, it is an input too: each layer then
starts from what it is given, so that its output shows its own error and not those before it.

The stream is found by the graph's form, not by names: it is the input of the norm before each attention, and of the
norm before the LM head. A SkipSimplifiedLayerNormalization yields it as the sum that it normalises.
"""

from collections import deque
from pathlib import Path
from typing import Any

from flownpu.errors import FlowNPUError, require
from flownpu.model.onnx_file import load_model, reading

_STATES = {"LinearAttention", "CausalConvWithState"}
_ATTENTIONS = {"FlowQKVAttention", "GroupQueryAttention"}
_SKIP = "SkipSimplifiedLayerNormalization"
# Norms, with the position of their weight among the inputs.
_NORMS = {"SimplifiedLayerNormalization": 1, "RMSNormalization": 1, "LayerNormalization": 1, _SKIP: 2}
_SUM = 3  # the output of _SKIP that is the sum
# Operators between the last norm and the LM head that select the last token, or restore its axis.
_SELECTIONS = {"Gather", "GatherND", "Slice", "Unsqueeze"}
_QUANTISED = {"MatMulNBits", "Q4NXMatMul", "FusedDQP", "Q4NXMoE"}


def hidden_input(layer: int) -> str:
    """The name of the input that a layer of a forced graph starts from; after the last layer, the head's."""
    return f"flownpu.hidden.{layer}"


class DecoderGraph:
    """A decoder's graph that yields the logits of all tokens and the residual stream.

    Attributes:
        model: the changed onnx_ir.Model in memory; its weights stay in their file.
        path: the .onnx file that it was read from.
        layers: how many layers it has.
        quantised: whether its products have 4-bit weights.
        hidden: the names of the outputs with the residual stream: before layer 0, .., after the last.
    """

    def __init__(self, path: Path) -> None:
        """Reads the graph.

        Raises:
            FlowNPUError: the file is not an ONNX model, or not a decoder whose layers can be told apart.
            MissingDependencyError: onnx_ir is not installed.
        """
        self._ir = require("onnx_ir", extra="convert", purpose="flownpu verify")
        self.path = path
        self.model = load_model(path, purpose="flownpu verify")
        with reading(path):
            self._find_norms()

    def _find_norms(self) -> None:
        """Finds the norms between the layers, and makes the values that they normalise outputs."""
        path, graph = self.path, self.model.graph
        attentions = [node for node in graph if node.op_type in _ATTENTIONS]
        if not attentions or graph.outputs[0].name != "logits":
            raise FlowNPUError(
                f"{path}: expected a decoder with FlowQKVAttention or GroupQueryAttention in each layer and logits as "
                f"its first output, got {len(attentions)} of them and {graph.outputs[0].name}"
            )
        if any(node.op_type in _STATES for node in graph):
            raise FlowNPUError(f"{path}: layers with a state in the place of attention cannot be compared")
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
            if node.op_type == "MatMulNBits":  # computed in float32, so that the source is exact
                node.attributes["accuracy_level"] = self._ir.AttrInt64("accuracy_level", 1)
            elif node in attentions:  # the cache begins empty and grows
                node.attributes["sliding_window_cache"] = self._ir.AttrInt64("sliding_window_cache", 0)
        # ONNX Runtime takes dimensions of equal name for equal sizes: with a named capacity it would write the grown
        # cache into the memory of the empty one.
        for value in (*graph.inputs, *graph.outputs):
            if value.shape is not None and len(value.shape) == 4:
                value.shape = self._ir.Shape([*value.shape[:2], None, value.shape[3]])
        self._keep_all_tokens(last)
        self.hidden = [self._expose(norm, size) for norm in self._norms]

    def _norm_before(self, start: Any, size: int | None) -> Any:
        """The nearest norm before a node whose weight has that size (None: any); FlowNPUError if there is none."""
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
        """Removes the nodes that select the last token's hidden state before the LM head."""
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
        """Makes the value that a norm normalises an output; returns its name."""
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
        """Changes the graph so that each layer, and the LM head, has a separate input."""
        for layer, norm in enumerate(self._norms):
            exposed = norm.outputs[_SUM] if norm.op_type == _SKIP else norm.inputs[0]
            given = self._ir.Value(name=hidden_input(layer), type=exposed.type, shape=exposed.shape)
            self.model.graph.inputs.append(given)
            if norm.op_type == _SKIP:
                self._normalise(norm, given)
            for use in list(exposed.uses()):
                use.node.replace_input_with(use.idx, given)

    def _normalise(self, skip: Any, given: Any) -> None:
        """Replaces the normalised output of `skip` by a norm of `given`; `skip` stays, for its output of the sum."""
        attributes = {"epsilon": skip.attributes["epsilon"].as_float(), "axis": -1, "stash_type": 1}
        norm = self._ir.node("SimplifiedLayerNormalization", [given, skip.inputs[2]], attributes)
        norm.name = f"{skip.name}/forced"
        norm.outputs[0].name = f"{norm.name}/output"
        skip.outputs[0].replace_all_uses_with(norm.outputs[0])
        self.model.graph.insert_after(skip, norm)

    def proto(self) -> tuple[bytes, Path]:
        """The serialised model, which refers to its weights in their files, and the folder of these files."""
        from flownpu.model.graph_loading import without_links  # noqa: PLC0415 needs the extra "convert"

        folder = without_links(self.model, self.path)
        return bytes(self._ir.to_proto(self.model).SerializeToString()), folder


def _is_norm(value: Any) -> bool:
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type in _NORMS


def _weight_size(norm: Any) -> int:
    weight = norm.inputs[_NORMS[norm.op_type]]
    return int(weight.shape[0])

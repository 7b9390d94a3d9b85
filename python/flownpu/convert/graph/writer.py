# SPDX-License-Identifier: Apache-2.0
"""The base of all classes that write an ONNX graph: named nodes, inputs, and initializers without duplicates."""

from collections.abc import Mapping, Sequence

import onnx_ir as ir
from onnx_ir.tape import Tape

from flownpu.ops.definitions import add_functions
from flownpu.ops.definitions.onnx_function import DOMAIN, IR_VERSION, OPSET, VERSION

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""


class GraphWriter:
    """Builds a graph. Values are float32 unless a method says otherwise."""

    def __init__(self, tensors: Mapping[str, ir.TensorProtocol]) -> None:
        """Takes the weights by name; only those that a node uses are put into the graph."""
        self.tape = Tape()
        self.tensors = tensors
        self.initializers: dict[str, ir.Value] = {}
        self.inputs: list[ir.Value] = []

    def _model(self, name: str, outputs: Sequence[ir.Value]) -> ir.Model:
        """The model of all nodes that were added, with the functions that define its operators."""
        graph = ir.Graph(
            self.inputs,
            outputs,
            nodes=self.tape.nodes,
            initializers=list(self.initializers.values()),
            opset_imports={"": OPSET, MICROSOFT: 1, DOMAIN: VERSION},
            name=name,
        )
        model = ir.Model(graph, ir_version=IR_VERSION, producer_name="flownpu")
        add_functions(model)
        return model

    def _op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        *,
        domain: str = "",
        **attributes: float | str | Sequence[int],
    ) -> ir.Value:
        """Adds a node with one output, which is returned."""
        value = self.tape.op(
            op_type, inputs, attributes, domain=domain, version=VERSION if domain else OPSET, name=f"/{name}"
        )
        value.name = f"/{name}/output"
        return value

    def _input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str | None] | None) -> ir.Value:
        """An input of the graph; without a shape it takes tensors of any rank."""
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))
        self.inputs.append(value)
        return value

    def _output(self, value: ir.Value, name: str, shape: Sequence[int | str | None]) -> ir.Value:
        """Makes a value an output of the graph."""
        value.name, value.dtype, value.shape = name, ir.DataType.FLOAT, ir.Shape(shape)
        return value

    def _lengths(self, attention_mask: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Two inputs of attention: seqlens_k, int32 [B], and total_sequence_length, an int32 scalar.

        seqlens_k is each row's number of tokens so far, less 1. A row's padding must be on its right, or in later runs
        after its prompt: attention takes the first seqlens_k + 1 places of the cache for the row's tokens. A row whose
        mask begins with 0 would be computed with its padding instead of its last tokens; so its seqlens_k is -2, which
        no attention accepts.
        """
        counts = self._op("ReduceSum", [attention_mask, self._integers("axis_1", [1])], "token_counts", keepdims=0)
        first = self._op("Gather", [attention_mask, self._integers("index_0", 0)], "first_in_mask", axis=1)
        is_token = self._op("Cast", [first], "begins_with_token", to=ir.DataType.BOOL.value)
        counts = self._op("Where", [is_token, counts, self._integers("minus_one", [-1])], "counts_if_not_left_padded")
        shape = self._op("Shape", [attention_mask], "attention_mask_shape")
        total = self._op("Gather", [shape, self._integers("index_1", 1)], "total_tokens", axis=0)
        lasts = self._op("Sub", [counts, self._integers("one", [1])], "last_positions")
        lengths = self._op("Cast", [lasts], "seqlens_k", to=ir.DataType.INT32.value)
        return lengths, self._op("Cast", [total], "total_sequence_length", to=ir.DataType.INT32.value)

    def _weight(self, name: str) -> ir.Value:
        return self._initializer(name, self.tensors[name])

    def _integers(self, name: str, values: int | list[int]) -> ir.Value:
        return self._initializer(name, ir.tensor(values, dtype=ir.DataType.INT64, name=name))

    def _float(self, name: str, value: float) -> ir.Value:
        return self._initializer(name, ir.tensor(value, dtype=ir.DataType.FLOAT, name=name))

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        if name not in self.initializers:
            self.initializers[name] = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
            )
        return self.initializers[name]

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.plain.weights.float_weight import FloatWeight
from flownpu.graph_rewrites.plain.weights.projection import quantise_projections
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_weight_in_external_file_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(4).standard_normal((256, 64)).astype(np.float32)
    (tmp_path / "data").write_bytes(weight.tobytes())
    tensor = ir.ExternalTensor(
        "data", 0, weight.nbytes, ir.DataType.FLOAT, name="w", shape=ir.Shape(weight.shape), base_dir=tmp_path
    )
    value = ir.Value(name="w", shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    load: Any = ir.ExternalTensor._load

    def slow_load(self: Any) -> None:
        time.sleep(0.05)
        load(self)

    monkeypatch.setattr(ir.ExternalTensor, "_load", slow_load)
    packed = FloatWeight(value, transposed=False).initializer(ir.Graph([], [], nodes=[])).const_value
    assert packed is not None
    np.testing.assert_array_equal(packed.numpy(), q4nx.pack(*q4nx.quantize(weight), q4nx.NARROW))


def test_model_is_freed_after_conversion() -> None:
    """If this fails, C++ keeps the graph alive through the weights that it holds, and converting leaks the model."""
    weight = np.zeros((64, 64), np.float32)
    model = testing.parse("product (float[1, 64] x) => (float y) { y = MatMul (x, w) }", w=weight)
    quantise_projections(model)
    values = [weakref.ref(value) for node in model.graph for value in node.outputs]
    assert values
    del model
    gc.collect()
    assert [value() for value in values] == [None] * len(values)

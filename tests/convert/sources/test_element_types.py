# SPDX-License-Identifier: Apache-2.0
"""`flownpu convert` keeps constants of every type that ONNX Runtime takes."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from flownpu.convert import ConversionError, convert

K = 64
TYPES = ["DOUBLE", "FLOAT16", "BFLOAT16", "FLOAT8E4M3FN", "INT4", "UINT4", "INT16", "UINT64", "BOOL"]


def _outputs(model: onnx.ModelProto | Path, x: np.ndarray) -> list[np.ndarray]:
    given = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = onnxruntime.InferenceSession(given, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, {"x": x})
    return found


def _model(constant: onnx.TensorProto) -> onnx.ModelProto:
    """A product, and a node that reads the constant."""
    is_text = constant.data_type == TensorProto.STRING
    kind = TensorProto.STRING if is_text else TensorProto.FLOAT
    reader = helper.make_node("Identity" if is_text else "Cast", ["c"], ["read"], **({} if is_text else {"to": kind}))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product"), reader],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", K]),
         helper.make_tensor_value_info("read", kind, constant.dims)],
        [numpy_helper.from_array(np.random.default_rng(0).standard_normal((K, K)).astype(np.float32), "w"), constant],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _saved(model: onnx.ModelProto, folder: Path) -> Path:
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("elements", [6, 1030], ids=["in the graph", "in the data file"])
@pytest.mark.parametrize("dtype", TYPES)
def test_constants_of_type_without_rules_are_kept(dtype: str, elements: int, tmp_path: Path) -> None:
    """ONNX Runtime reads the constant; the product beside it is converted."""
    kind = helper.tensor_dtype_to_np_dtype(getattr(TensorProto, dtype))
    model = _model(numpy_helper.from_array((np.arange(elements) % 2).astype(np.float32).astype(kind), "c"))
    convert(_saved(model, tmp_path / "source"), tmp_path / "made")
    x = np.ones((2, K), np.float32)
    found, expected = _outputs(tmp_path / "made" / "model.onnx", x), _outputs(model, x)
    np.testing.assert_array_equal(found[1], expected[1])


def test_string_constant_is_refused(tmp_path: Path) -> None:
    model = _model(helper.make_tensor("c", TensorProto.STRING, [3], [b"yes", b"no", b"perhaps"]))
    with pytest.raises(ConversionError, match=r"model\.onnx: expected tensor c to be of numbers, got STRING"):
        convert(_saved(model, tmp_path / "source"), tmp_path / "made")

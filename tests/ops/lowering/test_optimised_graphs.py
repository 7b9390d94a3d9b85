# SPDX-License-Identifier: Apache-2.0
"""Graphs of ONNX Runtime's optimiser: before the provider sees them, and in models that it saved.

Reference: ONNX Runtime's CPU provider on the graph as it was, not optimised. Sessions use the generic kernels, which
round nothing.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

LEVELS = onnxruntime.GraphOptimizationLevel
RNG = np.random.default_rng(0)
CONSTANTS = {
    "W": RNG.standard_normal((64, 32)), "V": RNG.standard_normal((32, 64)), "b": RNG.standard_normal(32),
    "G": RNG.standard_normal(32), "H": RNG.standard_normal(32), "K": RNG.standard_normal((4, 3, 4, 4)),
    "k": RNG.standard_normal(4), "half": np.array(0.5), "much": np.array(1.702),
}  # fmt: skip
FEEDS = {
    "x": RNG.standard_normal((5, 64)), "xt": RNG.standard_normal((64, 5)), "z": RNG.standard_normal((5, 32)),
    "x3": RNG.standard_normal((2, 5, 64)), "z3": RNG.standard_normal((2, 5, 32)),
    "q": RNG.standard_normal((2, 2, 5, 16)), "p": RNG.standard_normal((2, 2, 7, 16)),
    "i": RNG.standard_normal((2, 3, 8, 8)),
}  # fmt: skip
X, XT, Z = "float[N,64] x", "float[64,N] xt", "float[N,32] z"
X3, Z3 = "float[B,N,64] x3", "float[B,N,32] z3"
TURN = "<perm = [1, 0]>"
# Inputs, the graph, and the operator that FlowNPU leaves of it if it was saved with extended optimisations; "": none.
GRAPHS: dict[str, tuple[str, str, str]] = {
    "product and vector": (X, "a = MatMul(x, W) y = Add(a, b)", ""),
    "product and matrix": (f"{X}, {Z}", "a = MatMul(x, W) y = Add(a, z)", ""),
    "residual": (Z, "a = MatMul(z, V) c = MatMul(a, W) y = Add(c, z)", ""),
    "Gemm and matrix": (f"{X}, {Z}", "a = Gemm(x, W) y = Add(a, z)", ""),
    "transposed A": (XT, f"t = Transpose {TURN} (xt) y = Gemm(t, W, b)", ""),
    "transposed product": (X, f"a = Gemm(x, W) y = Transpose {TURN} (a)", ""),
    "transposed A and matrix": (f"{XT}, {Z}", f"t = Transpose {TURN} (xt) a = MatMul(t, W) y = Add(a, z)", ""),
    "product of three axes": (X3, "a = MatMul(x3, W) y = Add(a, b)", ""),
    "Gemm and activation": (X, "a = Gemm(x, W, b) y = Sigmoid(a)", "FusedGemm"),
    "bias and GELU": (X3, "a = MatMul(x3, W) c = Add(a, b) y = com.microsoft.Gelu(c)", ""),
    "QuickGelu": (X, "a = Mul(x, much) c = Sigmoid(a) y = Mul(x, c)", ""),
    "skip and layer norm": (
        f"{X3}, {Z3}", "a = MatMul(x3, W) c = Add(a, z3) y = LayerNormalization <axis = -1> (c, G, H)",
        "",
    ),
    "scores": (
        "float[B,2,N,16] q, float[B,2,M,16] p",
        "t = Transpose <perm = [0, 1, 3, 2]> (p) a = MatMul(q, t) y = Mul(a, half)", "FusedMatMul",
    ),
    "patches": (
        "float[B,3,8,8] i", "a = Conv <kernel_shape = [4, 4], strides = [4, 4]> (i, K, k) y = Mul(a, half)", "",
    ),
}  # fmt: skip


def _model(name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    inputs, body, _ = GRAPHS[name]
    header = '<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]>'
    rank = {"scores": "B,2,N,M", "patches": "B,4,2,2"}.get(name, "B,N,32" if "x3" in inputs else "N,M")
    model = onnx.parser.parse_model(f"{header} g ({inputs}) => (float[{rank}] y) {{ {body} }}")
    used = {each for node in model.graph.node for each in node.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(value.astype(np.float32), key) for key, value in CONSTANTS.items() if key in used
    )
    return model, {key: value.astype(np.float32) for key, value in FEEDS.items() if key in used}


def _run(model: onnx.ModelProto, feeds: dict[str, Any], level: Any, devices: list[Any], how: str = "error") -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 3
    if devices:
        options.add_provider_for_devices(devices, {"device": "cpu", "cpu_isa": "generic", "on_unsupported": how})
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)[0]


def _close(found: np.ndarray, expected: np.ndarray) -> None:
    """At most two products of 64 float32 terms: 256 roundings of the largest magnitude bound the error generously."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=256 * 2.0**-24 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize("name", GRAPHS)
def test_optimisation_level_does_not_change_placement(ep_devices: list[Any], name: str, level: str) -> None:
    model, feeds = _model(name)
    expected = _run(model, feeds, LEVELS.ORT_DISABLE_ALL, [])
    _close(_run(model, feeds, getattr(LEVELS, level), ep_devices), expected)


@pytest.mark.parametrize("name", GRAPHS)
def test_saved_optimised_model_runs_or_is_refused_with_reason(ep_devices: list[Any], name: str, tmp_path: Path) -> None:
    """Extended optimisations add operators of ONNX Runtime's CPU provider; all of them add the machine's layouts."""
    model, feeds = _model(name)
    expected = _run(model, feeds, LEVELS.ORT_DISABLE_ALL, [])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = LEVELS.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "saved.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    saved, left = onnx.load(tmp_path / "saved.onnx"), GRAPHS[name][2]
    if left:
        with pytest.raises(Exception, match=rf"{left} '.*': the cpu device has no com\.microsoft[.a-z]*::{left}"):
            _run(saved, feeds, LEVELS.ORT_DISABLE_ALL, ep_devices)
    else:
        _close(_run(saved, feeds, LEVELS.ORT_DISABLE_ALL, ep_devices), expected)
    _close(_run(saved, feeds, LEVELS.ORT_DISABLE_ALL, ep_devices, "cpu"), expected)

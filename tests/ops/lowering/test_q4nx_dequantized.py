# SPDX-License-Identifier: Apache-2.0
"""Weights and tables that DequantizeLinear makes of constant codes, in sessions, against float64."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from flownpu.graph_rewrites import testing
from flownpu.ops import q4nx
from tests.ops.lowering.test_rules import activations, session
from tests.pairwise import pairwise

DTYPES = {"int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4}
BYTES = {"int8": np.int8, "uint8": np.uint8}
# A weight [M, K] as [K, M] or [M, K], and the nodes that read it.
FORMS = {
    "matmul": (0, "y = MatMul (x, w)"),
    "transpose": (1, "t = Transpose <perm = [1, 0]> (w)  y = MatMul (x, t)"),
    "gemm": (0, "y = Gemm (x, w)"),
    "gemm of rows": (1, "y = Gemm <transB = 1> (x, w)"),
    "gemm of transpose": (0, "t = Transpose (w)  y = Gemm <transB = 1> (x, t)"),
}


class Weight:
    """A random weight [M, K] as DequantizeLinear has it: `constants`, `node`, and its exact values."""

    def __init__(
        self, dtype: str, rows: int, columns: int, block: int | None, axis: int, *, zero: bool, exact: bool = True
    ) -> None:
        """`block`: 0: a scale a row; None: one scale for all. `axis`: that of K. `exact`: scales are powers of 2."""
        rng = np.random.default_rng(rows * columns)
        bits, lowest = (8, -128) if dtype in BYTES else (4, -8)
        lowest = 0 if dtype.startswith("u") else lowest
        blocks = 1 if not block else -(-columns // block)
        shape = (1, 1) if block is None else (rows, blocks)
        scales = 2.0 ** rng.integers(-5, -2, shape) if exact else rng.uniform(0.01, 0.1, shape)
        self.scales = scales.astype(np.float32)
        codes = rng.integers(lowest, lowest + 2**bits, (rows, columns))
        points = rng.integers(lowest, lowest + 2**bits, shape) if zero else np.zeros(shape, np.int64)
        wide = [np.repeat(v, block or -(-columns // blocks), axis=1)[:, :columns]
                for v in (self.scales.astype(np.float64), points)]  # fmt: skip
        self.values = np.broadcast_to(wide[0] * (codes - wide[1]), (rows, columns))

        def stored(array: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(array if axis else array.T)

        def scale_like(array: np.ndarray) -> np.ndarray:
            return stored(array) if block else array.reshape(()) if block is None else array.reshape(-1)

        self.constants: dict[str, Any] = {
            "codes": stored(codes).astype((DTYPES | BYTES)[dtype]),
            "scales": scale_like(self.scales),
        }
        if zero:
            self.constants["zero"] = scale_like(points).astype((DTYPES | BYTES)[dtype])
        attributes = f"axis = {axis}, block_size = {block}" if block else f"axis = {1 - axis}"
        self.node = f"w = DequantizeLinear <{attributes}> (codes, scales{', zero' * zero})"


def model(weight: Weight, nodes: str) -> ir.Model:
    """A model of `nodes`, which multiply x by w."""
    rows, columns = weight.values.shape
    text = f"g (float[N, {columns}] x) => (float[N, {rows}] y) {{ {weight.node} {nodes} }}"
    return testing.parse(text, **weight.constants)


def run(
    ep_devices: list[Any], folder: Path, text: str, feeds: dict[str, np.ndarray], constants: dict[str, Any]
) -> tuple[np.ndarray, Counter[str]]:
    """The first output, and the operators that ran on our provider."""
    ours = session(ep_devices, ir.to_proto(testing.parse(text, **constants)), folder)
    result = ours.run(None, feeds)[0]
    events = json.loads(Path(ours.end_profiling()).read_text())
    run = [event["args"] for event in events if event["cat"] == "Kernel"]
    return result, Counter(args["op_name"] for args in run if args.get("provider") == "FlowNPUExecutionProvider")


def product(
    ep_devices: list[Any], folder: Path, weight: Weight, nodes: str, tokens: int = 3, **more: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Counter[str]]:
    rows, columns = weight.values.shape
    x = activations(tokens, columns)
    text = f"g (float[N, {columns}] x) => (float[N, {rows}] y) {{ {weight.node} {nodes} }}"
    result, operators = run(ep_devices, folder, text, {"x": x}, weight.constants | more)
    return x, result, operators


@pytest.mark.parametrize(
    ("form", "zero", "dtype", "sizes"),
    [
        *pairwise(list(FORMS), [False, True], [*DTYPES, *BYTES], [(40, 96, 32), (33, 80, 32), (33, 128, 64)]),
        # Without blocks, 8 bits are DenseMatMul's.
        *pairwise(list(FORMS), [False, True], list(DTYPES), [(7, 80, 0)]),
    ],
)
def test_product_is_a_q4nx_product(
    ep_devices: list[Any], tmp_path: Path, form: str, zero: bool, dtype: str, sizes: tuple[int, int, int]
) -> None:
    rows, columns, block = sizes
    axis, nodes = FORMS[form]
    weight = Weight(dtype, rows, columns, block, axis, zero=zero)
    x, result, operators = product(ep_devices, tmp_path, weight, nodes)
    assert operators == {"Q4NXMatMul": 1}
    # Scales and their products with codes and zero points are exact in bf16, so only the sums round.
    off = np.abs(result - x.astype(np.float64) @ weight.values.T)
    assert np.all(off <= testing.product_bound(x, np.abs(weight.values) + 8 * np.abs(weight.values).max()))


@pytest.mark.parametrize(
    ("form", "dtype", "zero", "block"),
    pairwise(list(FORMS), [*DTYPES, *BYTES], [False, True], [32, 64, 0, None]),
)
def test_conversion_keeps_each_weight(form: str, dtype: str, zero: bool, block: int | None) -> None:
    axis, nodes = FORMS[form]
    weight = Weight(dtype, 33, 128, block, axis, zero=zero)
    made, misses = testing.rewritten(model(weight, nodes), "q4nx_dequantized")
    (node,) = made.graph
    assert (node.op_type, misses) == ("Q4NXMatMul", [])
    blocks = node.inputs[1].const_value.numpy()
    np.testing.assert_array_equal(q4nx.dequantize(blocks, 33, 128), weight.values)
    assert (node.inputs[1].shape[2] < 1000) == (dtype in DTYPES)


@pytest.mark.parametrize("zero", [False, True])
def test_scales_that_bf16_lacks_cost_one_rounding_and_the_minimum_another(
    ep_devices: list[Any], tmp_path: Path, zero: bool
) -> None:
    """The same bound as that of MatMulNBits (test_q4nx_matmul.py)."""
    weight = Weight("int4", 40, 96, 32, 0, zero=zero, exact=False)
    x, result, _ = product(ep_devices, tmp_path, weight, FORMS["matmul"][1])
    scale = np.repeat(weight.scales, 32, axis=1)
    # code * scale, of at most 15 scales, and the minimum, of at most 15, each err by one rounding of the scale; the
    # minimum is then rounded itself. Symmetric blocks have no minimum of their own: the weight rounds with its scale.
    off = testing.BFLOAT16_ROUNDING * (3 * 15 * scale if zero else np.abs(weight.values))
    bound = np.abs(x).astype(np.float64) @ off.T + testing.product_bound(x, 31 * scale)
    difference = np.abs(result - x.astype(np.float64) @ weight.values.T)
    assert np.all(difference <= bound)
    assert np.any(difference > testing.product_bound(x, 31 * scale))  # it does round


@pytest.mark.parametrize(
    ("c", "operators"),
    [
        (np.linspace(-1, 1, 40, dtype=np.float32), {"Q4NXMatMul": 1}),
        (np.linspace(-1, 1, 3, dtype=np.float32).reshape(3, 1), {"Q4NXMatMul": 1, "Add": 1}),
        (np.linspace(-1, 1, 120, dtype=np.float32).reshape(3, 40), {"Q4NXMatMul": 1, "Add": 1}),
    ],
)
def test_third_input_of_gemm_is_added(
    ep_devices: list[Any], tmp_path: Path, c: np.ndarray, operators: dict[str, int]
) -> None:
    weight = Weight("int4", 40, 96, 32, 1, zero=False)
    x, result, found = product(ep_devices, tmp_path, weight, "y = Gemm <transB = 1> (x, w, c)", c=c)
    assert found == operators
    exact = x.astype(np.float64) @ weight.values.T + c
    bound = testing.product_bound(x, np.abs(weight.values) + 8) + testing.FLOAT32_ROUNDING * np.abs(exact) * 2
    assert np.all(np.abs(result - exact) <= bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_16_are_quantised_again(ep_devices: list[Any], tmp_path: Path, dtype: str) -> None:
    weight = Weight(dtype, 40, 80, 16, 0, zero=True)
    x, result, operators = product(ep_devices, tmp_path, weight, FORMS["matmul"][1])
    assert operators == {"Q4NXMatMul": 1}
    again = q4nx.dequantize_codes(q4nx.quantize(weight.values.astype(np.float32))).astype(np.float64)
    bound = testing.product_bound(x, np.abs(again) + 8 * np.abs(again).max())
    assert np.all(np.abs(result - x.astype(np.float64) @ again.T) <= bound)


@pytest.mark.parametrize("block", [24, 48])
def test_blocks_that_q4nx_lacks_are_dequantised_once(ep_devices: list[Any], tmp_path: Path, block: int) -> None:
    weight = Weight("uint4", 40, 96, block, 0, zero=True)
    x, result, operators = product(ep_devices, tmp_path, weight, FORMS["matmul"][1])
    assert operators == {"MatMul": 1}
    bound = testing.product_bound(x, np.abs(weight.values))
    assert np.all(np.abs(result - x.astype(np.float64) @ weight.values.T) <= bound)


def test_scale_along_columns_is_dequantised_once(ep_devices: list[Any], tmp_path: Path) -> None:
    """A scale for each k is no scale of a row's neighbours, and there are as many as rows."""
    weight = Weight("int4", 96, 96, 0, 0, zero=False)
    x = activations(3, 96)
    text = f"g (float[N, 96] x) => (float[N, 96] y) {{ {weight.node} y = Gemm <transB = 1> (x, w) }}"
    result, operators = run(ep_devices, tmp_path, text, {"x": x}, weight.constants)
    assert operators == {"Gemm": 1}
    bound = testing.product_bound(x, np.abs(weight.values).T)
    assert np.all(np.abs(result - x.astype(np.float64) @ weight.values) <= bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("columns", "block"), [(96, 32), (81, 64), (96, 0), (96, 24)])
def test_gathered_rows_of_four_bits_are_exact(
    ep_devices: list[Any], tmp_path: Path, dtype: str, zero: bool, columns: int, block: int
) -> None:
    table = Weight(dtype, 50, columns, block, 1, zero=zero)
    ids = np.array([[0, 49, 7], [31, 32, 7]])
    text = f"g (int64[B, S] ids) => (float[B, S, {columns}] y) {{ {table.node} y = Gather (w, ids) }}"
    result, operators = run(ep_devices, tmp_path, text, {"ids": ids}, table.constants)
    assert operators == {"Gather" if block == 24 else "Q4NXGather": 1}
    np.testing.assert_array_equal(result, table.values[ids])


def test_infinite_scale_keeps_its_numbers(ep_devices: list[Any], tmp_path: Path) -> None:
    weight = Weight("int4", 40, 96, 32, 0, zero=False)
    weight.constants["scales"][0, 0] = np.inf
    weight.constants["codes"][:32, 0] = np.ones(32, ml_dtypes.int4)
    x, result, operators = product(ep_devices, tmp_path, weight, FORMS["matmul"][1])
    assert operators == {"MatMul": 1}
    assert np.isnan(result[:, 0]).all()  # activations have both signs
    bound = testing.product_bound(x, np.abs(weight.values))
    assert np.all((np.abs(result - x.astype(np.float64) @ weight.values.T) <= bound)[:, 1:])

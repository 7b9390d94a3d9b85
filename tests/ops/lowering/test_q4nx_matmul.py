# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnxruntime.capi._pybind_state import quantize_matmul_bnb4

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.q4nx_tensor import Q4NXTensor
from flownpu.ops import q4nx
from tests.pairwise import pairwise

MODEL = """
matmul (float[B, S, {columns}] x) => (float[B, S, {rows}] y) {{
    y = com.microsoft.MatMulNBits <K = {columns}, N = {rows}, block_size = {block_size}, {attributes}>
        (x, codes, scales, {zero_points}, {group_index}, {bias})
}}
"""


class Case:
    """A random MatMulNBits: its model, its feeds, and the weight that the operator's description defines."""

    def __init__(
        self,
        rows: int = 40,
        columns: int = 96,
        block_size: int = 32,
        zero_points: str = "",
        constants: dict[str, testing.Array] | None = None,
        *,
        code_bits: int = 4,
        bias: bool = False,
        exact_scales: bool = True,
        **attributes: int,
    ) -> None:
        generator = np.random.default_rng(rows * columns + block_size)
        blocks = -(-columns // block_size)
        scales = testing.bfloat16_values(generator, rows, blocks)
        if not exact_scales:
            scales = generator.uniform(0.01, 0.1, scales.shape).astype(np.float32)
        pack = testing.pack_nibbles if code_bits == 4 else np.asarray
        codes = generator.integers(0, 2**code_bits, (rows, blocks * block_size), np.uint8)
        points = np.full_like(scales, 2 ** (code_bits - 1), np.uint8)
        if zero_points:
            points = generator.integers(0, 2**code_bits, (rows, blocks), np.uint8)
        given: dict[str, Any] = {
            "codes": pack(codes).reshape(rows, blocks, block_size * code_bits // 8),
            "scales": scales,
        }
        if zero_points:
            given["zero_points"] = pack(points) if zero_points == "packed" else points.astype(np.float32)
        if bias:
            given["bias"] = generator.standard_normal(rows, np.float32)
        given |= constants or {}

        self.codes = codes[:, :columns]
        self.scale, self.zero_point = (
            np.repeat(values.astype(np.float32), block_size, axis=1)[:, :columns] for values in (scales, points)
        )
        self.weight = self.scale * (self.codes - self.zero_point)
        # The weight of the code whose rounding is that of the minimum: 0, or of 8 bits the middle one.
        self.minimum = self.scale * ((0 if code_bits == 4 else 128) - self.zero_point)
        self.feeds = {"x": generator.standard_normal((2, 3, columns), np.float32)}
        self.model = testing.parse(
            MODEL.format(
                rows=rows,
                columns=columns,
                block_size=block_size,
                attributes=", ".join(f"{name} = {value}" for name, value in ({"bits": code_bits} | attributes).items()),
                **{name: name * (name in given) for name in ("zero_points", "group_index", "bias")},
            ),
            **given,
        )


LAYOUTS = {4: (q4nx.SYMMETRIC, q4nx.NARROW), 8: (q4nx.EIGHT_BITS, q4nx.EIGHT_BITS_WITH_MINIMA)}


@pytest.mark.parametrize(
    ("bias", "kind", "sizes"),
    pairwise(
        [False, True],
        # ONNX Runtime's kernel has no zero points in float beside 8 bits.
        [(4, ""), (4, "packed"), (4, "float"), (8, ""), (8, "packed")],
        [(32, 256, 32), (40, 96, 32), (33, 320, 64), (20, 384, 128), (7, 80, 32), (7, 80, 64)],
    ),
)
def test_q4nx_matmul_equals_matmul_nbits(bias: bool, kind: tuple[int, str], sizes: tuple[int, int, int]) -> None:
    (bits, zero_points), (rows, columns, block_size) = kind, sizes
    case = Case(rows, columns, block_size, zero_points, code_bits=bits, bias=bias)
    model, misses = testing.rewritten(case.model, "q4nx_matmul")

    assert testing.operator_names(model) == ["Q4NXMatMul"]
    assert misses == []
    blocks = _blocks(model)
    assert q4nx.layout_of(blocks) == LAYOUTS[bits][bool(zero_points)]
    np.testing.assert_array_equal(
        q4nx.unpack(blocks, rows, columns).codes, case.codes if bits == 4 else (case.codes ^ 128).view(np.int8)
    )
    weight = q4nx.dequantize(blocks, rows, columns)
    # The minimum is a multiple of the scale, whose 4 + 8 bits (or 8 + 8) bf16 rounds, except for the default zero
    # point; and then min + scale * code is no longer a multiple of the scale, and is rounded to float32.
    off = testing.BFLOAT16_ROUNDING * np.abs(case.minimum) + testing.FLOAT32_ROUNDING * np.abs(weight)
    off = off if zero_points else np.zeros_like(off)
    assert np.all(np.abs(weight - case.weight) <= off)

    (expected,), (result,) = (testing.run(m, case.feeds) for m in (case.model, model))
    x = case.feeds["x"]
    bound = testing.product_bound(x, np.maximum(np.abs(weight), np.abs(case.weight))) + np.abs(x) @ off.T
    bound += 2 * testing.FLOAT32_ROUNDING * np.abs(expected)  # each side adds the bias with one rounding
    assert np.all(np.abs(result - expected) <= bound)
    testing.check(model)


def _of_bnb4(kind: int, rows: int, columns: int, block_size: int, **more: int) -> tuple[Any, testing.Array]:
    """A MatMulBnb4 of codes that ONNX Runtime finds, and the scales [rows, columns]."""
    weight = np.random.default_rng(rows).standard_normal((rows, columns), np.float32)
    codes, scales = np.zeros(weight.size // 2, np.uint8), np.zeros(-(-weight.size // block_size), np.float32)
    quantize_matmul_bnb4(codes, weight, scales, block_size, kind, columns, rows)
    attributes = {"K": columns, "N": rows, "block_size": block_size, "quant_type": kind} | more
    text = ", ".join(f"{name} = {value}" for name, value in attributes.items())
    graph = f"""matmul (float[B, S, {columns}] x) => (float[B, S, {rows}] y) {{
        y = com.microsoft.MatMulBnb4 <{text}> (x, codes, scales)
    }}"""
    model = testing.parse(graph, codes=codes, scales=scales)
    return model, np.repeat(scales, block_size)[: weight.size].reshape(weight.shape)


@pytest.mark.parametrize("kind", [0, 1], ids=["FP4", "NF4"])
@pytest.mark.parametrize(("rows", "columns", "block_size"), [(32, 256, 64), (40, 96, 32), (7, 256, 128)])
def test_q4nx_matmul_equals_matmul_bnb4_with_values_rounded(
    rows: int, columns: int, block_size: int, kind: int
) -> None:
    """A weight is off by half a step of 1 / 127 of its scale, and by the rounding of the scale to bf16."""
    original, scales = _of_bnb4(kind, rows, columns, block_size)
    model, misses = testing.rewritten(original, "q4nx_matmul")
    assert (testing.operator_names(model), misses) == (["Q4NXMatMul"], [])
    blocks = _blocks(model)
    assert q4nx.layout_of(blocks) == q4nx.TABLE
    weight = q4nx.dequantize(blocks, rows, columns)
    # ONNX Runtime's kernel multiplies unit rows by the weights themselves.
    (exact,) = testing.run(original, {"x": np.eye(columns, dtype=np.float32)[None]})
    off = scales * 0.5 / 127 + testing.BFLOAT16_ROUNDING * np.abs(weight)
    assert np.all(np.abs(weight - exact[0].T) <= off * (1 + 2 * testing.BFLOAT16_ROUNDING))
    x = np.random.default_rng(1).standard_normal((2, 3, columns), np.float32)
    (result,) = testing.run(model, {"x": x})
    assert np.all(np.abs(result - x @ weight.T) <= testing.product_bound(x, np.abs(weight)))
    error = q4nx.relative_error(exact[0].T, weight)
    assert _weight(model).const_value.relative_error == pytest.approx(error, rel=1e-4)
    testing.check(model)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"columns": 96, "block_size": 64}, "K=96 is no multiple of block_size=64, so that rows share scales"),
        ({"block_size": 16}, "block_size=16: Q4NX has one scale for 32 columns"),
        ({"training_mode": 1}, "training_mode=1: it is for training"),
        ({"transB": 0}, "transB=0: the codes are then not those of rows of W"),
    ],
)
def test_unmatched_matmul_bnb4_reports_miss(changed: dict[str, int], reason: str) -> None:
    model, misses = testing.rewritten(
        _of_bnb4(**{"kind": 1, "rows": 8, "columns": 64, "block_size": 32, **changed})[0], "q4nx_matmul"
    )
    assert testing.operator_names(model) == ["MatMulBnb4"]
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [("q4nx_matmul", reason)]


@pytest.mark.parametrize("written", ["packed", "float"])
@pytest.mark.parametrize("others", [0, 1])
def test_zero_points_of_8_need_no_minima(written: str, others: int) -> None:
    """A row has three zero points, so that packed ones end in half a byte of padding, which is 0."""
    points = np.full((40, 3), 8, np.uint8)
    points.flat[:others] = 4
    given = testing.pack_nibbles(np.pad(points, ((0, 0), (0, 1)))) if written == "packed" else points.astype(np.float32)
    case = Case(zero_points=written, constants={"zero_points": given})
    model, _ = testing.rewritten(case.model, "q4nx_matmul")
    blocks = _blocks(model)
    assert q4nx.layout_of(blocks) == (q4nx.NARROW if others else q4nx.SYMMETRIC)
    expected = case.scale * (case.codes - np.repeat(points.astype(np.float32), 32, axis=1))
    np.testing.assert_array_equal(q4nx.dequantize(blocks, 40, 96), expected)


@pytest.mark.parametrize("zero_points", ["", "packed", "float"])
@pytest.mark.parametrize(("rows", "columns"), [(40, 96), (7, 80)])
def test_blocks_of_16_are_quantised_again(rows: int, columns: int, zero_points: str) -> None:
    """Two blocks get one scale, the best of a search, and the product is that of the new weight."""
    case = Case(rows, columns, 16, zero_points)
    model, misses = testing.rewritten(case.model, "q4nx_matmul")
    assert misses == []
    weight = q4nx.dequantize(_blocks(model), rows, columns)
    assert q4nx.layout_of(_blocks(model)) == q4nx.NARROW
    np.testing.assert_array_equal(weight, q4nx.dequantize_codes(q4nx.quantize(case.weight)))
    tensor = _weight(model).const_value
    assert isinstance(tensor, Q4NXTensor)
    assert not tensor.keeps_codes
    # Weights that spread evenly over 16 steps of d are rounded evenly to new steps of at most 2 d.
    assert 0 < tensor.relative_error < 0.2
    assert tensor.relative_error == pytest.approx(q4nx.relative_error(case.weight, weight), rel=1e-6)
    (result,) = testing.run(model, case.feeds)
    x = case.feeds["x"]
    expected = x.astype(np.float64) @ weight.T
    assert np.all(np.abs(result - expected) <= testing.product_bound(x, np.abs(weight)))


def test_scales_that_bf16_lacks_cost_one_rounding() -> None:
    case = Case(exact_scales=False)
    model, _ = testing.rewritten(case.model, "q4nx_matmul")
    weight = q4nx.dequantize(_blocks(model), *case.weight.shape)
    assert np.any(weight != case.weight)
    # The weight rounds with its scale; the minimum, 8 scales, is exact. (And case.weight itself was rounded once.)
    bound = (testing.BFLOAT16_ROUNDING + testing.FLOAT32_ROUNDING) * np.abs(case.weight)
    assert np.all(np.abs(weight - case.weight) <= bound)


def test_weight_with_more_rows_than_unpacked_at_once_is_kept() -> None:
    case = Case(rows=2048 + 40, columns=32)
    model, _ = testing.rewritten(case.model, "q4nx_matmul")
    np.testing.assert_array_equal(q4nx.dequantize(_blocks(model), *case.weight.shape), case.weight)


def test_weight_is_packed_when_it_is_read() -> None:
    model = Case().model
    testing.apply("q4nx_matmul", model, [])
    assert isinstance(_weight(model).const_value, ir.LazyTensor)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"bits": 3}, "bits=3: Q4NX stores codes of 4 or 8 bits; export this weight with these"),
        ({"code_bits": 8, "block_size": 16}, "block_size=16: Q4NX has one scale for 32 columns"),
        ({"block_size": 8}, "block_size=8: Q4NX has one scale for 32 columns"),
        ({"weight_prepacked": 1}, "weight_prepacked=1: the codes are in an order made for a GPU"),
        ({"constants": {"group_index": np.zeros(96, np.int32)}}, "input 4 (g_idx): expected none; Q4NX"),
        ({"constants": {"scales": np.ones((40, 3), np.float16)}}, "input 2 (scales): expected float, got float16"),
        ({"constants": {"codes": np.zeros((40, 3, 16), np.int8)}}, "input 1 (B): expected uint8, got int8"),
        ({"constants": {"scales": np.ones((40, 4), np.float32)}}, "scales has 160 elements, expected 120 for 40 rows"),
        ({"constants": {"codes": np.zeros((8, 3, 16), np.uint8)}}, "codes has 384 elements, expected 1920 for 40 rows"),
    ],
)
def test_unmatched_graph_reports_miss(changed: dict[str, Any], reason: str) -> None:
    model, misses = testing.rewritten(Case(**changed).model, "q4nx_matmul")
    assert testing.operator_names(model) == ["MatMulNBits"]
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [("q4nx_matmul", reason)]


def test_fed_weight_reports_miss() -> None:
    model = testing.parse(
        """
        matmul (float[S, 32] x, uint8[4, 1, 16] codes, float[4, 1] scales) => (float[S, 4] y) {
            y = com.microsoft.MatMulNBits <K = 32, N = 4, bits = 4, block_size = 32> (x, codes, scales)
        }
        """
    )
    _, misses = testing.rewritten(model, "q4nx_matmul")
    assert [miss.reason for miss in misses] == [
        "input 1 (B): expected a constant of the model, got 'codes', which is computed or fed"
    ]


def _weight(model: ir.Model) -> ir.Value:
    (node,) = (node for node in model.graph if node.op_type == "Q4NXMatMul")
    weight = node.inputs[1]
    assert weight is not None
    return weight


def _blocks(model: ir.Model) -> Any:
    tensor = _weight(model).const_value
    assert tensor is not None
    return tensor.numpy()

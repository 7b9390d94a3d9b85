# SPDX-License-Identifier: Apache-2.0

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from flownpu.graph_rewrites import testing

ROWS, COLUMNS, BLOCK_SIZE = 50, 96, 32

# The tied table of GenAI's exports: the LM head's codes, reshaped.
TIED = """
tied (int64[B, S] ids) => (float[B, S, 50] logits) {
    shape = Constant <value_ints = [50, 48]> ()
    table = Reshape (codes, shape)
    embedded = com.microsoft.GatherBlockQuantized <bits = 4, block_size = 32, gather_axis = 0, quantize_axis = 1>
        (table, ids, scales)
    logits = com.microsoft.MatMulNBits <K = 96, N = 50, bits = 4, block_size = 32> (embedded, codes, scales)
}
"""
ALONE = """
alone (int64[B, S] ids) => (float[B, S, K] embedded) {{
    embedded = com.microsoft.GatherBlockQuantized <{attributes}> (codes, ids, scales, {zero_points})
}}
"""
ATTRIBUTES = {"bits": 4, "block_size": BLOCK_SIZE, "gather_axis": 0, "quantize_axis": 1}
IDS = np.array([[0, 49, 7], [31, 32, 7]])


def _table(shape: tuple[int, ...] = (ROWS, COLUMNS // 2)) -> dict[str, testing.Array]:
    generator = np.random.default_rng(3)
    return {
        "codes": testing.pack_nibbles(generator.integers(0, 16, (ROWS, COLUMNS), np.uint8)).reshape(shape),
        "scales": testing.bfloat16_values(generator, ROWS, COLUMNS // BLOCK_SIZE),
    }


def _unpacked(packed: testing.Array) -> testing.Array:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _alone(constants: dict[str, testing.Array] | None = None, **attributes: int) -> ir.Model:
    given = _table() | (constants or {})
    text = ", ".join(f"{name} = {value}" for name, value in (ATTRIBUTES | attributes).items())
    return testing.parse(ALONE.format(attributes=text, zero_points="zero_points" * ("zero_points" in given)), **given)


def test_tied_table_is_one_initializer() -> None:
    original = testing.parse(TIED, **_table((ROWS, COLUMNS // BLOCK_SIZE, BLOCK_SIZE // 2)))
    model, misses = testing.rewritten(original, "q4nx_gather", "q4nx_matmul")

    assert testing.operator_names(model) == ["Q4NXGather", "Q4NXMatMul"]
    assert misses == []
    gather, matmul = (node for node in model.graph if node.op_type.startswith("Q4NX"))
    assert gather.inputs[0] is matmul.inputs[1]
    assert list(model.graph.initializers) == ["codes_Q4NX"]

    (expected,), (result,) = (testing.run(m, {"ids": IDS}) for m in (original, model))
    table = _table()
    scale = np.repeat(table["scales"], BLOCK_SIZE, axis=1)
    weight = scale * (_unpacked(table["codes"]).astype(np.float32) - 8)
    assert np.all(np.abs(result - expected) <= testing.product_bound(weight[IDS], weight))
    testing.check(model)


def test_gathered_rows_are_exact() -> None:
    original = _alone()
    model, misses = testing.rewritten(original, "q4nx_gather")
    assert testing.operator_names(model) == ["Q4NXGather"]
    assert misses == []
    # Scales that bf16 holds, times codes less 8: no step rounds.
    (expected,), (result,) = (testing.run(m, {"ids": IDS}) for m in (original, model))
    np.testing.assert_array_equal(result, expected)
    testing.check(model)


def test_rows_with_zero_points_equal_onnxruntime() -> None:
    generator = np.random.default_rng(4)
    points = generator.integers(0, 16, (ROWS, COLUMNS // BLOCK_SIZE), np.uint8)
    original = _alone({"zero_points": testing.pack_nibbles(points)})
    model, _ = testing.rewritten(original, "q4nx_gather")
    (expected,), (result,) = (testing.run(m, {"ids": IDS}) for m in (original, model))
    # The minimum, zero_point * scale, rounds to bf16, and what is added to it then rounds to float32.
    minimum = np.repeat(points * _table()["scales"], BLOCK_SIZE, axis=1)[IDS]
    bound = testing.BFLOAT16_ROUNDING * minimum + testing.FLOAT32_ROUNDING * np.abs(result)
    assert np.all(np.abs(result - expected) <= bound)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("block_size", [32, 128])
def test_table_of_8_bits_equals_onnxruntime(block_size: int, zero_points: bool) -> None:
    generator = np.random.default_rng(6)
    given = {
        "codes": generator.integers(0, 256, (ROWS, 3 * block_size), np.uint8),
        "scales": testing.bfloat16_values(generator, ROWS, 3),
    }
    points = generator.integers(0, 256, given["scales"].shape, np.uint8)
    if zero_points:
        given["zero_points"] = points
    original = _alone(given, bits=8, block_size=block_size)
    model, misses = testing.rewritten(original, "q4nx_gather")
    assert (testing.operator_names(model), misses) == (["Q4NXGather"], [])
    (expected,), (result,) = (testing.run(m, {"ids": IDS}) for m in (original, model))
    # Scales are values of bf16. The weight of the code 128, a multiple of one, is rounded, and then the sum.
    middle = np.repeat(np.abs(128.0 - points) * given["scales"] * zero_points, block_size, axis=1)[IDS]
    bound = testing.BFLOAT16_ROUNDING * middle + zero_points * testing.FLOAT32_ROUNDING * np.abs(result)
    assert np.all(np.abs(result - expected) <= bound)


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("columns", [96, 81])
def test_table_of_four_bit_type_equals_onnxruntime(dtype: str, zero_points: bool, columns: int) -> None:
    """Three blocks a row do not fill whole bytes, nor do 81 codes."""
    generator = np.random.default_rng(5)
    kind, lowest = getattr(ml_dtypes, dtype), -8 if dtype == "int4" else 0
    given = {
        "codes": generator.integers(lowest, lowest + 16, (ROWS, columns)).astype(kind),
        "scales": testing.bfloat16_values(generator, ROWS, 3),
    }
    if zero_points:
        given["zero_points"] = generator.integers(lowest, lowest + 16, (ROWS, 3)).astype(kind)
    original = _alone(given)
    model, misses = testing.rewritten(original, "q4nx_gather")
    assert (testing.operator_names(model), misses) == (["Q4NXGather"], [])
    (expected,), (result,) = (testing.run(m, {"ids": IDS}) for m in (original, model))
    # The scale is a value of bf16; the minimum, -zero point times scale, has up to four bits more and is rounded.
    np.testing.assert_allclose(
        result, expected, rtol=0, atol=15 * float(given["scales"].max()) * testing.BFLOAT16_ROUNDING * zero_points
    )


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (_alone(bits=2), "bits=2: Q4NX stores codes of 4 or 8 bits; export this table with these"),
        (_alone(block_size=24), "block_size=24: Q4NX has one scale for 32 columns"),
        (_alone(gather_axis=1, quantize_axis=0), "rows are gathered along axis 1 and quantised along axis 0"),
        (_alone({"scales": np.ones((ROWS, 3), np.float16)}), "input 2 (scales): expected float, got float16"),
        (_alone({"codes": np.zeros((ROWS, 48), np.int8)}), "input 0 (data): expected uint8 or int4 or uint4, got int8"),
        (
            testing.parse(
                """
                fed (int64[B, S] ids, uint8[50, 48] codes) => (float[B, S, 96] embedded) {
                    embedded = com.microsoft.GatherBlockQuantized <bits = 4, block_size = 32> (codes, ids, scales)
                }
                """,
                scales=np.ones((ROWS, 3), np.float32),
            ),
            "codes is not a constant of the model",
        ),
        (
            testing.parse(
                """
                fed (int64[B, S] ids, float[] scales) => (float[B, S, 96] embedded) {
                    embedded = com.microsoft.GatherBlockQuantized <bits = 4, block_size = 32> (codes, ids, scales)
                }
                """,
                codes=np.zeros((ROWS, 48), np.uint8),
            ),
            "input 2 (scales): expected a constant of the model, got 'scales'",
        ),
    ],
)
def test_unmatched_graph_reports_miss(model: ir.Model, reason: str) -> None:
    model, misses = testing.rewritten(model, "q4nx_gather")
    assert testing.operator_names(model) == ["GatherBlockQuantized"]
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [("q4nx_gather", reason)]

# SPDX-License-Identifier: Apache-2.0
"""Which nodes stay with ONNX Runtime because taking them would make the model slower, with the option `claim`."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.ep.conftest import MakeSession, Placed, parse, reference
from tests.ops.device import ISAS

RNG = np.random.default_rng(0)
PRICED = {"on_unsupported": "cpu", "claim": "worthwhile"}


def product(rows: str, k: int, m: int) -> onnx.ModelProto:
    """A product between two nodes that no device takes."""
    model = parse(
        f"g (float[{rows}, {k}] x) => (float[{rows}, {m}] y)"
        "{ a = Tan(x)  b = Neg(a)  c = MatMul(b, w)  d = Add(c, c)  y = Tan(d) }".replace("MatMul(b, w)", "Neg(b)")
    )
    weight = (RNG.standard_normal((k, m)) / k).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model.graph.node[2].CopyFrom(helper.make_node("MatMul", ["b", "w"], ["c"]))
    return model


@pytest.mark.parametrize(
    ("rows", "k", "m", "taken"),
    [
        ("8", 256, 256, 0),  # half a million multiply-adds
        ("1", 256, 256, 0),  # not the rows of a text: the graph says one
        ("16", 256, 256, 3),  # a million
        ("N", 256, 256, 3),  # as many for the 16 rows that a short text is taken to have
        ("N", 64, 64, 0),
    ],
)
def test_partition_is_taken_from_a_million_multiply_adds_on(
    placed: Placed, rows: str, k: int, m: int, taken: int
) -> None:
    session, placement = placed(product(rows, k, m), PRICED)
    assert placement["claimed"] == taken
    left = {item["op_type"]: item["reason"] for item in placement["left"]}
    assert ("claim=all takes it" in left.get("Neg", "")) == (taken == 0)
    x = RNG.uniform(-1, 1, (16 if rows == "N" else int(rows), k)).astype(np.float32)
    (found,), (expected,) = session.run(None, {"x": x}), reference(product(rows, k, m), {"x": x})
    assert found.shape == expected.shape


def test_all_is_taken_with_claim_all(placed: Placed) -> None:
    _, placement = placed(product("8", 256, 256), PRICED | {"claim": "all"})
    assert placement["claimed"] == 3


def test_whole_model_without_products_is_taken_however_small(placed: Placed) -> None:
    _, placement = placed("g (float[2] x) => (float[2] y) { y = Add(x, x) }", PRICED)
    assert (placement["claimed"], placement["left"]) == (1, [])


@pytest.mark.parametrize(
    ("channels", "isa", "taken"),
    [(64, "avx512", True), (64, "generic", False), (16, "avx512", False), (16, "generic", False)],
)
def test_convolutions_are_taken_where_they_are_faster(placed: Placed, channels: int, isa: str, taken: bool) -> None:
    """Those of many channels, if the instruction set multiplies bf16; whole models of others are left, too."""
    if isa not in ISAS:
        pytest.skip(f"expected a processor with {isa}")
    model = parse(f"g (float[1, {channels}, 8, 8] x) => (float[1, {channels}, 6, 6] y) {{ y = Neg(x) }}")
    weight = RNG.standard_normal((channels, channels, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model.graph.node[0].CopyFrom(helper.make_node("Conv", ["x", "w"], ["y"]))
    _, placement = placed(model, PRICED | {"cpu_isa": isa})
    assert placement["claimed"] == int(taken)
    assert [item["reason"] for item in placement["left"]] == (
        [] if taken else ["ONNX Runtime's convolutions are faster (claim=all takes them)"]
    )
    _, placement = placed(model, PRICED | {"cpu_isa": isa, "claim": "all"})
    assert placement["claimed"] == 1


@pytest.mark.skipif("avx512" not in ISAS, reason="expected a processor with avx512")
def test_convolution_of_floats_by_an_int8_weight_is_taken(placed: Placed) -> None:
    """As `convert --weights q8` writes it; that of dequantised images is ONNX Runtime's."""
    model = parse("g (float[1, 64, 8, 8] x) => (float[1, 64, 6, 6] y) { w = Neg(x)  y = Neg(x) }")
    codes = RNG.integers(-127, 128, (64, 64, 3, 3)).astype(np.int8)
    constants = {"codes": codes, "scales": RNG.uniform(0.001, 0.01, 64).astype(np.float32), "step": np.float32(0.02)}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    model.graph.node[0].CopyFrom(helper.make_node("DequantizeLinear", ["codes", "scales"], ["w"], axis=0))
    model.graph.node[1].CopyFrom(helper.make_node("Conv", ["x", "w"], ["y"]))
    session, placement = placed(model, PRICED)
    assert placement["claimed"] == 2
    x = RNG.standard_normal((1, 64, 8, 8)).astype(np.float32)
    (found,), (expected,) = session.run(None, {"x": x}), reference(model, {"x": x})
    # tests/ops/cpu/images/test_convolution.py derives it: 5/3 of two roundings to bf16.
    assert np.linalg.norm(found - expected) < 6e-3 * np.linalg.norm(expected)
    model.graph.node[1].input[0] = "r"
    for at, (kind, name) in enumerate((("QuantizeLinear", "x"), ("DequantizeLinear", "q"))):
        model.graph.node.insert(at, helper.make_node(kind, [name, "step"], ["qr"[at]]))
    _, placement = placed(model, PRICED)
    assert "ONNX Runtime's quantised convolutions are faster" in {item["reason"] for item in placement["left"]}


def quantized(weight_type: int, static: int) -> onnx.ModelProto:
    """x times a quantised weight; `static`: the type of 8 bits that x and the result are quantised to; 0: none."""
    codes = helper.make_tensor("codes", weight_type, [256, 256], RNG.integers(-7, 8, 256 * 256))
    nodes = [helper.make_node("DequantizeLinear", ["codes", "scale"], ["w"], axis=1)]
    if static:
        nodes += [
            helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "step", "zero"], ["r"]),
        ]
    nodes.append(helper.make_node("MatMul", ["r" if static else "x", "w"], ["c" if static else "y"]))
    if static:
        nodes += [
            helper.make_node("QuantizeLinear", ["c", "step", "zero"], ["p"]),
            helper.make_node("DequantizeLinear", ["p", "step", "zero"], ["y"]),
        ]
    constants = [
        codes,
        numpy_helper.from_array(np.full(256, 0.01, np.float32), "scale"),
        numpy_helper.from_array(np.float32(0.05), "step"),
        helper.make_tensor("zero", static or TensorProto.UINT8, [], [0]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 256])],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("weight_type", "static", "taken"),
    [
        (TensorProto.INT8, 0, 2),
        (TensorProto.INT4, 0, 2),
        (TensorProto.INT8, TensorProto.INT8, 6),
        (TensorProto.INT8, TensorProto.UINT8, 0),
        (TensorProto.INT4, TensorProto.INT8, 6),
        (TensorProto.INT4, TensorProto.UINT8, 0),
    ],
)
def test_quantized_pattern_is_taken_or_left_whole(placed: Placed, weight_type: int, static: int, taken: int) -> None:
    model = quantized(weight_type, static)
    session, placement = placed(model, PRICED)
    assert placement["claimed"] == taken
    x = RNG.uniform(-1, 1, (64, 256)).astype(np.float32)
    (found,), (expected,) = session.run(None, {"x": x}), reference(model, {"x": x})
    # Taken: activations have 8 bits for their largest, 1, and 256 terms of at most 0.07. A quantised output
    # is off by one step. Scales of 4-bit weights are rounded to bf16.
    bound = (256 * 0.07 * (1 / 254 + 2.0**-9) if taken else 0) + (0.05 * (1 + 2.0**-20) if static or not taken else 0)
    assert np.abs(found - expected).max() <= bound


@pytest.mark.parametrize("threads", ["1", "3"])
def test_partitions_on_threads_of_onnxruntime_give_same_bits(make_session: MakeSession, threads: str) -> None:
    """Between nodes of ONNX Runtime the tasks of a partition run on its threads, one or several."""
    model = product("512", 256, 256)
    x = RNG.uniform(-1, 1, (512, 256)).astype(np.float32)
    results = [
        make_session(
            model, PRICED | {"threads": threads}, configure={"intra_op_num_threads": count, "inter_op_num_threads": 1}
        ).run(None, {"x": x})[0]
        for count in (1, 2, 4)
    ]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])

# SPDX-License-Identifier: Apache-2.0
"""The projections' and the gather's functions in stock ONNX Runtime, and the functions that a model gets."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from flownpu.ops import definitions, q4nx
from flownpu.ops.contracts import input_names
from flownpu.ops.definitions import fused_dqp, q4nx_gather, q4nx_matmul, q4nx_unpack
from flownpu.ops.definitions.onnx_function import DOMAIN
from tests.ops.stock_onnxruntime import BFLOAT16, model_of, node, run, value, with_functions
from tests.pairwise import pairwise

U = 2.0**-24  # unit roundoff of float32
M, K = 70, 300  # neither a multiple of a block, nor K of a group
WITH_MINIMA = [q4nx.WIDE, q4nx.EIGHT_BITS_WITH_MINIMA]
HEADS = {"num_heads": 4, "kv_num_heads": 2, "head_size": 16}


def random_blocks(seed: int, layout: q4nx.Layout = q4nx.WIDE, *, gated: bool = False) -> np.ndarray:
    """A random weight in blocks, the same one in all layouts that have minima."""
    rng = np.random.default_rng(seed)
    if layout.unpacked_bits == 8:
        parts = [q4nx.quantize_bytes(rng.standard_normal((M, K)).astype(np.float32)) for _ in range(1 + gated)]
        if layout.table:
            parts = [part._replace(codes=part.codes // 16 * np.int8(15)) for part in parts]
        if layout.minima:  # other numbers than those of scales
            parts = [part._replace(minimum=3 * part.scale[::-1]) for part in parts]
        return q4nx.pack_gated(parts[0], parts[1], layout) if gated else q4nx.pack(*parts[0], layout)
    parts = [q4nx.quantize(rng.standard_normal((M, K)).astype(np.float32)) for _ in range(1 + gated)]
    if not layout.minima:
        parts = [symmetric(part) for part in parts]
    return q4nx.pack_gated(parts[0], parts[1], layout) if gated else q4nx.pack(*parts[0], layout)


def symmetric(weight: q4nx.Quantized) -> q4nx.Quantized:
    return weight._replace(minimum=BFLOAT16(-8) * weight.scale)


def project(
    operator: Any, x: np.ndarray, blocks: np.ndarray, addends: dict[str, np.ndarray], **attributes: Any
) -> np.ndarray:
    """Runs one Q4NXMatMul or FusedDQP node; the weight is an initializer, as in every model."""
    feeds = {"X": x, **addends}
    known = {name: value(name, array) for name, array in feeds.items()}
    weight = value("W", blocks)
    inputs = [known["X"], weight, known.get("bias"), known.get("residual")]
    model = model_of([node(operator.NAME, inputs, **attributes)], list(known.values()), {weight: blocks})
    return run(with_functions(model), feeds)[0]


def activations(leading: tuple[int, ...], is_sparse: bool) -> np.ndarray:
    """float32 [..., K]; sparse ones have one column that is not 0 in each row, which makes their bounds tight."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((*leading, K)).astype(np.float32)
    if is_sparse:
        x *= np.arange(K) == rng.integers(0, K, (*leading, 1))
    return x


def projection_bound(x: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """A bound of the error of sum d (code - 8) x + sum (m + 8 d) x in float32; of 8 bits without the 8.

    Adding n numbers in any order errs by n u of the sum of their magnitudes, and adding 0 is exact.
    """
    codes, scale, minimum = q4nx.unpack(blocks, M, K)
    middle = 0.0 if codes.dtype == np.int8 else 8.0
    scale, minimum = (p.astype(np.float64).repeat(32, axis=1)[:, :K] for p in (scale, minimum))
    mass = np.abs(x.astype(np.float64)) @ (np.abs(scale * (codes - middle)) + np.abs(minimum + middle * scale)).T
    return (np.count_nonzero(x, axis=-1)[..., None] + 8) * U * mass


@pytest.mark.parametrize(
    ("layout", "is_sparse", "addends", "call"),
    pairwise(
        WITH_MINIMA,
        [False, True],
        [(), ("bias",), ("residual",), ("bias", "residual")],
        [(q4nx_matmul, (2, 3)), (q4nx_matmul, (5,)), (fused_dqp, (1, 1)), (fused_dqp, (1,))],
    ),
)
def test_projection_function_equals_reference(
    layout: q4nx.Layout, is_sparse: bool, addends: tuple[str, ...], call: tuple[Any, tuple[int, ...]]
) -> None:
    operator, leading = call
    rng = np.random.default_rng(3)
    x = activations(leading, is_sparse)
    shapes = {"bias": (M,), "residual": (*leading, M)}
    arrays = {name: rng.standard_normal(shapes[name]).astype(np.float32) for name in addends}
    blocks = random_blocks(0, layout)

    actual = project(operator, x, blocks, arrays, M=M, K=K)

    exact = x.astype(np.float64) @ q4nx.dequantize(blocks, M, K).astype(np.float64).T + sum(
        a.astype(np.float64) for a in arrays.values()
    )
    np.testing.assert_allclose(operator.reference(x, blocks, **arrays, rows=M, columns=K), exact, rtol=0, atol=1e-12)
    assert actual.shape == exact.shape
    bound = projection_bound(x, blocks) + 2 * U * np.abs(exact) + 2 * U * sum(np.abs(a) for a in arrays.values())
    assert np.all(np.abs(actual - exact) <= bound)


@pytest.mark.parametrize("layout", WITH_MINIMA, ids=str)
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("gating", ["geglu", "swiglu"])
@pytest.mark.parametrize(("operator", "rows"), [(q4nx_matmul, 4), (fused_dqp, 1)])
def test_gated_projection_function_equals_reference(
    operator: Any, rows: int, gating: str, with_residual: bool, is_sparse: bool, layout: q4nx.Layout
) -> None:
    rng = np.random.default_rng(3)
    x = activations((rows,), is_sparse)
    residual = {"residual": rng.standard_normal((rows, M)).astype(np.float32)} if with_residual else {}
    blocks = random_blocks(1, layout, gated=True)

    actual = project(operator, x, blocks, residual, M=M, K=K, gating=gating)

    gate, up = (x.astype(np.float64) @ q4nx.dequantize(b, M, K).astype(np.float64).T for b in np.split(blocks, 2))
    # torch's activations compute in float64, and are independent of ours.
    act = {"geglu": lambda t: torch.nn.functional.gelu(t, approximate="tanh"), "swiglu": torch.nn.functional.silu}[
        gating
    ]
    activated = act(torch.from_numpy(gate)).numpy()
    exact = activated * up + residual.get("residual", 0.0)
    reference = operator.reference(x, blocks, **residual, rows=M, columns=K, gating=gating)
    np.testing.assert_allclose(reference, exact, rtol=0, atol=1e-12 * np.abs(exact).max())

    gate_bound, up_bound = (projection_bound(x, b) for b in np.split(blocks, 2))
    # No slope of GELU or SiLU exceeds 1.13; their own float32 error is a few roundings of the argument's size.
    activation_bound = 1.13 * gate_bound + 16 * U * np.abs(gate)
    bound = activation_bound * np.abs(up) + (np.abs(activated) + activation_bound) * up_bound + 4 * U * np.abs(exact)
    assert np.all(np.abs(actual - exact) <= bound + 4 * U * np.abs(residual.get("residual", 0.0)))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("operator", "rows"), [(q4nx_matmul, 4), (fused_dqp, 1)])
@pytest.mark.parametrize("layout", [q4nx.NARROW, q4nx.SYMMETRIC, q4nx.EIGHT_BITS, q4nx.TABLE], ids=str)
def test_projection_has_same_bits_in_every_layout(
    layout: q4nx.Layout, operator: Any, rows: int, *, gated: bool
) -> None:
    x = activations((rows,), is_sparse=False)
    parts = [q4nx.unpack(blocks, M, K) for blocks in np.split(random_blocks(0, layout, gated=gated), 1 + gated)]
    other = q4nx.WIDE if layout.unpacked_bits == 4 else q4nx.EIGHT_BITS_WITH_MINIMA
    wide = np.concatenate([q4nx.pack(*part, other) for part in parts])
    attributes = {"M": M, "K": K, **({"gating": "geglu"} if gated else {})}
    expected = project(operator, x, wide, {}, **attributes)
    np.testing.assert_array_equal(
        project(operator, x, random_blocks(0, layout, gated=gated), {}, **attributes), expected
    )


def test_fused_dqp_refuses_second_row() -> None:
    x = np.ones((1, 2, K), np.float32)
    with pytest.raises(Exception, match="cannot be reshaped"):
        project(fused_dqp, x, random_blocks(0), {}, M=M, K=K)
    with pytest.raises(ValueError, match=r"one row, got X \[1, 2, 300\]"):
        fused_dqp.reference(x, random_blocks(0), rows=M, columns=K)


def gather(blocks: np.ndarray, indices: np.ndarray) -> np.ndarray:
    weight, wanted = value("W", blocks), value("indices", indices)
    model = model_of([node("Q4NXGather", [weight, wanted], M=M, K=K)], [wanted], {weight: blocks})
    return run(with_functions(model), {"indices": indices})[0]


@pytest.mark.parametrize(
    ("layout", "dtype", "shape"),
    pairwise(
        [q4nx.WIDE, q4nx.NARROW, q4nx.SYMMETRIC, q4nx.EIGHT_BITS, q4nx.EIGHT_BITS_WITH_MINIMA, q4nx.TABLE],
        [np.int32, np.int64],
        [(), (5,), (2, 0), (2, 4)],
    ),
)
def test_gather_is_exact(layout: q4nx.Layout, dtype: Any, shape: tuple[int, ...]) -> None:
    blocks = random_blocks(0, layout)
    indices = np.random.default_rng(0).integers(0, M, shape).astype(dtype)
    expected = q4nx.dequantize(blocks, M, K)[indices]
    np.testing.assert_array_equal(gather(blocks, indices), expected)
    np.testing.assert_array_equal(q4nx_gather.reference(blocks, indices, rows=M, columns=K), expected)


@pytest.mark.parametrize("index", [-1, -M, M, 95, 96])  # 70..95 are rows of padding
def test_gather_refuses_index_outside_table(index: int) -> None:
    indices = np.array([3, index], np.int64)
    with pytest.raises(Exception, match="out of data bounds"):
        gather(random_blocks(0), indices)
    with pytest.raises(IndexError, match=rf"0\.\.69, got {index}"):
        q4nx_gather.reference(random_blocks(0), indices, rows=M, columns=K)


@pytest.mark.parametrize("kinds", [1, 2])
def test_bf16_scales_are_read_exactly(kinds: int) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    values = bits.view(BFLOAT16).astype(np.float32).reshape(-1, kinds)
    pairs = bits.view(np.uint8).reshape(-1, kinds, 2)
    as_bytes = value("bytes", pairs)
    model = model_of([node("Q4NXParameters", [as_bytes], outputs=2)], [as_bytes])
    function = q4nx_unpack.parameters()
    model.functions[function.identifier()] = function
    model.opset_imports[DOMAIN] = 1
    scale, minimum = run(model, {"bytes": pairs})
    with np.errstate(over="ignore", invalid="ignore"):
        expected = [values[:, :1], values[:, 1:] if kinds == 2 else -8 * values]
    for actual, exact in zip((scale, minimum), expected, strict=True):
        number = ~np.isnan(exact)
        np.testing.assert_array_equal(actual[number], exact[number])


def two_projections() -> ir.Model:
    x, weight, gated, bias = (ir.Value(name=name) for name in ("X", "W", "gated", "bias"))
    nodes = [
        node("Q4NXMatMul", [x, weight], M=M, K=K),
        node("Q4NXMatMul", [x, weight, bias], M=M, K=K),
        node("Q4NXMatMul", [x, gated], M=M, K=K, gating="geglu"),
        node("Q4NXMatMul", [x, gated], M=M, K=K, gating="geglu"),
    ]
    for known in (x, bias):
        known.type = ir.TensorType(ir.DataType.FLOAT)
    x.shape, bias.shape = ir.Shape(["rows", K]), ir.Shape([M])
    constants = {weight: random_blocks(0), gated: random_blocks(1, gated=True)}
    return model_of(nodes, [x, bias], constants)


def test_model_gets_needed_functions_once() -> None:
    model = two_projections()
    for _ in range(2):
        definitions.add_functions(model)
        assert set(model.functions) == {
            (DOMAIN, "Q4NXMatMul", ""),
            (DOMAIN, "Q4NXMatMul", "bias"),
            (DOMAIN, "Q4NXMatMul", "geglu"),
            (DOMAIN, "Q4NXProject", ""),
            (DOMAIN, "Q4NXUnpack", ""),
            (DOMAIN, "Q4NXFields", ""),
            (DOMAIN, "Q4NXParameters", ""),
        }
        assert [n.overload for n in model.graph] == ["", "bias", "geglu", "geglu"]
    assert model.opset_imports == {"": 21, DOMAIN: 1, "com.microsoft": 1}
    model.graph.outputs.pop(0)
    model.graph.remove(model.graph[0])
    definitions.add_functions(model)
    assert (DOMAIN, "Q4NXMatMul", "") not in model.functions


@pytest.mark.parametrize("opset", [21, 22, 23, 24, 25, 26])
def test_variants_of_one_operator_live_in_one_model(opset: int) -> None:
    model = two_projections()
    model.graph.opset_imports[""] = opset
    x = np.random.default_rng(5).standard_normal((2, K)).astype(np.float32)
    bias = np.arange(M, dtype=np.float32)
    plain, biased, *gated = run(with_functions(model), {"X": x, "bias": bias})
    np.testing.assert_array_equal(biased, plain + bias)
    assert not np.array_equal(gated[0], plain)
    np.testing.assert_array_equal(*gated)


def test_model_of_projections_passes_checker_of_onnx() -> None:
    model = two_projections()
    for output in model.graph.outputs:
        output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["rows", M])
    onnx.checker.check_model(ir.to_proto(with_functions(model)))


def test_nodes_of_subgraphs_are_found() -> None:
    x, weight, condition = (ir.Value(name=name) for name in ("X", "W", "condition"))
    inner = node("Q4NXMatMul", [x, weight], M=M, K=K)
    branch = ir.Graph([], inner.outputs, nodes=[inner], name="branch")
    other = ir.node("Identity", [x])
    outer = node(
        "If",
        [condition],
        domain="",
        then_branch=branch,
        else_branch=ir.Graph([], other.outputs, nodes=[other], name="other"),
    )
    model = with_functions(model_of([outer], [x, weight, condition]))
    assert (DOMAIN, "Q4NXMatMul", "") in model.functions


def attention_node(present: str, **attributes: Any) -> ir.Node:
    inputs = [ir.Value(name=name) if name in present.split() else None for name in input_names("FlowQKVAttention")]
    return node("FlowQKVAttention", inputs, outputs=3, **{**HEADS, **attributes})


X, W, B = (ir.Value(name=name) for name in "XWB")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: node("Q4NXMatmul", [X, W], M=M, K=K), "expected one of Q4NXMatMul, FusedDQP.*got Q4NXMatmul"),
        (lambda: node("Q4NXMatMul", [X, W], M=M), r"\[Q4NXMatMul\] expected an integer attribute K"),
        (lambda: node("Q4NXMatMul", [X, W], M=M, K=1.5), "expected an integer attribute K"),
        (lambda: node("FusedDQP", [X, W], M=0, K=K), r"\[FusedDQP\] expected M of at least 1, got 0 at node"),
        (lambda: node("Q4NXGather", [W, X], M=M, K=-1), r"\[Q4NXGather\] expected K of at least 1, got -1 at node"),
        (lambda: node("Q4NXMatMul", [X, W], M=M, K=K, gating="reglu"), "one of none, geglu, swiglu, got 'reglu'"),
        (lambda: node("Q4NXMatMul", [X, W, B], M=M, K=K, gating="geglu"), "no bias with gating 'geglu'"),
        (lambda: node("Q4NXMatMul", [X, W], M=M, K=K, gating=1), "one of none, geglu, swiglu, got 1"),
        (lambda: node("Q4NXMatMul", [X, W], M=M, K=K, gated="geglu"), "the attributes M, K, gating, got gated"),
        (lambda: node("Q4NXMatMul", [X], M=M, K=K), "expected an input W, got none at node"),
        (lambda: node("Q4NXGather", [W, X, B], M=M, K=K), r"at most 2 inputs \(W, indices\), got 3"),
        (lambda: node("Q4NXGather", [W, X], 2, M=M, K=K), r"at most 1 outputs \(Y\), got 2"),
        (lambda: attention_node("query", num_heads=5), "num_heads to be a multiple of kv_num_heads"),
        (lambda: attention_node("key value"), "expected an input query"),
        (lambda: attention_node("query key"), "both of key and value or neither"),
        (lambda: attention_node("query past_key past_value"), "past_key needs seqlens_k"),
        (lambda: attention_node("query", do_rotary=1), "do_rotary = 1 needs cos_cache"),
        (lambda: attention_node("query", sliding_window_cache=1), "sliding_window_cache = 1 needs past_key"),
        (lambda: attention_node("query", causal=0, local_window_size=4), "causal = 0 needs local_window_size = -1"),
    ],
)
def test_malformed_nodes_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        definitions.add_functions(model_of([wrong()], []))


def test_opset_below_21_is_refused() -> None:
    with pytest.raises(ValueError, match="opset 21 or newer, got 17"):
        definitions.add_functions(model_of([node("Q4NXMatMul", [X, W], M=M, K=K)], [], opset=17))

# SPDX-License-Identifier: Apache-2.0
"""ops/lowering in sessions: operators that run, read from the profile; numbers, compared with ORT's CPU provider;
reasons that the error and the placement report give. Each rule's own test has the graphs that the rule leaves alone."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from flownpu.graph_rewrites import testing
from flownpu.ops import q4nx
from tests.ops.lowering.test_weights import codes_of

Inputs = dict[str, np.ndarray]
# Activations and scales are exact in bf16, so that only float32 rounds: sums of at most 96 products and softmaxes of a
# few keys. That is less than 2^10 roundings, each of 2^-24 of the largest value.
TOLERANCE = 2.0**-14


def weight(name: str, rows: int, columns: int, block: int = 32) -> Inputs:
    codes, scales = codes_of(np.random.default_rng(rows + columns + len(name)), rows, columns, block)
    return {f"{name}_codes": codes, f"{name}_scales": scales}


def activations(*shape: int) -> np.ndarray:
    values = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def session(ep_devices: list[Any], model: onnx.ModelProto, folder: Path, **options: str) -> Any:
    configuration = onnxruntime.SessionOptions()
    configuration.enable_profiling = True
    configuration.profile_file_prefix = str(folder / "profile")
    configuration.add_provider_for_devices(ep_devices, {"activations": "bf16", **options})
    return onnxruntime.InferenceSession(model.SerializeToString(), configuration)


def check(ep_devices: list[Any], model: ir.Model, feeds: Inputs, folder: Path, **options: str) -> Counter[str]:
    """Compares the outputs with ORT's. Returns the operators that ran on our provider, and how often."""
    proto = ir.to_proto(model)
    ours = session(ep_devices, proto, folder, **options)
    stock = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for found, expected in zip(ours.run(None, feeds), stock.run(None, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
    events = json.loads(Path(ours.end_profiling()).read_text())
    run = [event["args"] for event in events if event["cat"] == "Kernel"]
    return Counter(args["op_name"] for args in run if args.get("provider") == "FlowNPUExecutionProvider")


# --- GELU in parts ----------------------------------------------------------------------------------------------------

ERF_GELU = """
gelu (float[1, S, 8] x) => (float[1, S, 8] y) {{
    half = Constant <value_float = 0.5> ()
    one = Constant <value_float = 1.0> ()
    root = Constant <value_float = {root}> ()
    scaled = {scale} (x, root)
    erf = Erf (scaled)
    sum = Add (one, erf)
    {products}
}}
"""
HALVED_LAST = "product = Mul (x, sum)  y = Mul (product, half)"
BY_ERF = {"scale": "Div", "root": np.float32(math.sqrt(2)), "products": HALVED_LAST}


@pytest.mark.parametrize(
    ("scale", "root", "products", "is_gelu"),
    [
        ("Div", math.sqrt(2), HALVED_LAST, True),
        ("Mul", math.sqrt(0.5), "product = Mul (half, x)  y = Mul (sum, product)", True),
        ("Div", 1.5, HALVED_LAST, False),
        ("Mul", math.sqrt(2), HALVED_LAST, False),
        ("Div", math.sqrt(2), "product = Mul (scaled, sum)  y = Mul (product, half)", False),
    ],
)
def test_gelu_by_erf_becomes_gelu_only_with_its_constants(
    ep_devices: list[Any], tmp_path: Path, scale: str, root: float, products: str, is_gelu: bool
) -> None:
    model = testing.parse(ERF_GELU.format(scale=scale, root=np.float32(root), products=products))
    operators = check(ep_devices, model, {"x": activations(1, 3, 8)}, tmp_path)
    assert operators.get("Gelu", 0) == (1 if is_gelu else 0)
    assert operators.get("Erf", 0) == (0 if is_gelu else 1)


TANH_GELU = """
gelu (float[1, S, 8] x) => (float[1, S, 8] y) {{
    half = Constant <value_float = 0.5> ()
    one = Constant <value_float = 1.0> ()
    three = Constant <value_float = 3.0> ()
    factor = Constant <value_float = 0.044715> ()
    root = Constant <value_float = {root}> ()
    {third}
    cubic = Add (x, third)
    scaled = Mul (root, cubic)
    tanh = Tanh (scaled)
    sum = Add (tanh, one)
    share = Mul (sum, half)
    y = Mul (x, share)
}}
"""
BY_TANH = {"root": np.float32(math.sqrt(2 / math.pi)), "third": "cube = Pow (x, three)  third = Mul (factor, cube)"}


@pytest.mark.parametrize(
    ("root", "third", "is_gelu"),
    [
        (math.sqrt(2 / math.pi), "cube = Pow (x, three)  third = Mul (factor, cube)", True),
        (math.sqrt(2 / math.pi), "square = Mul (x, x)  cube = Mul (x, square)  third = Mul (factor, cube)", True),
        (math.sqrt(2 / math.pi), "part = Mul (factor, x)  square = Mul (x, part)  third = Mul (x, square)", True),
        (math.sqrt(2 / math.pi), "square = Mul (x, x)  third = Mul (factor, square)", False),
        (0.8, "cube = Pow (x, three)  third = Mul (factor, cube)", False),
    ],
)
def test_gelu_by_tanh_becomes_gelu_only_with_its_constants(
    ep_devices: list[Any], tmp_path: Path, root: float, third: str, is_gelu: bool
) -> None:
    model = testing.parse(TANH_GELU.format(root=np.float32(root), third=third))
    operators = check(ep_devices, model, {"x": activations(1, 3, 8)}, tmp_path)
    assert operators.get("Gelu", 0) == (1 if is_gelu else 0)
    assert operators.get("Tanh", 0) == (0 if is_gelu else 1)


# --- Quantised graphs: dynamic_product, dequantized -------------------------------------------------------------------

DYNAMIC = """
dynamic (float[1, S, 64] x) => (float[1, S, 40] y) {{
    codes, step, zero = DynamicQuantizeLinear (x)
    sums = MatMulInteger (codes, w, zero, points)
    numbers = Cast <to = 1> (sums)
    factors = Mul ({factors})
    y = Mul (numbers, factors)
}}
"""


@pytest.mark.parametrize(
    ("kind", "point", "scales", "factors", "is_product"),
    [
        (np.int8, 0, 40, "step, scale", True),
        (np.int8, 0, 1, "scale, step", True),
        (np.int8, 1, 40, "step, scale", False),
        (np.uint8, 0, 40, "step, scale", False),
        (np.int8, 0, 40, "step, step", False),
    ],
)
def test_dynamic_product_becomes_product_of_symmetric_int8_weight(
    ep_devices: list[Any], tmp_path: Path, kind: Any, point: int, scales: int, factors: str, is_product: bool
) -> None:
    rng = np.random.default_rng(5)
    scale = rng.uniform(0.001, 0.01, scales).astype(np.float32)
    constants = {"w": rng.integers(0, 100, (64, 40)).astype(kind), "points": np.full(40, point, kind)}
    if "scale" in factors:
        constants["scale"] = scale
    proto = ir.to_proto(testing.parse(DYNAMIC.format(factors=factors), **constants))
    feeds = {"x": rng.uniform(-1, 1, (1, 6, 64)).astype(np.float32)}
    ours = session(ep_devices, proto, tmp_path, activations="int8")
    found = ours.run(None, feeds)[0]
    # Not ONNX Runtime's: with AVX2 its sums of two products of bytes saturate.
    x = feeds["x"].astype(np.float64)
    codes = constants["w"].astype(np.float64) - point
    factor = scale if "scale" in factors else np.ptp(x) / 255
    # Activations of at most 1 are rounded by half a step: 2 / 255 in DynamicQuantizeLinear; in DenseMatMul 2 / 127
    # with AVX2, half of that elsewhere. AVX2 also rounds the codes of a column if eight of one sign may add up to more
    # than 32767 / 127: each by half of the step with which eight, rounded by half each, do not.
    rounded = 0.5 * np.sort(np.abs(codes), 0)[-8:].sum(0) / (32767 // 127 - 4)
    bound = np.abs(codes).sum(0) / 127 + np.abs(x).sum(-1, keepdims=True) * rounded
    assert np.all(np.abs(found - x @ codes * factor) <= bound * 1.01 * factor + 1e-6)
    ran = json.loads(Path(ours.end_profiling()).read_text())
    names = {event["args"]["op_name"] for event in ran if event["cat"] == "Kernel"}
    assert ("DenseMatMul" in names) == is_product
    assert ("MatMulInteger" in names) == (not is_product)


TABLE = """
table (int64[N] ids) => (float[N, 24] y, float[40, 24] z) {
    rows = DequantizeLinear (w, scale, zero)
    y = Gather (rows, ids)
    bias = DequantizeLinear <axis = 0> (codes, steps)
    z = Add (bias, y0)
}
"""


def test_dequantized_constants_are_not_computed_in_each_run(ep_devices: list[Any], tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    model = testing.parse(
        TABLE,
        w=rng.integers(0, 256, (50, 24)).astype(np.uint8),
        scale=np.float32(0.02),
        zero=np.uint8(128),
        codes=rng.integers(-1000, 1000, (40, 24)).astype(np.int32),
        steps=rng.uniform(0.001, 0.01, 40).astype(np.float32),
        y0=activations(40, 24),
    )
    operators = check(ep_devices, model, {"ids": np.array([3, 49, 0, -1])}, tmp_path)
    # Rows of the table are gathered as bytes; the bias is a constant.
    assert operators == {"Gather": 1, "DequantizeLinear": 1, "Add": 1}


@pytest.mark.parametrize("count", [0, 3])
def test_dequantized_constant_with_wrong_number_of_scales_is_refused(
    ep_devices: list[Any], tmp_path: Path, count: int
) -> None:
    text = "g (float[4, 2] x) => (float[4, 2] y) { w = DequantizeLinear <axis = 0> (codes, scales)  y = Add (w, x) }"
    model = testing.parse(text, codes=np.ones((4, 2), np.int8), scales=np.ones(count, np.float32))
    with pytest.raises(Exception, match=r"[Ss]cale"):
        session(ep_devices, ir.to_proto(model), tmp_path).run(None, {"x": activations(4, 2)})


NATIVE = """
gated (float[1, S, {gate_columns}] x) => (float[1, S, 40] y) {{
    gate = ai.flownpu.Q4NXMatMul <K = 96, M = 40> (x, gate_q4nx)
    up = {up}
    activated = com.microsoft.FastGelu (gate)
    y = Mul (activated, up)
}}
"""


def native(name: str, rows: int, columns: int, layout: q4nx.Layout) -> Inputs:
    """A weight that is Q4NX in the model. Its minima are -8 times its scales, so that any layout can hold it."""
    rng = np.random.default_rng(rows + len(name))
    codes = rng.integers(0, 16, (rows, columns), np.uint8)
    scales = (rng.integers(128, 256, (rows, -(-columns // 32))) * 2.0**-14).astype(np.float32)
    return {f"{name}_q4nx": q4nx.pack(*q4nx.from_affine(codes, scales, -8 * scales), layout)}


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        pytest.param(q4nx.SYMMETRIC, q4nx.NARROW, {"Q4NXMatMul": 1}, id="of two layouts"),
        pytest.param(q4nx.WIDE, None, {"Q4NXMatMul": 1}, id="beside codes"),
    ],
)
def test_q4nx_weights_stay_as_they_are(
    ep_devices: list[Any], tmp_path: Path, gate: q4nx.Layout, up: q4nx.Layout | None, expected: dict[str, int]
) -> None:
    """As in a model whose projections were converted one by one."""
    makers = {
        True: "ai.flownpu.Q4NXMatMul <K = 96, M = 40> (x, up_q4nx)",
        False: "com.microsoft.MatMulNBits <K = 96, N = 40, block_size = 32> (x, up_codes, up_scales)",
    }
    constants = native("gate", 40, 96, gate) | (native("up", 40, 96, up) if up else weight("up", 40, 96))
    model = testing.parse(NATIVE.format(gate_columns=96, up=makers[up is not None]), **constants)
    testing.add_functions(model)
    assert check(ep_devices, model, {"x": activations(1, 3, 96)}, tmp_path) == expected


def test_projections_of_different_input_widths_stay_apart(ep_devices: list[Any], tmp_path: Path) -> None:
    """One of the two is wrong, which only a run shows, because the input's width is unknown before."""
    up = "com.microsoft.MatMulNBits <K = 64, N = 40, block_size = 32> (x, up_codes, up_scales)"
    constants = native("gate", 40, 96, q4nx.NARROW) | weight("up", 40, 64)
    model = testing.parse(NATIVE.format(gate_columns="N", up=up), **constants)
    testing.add_functions(model)
    with pytest.raises(Exception, match=r"expected X of shape \[.., 64\], got"):
        session(ep_devices, ir.to_proto(model), tmp_path).run(None, {"x": activations(1, 3, 96)})


# --- What is refused --------------------------------------------------------------------------------------------------

PRODUCT = """
product (float[S, 64] x) => (float[S, 32] y) {{
    y = com.microsoft.MatMulNBits <K = 64, N = 32, {attributes}> (x, w_codes, w_scales{more})
}}
"""


def product(attributes: str = "block_size = 32", constants: Inputs | None = None, more: str = "") -> ir.Model:
    text = PRODUCT.format(attributes=attributes, more=more)
    used = {name: array for name, array in (weight("w", 32, 64) | (constants or {})).items() if name in text}
    return testing.parse(text, **used)


GROUPED = """
attention (float[1, S, W] query, int32[1] lengths, int32[1] total)
    => (float y, float present_key, float present_value) {
    y, present_key, present_value = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1>
        (query, , , , , lengths, total)
}
"""
IDS = {"ids": np.array([3, 0, 3])}
X = {"x": activations(3, 64)}
QUERY = {"query": activations(1, 3, 128), "lengths": np.array([2], np.int32), "total": np.array([3], np.int32)}
REFUSED: dict[str, tuple[ir.Model, Inputs, str]] = {
    "q4nx_gather: scales of any shape": (
        testing.parse(
            """
            table (int64[S] ids, float[10] numbers, int64[N] sizes) => (float y) {
                scales = Reshape (numbers, sizes)
                y = com.microsoft.GatherBlockQuantized <bits = 4, block_size = 32> (codes, ids, scales)
            }
            """,
            codes=np.full((5, 32), 130, np.uint8),
        ),
        IDS | {"numbers": np.ones(10, np.float32), "sizes": np.array([5, 2])},
        "input 2 (scales): expected a constant of the model, got",
    ),
    "q4nx_matmul: a scale that is not finite": (
        product(constants={"w_scales": np.full(64, 3.4e38, np.float32)}),
        X,
        "holds a scale that is not finite, or too large",
    ),
    "q4nx_matmul: weights of small blocks that are too large": (
        product("block_size = 16", constants=weight("w", 32, 64, 16) | {"w_scales": np.full(128, 1e38, np.float32)}),
        X,
        "makes a weight that is not finite, or too large for bf16",
    ),
    "q4nx_matmul: zero points of another type": (
        product(more=", points", constants={"points": np.full((32, 2), 8, np.float16)}),
        X,
        "input 3 (zero_points): expected float or uint8, got float16",
    ),
    "flow_qkv_attention: queries of unknown width": (
        testing.parse(GROUPED),
        QUERY,
        "the head size is not known from the query's last axis",
    ),
}


# There is nothing to compare these with: ORT's own sums overflow, or its kernel refuses them too.
NO_NUMBERS = {"q4nx_matmul: a scale that is not finite", "q4nx_matmul: weights of small blocks that are too large"}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_operator_is_left_to_onnxruntime_with_reason(ep_devices: list[Any], tmp_path: Path, name: str) -> None:
    model, feeds, reason = REFUSED[name]
    with pytest.raises(Exception, match="FlowNPU") as raised:
        session(ep_devices, ir.to_proto(model), tmp_path)
    assert reason in str(raised.value)
    report = tmp_path / "placement.json"
    if name not in NO_NUMBERS:
        ran = check(ep_devices, model, feeds, tmp_path, on_unsupported="cpu", claim="all", placement=str(report))
        assert set(ran) <= {"Reshape"}  # that makes the table's scales
        (left,) = json.loads(report.read_text())["left"]
        assert reason in left["reason"]

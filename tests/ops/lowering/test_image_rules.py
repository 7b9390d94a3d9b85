# SPDX-License-Identifier: Apache-2.0
"""Rules of ops/lowering for image models: the steps that remain in a session, and results against ONNX Runtime's."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import numpy_helper, parser

RNG = np.random.default_rng(0)
HEAD = '<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]> agraph '
CONSTANTS = {
    "one": np.ones(4, np.float32),
    "zero": np.zeros(4, np.float32),
    "two": np.full(4, 2, np.float32),
    "gamma": RNG.standard_normal((8, 1, 1), dtype=np.float32),
    "beta": RNG.standard_normal((8, 1, 1), dtype=np.float32),
    "grouped": np.array([0, 4, -1]),
    "alpha": np.float32(1.702),
    "w": RNG.standard_normal((12, 8, 3, 3), dtype=np.float32),
    "wide": RNG.standard_normal((32, 32, 3, 3), dtype=np.float32),
    "twice": np.array([1, 1, 2, 2], np.float32),
    "heads": np.array([0, -1, 2, 40]),
    "by_head": np.array([0, 2, -1, 40]),
    "joined": np.array([0, -1, 80]),
    "last": np.array([-1]),
    "end": np.array([2**63 - 1]),
    "unit": np.ones(1, np.float32),
    "scale": np.float32(0.2),
}


def steps(
    ep_devices: list[Any], folder: Path, text: str, shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, int], float]:
    """The operators of the session's steps with their counts, and the largest difference to ONNX Runtime's results."""
    model = parser.parse_model(HEAD + text)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name)
        for name, array in CONSTANTS.items()
        if any(name in node.input for node in model.graph.node)
    )
    feeds = {name: RNG.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    configuration = onnxruntime.SessionOptions()
    configuration.enable_profiling = True
    configuration.profile_file_prefix = str(folder / "profile")
    # The generic kernels round nothing, and the steps do not depend on the kernels.
    options = {"device": "cpu", "on_unsupported": "error", "cpu_isa": "generic"}
    configuration.add_provider_for_devices(ep_devices, options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), configuration)
    (found,) = session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    stock = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    difference = np.abs(found - np.asarray(stock.run(None, feeds)[0])).max()
    return Counter(event["args"]["op_name"] for event in events if event["cat"] == "Kernel"), float(difference)


GROUP_NORM = """
    r = Reshape(x, grouped)  n = InstanceNormalization<epsilon = 0.001>(r, {scale}, zero)
    s = Shape(x)  b = Reshape(n, s)  m = Mul(b, gamma)  {result} = Add(m, beta)
"""
IMAGES = {"x": (2, 8, 6, 5)}
# Numbers of up to some 10, each of some ten roundings of 2^-24, and a mean of 60 numbers.
NORM_ERROR = 10 * 70 * 2.0**-24


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GROUP_NORM.format(scale="one", result="y"), {"GroupNorm": 1}),
        (GROUP_NORM.format(scale="one", result="a") + "g = Sigmoid(a)  y = Mul(a, g)", {"GroupNorm": 1}),
        (
            GROUP_NORM.format(scale="two", result="y"),
            {"Reshape": 2, "InstanceNormalization": 1, "Mul": 1, "Add": 1, "Shape": 1},
        ),
        (
            GROUP_NORM.format(scale="one", result="a") + "g = Sigmoid(a)  c = Mul(g, a)  y = Sub(c, a)",
            {"GroupNorm": 1, "Swish": 1, "Sub": 1},
        ),
    ],
    ids=["norm", "with SiLU", "another scale", "also read elsewhere"],
)
def test_group_norm_becomes_one_step(
    ep_devices: list[Any], tmp_path: Path, text: str, expected: dict[str, int]
) -> None:
    found, difference = steps(ep_devices, tmp_path, f"(float[N,8,H,W] x) => (float[N,8,H,W] y) {{{text}}}", IMAGES)
    assert found == expected
    assert difference < NORM_ERROR


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("g = Sigmoid(x)  y = Mul(g, x)", {"Swish": 1}),
        ("a = Mul(x, alpha)  g = Sigmoid(a)  y = Mul(x, g)", {"QuickGelu": 1}),
        ("g = Sigmoid(x)  a = Neg(x)  y = Mul(g, a)", {"Sigmoid": 1, "Neg": 1, "Mul": 1}),
    ],
)
def test_products_with_sigmoid_become_swish(
    ep_devices: list[Any], tmp_path: Path, text: str, expected: dict[str, int]
) -> None:
    found, difference = steps(ep_devices, tmp_path, f"(float[N,8,H,W] x) => (float[N,8,H,W] y) {{{text}}}", IMAGES)
    assert found == expected
    assert difference < 5 * 8 * 2.0**-24  # numbers up to 5, of some roundings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("c = Conv<pads = [1, 1, 1, 1]>(x, w)  s = Add(z, c)  y = Relu(s)", {"FusedConv": 1}),
        ("c = Conv<pads = [1, 1, 1, 1]>(x, w)  y = Relu(c)", {"FusedConv": 1}),
        ("c = Conv<pads = [1, 1, 1, 1]>(x, w)  r = Relu(c)  y = Add(r, z)", {"FusedConv": 1, "Add": 1}),
        ("c = Conv<pads = [1, 1, 1, 1]>(x, w)  s = Add(c, o)  y = Relu(s)", {"Conv": 1, "Add": 1, "Relu": 1}),
    ],
    ids=["sum, Relu", "Relu", "Relu, sum", "another shape"],
)
def test_convolution_takes_what_follows(
    ep_devices: list[Any], tmp_path: Path, text: str, expected: dict[str, int]
) -> None:
    shapes = IMAGES | {"z": (2, 12, 6, 5), "o": (2, 12, 1, 1)}
    given = {name: shape for name, shape in shapes.items() if f"{name})" in text or f"({name}," in text}
    inputs = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in given.items())
    found, difference = steps(ep_devices, tmp_path, f"({inputs}) => (float[2,12,6,5] y) {{{text}}}", given)
    assert found == expected
    # Sums of 72 products of up to 4 * 4, in two orders of summation.
    assert difference < 2 * 72 * 72 * 16 * 2.0**-24


@pytest.mark.parametrize(
    ("places", "rounding", "pads", "expected"),
    [
        ("asymmetric", "floor", "1, 1, 1, 1", {"FusedConv": 1}),
        ("half_pixel", "round_prefer_ceil", "1, 1, 1, 1", {"FusedConv": 1}),
        ("half_pixel", "floor", "1, 1, 1, 1", {"Resize": 1, "Conv": 1}),
        ("asymmetric", "ceil", "1, 1, 1, 1", {"Resize": 1, "Conv": 1}),
        ("asymmetric", "floor", "1, 1, 0, 2", {"Resize": 1, "Conv": 1}),
    ],
)
def test_convolution_reads_repeated_pixels_itself(
    ep_devices: list[Any], tmp_path: Path, places: str, rounding: str, pads: str, expected: dict[str, int]
) -> None:
    resize = f'Resize<coordinate_transformation_mode = "{places}", nearest_mode = "{rounding}">(v, , twice)'
    text = f"(float[2,32,5,4] v) => (float[2,32,A,B] y) {{r = {resize}  y = Conv<pads = [{pads}]>(r, wide)}}"
    found, difference = steps(ep_devices, tmp_path, text, {"v": (2, 32, 5, 4)})
    assert found == expected
    # Sums of 288 products of up to 4.5 * 4.5, in two orders of summation, the sums of taps and of pixels up to 9 and 4.
    assert difference < 2 * 288 * 2.0**-24 * 4.5 * 4.5 * 36


ATTENTION = """
    qh = Reshape(q, heads)  qt = Transpose<perm = [0, 2, 1, 3]>(qh)
    kh = Reshape(k, heads)  kt = Transpose<perm = [0, 2, 3, 1]>(kh)
    vh = Reshape(v, heads)  vt = Transpose<perm = [0, 2, 1, 3]>(vh)
    s = MatMul(qt, kt)  {scores}  p = Softmax<axis = -1>({last})
    t = MatMul(p, vt)  u = Transpose<perm = [0, 2, 1, 3]>(t)  y = Reshape(u, joined)
"""
# Scores are sums of 40 products of up to 4 * 4; probabilities are off by as much, and values are up to 4.
ATTENTION_ERROR = 2 * 40 * 44 * 16 * 2.0**-24 * 4


@pytest.mark.parametrize("scores", ["", "m = Mul(s, scale)", "m = Div(s, scale)", "c = Mul(s, scale)  m = Add(c, b)"])
def test_attention_over_other_keys_becomes_one_step(ep_devices: list[Any], tmp_path: Path, scores: str) -> None:
    shapes = {"q": (2, 70, 80), "k": (2, 77, 80), "v": (2, 77, 80), "b": (70, 77)}
    if "b)" not in scores:
        del shapes["b"]
    inputs = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    text = ATTENTION.format(scores=scores, last="m" if scores else "s")
    found, difference = steps(ep_devices, tmp_path, f"({inputs}) => (float[2,70,80] y) {{{text}}}", shapes)
    assert found == {"Reshape": 8, "Attention": 1}
    assert difference < ATTENTION_ERROR


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        # The root of one over the root of a head's size, as torch.onnx computes it.
        (
            "n = Shape(qt)  l = Slice(n, last, end)  f = Cast<to = 1>(l)  e = Sqrt(f)  i = Div(unit, e)  r = Sqrt(i)",
            {},
        ),
        ("a = Abs(x)  r = Sqrt(a)", {"Abs": 1, "Sqrt": 1, "Mul": 2}),
    ],
    ids=["of known sizes", "of an input"],
)
def test_numbers_that_multiply_queries_and_keys_need_no_transposes(
    ep_devices: list[Any], tmp_path: Path, root: str, expected: dict[str, int]
) -> None:
    shapes = {"q": (2, 70, 80), "k": (2, 77, 80), "v": (2, 77, 80), "x": (1,)}
    if not expected:
        del shapes["x"]
    inputs = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    text = ATTENTION.format(scores="", last="s").replace(
        "s = MatMul(qt, kt)", f"{root}  qs = Mul(qt, r)  ks = Mul(kt, r)  s = MatMul(qs, ks)"
    )
    found, difference = steps(ep_devices, tmp_path, f"({inputs}) => (float[2,70,80] y) {{{text}}}", shapes)
    assert found == {"Reshape": 8, "Attention": 1} | expected
    assert difference < ATTENTION_ERROR


@pytest.mark.parametrize(
    "change",
    [
        ("y = Reshape(u, joined)", "y = Identity(t)"),  # nobody swaps heads and tokens back
        ("vh = Reshape(v, heads)  vt = Transpose<perm = [0, 2, 1, 3]>(vh)", "vt = Reshape(v, by_head)"),
    ],
    ids=["result", "values"],
)
def test_attention_by_head_keeps_its_transposes(ep_devices: list[Any], tmp_path: Path, change: tuple[str, str]) -> None:
    shapes = {"q": (2, 70, 80), "k": (2, 77, 80), "v": (2, 77, 80)}
    inputs = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    text = ATTENTION.format(scores="", last="s").replace(*change)
    found, difference = steps(ep_devices, tmp_path, f"({inputs}) => (float y) {{{text}}}", shapes)
    assert found["Transpose"] == 3
    assert difference < ATTENTION_ERROR


def test_attention_of_few_scores_stays(ep_devices: list[Any], tmp_path: Path) -> None:
    shapes = {"q": (2, 5, 80), "k": (2, 7, 80), "v": (2, 7, 80)}
    inputs = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    text = ATTENTION.format(scores="", last="s")
    found, difference = steps(ep_devices, tmp_path, f"({inputs}) => (float[2,5,80] y) {{{text}}}", shapes)
    assert found == {"Reshape": 4, "Transpose": 4, "MatMul": 2, "Softmax": 1}
    assert difference < ATTENTION_ERROR

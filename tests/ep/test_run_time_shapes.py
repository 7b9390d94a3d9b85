# SPDX-License-Identifier: Apache-2.0
"""Shapes that are known only in a run: errors before anything is written, or ORT's CPU provider for that run."""

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from tests.ep.conftest import HEADER, MakeSession, reference

FALLBACK = {"on_unsupported": "cpu"}


def open_model(graph: str) -> onnx.ModelProto:
    """The graph, in which only the shapes of constants are known."""
    model = onnx.parser.parse_model(f"{HEADER} {graph}")  # The checker does not know operators of ONNX Runtime's own.
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    return model


RANK_9 = np.ones((1,) * 9, np.float32)
MANY = [
    pytest.param("g (float[2] x) => (float[2] y) { y = Add(x, x) }", {"x": RANK_9}, "rank 8 at most", id="rank 9"),
    pytest.param(
        "g (float[2,2] x, int64[1] a) => (float[2] y) { y = Unsqueeze(x, a) }",
        {"x": np.ones((1,) * 8, np.float32), "a": np.array([0])},
        "rank 8 at most",
        id="becomes rank 9",
    ),
    pytest.param(
        "g (float[2,4] x, float[4] w) => (float[2,4] y) { y = LayerNormalization(x, w) }",
        {"x": np.arange(8, dtype=np.float32).reshape(2, 4), "w": np.array([2], np.float32)},
        r"expected a weight of shape \[4\], got \[1\]",
        id="a weight for all",
    ),
]


@pytest.mark.parametrize(("graph", "feeds", "reason"), MANY)
def test_run_of_unsupported_shape_falls_back(
    make_session: MakeSession, graph: str, feeds: dict[str, Any], reason: str
) -> None:
    model = open_model(graph)
    with pytest.raises(Exception, match=reason):
        make_session(model).run(None, feeds)
    session = make_session(model, FALLBACK)
    for _ in range(2):
        (ours,) = session.run(None, feeds)
        np.testing.assert_array_equal(ours, reference(model, feeds)[0], strict=True)


def test_run_after_fallback_is_on_device(make_session: MakeSession) -> None:
    model = open_model("g (float[2] x) => (float[2] y) { a = Add(x, x)  y = Exp(a) }")
    session = make_session(model, FALLBACK)
    x = np.array([0.5, 1], np.float32)
    first = session.run(None, {"x": x})[0]
    assert session.run(None, {"x": RANK_9})[0].ndim == 9
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], first)


def test_constants_and_attributes_reach_fallback_provider(make_session: MakeSession) -> None:
    model = open_model(
        """g (float[2] x, int64[1] s) => (float[2] y) <float[1] c = {0.25}, float[2,3] w = {1, 2, 3, 4, 5, 6}> {
            f = ConstantOfShape <value = float[1] {3}> (s)  a = Concat <axis = 0> (f, c)
            b = ReduceSum <keepdims = 0> (a)  d = ReduceMax(w)  e = Mul(d, b)  g = Flatten <axis = 1> (x)
            h = Unsqueeze(g, s)  k = Identity(h)  y = Mul(k, e)
        }"""
    )
    feeds = {"x": np.ones((1, 2, 1, 1, 1, 1, 1, 1, 3), np.float32), "s": np.array([2])}
    (ours,) = make_session(model, FALLBACK).run(None, feeds)
    np.testing.assert_array_equal(ours, reference(model, feeds)[0], strict=True)


def test_shapes_of_constants_reach_fallback_provider(make_session: MakeSession) -> None:
    """ONNX Runtime needs the shape of a bias when a session is made."""
    model = open_model(
        """g (float[3,32] x) => (float[3,8] y)
           <float[8,1] s = {1, 2, 3, 4, 5, 6, 7, 8}, float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}, float[1] g = {2}> {
            p = com.microsoft.MatMulNBits <K = 32, N = 8, block_size = 32> (x, w, s, "", "", b)
            y = SimplifiedLayerNormalization (p, g)
        }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full((8, 1, 16), 0x97, np.uint8), "w"))
    feeds = {"x": np.ones((3, 32), np.float32)}
    (ours,) = make_session(model, FALLBACK).run(None, feeds)
    np.testing.assert_array_equal(ours, reference(model, feeds)[0], strict=True)


def test_repeated_axis_falls_back(make_session: MakeSession) -> None:
    model = open_model("g (float[2,2] x, int64[3] a) => (float[1,1] y) { y = ReduceSum (x, a) }")
    feeds = {"x": np.ones((2, 2), np.float32), "a": np.array([0, 1, 1])}
    with pytest.raises(Exception, match="expected each axis once, got axis 1 twice"):
        make_session(model).run(None, feeds)
    (ours,) = make_session(model, FALLBACK).run(None, feeds)
    np.testing.assert_array_equal(ours, reference(model, feeds)[0], strict=True)


def test_run_refused_by_onnxruntime_quotes_it(make_session: MakeSession) -> None:
    model = open_model("g (float[2,3] x, float[3,2] w) => (float[2,2] y) { y = MatMul(x, w) }")
    feeds = {"x": np.ones(4, np.float32), "w": np.ones((3, 2), np.float32)}
    with pytest.raises(Exception, match=r"MatMul|left operand"):
        make_session(model, FALLBACK).run(None, feeds)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ([-2, -2], "sizes of 0 or more, and one -1 at most, got -2"),
        ([-2, -1], "sizes of 0 or more, and one -1 at most, got -2"),
        ([-1, -1], "sizes of 0 or more, and one -1 at most, got -1"),
        ([2**62, 4], "a shape of 4 elements, got more"),
        ([-1, 3], r"a shape of 4 elements, got \[1,3\]"),
    ],
)
@pytest.mark.parametrize("options", [{}, FALLBACK], ids=["error", "cpu"])
def test_impossible_sizes_are_refused(
    make_session: MakeSession, shape: list[int], reason: str, options: dict[str, str]
) -> None:
    """Two negative sizes may have the right product."""
    model = open_model("g (float[4] x, int64[2] s) => (float[4] y) { y = Reshape(x, s) }")
    with pytest.raises(Exception, match=reason):
        make_session(model, options).run(None, {"x": np.ones(4, np.float32), "s": np.array(shape)})


HUGE = 2**31


@pytest.mark.parametrize("options", [{}, FALLBACK], ids=["error", "cpu"])
@pytest.mark.parametrize(
    "body",
    [
        pytest.param("y = Expand(x, s)", id="Expand"),
        pytest.param("y = ConstantOfShape(s)", id="ConstantOfShape"),
        pytest.param("a = Expand(x, s)  y = Exp(a)", id="in between"),
    ],
)
def test_tensor_beyond_memory_is_refused(make_session: MakeSession, body: str, options: dict[str, str]) -> None:
    """2^62 elements of 4 bytes are 2^64 bytes, which 64 bits would count as 0."""
    model = open_model(f"g (float[1] x, int64[2] s) => (float[1] y) {{ {body} }}")
    feeds = {"x": np.ones(1, np.float32), "s": np.array([HUGE, HUGE])}
    with pytest.raises(Exception, match=r"expected a tensor that fits memory, got shape \[2147483648,2147483648\]"):
        make_session(model, options).run(None, feeds)


@pytest.mark.parametrize(
    ("graph", "feeds", "reason"),
    [
        pytest.param(
            "g (float[4] x, int64[2] a, int64[2] b, int64[2] c) => (float[2] y) { y = Slice(x, a, b, c) }",
            {"x": np.ones((4, 4), np.float32), "a": np.array([0, 0]), "b": np.array([1]), "c": np.array([0, 1])},
            r"input 2 \(ends\) of shape \[2\], got \[1\]",
            id="fewer ends than starts",
        ),
        pytest.param(
            """g (float[1,2,4,4] x, float[3] b) => (float[1,3,2,2] y) <float[3,2,2,2] w = {
                1,1,1,1,1,1,1,1, 1,1,1,1,1,1,1,1, 1,1,1,1,1,1,1,1}> { y = Conv <strides = [2, 2]> (x, w, b) }""",
            {"x": np.ones((1, 2, 4, 4), np.float32), "b": np.ones(1, np.float32)},
            r"expected a bias of shape \[3\], got \[1\]",
            id="a short bias",
        ),
        pytest.param(
            "g (float[4] x, float[4] w) => (float[4] y) { y = SimplifiedLayerNormalization <axis = -1> (x, w) }",
            {"x": np.ones((2, 4), np.float32), "w": np.ones(3, np.float32)},
            r"expected a weight of shape \[4\], got \[3\]",
            id="a short weight",
        ),
        pytest.param(
            "g (float[2,2] x, int64[1,1] i) => (float[1] y) { y = GatherND <batch_dims = 1> (x, i) }",
            {"x": np.ones((2, 2), np.float32), "i": np.zeros((3, 1), np.int64)},
            "expected data and indices to share 1 batch dimensions",
            id="batches",
        ),
        pytest.param(
            "g (float[2] x) => (float[2] y) { y = Softmax(x) }",
            {"x": np.array(1, np.float32)},
            r"expected an index in",
            id="a scalar",
        ),
    ],
)
def test_unfit_inputs_are_refused(make_session: MakeSession, graph: str, feeds: dict[str, Any], reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        make_session(open_model(graph)).run(None, feeds)


@pytest.mark.parametrize(
    "text",
    [
        "a = Neg(x)  b = Reshape(a, s)  c = Abs(b)  y = Add(b, c)",  # the new shape is read last
        "a = Neg(x)  b = Reshape(a, s)  e = Exp(b)  f = Reshape(e, t)  c = Abs(f)  d = Add(a, c)  y = Reshape(d, s)",
        "a = Neg(x)  b = Identity(a)  e = Unsqueeze(b, i)  c = Abs(e)  d = Add(c, e)  f = Squeeze(d, i)"
        "  y = Reshape(f, s)",  # a shape of a shape
        "y = Reshape(x, s)",  # not the caller's memory
    ],
)
def test_values_that_only_change_shape_keep_their_elements(make_session: MakeSession, text: str) -> None:
    """They share memory, which other values get once nobody reads either of them."""
    sizes = "int64[2] s = {6, 4}, int64[2] t = {4, 6}, int64[1] i = {0}"
    model = open_model(f"g (float[4,6] x) => (float[6,4] y) <{sizes}> {{ {text} }}")
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    session = make_session(model, strict=True)
    for _ in range(2):
        (ours,) = session.run(None, {"x": x})
        np.testing.assert_allclose(ours, reference(model, {"x": x})[0], rtol=2**-21)  # e^x within four roundings

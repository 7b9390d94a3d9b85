# SPDX-License-Identifier: Apache-2.0
"""Nodes that the device does not take cause an error, or run on ORT's CPU provider, but never silently."""

from typing import Any

import numpy as np
import pytest

from tests.ep.conftest import HEADER, MakeSession, Placed, parse, reference

# No language model has a Det, so no device will ever take this operator.
IN_THE_MIDDLE = """g (float[2,2] x) => (float[2,2] z) {
    a = Add(x, x)  b = Mul(a, x)  [odd] d = Det(b)  c = Add(b, x)  e = Mul(c, d)  z = Add(e, a)
}"""
X = np.array([[1, 2], [3, 5]], np.float32)
FALLBACK = "set the provider option on_unsupported to warn or cpu"


@pytest.mark.parametrize("by_name", [False, True], ids=["add_provider_for_devices", "providers"])
@pytest.mark.parametrize("options", [{}, {"on_unsupported": "error"}], ids=["default", "error"])
def test_error_lists_nodes_and_reasons(make_session: MakeSession, by_name: bool, options: dict[str, str]) -> None:
    with pytest.raises(Exception, match="does not take 1 of the model's 6 nodes") as raised:
        make_session(IN_THE_MIDDLE, options, by_name=by_name)
    assert "Det 'odd': the cpu device has no ai.onnx::Det" in str(raised.value)
    assert FALLBACK in str(raised.value)


@pytest.mark.parametrize("choice", ["warn", "cpu"])
def test_fallback_splits_partition_around_node(placed: Placed, choice: str) -> None:
    session, placement = placed(IN_THE_MIDDLE, {"on_unsupported": choice})
    # Add, Mul, Add before (c does not need d) and Mul, Add after.
    assert (placement["nodes"], placement["claimed"], placement["partitions"]) == (6, 5, 2)
    assert [left["op_type"] for left in placement["left"]] == ["Det"]
    assert placement["summary"].endswith("; left to ONNX Runtime's CPU provider: Det")
    # d = det(2 x * x) is an integer: all is exact.
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], reference(IN_THE_MIDDLE, {"x": X})[0])


def test_fallback_warns_with_warn_alone(make_session: MakeSession, capfd: pytest.CaptureFixture[str]) -> None:
    make_session(IN_THE_MIDDLE, {"on_unsupported": "warn"})
    assert "Det 'odd': the cpu device has no ai.onnx::Det" in capfd.readouterr().err
    make_session(IN_THE_MIDDLE, {"on_unsupported": "cpu"})
    assert "FlowNPU" not in capfd.readouterr().err
    information = 1
    make_session(IN_THE_MIDDLE, {"on_unsupported": "cpu"}, configure={"log_severity_level": information})
    assert "Det 'odd': the cpu device has no ai.onnx::Det" in capfd.readouterr().err


def test_strict_sessions_see_fallback(make_session: MakeSession) -> None:
    with pytest.raises(Exception, match="fallback to CPU EP has been explicitly disabled"):
        make_session(IN_THE_MIDDLE, {"on_unsupported": "cpu"}, strict=True)


def test_unsupported_nodes_are_counted_beyond_20(make_session: MakeSession) -> None:
    chain = "".join(f"y{i + 1} = Tan(y{i})  " for i in range(50))
    with pytest.raises(Exception, match="does not take 50 of the model's 51 nodes") as raised:
        make_session(f"g (float[2] y0) => (float[2] z) {{ {chain} z = Add(y50, y0) }}")
    assert str(raised.value).count("Tan '") == 20
    assert "and 30 more" in str(raised.value)


@pytest.mark.parametrize(
    ("graph", "dtype"),
    [
        pytest.param("g (float[2,2] x) => (float z) { z = Det(x) }", "float32", id="one node"),
        pytest.param("g (double[2,2] x) => (double[2,2] z) { z = Add(x, x) }", "float64", id="type"),
        pytest.param("g (string[2] x) => (string[2] z) { z = Identity(x) }", "str", id="strings"),
        pytest.param(
            "g (float[1,1,1,1,1,1,1,1,1] x) => (float[1,1,1,1,1,1,1,1,1] z) { z = Add(x, x) }", "float32", id="rank"
        ),
    ],
)
def test_graph_without_supported_nodes_falls_back(
    make_session: MakeSession, placed: Placed, graph: str, dtype: str
) -> None:
    with pytest.raises(Exception, match="does not take 1 of the model's 1 nodes"):
        make_session(graph)
    session, placement = placed(graph, {"on_unsupported": "warn"})
    assert (placement["claimed"], placement["partitions"], len(placement["left"])) == (0, 0, 1)
    shape = [value.dim_value for value in parse(graph).graph.input[0].type.tensor_type.shape.dim]
    x: Any = np.ones(shape, dtype)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], reference(graph, {"x": x})[0])


def test_reason_names_type(make_session: MakeSession) -> None:
    with pytest.raises(Exception, match="Add 'z': value 'x' has type double, which no device takes"):
        make_session("g (double[2] x) => (double[2] z) { z = Add(x, x) }")


def test_tensor_attribute_is_kept(make_session: MakeSession) -> None:
    graph = "g (int64[1] s) => (float[N] z) { c = ConstantOfShape<value = float[1] {2.0}>(s)  z = Add(c, c) }"
    np.testing.assert_array_equal(make_session(graph).run(None, {"s": np.array([3])})[0], np.full(3, 4, np.float32))


def test_tensor_attribute_of_unsupported_type_is_named(make_session: MakeSession) -> None:
    graph = """g (int64[1] s) => (bool[N] z) {
        c = ConstantOfShape<value = double[1] {2.0}>(s)  z = Greater(c, c)
    }"""
    with pytest.raises(Exception, match="does not take 2 of the model's 2 nodes") as raised:
        make_session(graph)
    assert "ConstantOfShape 'c': value 'c' has type double, which no device takes" in str(raised.value)


FUNCTIONS = """<ir_version: 10, opset_import: ["": 21, "%(domain)s": 1]>
g (float[3] x, float[3] y) => (float[3] z) { a = Add(x, y)  [call] z = %(domain)s.Twice:%(overload)s(a, x) }
<domain: "%(domain)s", overload: "%(overload)s", opset_import: ["": 21]>
Twice (p, q) => (r) { t = Mul(p, q)  r = Add(t, t) }"""


def functions(domain: str, overload: str) -> Any:
    """A graph that calls a function of the model; onnx's text syntax has overloads in calls from 1.20 on."""
    text = FUNCTIONS % {"domain": domain, "overload": overload}
    model = parse((text if overload else text.replace(":(a", "(a")).replace(f":{overload}(a", "(a"))
    model.graph.node[1].overload = overload
    return model


@pytest.mark.parametrize("overload", ["", "variant"])
def test_model_function_runs_as_its_body(placed: Placed, overload: str) -> None:
    session, placement = placed(functions("anyones", overload), strict=True)
    assert (placement["nodes"], placement["claimed"], placement["partitions"]) == (3, 3, 1)
    x, y = np.array([1, 2, 3], np.float32), np.array([4, 5, 6], np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x, "y": y})[0], (x + y) * x * 2)


@pytest.mark.parametrize("overload", ["", "variant"])
def test_inlined_operator_of_flownpu_is_reported(make_session: MakeSession, placed: Placed, overload: str) -> None:
    model = functions("ai.flownpu", overload)
    with pytest.raises(Exception, match=r"does not take 1 of the model's 2 nodes.*\n.*Twice 'call'"):
        make_session(model)
    session, placement = placed(model, {"on_unsupported": "cpu"})
    assert [node["node"] for node in placement["inlined"]] == ["Twice 'call'"]
    assert placement["summary"].endswith("; replaced by their definitions: Twice")
    x, y = np.array([1, 2, 3], np.float32), np.array([4, 5, 6], np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x, "y": y})[0], (x + y) * x * 2)


def test_partitions_are_convex_and_few(placed: Placed) -> None:
    # Layers of supported nodes, some followed by a node that is not: random, but always the same.
    random = np.random.default_rng(0)
    values, body, rejected = ["x"], [], 0
    for index in range(60):
        first, second = random.choice(values[-8:], 2)
        if random.random() < 0.15:
            rejected += 1
            body.append(f"v{index} = Sign({first})")
        else:
            body.append(f"v{index} = {random.choice(['Add', 'Min', 'Max'])}({first}, {second})")
        values.append(f"v{index}")
    outputs = ", ".join(f"float[4] {value}" for value in values[1:])
    graph = f"{HEADER} g (float[4] x) => ({outputs}) {{ {'  '.join(body)} }}"
    session, placement = placed(graph, {"on_unsupported": "cpu"})
    assert (placement["nodes"], placement["claimed"]) == (60, 60 - rejected)
    assert 1 < placement["partitions"] <= rejected + 1
    x = np.array([-2, -1, 0, 3], np.float32)
    for value, expected in zip(session.run(None, {"x": x}), reference(graph, {"x": x}), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(
    ("graph", "feeds", "reason"),
    [
        pytest.param(
            """g (float[1,3,1728] q, int32[1] n, int32[1] t) => (float[1,3,576] y, float[1,1,3,576] k, float v) {
                y, k, v = com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1> (q, , , , , n, t)
            }""",
            {
                "q": np.random.default_rng(0).standard_normal((1, 3, 1728), np.float32),
                "n": np.array([2], np.int32),
                "t": np.array([3], np.int32),
            },
            r"attribute 'head_size': expected 1 to 512, got 576",
            id="a head of 576",
        )
    ],
)
def test_lowered_node_is_taken_with_its_parts(
    make_session: MakeSession, placed: Placed, graph: str, feeds: Any, reason: str
) -> None:
    """A lowered operator is taken only if its replacements are taken."""
    with pytest.raises(Exception, match=reason):
        make_session(graph)
    session, placement = placed(graph, {"on_unsupported": "cpu"})
    assert placement["left"]
    for ours, expected in zip(session.run(None, feeds), reference(graph, feeds), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_functions_are_judged_by_their_bodies(make_session: MakeSession) -> None:
    """ONNX Runtime replaces a function by its body after it has asked for the first time what is taken."""
    header = '<ir_version: 10, opset_import: ["": 21]>'
    graph = """g ({0}[1,4,3,3] x, {0}[4] s, {0}[4] b) => ({0}[1,4,3,3] y) {{
        y = GroupNormalization <num_groups = 2> (x, s, b)
    }}"""
    feeds = {
        "x": np.arange(36, dtype=np.float32).reshape(1, 4, 3, 3),
        "s": np.full(4, 2, np.float32),
        "b": np.zeros(4, np.float32),
    }
    taken = header + graph.format("float")
    (ours,) = make_session(taken).run(None, feeds)
    # Normed numbers up to 4, of some 20 roundings each.
    np.testing.assert_allclose(ours, reference(taken, feeds)[0], rtol=0, atol=4 * 20 * 2.0**-24)
    # The error names the function, which is what the user's model has.
    with pytest.raises(Exception, match=r"does not take 1 of the model's 1 nodes:\s+GroupNormalization 'y'"):
        make_session(header + graph.format("double"))

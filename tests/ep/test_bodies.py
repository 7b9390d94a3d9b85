# SPDX-License-Identifier: Apache-2.0
"""The bodies of If, Loop and Scan: their nodes are taken, those operators stay with ONNX Runtime around them.

An If between constants is a node that the device takes.
"""

import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from flownpu.explain.placement import place_nodes
from tests.ep.conftest import MakeSession, Placed, parse, reference
from tests.fuzz.graphs.strategy import HEAD_BYTES, NODE_BYTES, build

# w is of the model's graph, and longer than the 127 bytes to which ONNX Runtime copies constants for each question.
W = numpy_helper.from_array(np.random.default_rng(0).integers(-4, 5, (2, 32)).astype(np.float32), "w")
X = np.random.default_rng(1).integers(-4, 5, (2, 32)).astype(np.float32)
BRANCHES = """<
    then_branch = t () => (float[2,32] p) { k = Mul(a, w)  p = Add(k, x) },
    else_branch = e () => (float[2,32] q) { q = Sub(w, a) }
>"""
# Only the branches read `a`: an edge of the graph that no input list shows.
CHOICE = f"""g (float[2,32] x, bool c) => (float[2,32] z) {{
    a = Add(x, x)  b = If (c) {BRANCHES}  d = Add(b, a)  z = Mul(d, w)
}}"""
LOOP = """g (float[2,32] x, int64 n) => (float[2,32] z, float[K,2,32] s) <bool yes = {1}> {
    a = Neg(x)
    z, s = Loop (n, yes, x) <body = b (int64 i, bool go, float[2,32] v) => (bool on, float[2,32] m, float[2,32] o) {
        on = Identity(go)  t = Mul(v, w)  m = Add(t, a)  o = Sub(m, w)
    }>
}"""
SCAN = """g (float[2,32] x) => (float[32] z, float[2,32] s) <float[32] zero = {%s}> {
    z, s = Scan <num_scan_inputs = 1, body = b (float[32] v, float[32] r) => (float[32] u, float[32] o) {
        k = Mul(r, x)  u = ReduceMax<keepdims = 0>(k, axes)  o = Add(u, v)
    }> (zero, x)
}""".replace("%s", ", ".join("0" * 32))
# The If of the body reads a constant of the model's graph, and values of both graphs around it.
NESTED = """g (float[2,32] x, int64 n, bool c) => (float[2,32] z) <bool yes = {1}> {
    a = Add(x, x)
    z = Loop (n, yes, x) <body = b (int64 i, bool go, float[2,32] v) => (bool on, float[2,32] m) {
        on = Identity(go)  u = Neg(v)
        m = If (c) <then_branch = t () => (float[2,32] p) { k = Mul(u, w)  p = Add(k, a) },
                    else_branch = e () => (float[2,32] q) { q = Sub(w, v) }>
    }>
}"""
# Optimised: the Transposes are folded, and the first If is replaced by its branch.
FOLDED = """g (float[2,32] x, bool c) => (float[2,32] z) <bool yes = {1}> {
    a = If (yes) <then_branch = t () => (float[2,32] p) { p = Mul(x, w) },
                  else_branch = e () => (float[2,32] q) { q = Neg(x) }>
    t = Transpose(w)
    z = If (c) <then_branch = t2 () => (float[2,32] p2) { u = Transpose(t)  p2 = Mul(a, u) },
                else_branch = e2 () => (float[2,32] q2) { k = Constant<value = float[1] {3}>()  q2 = Mul(a, k) }>
}"""
# Text, the graph's other inputs, and the numbers of nodes and of partitions.
GRAPHS = {
    "If": (CHOICE, {"c": np.array(True)}, 6, 4),
    "If, else": (CHOICE, {"c": np.array(False)}, 6, 4),
    "If, a constant": (CHOICE.replace("Sub(w, a)", "Constant<value = float[1] {2}>()"), {"c": np.array(False)}, 5, 3),
    "Loop": (LOOP, {"n": np.array(3)}, 5, 2),
    "Loop without a run": (LOOP, {"n": np.array(0)}, 5, 2),
    "Scan": (SCAN, {}, 3, 1),
    "If in Loop": (NESTED, {"n": np.array(3), "c": np.array(True)}, 6, 4),
    "If in Loop, else": (NESTED, {"n": np.array(3), "c": np.array(False)}, 6, 4),
    "folded": (FOLDED, {"c": np.array(True)}, 3, 3),
    "folded, else": (FOLDED, {"c": np.array(False)}, 3, 3),
}


def model_of(text: str, **constants: NDArray[Any]) -> onnx.ModelProto:
    """The model, with w, the axes of a reduction and others as constants."""
    header = '<ir_version: 10, opset_import: ["": 21, "anyones": 1, "com.microsoft": 1]>'
    model = onnx.parser.parse_model(f"{header} {text}")
    model.graph.initializer.append(W)
    for name, value in {"axes": np.array([0]), **constants}.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    onnx.checker.check_model(model)
    return model


def check(session: onnxruntime.InferenceSession, model: onnx.ModelProto, feeds: dict[str, Any]) -> None:
    """Compares with ORT's own kernels; products and sums of these integers are exact."""
    for ours, expected in zip(session.run(None, feeds), reference(model, feeds), strict=True):
        np.testing.assert_array_equal(ours, expected, strict=True)


@pytest.mark.parametrize("optimised", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_bodies_are_taken_and_counted_once(placed: Placed, name: str, optimised: bool) -> None:
    text, others, nodes, partitions = GRAPHS[name]
    levels = onnxruntime.GraphOptimizationLevel
    level = levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
    model, feeds = model_of(text), {"x": X, **others}
    # The default, on_unsupported=error: those operators do not count as left.
    session, placement = placed(model, configure={"graph_optimization_level": level})
    assert placement["left"] == []
    assert placement["claimed"] == placement["nodes"]
    if optimised or "folded" not in name:
        assert (placement["nodes"], placement["partitions"]) == (nodes, partitions)
    check(session, model, feeds)


def test_weight_of_outer_graph_is_a_constant_of_a_body(make_session: MakeSession) -> None:
    """MatMulNBits is only taken with a constant weight."""
    random = np.random.default_rng(2)
    x = random.integers(-127, 128, (1, 64)).astype(np.float32)
    x[:, ::32] = 127  # each 32 elements then have 8 bits with a scale of 1: all is exact
    text = """g (float[1,64] x, bool c) => (float[1,16] z) {
        z = If (c) <then_branch = t () => (float[1,16] p) {
            p = com.microsoft.MatMulNBits <K = 64, N = 16, bits = 4, block_size = 32> (x, codes, scales)
        }, else_branch = e () => (float[1,16] q) { q = Identity(none) }>
    }"""
    codes = random.integers(0, 256, (16, 2, 16), np.uint8)
    model = model_of(text, codes=codes, scales=np.full(32, 0.5, np.float32), none=np.zeros((1, 16), np.float32))
    check(make_session(model), model, {"x": x, "c": np.array(True)})


def in_branches(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model's graph as both branches of an If, with the constants and inputs in the graph around it."""
    whole, graph = onnx.ModelProto(), model.graph
    whole.CopyFrom(model)
    branch = helper.make_graph(graph.node, "branch", [], graph.output)
    outputs = [onnx.ValueInfoProto() for _ in graph.output]
    for renamed, output in zip(outputs, graph.output, strict=True):
        renamed.CopyFrom(output)
        renamed.name = f"{output.name} of If"
    choice = helper.make_node(
        "If", ["condition"], [output.name for output in outputs], then_branch=branch, else_branch=branch
    )
    inputs = [*graph.input, helper.make_tensor_value_info("condition", onnx.TensorProto.BOOL, [])]
    whole.graph.CopyFrom(helper.make_graph([choice], "whole", inputs, outputs, graph.initializer))
    return whole


# Attention without outputs for keys and values reads uninitialised memory; FlowNPU's become the first there.
FRAGILE = {"GroupQueryAttention": 3, "FlowQKVAttention": 3, "FlowKVAttention": 3}


def is_fragile(node: onnx.NodeProto) -> bool:
    """Whether ONNX Runtime's kernel crashes or gives other numbers in each run, for want of an output."""
    if node.op_type == "Split":
        return "" in node.output
    return sum(map(bool, node.output)) < FRAGILE.get(node.op_type, 0)


def test_random_graphs_in_branches_equal_graphs_by_themselves(make_session: MakeSession) -> None:
    """Bit for bit, where FlowNPU takes the graph by itself; these numbers are held against others in tests/fuzz."""
    # A seed none of whose graphs crashes ONNX Runtime by itself, as some do in which a mistake was planted.
    random, compared = Random(1), 0
    none = {"graph_optimization_level": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL, "log_severity_level": 4}
    for _ in range(60):
        case = build(random.randbytes(HEAD_BYTES), [random.randbytes(NODE_BYTES) for _ in range(4)])
        model = onnx.load_from_string(case.model)
        if any(map(is_fragile, model.graph.node)):
            continue
        options = case.options | {"on_unsupported": "cpu"}
        feeds = case.feeds[0] | {"condition": np.array(random.random() < 0.5)}
        try:
            expected = make_session(model, options, configure=none).run(None, case.feeds[0])
            reference(in_branches(model), feeds)
        except Exception:  # noqa: BLE001, S112  (some random graphs are mistakes)
            continue
        found = make_session(in_branches(model), options, configure=none).run(None, feeds)
        compared += 1
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs, strict=True)
    assert compared > 30


def test_explanation_has_nodes_of_bodies(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    text = re.sub(r"\b([abdkpqz]) = ", r"[\1] \1 = ", CHOICE.replace("Sub(w, a)", "Tan(a)"))  # with names
    onnx.save(model_of(text), path)
    placement = place_nodes(path, onnx_ir.load(path).graph, {"device": "cpu", "claim": "all"})
    assert placement.count() == {"flownpu": 5, "cpu": 2}
    reasons = {node.operator: node.reason for node in placement.nodes if node.place == "cpu"}
    assert reasons == {
        "If": "ONNX Runtime runs it around the nodes of its bodies",
        "Tan": "the cpu device has no ai.onnx::Tan",
    }


def test_functions_in_bodies_are_counted_as_their_bodies(placed: Placed) -> None:
    """ONNX Runtime first asks for the graphs that call functions, then again for all."""
    model = model_of(CHOICE.replace("k = Mul(a, w)", "k = anyones.Twice(a, w)"))
    nodes = [helper.make_node("Mul", ["l", "m"], ["n"]), helper.make_node("Add", ["n", "n"], ["o"])]
    model.functions.append(helper.make_function("anyones", "Twice", ["l", "m"], ["o"], nodes, model.opset_import[:1]))
    session, placement = placed(model)
    assert (placement["nodes"], placement["claimed"], placement["partitions"]) == (7, 7, 4)
    check(session, model, {"x": X, "c": np.array(True)})


def test_placement_names_control_flow(placed: Placed) -> None:
    _, placement = placed(model_of(NESTED))
    assert sorted(node["op_type"] for node in placement["control_flow"]) == ["If", "Loop"]
    assert placement["summary"].endswith("; control flow around its nodes: If, Loop")


def test_error_lists_nodes_of_all_graphs(make_session: MakeSession) -> None:
    text = CHOICE.replace("Mul(a, w)", "Tan(x)").replace("Sub(w, a)", "Tan(a)").replace("Add(b, a)", "Tan(b)")
    with pytest.raises(Exception, match="does not take 3 of the model's 6 nodes") as raised:
        make_session(model_of(text))
    assert all(f"Tan '{output}': the cpu device has no" in str(raised.value) for output in "kqd")


def test_error_lists_nodes_where_all_others_are_control_flow(make_session: MakeSession) -> None:
    text = """g (float[2,32] x, bool c) => (float[2,32] z) {
        z = If (c) <then_branch = t () => (float[2,32] p) { k = Tan(x)  p = Mul(k, w) },
                    else_branch = e () => (float[2,32] q) { q = Tan(x) }>
    }"""
    with pytest.raises(Exception, match="does not take 2 of the model's 3 nodes"):
        make_session(model_of(text))


def test_fallback_splits_body_around_node(placed: Placed) -> None:
    model = model_of(LOOP.replace("m = Add(t, a)", "f = Neg(t)  g = Tan(f)  h = Neg(g)  m = Add(f, h)"))
    session, placement = placed(model, {"on_unsupported": "cpu"})
    assert [node["op_type"] for node in placement["left"]] == ["Tan"]
    assert (placement["nodes"], placement["claimed"], placement["partitions"]) == (8, 7, 3)
    check(session, model, {"x": X, "n": np.array(1)})


def product(graph: str, rows: str) -> onnx.ModelProto:
    """A graph whose body multiplies x[rows, 256] by a weight of the model's graph."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {graph.replace("ROWS", rows)}')
    weight = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


PRODUCTS = """g (float[ROWS,256] x, bool c) => (float[ROWS,256] z) {
    z = If (c) <then_branch = t () => (float[ROWS,256] p) { p = MatMul(x, w) },
                else_branch = e () => (float[ROWS,256] q) { m = MatMul(x, w)  q = Neg(m) }>
}"""


@pytest.mark.parametrize(("rows", "taken"), [("16", 3), ("8", 0), ("N", 0)])
def test_body_is_taken_from_a_million_multiply_adds_on(placed: Placed, rows: str, taken: int) -> None:
    """Half a million are too few; of unknown rows a body is taken to have one."""
    model = product(PRODUCTS, rows)
    session, placement = placed(model, {"on_unsupported": "cpu", "claim": "worthwhile"})
    assert placement["claimed"] == taken
    x = np.random.default_rng(1).uniform(-1, 1, (8 if rows == "8" else 16, 256)).astype(np.float32)
    feeds = {"x": x, "c": np.array(False)}
    (ours,), (expected,) = session.run(None, feeds), reference(model, feeds)
    # AVX2 rounds most (dense/matmul_avx2.h): x to 150 steps of a range of 2, weights to steps of which the largest sum
    # of eight of one sign has 32767 / 150 - 4. Half of eight weights are of one sign, of 0.8 on average; no sum is
    # larger than 8. An error is uniform in a step; 6 standard deviations of the sum of 256 products.
    of_x, of_weight = 2 / 150, 8 / (32767 // 150 - 4)
    deviation = np.sqrt(256 * (of_x**2 * 1 + of_weight**2 / 3) / 12)  # mean squares: 1 of weights, 1/3 of x
    np.testing.assert_allclose(ours, expected, rtol=0, atol=6 * deviation)


@pytest.mark.parametrize(
    ("trips", "times"), [("int64 n = {5}", 5), ("int64 n = {9223372036854775807}", 1), ("int64 zero = {0}", 1)]
)
def test_multiply_adds_of_loops_are_counted_for_each_iteration(placed: Placed, trips: str, times: int) -> None:
    """Where the count is a constant that means one; the others are a condition's loop, and a count that is an input."""
    count = "" if "int64 n" in trips else "int64 n, "
    graph = f"""g ({count}float[1,256] x) => (float[1,256] z) <bool yes = {{1}}, {trips}> {{
        z = Loop (n, yes, x) <body = b (int64 i, bool go, float[1,256] v) => (bool on, float[1,256] o) {{
            on = Identity(go)  o = MatMul(v, w)
        }}>
    }}"""
    _, placement = placed(product(graph, "1"))
    assert placement["claimed_multiply_adds"] == placement["multiply_adds"] == times * 256 * 256


def test_multiply_adds_of_scans_are_counted_for_each_slice(placed: Placed) -> None:
    graph = """g (float[1,256] x, float[7,1,256] s) => (float[1,256] z, float[7,1,256] y) {
        l, y = Scan <num_scan_inputs = 1, body = d (float[1,256] h, float[1,256] r)
            => (float[1,256] n, float[1,256] m) { t = MatMul(r, w)  n = Add(h, t)  m = Tan(n) }> (x, s)
        z = Loop (two, yes, l) <body = b (int64 i, bool go, float[1,256] v) => (bool on, float[1,256] o) {
            on = Identity(go)
            o, unused = Scan <num_scan_inputs = 1, body = c (float[1,256] h, float[1,256] r)
                => (float[1,256] n, float[1,256] m) { t = Add(h, r)  n = MatMul(t, w)  m = Identity(n) }> (v, s)
        }>
    }"""
    model = product(graph, "1")
    model.graph.initializer.extend(
        [helper.make_tensor("yes", onnx.TensorProto.BOOL, [], [1]), numpy_helper.from_array(np.array(2), "two")]
    )
    _, placement = placed(model, {"on_unsupported": "cpu"})
    assert placement["multiply_adds"] == (2 * 7 + 7) * 256 * 256


def compile_model(ep_devices: list[Any], model: onnx.ModelProto, folder: Path) -> Path:
    """Keeps the compiled partitions of a session."""
    onnx.save(model, folder / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("ep.context_enable", "1")
    options.add_session_config_entry("ep.context_file_path", str(folder / "compiled.onnx"))
    options.add_provider_for_devices(ep_devices, {})
    onnxruntime.InferenceSession(str(folder / "model.onnx"), options)
    (folder / "model.onnx").unlink()
    return folder / "compiled.onnx"


def test_compiled_model_keeps_bodies_as_they_are(ep_devices: list[Any], placed: Placed, tmp_path: Path) -> None:
    """They are compiled when it is loaded."""
    model = model_of(CHOICE.replace("w)", "x)").replace("(w", "(x").replace("d, x", "d, w"))
    compiled = compile_model(ep_devices, model, tmp_path)
    assert [node.op_type for node in onnx.load(compiled).graph.node] == ["EPContext", "If", "EPContext"]
    assert len(list(tmp_path.glob("*.flownpu"))) == 2
    session, placement = placed(compiled)
    assert (placement["nodes"], placement["partitions"]) == (5, 4)
    check(session, model, {"x": X, "c": np.array(True)})


def test_compiled_model_whose_bodies_read_constants_is_refused(ep_devices: list[Any], tmp_path: Path) -> None:
    """ONNX Runtime would write the compiled model without these constants, and refuse it as invalid."""
    with pytest.raises(Exception, match="a body of If 'b' reads the constant 'w' of the graph around it"):
        compile_model(ep_devices, model_of(CHOICE), tmp_path)


def test_sessions_of_a_file_use_its_outer_weights(make_session: MakeSession, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model_of(NESTED), path, save_as_external_data=True, location="data", size_threshold=0)
    sessions = [make_session(path) for _ in range(2)]
    feeds = {"x": X, "n": np.array(2), "c": np.array(True)}
    for session in sessions:
        check(session, model_of(NESTED), feeds)


def test_run_that_a_body_does_not_take_falls_back(make_session: MakeSession) -> None:
    model = model_of(CHOICE)
    for value in (*model.graph.input[:1], *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    for branch in model.graph.node[1].attribute:
        branch.g.output[0].type.tensor_type.ClearField("shape")
    session = make_session(model, {"on_unsupported": "cpu"})
    check(session, model, {"x": X.reshape((1,) * 7 + (2, 32)), "c": np.array(True)})
    check(session, model, {"x": X, "c": np.array(True)})


# --- An If between constants, which the device takes as one node ------------------------------------------------------

# The branches differ in length, as the two LongRoPE tables that GenAI's builder writes. b is an output of the graph.
TABLES = """<
    then_branch = long () => (float[3,2] p, float[2] q) {
        p = Constant <value = float[3,2] {1, 2, 3, 4, 5, 6}> ()  q = Constant <value = float[2] {7, 8}> ()
    },
    else_branch = short () => (float[1,2] p, float[2] r) {
        p = Constant <value = float[1,2] {9, 10}> ()  r = Constant <value = float[2] {11, 12}> ()
    }
>"""
BETWEEN_CONSTANTS = f"""g (float[N] x, int64 n) => (float[M,2] y, float[2] b) <int64 border = {{2}}> {{
    c = Greater (n, border)  a, b = If (c) {TABLES}  s = ReduceSum <keepdims = 0> (x)  y = Mul (a, s)
}}"""


def both(x: Any) -> list[dict[str, Any]]:
    """Feeds that choose the first branch, the second, and the first again."""
    return [{"x": x, "n": np.array(n)} for n in (3, 2, 4)]


def test_run_takes_branch_of_its_condition(placed: Placed) -> None:
    model = parse(BETWEEN_CONSTANTS)
    session, placement = placed(model)
    assert (placement["nodes"], placement["claimed"], placement["partitions"]) == (4, 4, 1)
    for feeds in both(np.array([0.5, 1], np.float32)):
        check(session, model, feeds)


def test_constant_branch_falls_back_to_onnxruntime(make_session: MakeSession) -> None:
    """ONNX Runtime's CPU provider computes runs whose shapes the device does not take (rank 9)."""
    model = parse(BETWEEN_CONSTANTS)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    session = make_session(model, {"on_unsupported": "cpu"})
    for feeds in both(np.ones((1, 1, 2, 1, 1, 1, 1, 1, 3), np.float32)):
        check(session, model, feeds)


def test_compiled_model_has_both_constant_branches(
    ep_devices: list[Any], make_session: MakeSession, tmp_path: Path
) -> None:
    model = parse(BETWEEN_CONSTANTS)
    session = make_session(compile_model(ep_devices, model, tmp_path), strict=True)
    for feeds in both(np.array([0.5, 1], np.float32)):
        check(session, model, feeds)

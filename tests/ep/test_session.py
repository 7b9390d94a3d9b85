# SPDX-License-Identifier: Apache-2.0
"""A graph that the device takes as a whole: one partition, the same numbers, every kind of input and output."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.ep.conftest import MakeSession, Placed, parse, reference
from tests.large_pages import asks_for_large_pages, has_large_pages

# The graphs compute with small integers in float32, where sums and products are exact: results are compared bit by bit.
CHAIN = "g (float[N] x, float[N] y) => (float[N] z) { a = Add(x, y)  b = Mul(a, x)  z = Add(b, a) }"


def integers(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).integers(-9, 10, shape).astype(np.float32)


def check(session: onnxruntime.InferenceSession, model: str, inputs: dict[str, Any]) -> None:
    for output, expected in zip(session.run(None, inputs), reference(model, inputs), strict=True):
        assert output.dtype == expected.dtype
        np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("by_name", [False, True], ids=["add_provider_for_devices", "providers"])
def test_provider_is_taken_by_name_and_by_device(make_session: MakeSession, by_name: bool) -> None:
    session = make_session(CHAIN, by_name=by_name, strict=True)
    assert session.get_providers()[0] == "FlowNPUExecutionProvider"
    check(session, CHAIN, {"x": integers(5), "y": integers(5)})


def test_whole_graph_is_one_partition(placed: Placed) -> None:
    _, placement = placed(CHAIN, strict=True)
    assert (placement["nodes"], placement["claimed"], placement["partitions"]) == (3, 3, 1)


def test_provider_listed_before_keeps_nodes(ep_devices: list[Any], tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    cpu = [device for device in onnxruntime.get_ep_devices() if device.ep_name == "CPUExecutionProvider"]
    options.add_provider_for_devices(cpu, {})
    options.add_provider_for_devices(ep_devices, {"placement": str(tmp_path / "placement.json")})
    session = onnxruntime.InferenceSession(parse(CHAIN).SerializeToString(), options)
    placement = json.loads((tmp_path / "placement.json").read_text())
    assert (placement["nodes"], placement["elsewhere"]) == (0, 3)
    assert placement["summary"].endswith("; 3 more nodes are with providers listed before it")
    check(session, CHAIN, {"x": integers(5), "y": integers(5)})


@pytest.mark.usefixtures("ep_devices")
@pytest.mark.parametrize("policy", ["PREFER_CPU", "PREFER_NPU", "MAX_PERFORMANCE"])
def test_device_policies_choose_provider(policy: str) -> None:
    options = onnxruntime.SessionOptions()
    options.set_provider_selection_policy(getattr(onnxruntime.OrtExecutionProviderDevicePolicy, policy))
    session = onnxruntime.InferenceSession(parse(CHAIN).SerializeToString(), options)
    assert "FlowNPUExecutionProvider" in session.get_providers()
    check(session, CHAIN, {"x": integers(5), "y": integers(5)})


def test_values_live_as_long_as_they_are_read(make_session: MakeSession) -> None:
    # Only the last value is an output, so that all values before it share memory.
    random = np.random.default_rng(0)
    body = [
        f"v{i} = {random.choice(['Add', 'Sub', 'Min', 'Max'])}(v{random.integers(max(0, i - 9), i)}, v{i - 1})"
        for i in range(1, 200)
    ]
    graph = f"g (float[N] x) => (float[N] z) {{ v0 = Add(x, x)  {'  '.join(body)}  z = Add(v199, x) }}"
    session = make_session(graph, strict=True)
    for size in (3, 1000, 5):
        check(session, graph, {"x": integers(size)})


def test_outputs_are_right_after_shapes_change_between_runs(make_session: MakeSession) -> None:
    session = make_session(CHAIN)
    for size in (1, 100, 3, 1000, 0, 7):
        check(session, CHAIN, {"x": integers(size), "y": integers(size)})


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param("g (float x, float[3] y) => (float[3] z) { z = Mul(x, y) }", id="scalar input"),
        pytest.param("g (float x) => (float z) { z = Add(x, x) }", id="scalar output"),
        pytest.param(
            "g (float[3] x) => (float[3] a, float[3] z) { a = Add(x, x)  z = Mul(a, x) }",
            id="output that is read inside",
        ),
        pytest.param("g (float[3] x) => (float[3] z, float[3] x) { z = Add(x, x) }", id="input that is an output"),
        pytest.param("g (float[3] x) => (float[3] z) { z = Identity(x) }", id="input copied to an output"),
        pytest.param(
            "g (float[3] x, float[3] unused) => (float[3] z) { z = Add(x, x) }", id="input that no node reads"
        ),
        pytest.param(
            "g (float[3] x) => (float[3] z) { dead = Mul(x, x)  z = Add(x, x) }", id="node that no node reads"
        ),
        pytest.param(
            "g (float[1,3] x, float[3] w) => (float[1,3] sum) "
            "{ unread, , , sum = com.microsoft.SkipSimplifiedLayerNormalization(x, x, w) }",
            id="output that no node reads",
        ),
        pytest.param(
            "g (float[1,3] x) => (float[1,3] z) <float[3] w = {0, 0, 0}> "
            "{ zero, , , sum = com.microsoft.SkipSimplifiedLayerNormalization(x, x, w)  z = Add(zero, sum) }",
            id="outputs left out",
        ),
        pytest.param(
            "g (float[3] x) => (float[3] z) <float[3] w = {1, 2, 3}> { a = Mul(x, w)  z = Add(a, w) }", id="initializer"
        ),
        pytest.param(
            "g (float[3] x, float[3] w) => (float[3] z) <float[3] w = {1, 2, 3}> { z = Mul(x, w) }",
            id="initializer that may be overridden",
        ),
    ],
)
def test_session_lists_inputs_and_outputs(make_session: MakeSession, graph: str) -> None:
    model = parse(graph)
    initializers = {initializer.name for initializer in model.graph.initializer}
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
        if value.name not in initializers
    }
    check(make_session(graph, strict=True), graph, {name: integers(*shape) for name, shape in shapes.items()})


def test_overridden_initializer_changes_output(make_session: MakeSession) -> None:
    graph = "g (float[3] x, float[3] w) => (float[3] z) <float[3] w = {1, 2, 3}> { z = Mul(x, w) }"
    check(make_session(graph, strict=True), graph, {"x": integers(3), "w": integers(3) + 1})


def test_empty_tensor_runs(make_session: MakeSession) -> None:
    graph = "g (float[N,2] x) => (float[N,2] z, int64[2] s) { a = Add(x, x)  z = Mul(a, x)  s = Shape(a) }"
    check(make_session(graph, strict=True), graph, {"x": integers(0, 2)})


def test_empty_initializer_runs(make_session: MakeSession) -> None:
    graph = "g (float[1] x) => (float[0] z) <float[0] w = {}> { z = Add(x, w) }"
    check(make_session(graph, strict=True), graph, {"x": integers(1)})


# ORT keeps initializers of up to 127 bytes in another place than larger ones, and we copy those of up to 4096.
@pytest.mark.parametrize("elements", [1, 31, 32, 1024, 1025, 100_000])
@pytest.mark.parametrize("place", ["inline", "external", "folded"])
def test_initializers_of_all_sizes_are_read(
    make_session: MakeSession, tmp_path: Path, elements: int, place: str
) -> None:
    weight = integers(elements)
    body = "folded = Mul(weight, weight)  z = Add(x, folded)" if place == "folded" else "z = Add(x, weight)"
    model = parse(f"g (float[N] x, float[{elements}] weight) => (float[{elements}] z) {{ {body} }}")
    del model.graph.input[1]
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=place == "external", location="model.onnx.data", size_threshold=0)
    session = make_session(path, strict=True)
    x = integers(elements)
    for _ in range(2):
        (z,) = session.run(None, {"x": x})
        np.testing.assert_array_equal(z, x + (weight * weight if place == "folded" else weight))


def test_truncated_external_data_is_error_that_names_initializer(make_session: MakeSession, tmp_path: Path) -> None:
    model = parse("g (float[N] x, float[5000] weight) => (float[5000] z) { z = Add(x, weight) }")
    del model.graph.input[1]
    model.graph.initializer.append(onnx.numpy_helper.from_array(integers(5000), "weight"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    os.truncate(tmp_path / "model.onnx.data", 100)
    with pytest.raises(Exception, match=r"initializer 'weight' cannot be read from '.*data': .*file_length: 100"):
        make_session(path)


def bind(session: onnxruntime.InferenceSession, values: dict[str, Any], outputs: dict[str, Any]) -> Any:
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in outputs.items():
        binding.bind_ortvalue_output(name, value)
    return binding


def test_output_bound_to_input_read_before_is_right(make_session: MakeSession) -> None:
    session = make_session("g (float[3] x, float[3] y) => (float[3] z) { a = Add(x, y)  z = Mul(a, y) }")
    x, y = integers(3), integers(3) + 1
    # An OrtValue uses the memory of its array.
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array.copy()) for name, array in (("x", x), ("y", y))}
    session.run_with_iobinding(bind(session, values, {"z": values["x"]}))
    np.testing.assert_array_equal(values["x"].numpy(), (x + y) * y)


def test_output_bound_to_input_read_later_is_refused(make_session: MakeSession) -> None:
    session = make_session("g (float[3] x, float[3] y) => (float[3] a, float[3] z) { a = Add(x, x)  z = Mul(a, y) }")
    y = onnxruntime.OrtValue.ortvalue_from_numpy(integers(3))
    values = {"x": onnxruntime.OrtValue.ortvalue_from_numpy(integers(3)), "y": y}
    z = onnxruntime.OrtValue.ortvalue_from_numpy(integers(3))
    with pytest.raises(Exception, match="output 'a' is bound to the memory of input 'y', which is still read"):
        session.run_with_iobinding(bind(session, values, {"a": y, "z": z}))


def test_run_time_error_names_node_and_session_goes_on(make_session: MakeSession) -> None:
    session = make_session(CHAIN)
    for _ in range(2):
        with pytest.raises(Exception, match=r"Add 'a'.*\[4\] and \[3\]"):
            session.run(None, {"x": integers(4), "y": integers(3)})
        assert session.get_providers()[0] == "FlowNPUExecutionProvider", "onnxruntime fell back to its CPU provider"
        check(session, CHAIN, {"x": integers(4), "y": integers(4)})


@pytest.mark.skipif(not has_large_pages(), reason="this system has no large pages (transparent_hugepage) to ask for")
def test_large_outputs_are_asked_to_be_in_large_pages(make_session: MakeSession) -> None:
    session = make_session("g (float[N] x) => (float[N] z) { z = Mul(x, x) }", strict=True)
    x = np.arange(9 << 20, dtype=np.float32)  # 36 MiB
    (z,) = session.run_with_ort_values(["z"], {"x": onnxruntime.OrtValue.ortvalue_from_numpy(x)})
    assert asks_for_large_pages(z.data_ptr() + x.nbytes // 2)
    np.testing.assert_array_equal(z.numpy(), x * x)

# SPDX-License-Identifier: Apache-2.0
"""The device takes an If whose branches are constants as one node."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests.ep.conftest import MakeSession, Placed, parse, reference

# The branches differ in length, as the two LongRoPE tables that GenAI's builder writes. b is an output of the graph.
BRANCHES = """<
    then_branch = long () => (float[3,2] p, float[2] q) {
        p = Constant <value = float[3,2] {1, 2, 3, 4, 5, 6}> ()  q = Constant <value = float[2] {7, 8}> ()
    },
    else_branch = short () => (float[1,2] p, float[2] r) {
        p = Constant <value = float[1,2] {9, 10}> ()  r = Constant <value = float[2] {11, 12}> ()
    }
>"""
CHOICE = f"""g (float[N] x, int64 n) => (float[M,2] y, float[2] b) <int64 border = {{2}}> {{
    c = Greater (n, border)  a, b = If (c) {BRANCHES}  s = ReduceSum <keepdims = 0> (x)  y = Mul (a, s)
}}"""


def both(x: Any) -> list[dict[str, Any]]:
    """Feeds that choose the first branch, the second, and the first again."""
    return [{"x": x, "n": np.array(n)} for n in (3, 2, 4)]


def test_run_takes_branch_of_its_condition(placed: Placed) -> None:
    session, placement = placed(CHOICE)
    assert (placement["nodes"], placement["claimed"], placement["partitions"]) == (4, 4, 1)
    for feeds in both(np.array([0.5, 1], np.float32)):
        for ours, expected in zip(session.run(None, feeds), reference(CHOICE, feeds), strict=True):
            np.testing.assert_array_equal(ours, expected, strict=True)


def test_branch_falls_back_to_onnxruntime(make_session: MakeSession) -> None:
    """ONNX Runtime's CPU provider computes runs whose shapes the device does not take (rank 9)."""
    model = parse(CHOICE)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    session = make_session(model, {"on_unsupported": "cpu"})
    for feeds in both(np.ones((1, 1, 2, 1, 1, 1, 1, 1, 3), np.float32)):
        for ours, expected in zip(session.run(None, feeds), reference(model, feeds), strict=True):
            np.testing.assert_array_equal(ours, expected, strict=True)


def test_compiled_model_has_both_branches(ep_devices: list[Any], make_session: MakeSession, tmp_path: Path) -> None:
    import onnxruntime

    onnx.save(parse(CHOICE), tmp_path / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("ep.context_enable", "1")
    options.add_session_config_entry("ep.context_file_path", str(tmp_path / "compiled.onnx"))
    options.add_provider_for_devices(ep_devices, {})
    onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), options)
    (tmp_path / "model.onnx").unlink()
    session = make_session(tmp_path / "compiled.onnx", strict=True)
    for feeds in both(np.array([0.5, 1], np.float32)):
        for ours, expected in zip(session.run(None, feeds), reference(CHOICE, feeds), strict=True):
            np.testing.assert_array_equal(ours, expected, strict=True)

# SPDX-License-Identifier: Apache-2.0
"""Names that are not UTF-8, which protobuf accepts: messages show them escaped, and they cause no fallback."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.ep.conftest import MakeSession, parse

# The CPU device takes no Det.
GRAPH = """g (float[2,2] x) => (float[2,2] y) {
    sum_ab = Add (x, x)
    d = Det (sum_ab)
    y = Mul (sum_ab, d)
}"""
X = np.array([[1, 2], [3, 5]], np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The graph in a file, its node Det called b"det_\\xff\\xfe" and the output of its Add b"sum_\\xe9\\xe9"."""
    proto = parse(GRAPH)
    proto.graph.node[1].name = "det_ab"
    # onnx's Python refuses names that are no UTF-8.
    content = proto.SerializeToString().replace(b"det_ab", b"det_\xff\xfe").replace(b"sum_ab", b"sum_\xe9\xe9")
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    return path


def test_refusal_names_node_without_utf8(model: Path, make_session: MakeSession, capfd: Any) -> None:
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail, match=r"Det 'det_\\xff\\xfe'"):
        make_session(model)
    assert "Falling back" not in capfd.readouterr().out


def test_failing_run_names_node_without_utf8(model: Path, make_session: MakeSession) -> None:
    proto = parse("""g (float[2,2] x, int64[1] row) => (float[1,2] y) { y = Gather (x, row) }""")
    proto.graph.node[0].name = "rows_ab"
    model.write_bytes(proto.SerializeToString().replace(b"rows_ab", b"rows_\xff\xfe"))
    session = make_session(model)
    with pytest.raises(Exception, match=r"Gather 'rows_\\xff\\xfe'.*got 7"):
        session.run(None, {"x": X, "row": np.array([7])})


def test_placement_report_without_utf8_names_is_json(
    model: Path, make_session: MakeSession, tmp_path: Path, capfd: Any
) -> None:
    path = tmp_path / "placement.json"
    make_session(model, {"on_unsupported": "cpu", "placement": str(path)})
    (left,) = json.loads(path.read_text(encoding="utf-8"))["left"]
    assert left["node"] == "Det 'det_\\xff\\xfe'"
    make_session(model, {"on_unsupported": "warn"})
    assert r"det_\xff\xfe" in capfd.readouterr().err


def test_profile_without_utf8_names_is_json(model: Path, make_session: MakeSession, tmp_path: Path) -> None:
    prefix = str(tmp_path / "profile")
    session = make_session(
        model, {"on_unsupported": "cpu"}, configure={"enable_profiling": True, "profile_file_prefix": prefix}
    )
    session.run(None, {"x": X})
    raw = Path(session.end_profiling()).read_bytes()
    assert re.search(rb'"sum_\\\\+xe9\\\\+xe9"', raw)

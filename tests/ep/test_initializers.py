# SPDX-License-Identifier: Apache-2.0
"""Constants of a model: those in a file of external data are used in its mapping, once for all sessions."""

import gc
import os
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime
import pytest
from numpy.typing import NDArray

from tests.ep.conftest import MakeSession, parse

ELEMENTS = 5000
TYPE = f"float[{ELEMENTS}]"
TEXT = f"g ({TYPE} x, {TYPE} a, {TYPE} b) => ({TYPE} z) {{ p = Mul(x, a)  z = Add(p, b) }}"


def integers(seed: int) -> NDArray[np.float32]:
    """Random integers as float32, whose products and sums are exact."""
    return np.random.default_rng(seed).integers(-50, 50, ELEMENTS).astype(np.float32)


def save(
    path: Path, a: NDArray[np.float32], b: NDArray[np.float32], location: str = "model.onnx.data"
) -> onnx.ModelProto:
    """x * a + b, with `a` and `b` in one file."""
    model = parse(TEXT)
    del model.graph.input[1:]
    model.graph.initializer.extend([onnx.numpy_helper.from_array(a, "a"), onnx.numpy_helper.from_array(b, "b")])
    onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=0)
    return onnx.load(path, load_external_data=False)


def whole_mappings(data: Path) -> int:
    """How many mappings cover the whole file: ours, since ONNX Runtime maps each tensor by itself."""
    pages = -(-data.stat().st_size // os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PAGE_SIZE")
    with Path("/proc/self/maps").open(encoding="utf-8") as lines:
        ranges = [line.split()[0].split("-") for line in lines if line.rstrip().endswith(str(data))]
    return sum(int(end, 16) - int(begin, 16) == pages for begin, end in ranges)


def check(session: onnxruntime.InferenceSession, a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
    x = integers(9)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x * a + b)


def test_sessions_share_one_mapping_of_file(make_session: MakeSession, tmp_path: Path) -> None:
    a, b = integers(1), integers(2)
    save(tmp_path / "model.onnx", a, b)
    data = tmp_path / "model.onnx.data"
    sessions = [make_session(tmp_path / "model.onnx", strict=True) for _ in range(2)]
    assert whole_mappings(data) == 1
    for session in sessions:
        check(session, a, b)
    del sessions, session
    gc.collect()
    assert whole_mappings(data) == 0


def test_data_between_two_elements_is_copied(make_session: MakeSession, tmp_path: Path) -> None:
    """ONNX does not align tensors, but reads of whole elements need aligned ones (UndefinedBehaviorSanitizer reports
    others).
    """
    a, b = integers(1), integers(2)
    model = save(tmp_path / "model.onnx", a, b)
    data = tmp_path / "model.onnx.data"
    data.write_bytes(b"x" + a.tobytes() + b"xy" + b.tobytes())
    for tensor, offset in zip(model.graph.initializer, (1, 1 + a.nbytes + 2), strict=True):
        next(entry for entry in tensor.external_data if entry.key == "offset").value = str(offset)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    session = make_session(tmp_path / "model.onnx", strict=True)
    check(session, a, b)
    assert whole_mappings(data) == 0


def test_replaced_data_file_is_mapped_anew(make_session: MakeSession, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    save(path, integers(1), integers(2))
    before = make_session(path, strict=True)
    (tmp_path / "new").mkdir()
    save(tmp_path / "new" / "model.onnx", integers(3), integers(4))
    (tmp_path / "new" / "model.onnx.data").replace(tmp_path / "model.onnx.data")
    check(make_session(path, strict=True), integers(3), integers(4))
    check(before, integers(1), integers(2))


def test_data_file_in_subfolder_is_mapped(
    make_session: MakeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    save(tmp_path / "model.onnx", integers(1), integers(2), "data/weights")
    monkeypatch.chdir(tmp_path)
    session = make_session(Path("model.onnx"), strict=True)
    assert whole_mappings(tmp_path / "data" / "weights") == 1
    check(session, integers(1), integers(2))


def test_values_of_caller_override_file(make_session: MakeSession, tmp_path: Path) -> None:
    save(tmp_path / "model.onnx", integers(1), integers(2))
    given = integers(5)
    values = onnxruntime.OrtValue.ortvalue_from_numpy(given)
    session = make_session(
        tmp_path / "model.onnx", strict=True, prepare=lambda options: options.add_external_initializers(["a"], [values])
    )
    check(session, given, integers(2))


def test_model_in_memory_finds_data_in_given_folder(make_session: MakeSession, tmp_path: Path) -> None:
    model = save(tmp_path / "model.onnx", integers(1), integers(2))
    session = make_session(
        model,
        strict=True,
        prepare=lambda options: options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(tmp_path)
        ),
    )
    check(session, integers(1), integers(2))

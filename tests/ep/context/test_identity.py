# SPDX-License-Identifier: Apache-2.0
"""A compiled model computes with its own partition's file, wherever ORT says the model is, or is refused.

Two models that differ in nothing but their weights: each one's file fits the other.
"""

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

from tests.ep.conftest import HEADER
from tests.ep.context import files
from tests.ep.context.conftest import Load

GRAPH = "g (float[N,8] x) => (float[N,4] y) { y = MatMul (x, w) }"
COMPILED = "model_ctx.onnx"
PARTITION = "model_ctx.0.flownpu"
# ORT looks for external data there, and then believes that the model is there, too.
DATA_FOLDER = "session__model_external_initializers_file_folder_path"
OTHERS = r"'.*model_ctx\.0\.flownpu' is another model's partition: expected [0-9a-f]{16}, got [0-9a-f]{16}; copy the"


def weight(name: str) -> np.ndarray[Any, Any]:
    return np.random.default_rng(ord(name)).standard_normal((8, 4)).astype(np.float32)


def output(session: onnxruntime.InferenceSession) -> np.ndarray[Any, Any]:
    (y,) = session.run(None, {"x": np.eye(8, dtype=np.float32)})
    return np.asarray(y)


@pytest.fixture
def ours(load: Load, tmp_path: Path) -> Path:
    """The compiled model in folder `a`; in folder `b` is the other model's, by the same names."""
    for name in "ab":
        model = onnx.parser.parse_model(f"{HEADER} {GRAPH}")
        model.graph.initializer.append(numpy_helper.from_array(weight(name), "w"))
        (tmp_path / name).mkdir()
        onnx.save(model, tmp_path / name / "model.onnx")
        load(tmp_path / name / "model.onnx", ep__context_enable="1")
    return tmp_path / "a" / COMPILED


def check_is_ours(session: onnxruntime.InferenceSession) -> None:
    """Products round to bf16 at most; the other model's weights differ by more than the weights' own size."""
    np.testing.assert_allclose(output(session), weight("a"), atol=2**-6)


def test_node_has_identity_of_its_file(ours: Path) -> None:
    (node,) = onnx.load(ours).graph.node
    (identity,) = (attribute.s.decode() for attribute in node.attribute if attribute.name == "notes")
    assert identity == f"{files.read(ours.with_name(PARTITION).read_bytes()).identity:016x}"


def test_equal_models_compile_to_equal_files(ours: Path, load: Load, tmp_path: Path) -> None:
    """Two processes that compile a model at the same time may each write one of the two files."""
    (tmp_path / "again").mkdir()
    load(ours.with_name("model.onnx"), ep__context_enable="1", ep__context_file_path=str(tmp_path / "again" / COMPILED))
    for name in (PARTITION, COMPILED):
        assert (tmp_path / "again" / name).read_bytes() == ours.with_name(name).read_bytes(), name


def test_file_of_another_model_is_refused(ours: Path, load: Load, tmp_path: Path) -> None:
    check_is_ours(load(ours))
    shutil.copy(tmp_path / "b" / PARTITION, ours.parent)
    with pytest.raises(Exception, match=OTHERS):
        load(ours)


def test_model_without_identity_is_refused(ours: Path, load: Load) -> None:
    """It lacks the identity."""
    model = onnx.load(ours)
    (node,) = model.graph.node
    node.attribute.remove(next(attribute for attribute in node.attribute if attribute.name == "notes"))
    onnx.save(model, ours)
    with pytest.raises(
        Exception, match=r"is another model's partition: expected one of a model that .* compile it again"
    ):
        load(ours)


@pytest.mark.parametrize("from_memory", [False, True])
def test_folder_of_external_data_is_not_model_folder(ours: Path, load: Load, tmp_path: Path, from_memory: bool) -> None:
    model = ours.read_bytes() if from_memory else ours
    elsewhere = {DATA_FOLDER: str(tmp_path / "b")}
    with pytest.raises(Exception, match=OTHERS):
        load(model, **elsewhere)
    (tmp_path / "b" / PARTITION).unlink()
    with pytest.raises(
        Exception, match=r"there is no '.*b/model_ctx\.0\.flownpu'.* name the compiled model with ep\.con"
    ):
        load(model, **elsewhere)
    check_is_ours(load(model, **elsewhere, ep__context_file_path=str(ours)))


def test_model_from_memory_uses_given_folder(
    ours: Path, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = ours.read_bytes()
    check_is_ours(load(content, ep__context_file_path=str(ours)))
    check_is_ours(load(content, **{DATA_FOLDER: str(ours.parent)}))
    monkeypatch.chdir(tmp_path / "b")
    check_is_ours(load(content, ep__context_file_path=str(ours)))
    with pytest.raises(Exception, match=OTHERS):
        load(content)


def test_compiled_model_beside_stale_one_can_be_compiled_again(ours: Path, load: Load, tmp_path: Path) -> None:
    """The folder to write to is not where the model's own file is."""
    (tmp_path / "b" / COMPILED).unlink()
    load(ours, ep__context_enable="1", ep__context_file_path=str(tmp_path / "b" / COMPILED))
    check_is_ours(load(tmp_path / "b" / COMPILED))


def test_models_compiled_at_once_to_one_name_are_whole(ours: Path, load: Load, tmp_path: Path) -> None:
    """ORT refuses to write its model where one is already; the partition's file is written before that."""
    target = tmp_path / "at once" / COMPILED
    target.parent.mkdir()

    def compile_it() -> None:
        try:
            load(ours.with_name("model.onnx"), ep__context_enable="1", ep__context_file_path=str(target))
        except Exception as error:  # noqa: BLE001  # ORT's exceptions have no common base class
            assert "exists already" in str(error)  # noqa: PT017

    threads = [threading.Thread(target=compile_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in target.parent.iterdir()) == [PARTITION, COMPILED]
    check_is_ours(load(target))

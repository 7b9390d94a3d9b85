# SPDX-License-Identifier: Apache-2.0
"""RunOptions.terminate, set by another thread while a partition computes, ends the run."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

from tests.ep.conftest import HEADER, MakeSession

# A run of seconds. The test waits for DELAY and one step of it.
STEPS, WIDTH, ROWS = 400, 256, 4000
DELAY = 0.2
# ORT's message for a node's error, then its text for a terminated run. A run that ORT ends itself has only the text.
ENDED = "while running FlowNPU.*terminate flag"


@pytest.fixture
def model() -> onnx.ModelProto:
    body = " ".join(f"h{step + 1} = MatMul (h{step}, w)" for step in range(STEPS))
    made = onnx.parser.parse_model(f"{HEADER} g (float[N,{WIDTH}] h0) => (float[N,{WIDTH}] h{STEPS}) {{ {body} }}")
    made.graph.initializer.append(numpy_helper.from_array(np.eye(WIDTH, dtype=np.float32), "w"))
    return made


@contextmanager
def terminated() -> Iterator[onnxruntime.RunOptions]:
    """Options of a run that is told to end DELAY from now: the session is made before."""
    options = onnxruntime.RunOptions()
    timer = threading.Timer(DELAY, lambda: setattr(options, "terminate", True))
    timer.start()
    yield options
    timer.join()


def test_terminate_during_run_ends_it(make_session: MakeSession, model: onnx.ModelProto) -> None:
    session = make_session(model, {"activations": "bf16"}, strict=True)
    many, few = np.ones((ROWS, WIDTH), np.float32), np.eye(2, WIDTH, dtype=np.float32)
    with terminated() as ended, pytest.raises(Exception, match=ENDED):
        session.run(None, {"h0": many}, ended)
    ended.terminate = False
    for options in (None, onnxruntime.RunOptions(), ended):
        np.testing.assert_array_equal(session.run(None, {"h0": few}, options)[0], few)


def test_terminate_of_another_run_ends_no_other(make_session: MakeSession, model: onnx.ModelProto) -> None:
    """Two runs of a session at the same time, of which one is told to end."""
    session = make_session(model, {"activations": "bf16"}, strict=True)
    errors = []

    def run() -> None:
        try:
            with terminated() as ended:
                session.run(None, {"h0": np.ones((ROWS, WIDTH), np.float32)}, ended)
        except Exception as error:  # noqa: BLE001  # ORT's exceptions have no common base class
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    some = np.ones((ROWS // 40, WIDTH), np.float32)
    while thread.is_alive():
        np.testing.assert_array_equal(session.run(None, {"h0": some}, onnxruntime.RunOptions())[0], some)
    thread.join()
    assert len(errors) == 1
    assert "terminate flag" in errors[0]

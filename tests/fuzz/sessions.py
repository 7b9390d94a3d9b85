# SPDX-License-Identifier: Apache-2.0
"""Functions for workers: run a model on ONNX Runtime's CPU provider alone, or on FlowNPU's."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto

from tests.fuzz.arrays import numpy_type

Arrays = dict[str, NDArray[Any]]

LEVELS = {
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
SILENT = 4
# Most elements of a run's outputs: Expand and Range may make arrays too large to be sent to another process.
MOST_ELEMENTS = 1 << 24
TOO_LARGE = "the outputs are too large to compare"


@dataclass
class Outcome:
    """The outcome of a session and its runs: `refusal` if there was no session, else arrays or an error of each run."""

    refusal: str | None = None
    runs: list[Arrays | str] = field(default_factory=list)


@cache
def _devices() -> list[Any]:
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == "FlowNPUExecutionProvider"][:1]


def _session_options(optimise: str) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[optimise]
    options.log_severity_level = SILENT
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return options


def run_reference(model: bytes, feeds: Sequence[Arrays], optimise: str = "none") -> Outcome:
    """Runs a model on ONNX Runtime's CPU provider."""
    try:
        options = _session_options(optimise)
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001  (any error is a refusal)
        return Outcome(refusal=_text(error))
    return Outcome(runs=[_run(session, feed) for feed in feeds])


def run_ours(model: bytes, feeds: Sequence[Arrays], provider: dict[str, str], optimise: str = "none") -> Outcome:
    """Runs a model on FlowNPU's provider, which is registered in this process."""
    try:
        options = _session_options(optimise)
        options.add_provider_for_devices(_devices(), provider)
        session = onnxruntime.InferenceSession(model, options)
        session.disable_fallback()
    except Exception as error:  # noqa: BLE001
        return Outcome(refusal=_text(error))
    if "FlowNPUExecutionProvider" not in session.get_providers():
        return Outcome(refusal="onnxruntime made a session without FlowNPU, and said nothing")
    return Outcome(runs=[_run(session, feed) for feed in feeds])


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _run(session: onnxruntime.InferenceSession, feed: Arrays) -> Arrays | str:
    try:
        names = [output.name for output in session.get_outputs()]
        if any(array.dtype == object for array in feed.values()):  # OrtValues cannot be made from texts
            return dict(zip(names, session.run(names, feed), strict=True))
        given = {name: _to_ort(array) for name, array in feed.items()}
        outputs = session.run_with_ort_values(names, given)
        if sum(math.prod(value.shape()) for value in outputs) > MOST_ELEMENTS:
            return TOO_LARGE
        return dict(zip(names, map(_from_ort, outputs), strict=True))
    except Exception as error:  # noqa: BLE001
        return _text(error)


def _to_ort(array: NDArray[Any]) -> onnxruntime.OrtValue:
    array = np.ascontiguousarray(array) if array.ndim else array
    if array.dtype == numpy_type(TensorProto.BFLOAT16):
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _from_ort(value: onnxruntime.OrtValue) -> NDArray[Any]:
    if value.element_type() != TensorProto.BFLOAT16:
        return np.array(value.numpy())
    # ONNX Runtime gives no numpy array of a bfloat16 value.
    shape = tuple(value.shape())
    if 0 in shape:
        return np.zeros(shape, numpy_type(TensorProto.BFLOAT16))
    bits = ctypes.cast(value.data_ptr(), ctypes.POINTER(ctypes.c_uint16))
    return np.ctypeslib.as_array(bits, shape or (1,)).reshape(shape).copy().view(numpy_type(TensorProto.BFLOAT16))

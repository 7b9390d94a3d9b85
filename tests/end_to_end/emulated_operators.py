# SPDX-License-Identifier: Apache-2.0
"""Single nodes in sessions with device=emulate: their file, its artifacts, and their dispatches."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from flownpu.graph_rewrites.testing import run_session
from flownpu.npu.artifacts import build_artifacts
from flownpu.ops import q4nx
from tests.aie.host_kernels import BF16_ROUNDING, bf16, wide
from tests.decoding import dispatches_of
from tests.ops.stock_onnxruntime import model_of, node, value, with_functions

Arrays = Mapping[str, np.ndarray | None]

ENGINE_AND_GEMM = ["dequant_engine", "gemm"]  # a product's designs


def stems(dispatches: list[str]) -> list[str]:
    """The designs of dispatches."""
    return [name.partition(",")[0].split()[0] for name in dispatches]


def rounded(expected: np.ndarray, error: np.ndarray) -> np.ndarray:
    """A bound on the error of results that come back in bf16: `error`, and the rounding to bf16."""
    return np.asarray(error + BF16_ROUNDING * (np.abs(expected) + error))


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Normal numbers in float32 that bf16 holds exactly."""
    return wide(bf16(np.random.default_rng(seed).normal(size=shape))).astype(np.float32)


def weights(seed: int, rows: int, columns: int) -> q4nx.Quantized:
    return q4nx.quantize(np.random.default_rng(seed).standard_normal((rows, columns), np.float32) / 8)


def write_node(
    file: Path, op_type: str, inputs: Arrays, constants: Arrays | None = None, outputs: int = 1, **attributes: Any
) -> Path:
    """A model of one node; inputs and constants by name, in the operator's order; None: absent."""
    given = {**inputs, **(constants or {})}
    known = {name: value(name, array) for name, array in given.items() if array is not None}
    kept = {known[name]: array for name, array in (constants or {}).items() if array is not None}
    feeds = [known[name] for name, array in inputs.items() if array is not None]
    order = [known.get(name) for name in given]
    model = with_functions(model_of([node(op_type, order, outputs, **attributes)], feeds, kept))
    ir.save(model, file)
    return file


def product(folder: Path, rows: int = 64) -> tuple[Path, dict[str, np.ndarray]]:
    """A product of 256 x 256, as a file, and what it is fed."""
    x = numbers(1, rows, 256)
    blocks = q4nx.pack(*weights(2, 256, 256))
    return write_node(folder / "model.onnx", "Q4NXMatMul", {"X": x}, {"W": blocks}, M=256, K=256), {"X": x}


@dataclass
class Emulated:
    """A session of a file.

    Attributes:
        session: ONNX Runtime's session.
        placement: its placement report.
    """

    session: onnxruntime.InferenceSession
    placement: dict[str, Any]

    def run(self, feeds: Arrays) -> tuple[list[np.ndarray], list[str]]:
        """The outputs of a run, and the names of its dispatches; it ends the session's profile, so only one can be."""
        outputs = run_session(self.session, {name: array for name, array in feeds.items() if array is not None})
        return outputs, dispatches_of(self.session)


def session_of(file: Path, devices: list[Any], **options: str) -> Emulated:
    """A session with device=emulate whose array gets all that it takes; options with the value "" are left out."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.enable_profiling = True
    settings.profile_file_prefix = str(file.with_suffix(".profile"))
    report = file.with_suffix(".placement.json")
    given = {"device": "emulate", "npu_threshold": "0", "activations": "bf16", "placement": str(report), **options}
    given = {key: text for key, text in given.items() if text}
    settings.add_provider_for_devices(devices, given)
    session = onnxruntime.InferenceSession(str(file), settings)
    return Emulated(session, json.loads(report.read_text()))


@dataclass
class Alone:
    """Makes single nodes in a folder, builds their artifacts, and runs them."""

    folder: Path
    devices: list[Any]
    context: int = 128
    target: str = "npu2"

    def __call__(
        self,
        op_type: str,
        inputs: Arrays,
        constants: Arrays | None = None,
        outputs: int = 1,
        options: dict[str, str] | None = None,
        **attributes: Any,
    ) -> tuple[list[np.ndarray], list[str]]:
        """Outputs, and names of dispatches."""
        file = write_node(self.folder / "model.onnx", op_type, inputs, constants, outputs, **attributes)
        build_artifacts(file, context=self.context, target=self.target)
        return session_of(file, self.devices, **(options or {})).run(inputs)

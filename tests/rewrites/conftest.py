# SPDX-License-Identifier: Apache-2.0
"""Exports of ORT GenAI's builder, made once for all tests, and a decoder loop over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

from flownpu.convert import convert
from flownpu.errors import FlowNPUError
from flownpu.graph_rewrites.testing import Array, run_session
from tests.rewrites import optimum_export
from tests.rewrites.genai_export import Export, export, make_checkpoint

TOPICS = Path(__file__).parent.parent / "fixtures" / "gemma3-topics"

# One of each family, in the forms that exports come in. accuracy_level=0 keeps activations in float32: the builder's
# default for the CPU rounds them to int8, which would hide everything that is to be compared here.
OPTIONS = {
    "gemma3": ("accuracy_level=0",),
    "llama": ("accuracy_level=0", "block_size=64"),
    "qwen3": ("accuracy_level=0", "disable_qkv_fusion=true"),
    "topics": ("accuracy_level=0",),
    "topics in blocks of 16": ("accuracy_level=0", "block_size=16"),
}


NUMPY_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(bfloat16)": ml_dtypes.bfloat16}


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """GenAI model folders by name: tiny random ones, and the small trained Gemma3 ("topics")."""
    folder = tmp_path_factory.mktemp("exports")
    runs = []
    for name, options in OPTIONS.items():
        checkpoint = TOPICS if name.startswith("topics") else make_checkpoint(name, folder / f"{name}-checkpoint")
        runs.append(Export(str(checkpoint), str(folder / name), options))
    export(*runs)
    return {name: folder / name for name in OPTIONS}


@pytest.fixture(scope="session")
def optimum_python() -> Path:
    """The interpreter of optimum's environment; tests that need it are skipped where it cannot be installed."""
    try:
        return optimum_export.environment()
    except FlowNPUError as error:
        pytest.skip(f"optimum's environment cannot be made: {error}")


@pytest.fixture(scope="session")
def optimum_exports(optimum_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """optimum's exports of tiny random models, by name."""
    folder = tmp_path_factory.mktemp("optimum")
    optimum_export.call(optimum_python, "export", output=folder, names=list(optimum_export.TASKS))
    return {name: folder / name for name in optimum_export.TASKS}


@pytest.fixture(scope="session")
def folded(optimum_exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same, converted."""
    folder = tmp_path_factory.mktemp("folded")
    for name, source in optimum_exports.items():
        convert(source, folder / name)
    return {name: folder / name for name in optimum_exports}


class Decoder:
    """Runs a GenAI model folder in ORT's CPU provider, call by call, as GenAI does without sharing buffers."""

    def __init__(self, folder: Path) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        config = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
        self._session = ort.InferenceSession(str(folder / config["filename"]), options, ["CPUExecutionProvider"])
        section = config.get("sliding_window", {"layers": [], "window_size": 0})
        # GenAI's own capacity for single tokens: the window and a slack of 16.
        windowed = {
            f"past_key_values.{layer}.{part}": section["window_size"] + 16
            for layer in section["layers"]
            for part in ("key", "value")
        }
        heads, head_size = config["num_key_value_heads"], config["head_size"]
        self._past = {
            value.name: np.zeros((1, heads, windowed.get(value.name, 0), head_size), NUMPY_TYPES[value.type])
            for value in self._session.get_inputs()
            if value.name.startswith("past_key_values")
        }
        self._tokens = 0

    def __call__(self, ids: Any) -> Array:
        """Logits [S, V] or [1, V] of the next tokens."""
        self._tokens += len(ids)
        feeds = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, self._tokens), np.int64),
            **self._past,
        }
        names = [value.name for value in self._session.get_outputs()]
        outputs = dict(zip(names, run_session(self._session, feeds), strict=True))
        self._past = {name: outputs[name.replace("past_key_values", "present")] for name in self._past}
        logits: Array = outputs["logits"][0]
        return logits

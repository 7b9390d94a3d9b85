# SPDX-License-Identifier: Apache-2.0
"""The encoder of a converted model in a session with device=emulate: built, placed and run as a user would."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from flownpu.convert import convert
from flownpu.npu.artifacts import build_artifacts
from tests.convert.picture_models import reference, write_pictures_checkpoint
from tests.npu.rounding import encoder_error


def features(file: Path, pixels: np.ndarray, devices: list[Any], **options: str) -> np.ndarray:
    """The features of a picture, from a session of its own."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.add_provider_for_devices(devices, options)
    session = onnxruntime.InferenceSession(file, settings)
    return np.asarray(session.run(["image_features"], {"pixel_values": pixels})[0])


def test_encoder_runs_entirely_on_array(ep_devices: list[Any], tmp_path: Path) -> None:
    """The CPU device, with which it is compared, rounds to bf16 as well; twice the estimated error is allowed."""
    checkpoint, model = tmp_path / "checkpoint", tmp_path / "model"
    write_pictures_checkpoint(checkpoint)
    convert(checkpoint, model)
    build_artifacts(model)  # into the folder where the provider looks for them
    pixels = np.random.default_rng(1).uniform(-1, 1, (1, 3, 128, 128)).astype(np.float32)
    placement = tmp_path / "placement.json"
    ours = features(model / "vision.onnx", pixels, ep_devices[:1], device="emulate", placement=str(placement))
    theirs = features(model / "vision.onnx", pixels, ep_devices[:1], device="cpu", activations="bf16")
    assert ours.shape == theirs.shape == (1, 256, 128)
    error = float(np.sqrt(np.square(ours - theirs).mean()))
    assert 0 < error < 2 * encoder_error(reference(checkpoint, model), pixels) < theirs.std() / 16
    told = json.loads(placement.read_text())
    assert told["on_host"] == []
    assert told["lowered"] == ["an encoder's 2 layers in 11 dispatches an image"]

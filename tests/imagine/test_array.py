# SPDX-License-Identifier: Apache-2.0
"""A step of the trained pipeline's U-Net with its convolutions on the emulated array."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.tools.onnx_model_utils import make_dim_param_fixed

from flownpu.npu.artifacts import build_artifacts
from tests.decoding import dispatches_of
from tests.end_to_end.emulated_operators import session_of, stems

SIZES = {"batch_size": 2, "height": 8, "width": 8, "sequence_length": 16}  # a guided pair of latents
# Multiply-adds of 3 x 3 taps of 32 x 32 channels over the pair: the array gets nothing smaller, which would only take
# the emulator's time.
LEAST = SIZES["batch_size"] * SIZES["height"] * SIZES["width"] * 9 * 32 * 32


@pytest.fixture(scope="module")
def unet(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The U-Net with fixed sizes, and its programs."""
    model = onnx.load(exported / "unet" / "model.onnx")
    for name, size in SIZES.items():
        make_dim_param_fixed(model.graph, name, size)
    del model.graph.value_info[:]
    file = tmp_path_factory.mktemp("unet") / "model.onnx"
    onnx.save(onnx.shape_inference.infer_shapes(model, data_prop=True), file)
    build_artifacts(file)
    return file


def test_step_on_array_equals_cpu(unet: Path, ep_devices: list[Any]) -> None:
    """The difference is 40 dB below the largest number or less, as a step of rounded weights has to be.

    The array gets all 3 x 3 convolutions but those of 4 channels, the latent's own, and two of 32 to the smaller one.
    """
    rng = np.random.default_rng(0)
    feeds = {
        "sample": rng.standard_normal((2, 4, 8, 8), np.float32),
        "timestep": np.array(400, np.float32),
        "encoder_hidden_states": rng.standard_normal((2, 16, 32), np.float32),
    }
    on_cpu = session_of(unet, ep_devices[:1], device="cpu", npu_threshold="", activations="")
    on_array = session_of(unet, ep_devices[:1], npu_threshold=str(LEAST))
    assert "by themselves on the array: " in on_array.placement["lowered"][0]
    (expected,), (found,) = (each.session.run(None, feeds) for each in (on_cpu, on_array))
    dispatches = dispatches_of(on_array.session)
    graph = onnx.load(unet).graph
    shapes = [tuple(each.dims) for each in graph.initializer if len(each.dims) == 4]
    large = sum(shape[2:] == (3, 3) and min(shape[:2]) > 4 for shape in shapes)
    assert stems(dispatches) == ["gemm"] * (large - 2)
    noise = np.sqrt(np.mean(np.square(found - expected)))
    assert 20 * np.log10(np.abs(expected).max() / noise) > 40

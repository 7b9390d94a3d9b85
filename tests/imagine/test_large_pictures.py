# SPDX-License-Identifier: Apache-2.0
"""Networks of the trained pipeline over the latents of a published model's picture, 768 x 512, on the CPU device.

test_networks.py has small pictures on the GPU, whose kernels no size changes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.imagine.test_networks import inputs

# Two pictures; the decoder of the trained pipeline makes 4 x 4 pixels of each of these, published ones 8 x 8.
LATENTS = (2, 4, 64, 96)


@pytest.mark.parametrize("part", ["unet", "vae_decoder"])
def test_network_of_large_pictures_equals_cpu_provider(part: str, exported: Path, ep_devices: Any) -> None:
    """Every node runs on the device, attention over 6144 tokens among them.

    Products may round both factors to bf16: each changes by 2^-9 at most, and errors of some tens of products in a row
    add up in quadrature; sums of these have the same relative error in the root mean square.
    """
    path = exported / part / "model.onnx"
    graph = onnx.load(path, load_external_data=False).graph
    given = inputs(graph, part)
    given["sample" if part == "unet" else "latent_sample"] = np.random.default_rng(3).standard_normal(
        LATENTS, np.float32
    )
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices(ep_devices[:1], {"activations": "bf16", "on_unsupported": "error"})
    found = onnxruntime.InferenceSession(path, options).run(None, given)[0]
    expected = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, given)[0]
    products = sum(node.op_type in ("Conv", "MatMul", "Gemm") for node in graph.node)
    error = np.sqrt(np.mean(np.square(found - expected)))
    assert error < np.sqrt(2 * products) * 2**-9 * np.sqrt(np.mean(np.square(expected)))

# SPDX-License-Identifier: Apache-2.0
"""The trained pipeline's networks in sessions of ONNX Runtime on device=gpu, on each API, against its CPU provider."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("gpu_api")]

# Latents that are not square, of two pictures; tokens and width of the text.
IMAGES, HEIGHT, WIDTH, TOKENS, HIDDEN = 2, 4, 8, 16, 32
GIVEN = {
    "text_encoder": {"input_ids": (IMAGES, TOKENS)},
    "unet": {"sample": (IMAGES, 4, HEIGHT, WIDTH), "timestep": (), "encoder_hidden_states": (IMAGES, TOKENS, HIDDEN)},
    "vae_decoder": {"latent_sample": (IMAGES, 4, HEIGHT, WIDTH)},
    "vae_encoder": {"sample": (IMAGES, 3, 4 * HEIGHT, 4 * WIDTH)},
}
# Floats that the host makes of integers, which no kernel reads: the tokens' embeddings, their norm twice, and the
# causal mask for each of two layers; for each picture the sinusoids of the time, of 32 numbers.
FROM_HOST = {"text_encoder": IMAGES * TOKENS * (3 * HIDDEN + 2 * TOKENS), "unet": IMAGES * HIDDEN}


def inputs(graph: onnx.GraphProto, part: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    kinds = {one.name: onnx.helper.tensor_dtype_to_np_dtype(one.type.tensor_type.elem_type) for one in graph.input}
    return {
        name: (rng.standard_normal(shape) if kinds[name] == np.float32 else rng.integers(3, 20, shape)).astype(
            kinds[name]
        )
        for name, shape in GIVEN[part].items()
    }


def tolerance(graph: onnx.GraphProto, expected: np.ndarray) -> float:
    """The distance of two computations in float32: errors of sums of K terms, sqrt(K) 2^-24 of a result, in quadrature
    over all products and norms, for either; 4 because the largest of many errors counts."""
    sizes = {one.name: list(one.dims) for one in graph.initializer}
    terms = [math.prod(sizes.get(node.input[1], [HIDDEN])[1:]) for node in graph.node if node.op_type == "Conv"]
    terms += [sizes.get(node.input[1], [HIDDEN])[0] for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    return 4 * math.sqrt(2 * sum(terms)) * 2**-24 * float(np.abs(expected).max())


@pytest.mark.parametrize("part", GIVEN)
def test_network_equals_cpu_provider_and_moves_nothing_between(
    part: str, exported: Path, gpu_api: str, ep_devices: Any, tmp_path: Path
) -> None:
    """All steps that compute with floats run on the device; each input goes there once, and only results come back."""
    path = exported / part / "model.onnx"
    graph = onnx.load(path, load_external_data=False).graph
    given = inputs(graph, part)
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "gpu")
    settings = {"device": "gpu", "gpu_api": gpu_api, "on_unsupported": "error"}
    options.add_provider_for_devices(ep_devices, settings)
    session = onnxruntime.InferenceSession(path, options)
    expected = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, given)
    for found, wanted in zip(session.run(None, given), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance(graph, wanted))
    events = [event.get("args", {}) for event in json.loads(Path(session.end_profiling()).read_text())]
    moved = {
        to: sum(int(event[f"bytes_to_{to}"]) for event in events if event.get("array") == "gpu")
        for to in ("device", "host")
    }
    floats = sum(array.nbytes for name, array in given.items() if name not in ("input_ids", "timestep"))
    assert moved == {"device": floats + 4 * FROM_HOST.get(part, 0), "host": expected[0].nbytes}

# SPDX-License-Identifier: Apache-2.0
"""Layers that keep a state on device=gpu, on each API: small models against transformers, in GenAI's loop."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.convert.test_states import check_loop, check_padded_batch
from tests.generate.test_trained_states import NAMES, check_turns_and_rewinds

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("gpu_api")]

FAMILIES = ["lfm2", "qwen3_5_text"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, gpu_api: str, tmp_path: Path) -> None:
    """Weights, norms and rates are random, so that none can stand for another."""
    check_loop(family, tmp_path, device="gpu", gpu_api=gpu_api)


@pytest.mark.parametrize(
    ("family", "gpu_api"), list(zip(FAMILIES, ("opencl", "vulkan"), strict=True)), indirect=["gpu_api"]
)
def test_logits_of_prompts_on_gpu_and_tokens_on_cpu_equal_transformers(
    family: str, gpu_api: str, tmp_path: Path
) -> None:
    """States go from device to device as tensors, keys and values by the hand-over."""
    check_loop(family, tmp_path, device="gpu+cpu", gpu_api=gpu_api)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batch_equals_single_sequences(family: str, gpu_api: str, tmp_path: Path) -> None:
    check_padded_batch(family, tmp_path, device="gpu", gpu_api=gpu_api)


@pytest.mark.parametrize(("name", "gpu_api"), list(zip(NAMES, ("opencl", "vulkan"), strict=True)), indirect=["gpu_api"])
def test_turns_and_rewinds_of_trained_model_continue_as_transformers(
    name: str, gpu_api: str, converted: Callable[..., Path]
) -> None:
    """Prompts of more than two tiles of the delta rule; the rewind takes a copy of states that an earlier run left."""
    folder = converted(name, kv_dtype="fp32")
    check_turns_and_rewinds(name, folder, 40, 6, activations="bf16", device="gpu", gpu_api=gpu_api)

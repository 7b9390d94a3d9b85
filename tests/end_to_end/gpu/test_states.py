# SPDX-License-Identifier: Apache-2.0
"""Layers that keep a state on device=gpu, on each API: small models against transformers, in GenAI's loop."""

from pathlib import Path

import pytest

from flownpu.convert import convert
from tests.convert.conftest import write_tiny
from tests.convert.test_states import check_loop, check_padded_batch, open_model
from tests.generate.test_trained_states import NAMES, check_turns_and_rewinds

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("gpu_api", "not_optimised")]

FAMILIES = ["lfm2", "qwen3_5_text"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, gpu_api: str, tmp_path: Path) -> None:
    """Weights, norms and rates are random, so that none can stand for another."""
    check_loop(family, tmp_path, device="gpu", gpu_api=gpu_api)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batch_equals_single_sequences(family: str, gpu_api: str, tmp_path: Path) -> None:
    check_padded_batch(family, tmp_path, device="gpu", gpu_api=gpu_api)


@pytest.mark.parametrize("name", NAMES)
def test_turns_and_rewinds_of_trained_model_continue_as_transformers(name: str, gpu_api: str, tmp_path: Path) -> None:
    """Prompts of more than a tile of the delta rule; the rewind takes a copy of states that an earlier run left."""
    check_turns_and_rewinds(name, tmp_path, 12, activations="bf16", device="gpu", gpu_api=gpu_api)


def test_state_layers_with_experts_are_refused_with_the_reason(gpu_api: str, tmp_path: Path) -> None:
    tiny = write_tiny("qwen3_5_moe_text", tmp_path / "checkpoint")
    convert(tiny.folder, tmp_path / "model", kv_dtype="fp32")
    with pytest.raises(RuntimeError, match=r"(?s)device gpu leaves .* a mixture of experts, which the GPU's kernels"):
        open_model(tmp_path / "model", device="gpu", gpu_api=gpu_api)

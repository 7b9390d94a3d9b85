# SPDX-License-Identifier: Apache-2.0
"""GenAI's exports of more families, as they are and converted, compute the same with all nodes on FlowNPU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from flownpu.convert import convert
from tests.convert.conftest import YARN
from tests.convert.running import assert_near, logits_of
from tests.convert.sources.test_experts_in_turns import write_mxfp4
from tests.decoding import DecoderSession, float32_tolerance
from tests.rewrites.genai_export import OTHER_CONFIGS, SIZES, Export, export, make_tokenizer
from tests.rewrites.test_sources import OPTIONS, check_placement, check_tokens, run


@pytest.mark.parametrize("name", OTHER_CONFIGS)
def test_exports_give_logits_of_transformers(
    name: str, exports: dict[str, Path], tmp_path: Path, ep_devices: list[Any]
) -> None:
    export, layers = exports[name], SIZES["num_hidden_layers"]
    convert(export, tmp_path / "model", kv_dtype="fp32")
    reports = {tmp_path / f"{i}.json": folder for i, folder in enumerate((export, tmp_path / "model"))}
    decoders = [
        DecoderSession(folder, ep_devices[:1], OPTIONS | {"placement": str(report)})
        for report, folder in reports.items()
    ]
    expected, *found = run(DecoderSession(export), *decoders)
    for logits in found:
        check_tokens(logits, expected, layers)
    for report in reports:
        check_placement(report)


@pytest.mark.parametrize("options", [(), ("moe_quant_type=int8", "qmoe_block_size=0")], ids=["int4", "int8 in rows"])
def test_gpt_oss_export_equals_onnxruntime(options: tuple[str, ...], tmp_path: Path, ep_devices: list[Any]) -> None:
    """QMoE with biases and limited gates, sinks and YaRN. The builder quantises MXFP4 again."""
    # The builder wants a context in which some frequencies are kept and some divided. All experts are chosen: rounding
    # to bfloat16 would swap one token's choice among four.
    rope = YARN | {"original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}
    tiny = write_mxfp4(tmp_path / "checkpoint", rope_parameters=rope, num_local_experts=2, num_experts_per_tok=2)
    _add_experts_in_floats(tiny.folder, tiny.reference.state_dict())
    make_tokenizer(tiny.folder)
    export(Export(str(tiny.folder), str(tmp_path / "export"), ("accuracy_level=0", *options)))
    convert(tmp_path / "export", tmp_path / "model", kv_dtype="fp32")
    expected = logits_of(tmp_path / "export")
    config = tiny.reference.config
    atol = float32_tolerance(expected, config.num_hidden_layers, config.intermediate_size)
    np.testing.assert_allclose(logits_of(tmp_path / "model"), expected, rtol=0, atol=atol)
    for name in ("export", "model"):
        assert_near(logits_of(tmp_path / name, ep_devices), expected, tiny)


def _add_experts_in_floats(folder: Path, weights: dict[str, Any]) -> None:
    """Experts as the builder reads them with transformers, which would need accelerate for MXFP4."""
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    experts = {name: weights[name].bfloat16().contiguous() for name in names}
    save_file(tensors | experts, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))

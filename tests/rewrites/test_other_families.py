# SPDX-License-Identifier: Apache-2.0
"""GenAI's exports of more families, as they are and converted, compute the same with all nodes on FlowNPU."""

from pathlib import Path
from typing import Any

import pytest

from flownpu.convert import convert
from tests.decoding import DecoderSession
from tests.rewrites.genai_export import OTHER_CONFIGS, SIZES
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

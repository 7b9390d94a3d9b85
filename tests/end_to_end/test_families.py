# SPDX-License-Identifier: Apache-2.0
"""Each model family on our provider in GenAI computes what transformers computes with the same weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flownpu.convert import convert
from tests.convert.conftest import CONFIGS, write_tiny
from tests.convert.test_numbers import random_ids
from tests.end_to_end.test_numbers import ACTIVATIONS, logit_error


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_near_transformers(family: str, activations: str, genai: Any, tmp_path: Path) -> None:
    """Compares logits of a prompt that is read in two parts, and of 20 tokens after it."""
    tiny = write_tiny(family, tmp_path / "checkpoint")
    convert(tiny.folder, tmp_path / "model")
    path = tmp_path / "model" / "genai_config.json"
    config = json.loads(path.read_text())
    options = {"activations": activations, "on_unsupported": "error"}
    config["model"]["decoder"]["session_options"]["provider_options"] = [{"FlowNPUExecutionProvider": options}]
    path.write_text(json.dumps(config))
    model = genai.Model(str(tmp_path / "model"))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(do_sample=False, max_length=64, min_length=64)
    generator = genai.Generator(model, parameters)
    ids = random_ids(1, 60)
    positions, logits = [], []
    for start, stop in ((0, 25), (25, 40), *((i, i + 1) for i in range(40, 60))):
        generator.append_tokens(ids[:, start:stop].astype(np.int32))
        positions.append(stop - 1)
        logits.append(generator.get_logits()[0, -1].astype(np.float64))
    expected = tiny.logits(ids)[0, positions]
    error = np.sqrt(((np.array(logits) - expected) ** 2).mean())
    rounding = logit_error(activations, tiny.reference.config.num_hidden_layers, expected)
    # Where no norm follows attention and feed-forward, a layer may add several times what it was given, and with it the
    # error of its products counts several times: 6 stands for that. The bound is a fiftieth of the logits' spread in
    # bf16 and a twelfth in int8; a wrong angle, scale or norm changes logits by the spread itself.
    assert error < 6 * rounding

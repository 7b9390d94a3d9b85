# SPDX-License-Identifier: Apache-2.0
"""`flownpu embed` and `flownpu rerank`: texts as vectors, and scores of pairs of texts."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from flownpu.cli import options
from flownpu.cli.output import print_json, progress_bar, read_all_bytes, status
from flownpu.embed import EmbeddingModel, Reranker
from flownpu.errors import FlowNPUError

Texts = Annotated[
    list[str] | None, typer.Argument(metavar="TEXT", help="Texts. Without them, each line of stdin is one.")
]


def embed(
    model: options.ModelFolder,
    text: Texts = None,
    prompt_name: Annotated[
        str | None,
        typer.Option("--prompt-name", metavar="NAME", help="The model's prompt for such texts, such as query."),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Only the first of each embedding, of models that were trained for it.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.npy", help="Write the embeddings as a NumPy array.")
    ] = None,
    provider: options.ProviderOption = "flownpu",
    device: options.DeviceOption = None,
    activations: options.ActivationsOption = None,
    threads: options.Threads = None,
    option: options.Option = None,
) -> None:
    """Embed texts with a model of sentence-transformers that `flownpu convert` converted.

    Prints a JSON object a line, or writes an array [texts, dimensions] with -o. Pooling, dense layers, normalisation
    and prompts are as the model's own files say. Texts longer than the model takes are cut, and a line says so.
    """
    texts = _texts(text)
    if output is not None and output.suffix != ".npy":
        raise typer.BadParameter(f"expected a name that ends with .npy, got {output}", param_hint="--output")
    given = options.provider_options(device, activations, option)
    opened = EmbeddingModel(model, provider=provider, options=given, threads=threads)
    with _progress(len(texts)) as advance:
        embeddings = opened.embed(texts, prompt_name=prompt_name, dimensions=dimensions, advance=advance)
    _say_cut(embeddings.cut, opened.longest)
    if output is not None:
        np.save(output, embeddings.vectors)
        count, size = embeddings.vectors.shape
        status(f"{output}: {count} embeddings of {size} dimensions, {sum(embeddings.tokens)} tokens")
    else:
        cut = set(embeddings.cut)
        for index, (vector, tokens) in enumerate(zip(embeddings.vectors.tolist(), embeddings.tokens, strict=True)):
            print(json.dumps({"index": index, "tokens": tokens, "cut": index in cut, "embedding": vector}))
    status(opened.placement)


def rerank(
    model: options.ModelFolder,
    query: Annotated[str, typer.Option("--query", "-q", metavar="TEXT", help="What the documents shall answer.")],
    document: Texts = None,
    provider: options.ProviderOption = "flownpu",
    device: options.DeviceOption = None,
    activations: options.ActivationsOption = None,
    threads: options.Threads = None,
    option: options.Option = None,
    as_json: options.AsJson = False,
) -> None:
    """Sort documents by how well they answer a query, with a model that scores pairs of texts (a cross-encoder)."""
    documents = _texts(document)
    given = options.provider_options(device, activations, option)
    opened = Reranker(model, provider=provider, options=given, threads=threads)
    with _progress(len(documents)) as advance:
        found = opened.score(query, documents, advance=advance)
    _say_cut(found.cut, opened.longest)
    order = np.argsort(-found.logits, kind="stable").tolist()
    scores, logits = found.scores.tolist(), found.logits.tolist()
    if as_json:
        results = [{"index": index, "score": scores[index], "logit": logits[index]} for index in order]
        print_json({"model": str(model), "query": query, "results": results})
    else:
        for index in order:
            print(f"{scores[index]:.4f}  {documents[index]}")
    status(opened.placement)


def _texts(given: list[str] | None) -> list[str]:
    """The texts of the command line, or the lines of stdin.

    Raises:
        FlowNPUError: there is none.
    """
    if given:
        return given
    if sys.stdin.isatty():
        raise typer.BadParameter('expected "some text" ..., or a text on each line of stdin', param_hint="TEXT")
    read_all_bytes()
    texts = sys.stdin.read().splitlines()
    if not texts:
        raise FlowNPUError("expected a text on each line of stdin, and it is empty")
    return texts


def _say_cut(cut: list[int], longest: int) -> None:
    if cut:
        which = ", ".join(str(index + 1) for index in cut[:10]) + (" ..." if len(cut) > 10 else "")
        count = "1 text was" if len(cut) == 1 else f"{len(cut)} texts were"
        status(f"{count} longer than the {longest} tokens that the model takes, and cut there: number {which}")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar of the texts that are done, and what advances it."""
    columns = (TextColumn("Texts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as bar:
        task = bar.add_task("texts", total=total)
        yield lambda count: bar.update(task, advance=count)

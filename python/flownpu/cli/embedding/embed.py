# SPDX-License-Identifier: Apache-2.0
"""`flownpu embed`: texts as vectors."""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from flownpu.cli import options
from flownpu.cli.embedding.texts import Texts, read_texts, say_cut, texts_progress
from flownpu.cli.output import status
from flownpu.embed import EmbeddingModel


def embed(
    model: options.ModelFolder,
    text: Texts = None,
    prompt_name: Annotated[
        str | None,
        typer.Option("--prompt-name", metavar="NAME", help="The model's prompt for such texts, such as query."),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Only so many values of each embedding, if the model was trained for it.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.npy", help="Write the embeddings as a NumPy array.")
    ] = None,
    *,
    session: options.SessionOptions,
) -> None:
    """Embed texts with a model of sentence-transformers that `flownpu convert` converted.

    Prints a JSON object a line, or writes an array [texts, dimensions] with -o. Pooling, normalisation and prompts are
    as the model's own files say. Longer texts are cut, which is reported.
    """
    texts = read_texts(text)
    if output is not None and output.suffix != ".npy":
        raise typer.BadParameter(f"expected a name that ends with .npy, got {output}", param_hint="--output")
    opened = EmbeddingModel(model, **session.settings())
    with texts_progress(len(texts)) as advance:
        embeddings = opened.embed(texts, prompt_name=prompt_name, dimensions=dimensions, advance=advance)
    say_cut(embeddings.cut, opened.longest)
    if output is not None:
        np.save(output, embeddings.vectors)
        count, size = embeddings.vectors.shape
        status(f"{output}: {count} embeddings of {size} dimensions, {sum(embeddings.tokens)} tokens")
    else:
        cut = set(embeddings.cut)
        for index, (vector, tokens) in enumerate(zip(embeddings.vectors.tolist(), embeddings.tokens, strict=True)):
            print(json.dumps({"index": index, "tokens": tokens, "cut": index in cut, "embedding": vector}))
    status(opened.placement)

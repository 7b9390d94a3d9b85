# SPDX-License-Identifier: Apache-2.0
"""`flownpu rerank`: documents by how well they answer a query."""

from typing import Annotated

import numpy as np
import typer

from flownpu.cli import options
from flownpu.cli.embedding.texts import Texts, read_texts, say_cut, texts_progress
from flownpu.cli.output import print_json, status
from flownpu.embed import GeneratingReranker, open_reranker
from flownpu.errors import FlowNPUError


def rerank(
    model: options.ModelFolder,
    query: Annotated[str, typer.Option("--query", "-q", metavar="TEXT", help="What documents are to answer.")],
    document: Texts = None,
    instruction: Annotated[
        str | None,
        typer.Option(
            "--instruction", metavar="TEXT", help="What counts as an answer, if the model takes instructions."
        ),
    ] = None,
    *,
    session: options.SessionOptions,
    as_json: options.AsJson = False,
) -> None:
    """Sort documents by how well they answer a query, with a model that scores pairs of texts.

    Such models are cross-encoders, and generating models trained to answer yes or no, such as Qwen3-Reranker.
    """
    documents = read_texts(document)
    opened = open_reranker(model, **session.settings())
    if instruction is not None:
        if not isinstance(opened, GeneratingReranker):
            raise FlowNPUError(f"{model} classifies pairs of texts and is told nothing else: leave --instruction out")
        opened.instruction = instruction
    with texts_progress(len(documents)) as advance:
        found = opened.score(query, documents, advance=advance)
    say_cut(found.cut, opened.longest)
    order = np.argsort(-found.logits, kind="stable").tolist()
    scores, logits = found.scores.tolist(), found.logits.tolist()
    if as_json:
        results = [{"index": index, "score": scores[index], "logit": logits[index]} for index in order]
        print_json({"model": str(model), "query": query, "results": results})
    else:
        for index in order:
            print(f"{scores[index]:.4f}  {documents[index]}")
    status(opened.placement)

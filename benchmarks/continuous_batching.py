# SPDX-License-Identifier: Apache-2.0
"""Times many requests at once in GenAI's engine: decoding, and the first token of a prompt whose prefix is cached.

    flownpu make-model gemma3-1b gemma3-1b-paged --random --paged
    python -m benchmarks.continuous_batching gemma3-1b-paged --requests 1,2,4,8,16

MODEL is a folder that `flownpu convert --paged` or `flownpu make-model --paged` wrote. All requests have prompts of
their own; timing begins when each has its first token. `--beside FOLDER`, the same model without --paged, also times a
GenAI generator with a batch of as many rows, in each round after the engine.
"""

import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import onnxruntime_genai as og
import typer
from rich.console import Console
from rich.table import Table

from flownpu.generate.language_model import LanguageModel, Tokens


class Engine:
    """GenAI's engine over a paged model."""

    def __init__(self, model: LanguageModel) -> None:
        self._engine = model.engine()
        self._events = self._engine.create_event_buffer(256)

    def begin(self, tokens: Tokens, new: int, *, sampled: bool = False) -> Any:
        """A request that generates exactly `new` tokens."""
        request = self._engine.create_request()
        options = og.TurnOptions(request)
        options.set_do_sample(sampled)
        options.set_min_generated_tokens(new)
        options.set_max_generated_tokens(new)
        request.begin_turn(tokens, options)
        return request

    def run(self) -> list[Any]:
        """The events of one run."""
        return list(self._engine.run(self._events))

    def decode(self, prompts: list[Tokens], new: int) -> float:
        """Tokens per second of all requests together, after each has its first token."""
        requests = [self.begin(prompt, new) for prompt in prompts]
        counts = dict.fromkeys(map(id, requests), 0)
        started, ended = 0.0, 0
        tokens = 0
        while ended < len(requests):
            for event in self.run():
                if event.flags & og.EngineEventFlags.TOKEN:
                    counts[id(event.request)] += 1
                    tokens += started > 0
                ended += bool(event.flags & og.EngineEventFlags.TURN_FINISHED)
            if not started and min(counts.values()) > 0:
                started = time.perf_counter()
        seconds = time.perf_counter() - started
        for request in requests:
            request.close()
        return tokens / seconds

    def first_token(self, prompt: Tokens) -> tuple[float, int]:
        """Seconds to the first token, and how many of the prompt's tokens were cached."""
        started = time.perf_counter()
        request = self.begin(prompt, 1)
        while True:
            for event in self.run():
                if event.flags & og.EngineEventFlags.TURN_FINISHED:
                    seconds = time.perf_counter() - started
                    request.close()
                    return seconds, int(event.usage.cached_prompt_tokens)


def _batch(model: LanguageModel, prompts: list[Tokens], new: int) -> float:
    """Tokens per second of all rows of a GenAI generator's batch together, after each has its first token."""
    length = len(prompts[0]) + new
    parameters = og.GeneratorParams(model._model)
    parameters.set_search_options(do_sample=False, max_length=length, min_length=length, batch_size=len(prompts))
    generator = og.Generator(model._model, parameters)
    generator.append_tokens(np.stack(prompts))
    generator.generate_next_token()
    started = time.perf_counter()
    for _ in range(new - 1):
        generator.generate_next_token()
    return len(prompts) * (new - 1) / (time.perf_counter() - started)


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a paged model.")],
    requests: Annotated[str, typer.Option(help="At once; each is a measurement.")] = "1,2,4,8,16",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256,
    generate: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds.")] = 5,
    prefix: Annotated[int, typer.Option(min=16, help="Tokens of a prompt that a second request has again.")] = 1024,
    beside: Annotated[Path | None, typer.Option(help="The same model without --paged.")] = None,
    activations: Annotated[str, typer.Option(help="bf16 or int8")] = "int8",
) -> None:
    """Prints medians, minima and maxima."""
    options = {"activations": activations}
    opened = LanguageModel(model, options=options)
    engine = Engine(opened)
    plain = LanguageModel(beside, options=options) if beside is not None else None
    random = np.random.default_rng(0)

    def prompts(count: int, tokens: int) -> list[Tokens]:
        # New prompts each time, so that none is cached.
        return [random.integers(8, opened.vocabulary_size, tokens, dtype=np.int32) for _ in range(count)]

    table = Table(title=f"{model.name}, {activations} activations: {generate} tokens behind {prompt} each, tokens/s")
    for heading in ("requests", "engine", "least", "most", *(("generator", "paired") if plain else ())):
        table.add_column(heading, justify="right")
    engine.decode(prompts(1, 32), 8)  # warms up
    for count in map(int, requests.split(",")):
        ours, theirs = [], []
        for _ in range(repeats):
            ours.append(engine.decode(prompts(count, prompt), generate))
            if plain is not None:
                theirs.append(_batch(plain, prompts(count, prompt), generate))
        row = [f"{count}", *(f"{pick(ours):.1f}" for pick in (median, min, max))]
        if theirs:
            paired = median(a / b for a, b in zip(ours, theirs, strict=True))
            row += [f"{median(theirs):.1f}", f"{paired:.2f}"]
        table.add_row(*row)
    Console(width=120).print(table)
    times = []
    for _ in range(repeats):
        (tokens,) = prompts(1, prefix)
        first, second = engine.first_token(tokens), engine.first_token(tokens)
        times.append((first[0], second[0], second[1]))
    first_seconds, second_seconds, cached = (median(column) for column in zip(*times, strict=True))
    print(
        f"first token of {prefix} tokens: {1e3 * first_seconds:.0f} ms; again, with {cached:.0f} of them cached: "
        f"{1e3 * second_seconds:.0f} ms"
    )


if __name__ == "__main__":
    typer.run(main)

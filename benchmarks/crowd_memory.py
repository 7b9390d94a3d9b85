# SPDX-License-Identifier: Apache-2.0
"""Asks one server with many clients for minutes: prints errors, and the server's memory after each round.

    flownpu make-model gemma3-1b gemma3-1b-paged --random --paged
    python -m benchmarks.crowd_memory gemma3-1b-paged --clients 32 --minutes 10

Each round has new prompts; all prompts of a round share their first half (`flownpu.bench.crowd`).
"""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from flownpu.bench.crowd import Crowd, ask_all
from flownpu.bench.servers import resident, running
from flownpu.model.folder import read_genai_config
from flownpu.peers.servers import own_server


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a model.")],
    clients: Annotated[int, typer.Option(min=1)] = 32,
    minutes: Annotated[float, typer.Option(min=0.1, help="After which no further round begins.")] = 10,
    prompt: Annotated[str, typer.Option(help="Tokens of the prompts that each client asks in a round.")] = "64,256",
    generate: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 32,
) -> None:
    """Prints a line for each round."""
    crowd = Crowd(clients, tuple(map(int, prompt.split(","))), generate)
    vocabulary = int(read_genai_config(model)["model"]["vocab_size"])
    threads = len(os.sched_getaffinity(0))
    context = max(crowd.prompts) + generate
    server = own_server(model, provider="flownpu", options={}, threads=threads, context=context, clients=clients)
    end = time.monotonic() + 60 * minutes
    with running(server) as (service, process):
        number = 0
        while time.monotonic() < end:
            number += 1
            seconds, answers = ask_all(service, crowd, vocabulary_size=vocabulary, seed=number)
            failures = [answer.failure for answer in answers if answer.failure]
            tokens = sum(answer.tokens for answer in answers)
            print(
                f"round {number}: {len(answers)} answers, {tokens} tokens in {seconds:.1f} s, {len(failures)} errors, "
                f"{resident(process) / 2**20:.0f} MiB",
                flush=True,
            )
            for failure in sorted(set(failures)):
                print(f"    {failure}", flush=True)


if __name__ == "__main__":
    typer.run(main)

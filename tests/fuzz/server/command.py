# SPDX-License-Identifier: Apache-2.0
"""Starts FlowNPU's server with models of this repository's small checkpoints and attacks it."""

import asyncio
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from flownpu.convert import convert
from tests.fuzz.server import bodies
from tests.fuzz.server.campaign import Campaign, Report
from tests.fuzz.server.neighbours import Neighbours, questions
from tests.fuzz.server.process import PORT, served

FIXTURES = Path(__file__).parents[2] / "fixtures"
# With bf16 an answer does not depend on the other rows of a product, so it does not depend on other clients. Bodies are
# small and answers short, so that an hour has many. Whole bodies must come within 5 s, whole answers within 40.
OPTIONS = ("--activations", "bf16", "--context", 1024, "--max-output", 400, "--max-body", 4, "--body-seconds", 5)
COMMAND = "import sys; from flownpu.cli import main; sys.exit(main())"


def command_of(folder: Path, *, embedding: bool = True, request_seconds: int = 40) -> tuple[str, ...]:
    """The command that serves the models of a folder, which are converted if they are not there.

    Args:
        folder: the folder of the models.
        embedding: whether there is a model that embeds texts, whose checkpoint is random.
        request_seconds: the longest time of an answer.
    """
    sources = {bodies.SLOTS: "gemma3-topics", bodies.PAGED: "gemma3-topics", bodies.SEEING: "gemma3-shapes"}
    models = {name: folder / name for name in sources}
    for name, made in models.items():
        if not made.exists():
            convert(FIXTURES / sources[name], made, paged=name == bodies.PAGED)
    if embedding:
        made = models[bodies.EMBEDDING] = folder / bodies.EMBEDDING
        if not made.exists():
            from tests.embed.checkpoints import make_checkpoint  # it imports torch, which takes seconds

            with tempfile.TemporaryDirectory() as checkpoint:
                convert(make_checkpoint("bert-mean", Path(checkpoint) / "bert"), made)
    named = [f"{name}={model}" for name, model in models.items()]
    options = map(str, (*OPTIONS, "--request-seconds", request_seconds))
    return (sys.executable, "-c", COMMAND, "serve", *named, "--port", PORT, *options)


def attack(command: tuple[str, ...], seconds: float, clients: int, seed: int, kinds: Collection[str]) -> Report:
    """Starts a server, runs a campaign against it, and ends it; arguments as those of `Campaign`."""

    async def run() -> Report:
        campaign = Campaign(server, Neighbours(()), clients, seed, kinds)
        # All models are loaded and have answered before the measurement begins.
        campaign.neighbours = await Neighbours.alone(server.port, questions(), campaign.bounds.in_time)
        return await campaign.run(seconds)

    with served(command) as server:
        return asyncio.run(run())

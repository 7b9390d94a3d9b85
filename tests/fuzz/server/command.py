# SPDX-License-Identifier: Apache-2.0
"""Starts FlowNPU's server with its models, runs a campaign against it, and replays findings."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.fuzz.server.campaign import Bounds, Campaign, Report
from tests.fuzz.server.kinds import KINDS
from tests.fuzz.server.models import make_models
from tests.fuzz.server.neighbours import Neighbours, questions
from tests.fuzz.server.process import flownpu_serve, served

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from tests.fuzz.server.exchange import Request

# With bf16 an answer does not depend on the other rows of a product, so not on who else asks. Bodies are small and
# answers short, so that an hour has many; whole bodies must come within 5 s, whole answers within 40.
OPTIONS = ("--activations", "bf16", "--context", 1024, "--max-output", 400, "--max-body", 4, "--body-seconds", 5)
REQUEST_SECONDS = 40
BOUNDS = Bounds()


@dataclass(frozen=True)
class Attack:
    """How a server is asked, see `Campaign`."""

    seconds: float = 60.0
    clients: int = 32
    seed: int = 1
    kinds: Collection[str] = field(default_factory=lambda: tuple(KINDS))
    bounds: Bounds = BOUNDS


def command_of(models: Path) -> tuple[str, ...]:
    """The command that serves the models of this folder, which are made if they are not there."""
    return flownpu_serve(make_models(models, embedding=True), *OPTIONS, "--request-seconds", REQUEST_SECONDS)


def attack(command: tuple[str, ...], how: Attack, *, seeing: bool = True) -> Report:
    """Starts a server, asks it, ends it, and judges how it ended.

    Args:
        command: what starts it, with PORT in it.
        how: the crowd.
        seeing: whether it has a model that takes images.
    """

    async def run() -> Report:
        # All models are loaded and have answered before anything is measured.
        neighbours = await Neighbours.alone(server.port, questions(seeing), how.bounds.in_time)
        campaign = Campaign(server, neighbours, how.clients, how.seed, how.kinds, how.bounds)
        return await campaign.run(how.seconds)

    with served(command) as server:
        return asyncio.run(run())


def replay(command: tuple[str, ...], requests: list[Request]) -> Report:
    """Sends requests one after the other to a server that is started for them."""

    async def run() -> Report:
        campaign = Campaign(server, Neighbours(()), 1, 0)
        for number, request in enumerate(requests):
            await campaign.ask(request, 0, number)
        return campaign.report

    with served(command) as server:
        return asyncio.run(run())

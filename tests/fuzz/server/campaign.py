# SPDX-License-Identifier: Apache-2.0
"""Concurrent requests, some valid and some hostile, for a time; and what was wrong with the answers.

The requests of a client follow only from the seed and the client's number. How many are sent in time depends on the
machine.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random
from statistics import median_high
from typing import Any

from tests.fuzz.server import kinds
from tests.fuzz.server.exchange import Request, exchange
from tests.fuzz.server.neighbours import Neighbours
from tests.fuzz.server.process import Memory, Served
from tests.fuzz.server.verdicts import fault_of

NEIGHBOURS = 4  # one client of so many is well-behaved
SLOWEST = 12  # answers that a report names
# share of the time after which memory should no longer grow: by then every kind of request has come, and caches are
# full
WARM_UP = 0.2
LOG_KEPT = 1 << 20  # bytes of the log that a report keeps
LOG_BYTES = 2000  # for each request, on average: a line or two, and a reason


@dataclass(frozen=True)
class Bounds:
    """Limits of time and memory of a server.

    Attributes:
        in_time: seconds until a neighbour has its answer, being sent away and coming again included.
        late: seconds until any request has an answer; the server gives up before.
        growth: bytes by which the median of the memory at the end may exceed that after the warm-up.
        peak: bytes that all processes may have at any moment.
    """

    in_time: float = 60.0
    late: float = 75.0
    growth: int = 512 << 20
    peak: int = 4 << 30


@dataclass
class Finding:
    """A fault and its request (None: no single one), whose place in the stream is client and number."""

    fault: str
    request: Request | None = None
    client: int = 0
    number: int = 0
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        """The finding as JSON."""
        return vars(self) | {"request": None if self.request is None else self.request.document()}


@dataclass
class Report:
    """Results of a campaign. Statuses by kind; "left": the client went away, "late": there was no answer."""

    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    slowest: list[tuple[float, str, str, int, int]] = field(default_factory=list)
    """Seconds, kind, status, client and number of the slowest answers."""
    memory: list[Memory] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    refusals: int = 0
    """Times that neighbours were told to come again."""
    requests: int = 0
    log: str = ""
    """The end of what the server wrote."""

    def count(self, request: Request, status: str, seconds: float, client: int, number: int) -> None:
        """Adds an answer."""
        self.requests += 1
        self.statuses.setdefault(request.kind, Counter())[status] += 1
        self.slowest = sorted([*self.slowest, (seconds, request.kind, status, client, number)], reverse=True)[:SLOWEST]


@dataclass
class Campaign:
    """Asks a server for `seconds`, from `clients` clients at a time."""

    server: Served
    neighbours: Neighbours
    clients: int
    seed: int
    kinds: Collection[str] = tuple(kinds.KINDS)
    bounds: Bounds = field(default_factory=Bounds)
    report: Report = field(default_factory=Report)

    async def run(self, seconds: float) -> Report:
        """Runs it; faults of the server are in the report."""
        files, logged, end = self.server.open_files(), self._logged(), time.monotonic() + seconds
        well_behaved = max(1, self.clients // NEIGHBOURS)
        watch = asyncio.create_task(self.server.watch())
        hostile = [asyncio.create_task(self._attack(client)) for client in range(well_behaved, self.clients)]
        try:
            await asyncio.gather(*(self._live(client, end) for client in range(well_behaved)))
        finally:
            # Waiting clients leave, which the server must bear, too.
            for task in hostile:
                task.cancel()
            ended = await asyncio.gather(*hostile, return_exceptions=True)
        for error in ended:
            if not isinstance(error, asyncio.CancelledError):
                self.report.findings.append(Finding(f"a client could not go on: {error!r}"))
        await self._settle(files)
        self._judge_log(logged)
        watch.cancel()
        self.report.memory = self.server.memory
        self._judge_memory()
        return self.report

    async def _attack(self, client: int) -> None:
        number = 0
        while True:
            await self.ask(kinds.request(self.seed, client, number, self.kinds), client, number)
            number += 1

    async def ask(self, request: Request, client: int, number: int) -> None:
        """Sends one request, and judges the reply."""
        begin = time.monotonic()
        try:
            reply = await exchange(self.server.port, request, self.bounds.late)
        except TimeoutError:
            reply = None
        seconds = time.monotonic() - begin
        status = "late" if reply is None else "left" if reply.left else str(reply.status)
        self.report.count(request, status, seconds, client, number)
        fault = f"no end of the answer within {self.bounds.late:.0f} s" if reply is None else fault_of(request, reply)
        if fault:
            self.report.findings.append(Finding(fault, request, client, number, seconds))

    async def _live(self, client: int, end: float) -> None:
        random, number = Random(f"{self.seed}/{client}"), 0
        while time.monotonic() < end:
            request, outcome = await self.neighbours.ask_one(self.server.port, random, self.bounds.in_time)
            status = "late" if outcome.reply is None else str(outcome.reply.status)
            self.report.count(request, status, outcome.seconds, client, number)
            self.report.refusals += outcome.refusals
            if outcome.fault:
                self.report.findings.append(Finding(outcome.fault, request, client, number, outcome.seconds))
            number += 1

    async def _settle(self, files: int) -> None:
        """After the last request nothing may remain in computation or open."""
        end = time.monotonic() + self.bounds.in_time
        while (requests := await self.server.requests()) or self.server.open_files() > files + 2:
            if time.monotonic() > end:
                left = f"{requests} requests and {self.server.open_files() - files} open files more than before"
                self.report.findings.append(Finding(f"{left} are left {self.bounds.in_time:.0f} s after all clients"))
                break
            await asyncio.sleep(0.2)

    def _logged(self) -> int:
        return self.server.log.stat().st_size

    def _judge_log(self, before: int) -> None:
        size = self._logged() - before
        self.report.log = self.server.log.read_text(encoding="utf-8", errors="replace")[-LOG_KEPT:]
        if size > LOG_BYTES * max(self.report.requests, 100):
            self.report.findings.append(Finding(f"the log has {size} bytes more after {self.report.requests} requests"))

    def _judge_memory(self) -> None:
        used = self.report.memory
        most = max(used, key=lambda memory: memory.total)
        if most.total > self.bounds.peak:
            told = f"the processes had {most.total >> 20} MiB at a time, beyond {self.bounds.peak >> 20}: {most.told()}"
            self.report.findings.append(Finding(told))
        after = used[int(WARM_UP * len(used)) :]
        quarter = max(1, len(after) // 4)
        early, late = (median_high(memory.total for memory in part) for part in (after[:quarter], after[-quarter:]))
        if late - early > self.bounds.growth:
            told = f"{early >> 20} to {late >> 20} MiB, by more than {self.bounds.growth >> 20}"
            self.report.findings.append(Finding(f"memory grew from {told}: {after[0].told()}, then {used[-1].told()}"))

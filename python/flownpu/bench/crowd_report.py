# SPDX-License-Identifier: Apache-2.0
"""What `flownpu bench --serve` found, as a table, as Markdown and as JSON."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from flownpu.bench.measurement import Spread
from flownpu.bench.servers import CrowdMeasurement, CrowdMeasurements, CrowdRun
from flownpu.machine import Machine

__all__ = ["CrowdReport"]

PERCENTILES = (50, 95)


@dataclass(frozen=True)
class CrowdReport:
    """Measurements, and what they depend on.

    Attributes:
        machine: where it was measured.
        model: the model's folder, as it was given.
        settings: the options of the command.
        found: what was measured; ratios compare the first server with each of the others.
    """

    machine: Machine
    model: str
    settings: dict[str, Any]
    found: CrowdMeasurements

    def header(self) -> list[str]:
        """Machine, versions and what was asked: a line each."""
        machine, crowd = self.machine, self.found.crowds[0]
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        peers = [f"{name}: {peer.version}" for name, peer in self.found.servers.items() if peer.version]
        lengths = ", ".join(map(str, crowd.prompts))
        return [
            f"{machine.cpu}, {machine.isa}, {machine.cores} cores, {machine.memory / 2**30:.1f} GiB, {machine.system}",
            f"Python {machine.python}, {versions}",
            *([", ".join(peers)] if peers else []),
            f"{self.model}: each client asks a prompt of {lengths} tokens, half of it common to all, and reads "
            f"{crowd.generate} new ones; {self.settings['repeats']} rounds",
        ]

    def footer(self) -> list[str]:
        """What went wrong."""
        lines = [f"{name} failed and was left out: {reason}" for name, reason in self.found.failures.items()]
        for name, server in self.found.servers.items():
            for clients, runs in server.runs.items():
                failures = [answer.failure for run in runs for answer in run.answers if answer.failure]
                lines += [f"{name}, {clients} clients: {len(failures)} failed, {failures[0]}"] if failures else []
        return lines + (["Interrupted: what had been measured until then."] if self.found.interrupted else [])

    def columns(self) -> list[str]:
        """The table's headings."""
        own, *peers = self.found.servers
        return ["clients", own, *(heading for peer in peers for heading in (peer, f"{own} / {peer}"))]

    def sections(self) -> Iterator[list[list[str]]]:
        """The rows of each quantity, one for each number of clients. Ratios above 1: the first server is better."""
        yield self._rows(
            "new tokens/s", lambda runs: _median([run.rate for run in runs]), "{:.1f}", more_is_better=True
        )
        for name, values in (("first token", _first), ("between tokens", _between)):
            for percentile in PERCENTILES:
                yield self._rows(
                    f"{name}, p{percentile}, ms",
                    lambda runs, values=values, percentile=percentile: _percentile(values(runs), percentile),  # type: ignore[misc]
                    "{:.0f}",
                    more_is_better=False,
                )
        yield self._rows("of prompts not computed again, %", _cached, "{:.0f}")
        yield self._rows("memory afterwards, MiB", _resident, "{:.0f}")

    def markdown(self) -> str:
        """The table and its header, to paste into a page."""
        table = [self.columns(), ["---", *["---:"] * (len(self.columns()) - 1)]]
        table += [row for rows in self.sections() for row in rows]
        lines = [f"{line}  " for line in self.header()]  # two blanks break a line
        rows = ["| " + " | ".join(cells) + " |" for cells in table]
        return "\n".join([*lines, "", *rows, *([""] if self.footer() else []), *self.footer()]) + "\n"

    def json(self) -> dict[str, Any]:
        """Everything except the times of single requests."""
        return {
            "machine": asdict(self.machine),
            "model": self.model,
            "settings": self.settings,
            "crowds": [asdict(crowd) for crowd in self.found.crowds],
            "servers": {name: self._server(server) for name, server in self.found.servers.items()},
            "failures": self.found.failures,
            "interrupted": self.found.interrupted,
        }

    def _rows(
        self,
        name: str,
        value: Callable[[list[CrowdRun]], float | None],
        form: str,
        *,
        more_is_better: bool | None = None,
    ) -> list[list[str]]:
        rows = []
        for crowd in self.found.crowds:
            own, *peers = [
                value(server.runs[crowd.clients]) if crowd.clients in server.runs else None
                for server in self.found.servers.values()
            ]
            cells = [_text(own, form)]
            for peer in peers:
                ratio = ""
                if own and peer and more_is_better is not None:
                    ratio = f"{own / peer if more_is_better else peer / own:.2f}"
                cells += [_text(peer, form), ratio]
            rows.append([f"{name}: {crowd.clients}", *cells])
        return rows

    def _server(self, server: CrowdMeasurement) -> dict[str, Any]:
        return {
            "version": server.version,
            "crowds": [_crowd(clients, runs) for clients, runs in server.runs.items()],
        }


def _crowd(clients: int, runs: list[CrowdRun]) -> dict[str, Any]:
    answers = [answer for run in runs for answer in run.answers]
    document: dict[str, Any] = {
        "clients": clients,
        "rounds": len(runs),
        "answers": len(answers),
        "failures": [answer.failure for answer in answers if answer.failure],
        "new_tokens": sum(answer.tokens for answer in answers),
        "prompt_tokens": sum(answer.prompt for answer in answers),
        "cached_tokens": sum(answer.cached for answer in answers),
        "rate": asdict(Spread.of([run.rate for run in runs])),
        "resident": [run.resident for run in runs],
    }
    for name, values in (("first_token_seconds", _first), ("between_tokens_seconds", _between)):
        milliseconds = {f"p{each}": _percentile(values(runs), each) for each in PERCENTILES}
        document[name] = {key: None if value is None else value / 1e3 for key, value in milliseconds.items()}
    return document


def _first(runs: list[CrowdRun]) -> list[float]:
    return [answer.first for run in runs for answer in run.answers if not answer.failure]


def _between(runs: list[CrowdRun]) -> list[float]:
    return [time for run in runs for answer in run.answers if not answer.failure for time in answer.between]


def _cached(runs: list[CrowdRun]) -> float | None:
    answers = [answer for run in runs for answer in run.answers if not answer.failure]
    prompts = sum(answer.prompt for answer in answers)
    return 100 * sum(answer.cached for answer in answers) / prompts if prompts else None


def _resident(runs: list[CrowdRun]) -> float | None:
    return _median([run.resident / 2**20 for run in runs if run.resident])


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _percentile(values: list[float], percentile: int) -> float | None:
    """A percentile of seconds, in milliseconds."""
    return 1e3 * float(np.percentile(values, percentile)) if values else None


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)

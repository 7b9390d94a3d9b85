# SPDX-License-Identifier: Apache-2.0
"""A campaign's report: tables, report.json, log.txt, and findings.jsonl with one offending request a line."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from rich.table import Table

from tests.fuzz.server.exchange import request_of

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from tests.fuzz.server.campaign import Report
    from tests.fuzz.server.exchange import Request

FINDINGS = "findings.jsonl"
_POINTS = 12  # of the memory over time that are printed


def write(report: Report, folder: Path) -> None:
    """Writes the report's files."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(finding.document()) for finding in report.findings]
    (folder / FINDINGS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "log.txt").write_text(report.log, encoding="utf-8")
    document = {
        "requests": report.requests,
        "refusals_of_neighbours": report.refusals,
        "statuses": {kind: dict(counts) for kind, counts in report.statuses.items()},
        "slowest": report.slowest,
        "memory": [vars(memory) for memory in report.memory],
    }
    (folder / "report.json").write_text(json.dumps(document, indent=1), encoding="utf-8")


def saved_requests(path: Path) -> list[Request]:
    """The requests of a findings.jsonl."""
    found = [json.loads(line)["request"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [request_of(document) for document in found if document is not None]


def show(report: Report, console: Console) -> None:
    """Prints the report."""
    statuses = sorted({status for counts in report.statuses.values() for status in counts})
    table = Table("kind", *statuses)
    for kind, counts in sorted(report.statuses.items()):
        table.add_row(kind, *(str(counts[status] or "") for status in statuses))
    console.print(table)
    slow = Table("slowest, s", "kind", "status", "client", "number")
    for seconds, *rest in report.slowest:
        slow.add_row(f"{seconds:.2f}", *map(str, rest))
    console.print(slow)
    step = max(1, len(report.memory) // _POINTS)
    points = ", ".join(f"{memory.total >> 20} at {memory.seconds:.0f} s" for memory in report.memory[::step])
    peak = max((memory.total for memory in report.memory), default=0) >> 20
    console.print(f"memory in MiB: {points}; most {peak}", soft_wrap=True)
    if report.memory:
        console.print(f"at the end: {report.memory[-1].told()}", soft_wrap=True)
    console.print(f"neighbours were told {report.refusals} times to come again", soft_wrap=True)
    faults = Counter((finding.request.kind if finding.request else "", finding.fault) for finding in report.findings)
    for (kind, fault), count in faults.most_common():
        console.print(f"  {count} x {kind}: {fault}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{report.requests} requests, {len(report.findings)} findings", style="bold")

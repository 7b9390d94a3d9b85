# SPDX-License-Identifier: Apache-2.0
"""A campaign's report: report.json, log.txt, and findings.jsonl with one offending request a line."""

import json
from collections import Counter
from pathlib import Path

from tests.fuzz.server.campaign import Report


def write(report: Report, folder: Path) -> None:
    """Writes the report's files."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(finding.document()) for finding in report.findings]
    (folder / "findings.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "log.txt").write_text(report.log, encoding="utf-8")
    document = vars(report) | {"findings": len(lines), "log": "log.txt", "memory": list(map(vars, report.memory))}
    (folder / "report.json").write_text(json.dumps(document, indent=1), encoding="utf-8")


def text_of(report: Report) -> str:
    """The report in lines: statuses by kind, the slowest answers, memory, and findings."""
    lines = [f"{kind}: {dict(counts)}" for kind, counts in sorted(report.statuses.items())]
    lines += [f"slowest: {seconds:.2f} s, {rest}" for seconds, *rest in report.slowest]
    peak = max((memory.total for memory in report.memory), default=0) >> 20
    lines += [f"memory: at most {peak} MiB; at the end {memory.told()}" for memory in report.memory[-1:]]
    faults = Counter((finding.request.kind if finding.request else "", finding.fault) for finding in report.findings)
    lines += [f"  {count} x {kind}: {fault}" for (kind, fault), count in faults.most_common()]
    return "\n".join([*lines, f"{report.requests} requests, {len(report.findings)} findings"])

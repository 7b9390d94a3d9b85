# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/model.md from the cost model itself; a test sees to it that the page is up to date."""

import re
import sys
from pathlib import Path

from flownpu.aie.cost.device import DEVICES
from flownpu.aie.cost.parameters import TABLE, VALUES
from flownpu.prediction_designs import DESIGNS
from flownpu.prediction_report import Report, predict
from flownpu.prediction_validation import leave_one_out, markdown
from flownpu.published import TABLES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "model.md"
_SECTION = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
_DEVICE = "kraken-350"
_OWN = ("flownpu", "split")
_MODELS = ("gemma3-1b", "gemma3-4b", "llama3.2-1b", "llama3.2-3b")
_AIM = 1.15  # times the papers' tables


def page(text: str) -> str:
    """The page's text with its tables as they are now."""
    return _SECTION.sub(lambda found: f"{found[1]}{SECTIONS[found[2]]()}\n{found[3]}", text)


def parameters() -> str:
    """Every parameter."""
    lines = ["| parameter | value | unit | source | fitted to |", "|---|---|---|---|---|"]
    for name, known in TABLE.items():
        source = f"{known.source} (read {known.date})"
        lines.append(f"| `{name}` | {known.value:g} | {known.unit} | {source} | {known.fitted_from or '–'} |")
    return "\n".join(lines)


def validation() -> str:
    """Every row that was left out, and what was predicted of it."""
    return markdown(leave_one_out())


def decoding() -> str:
    """Decode beside the papers' tables and what others reach by now."""
    lines = [
        f"| model | context | papers | FastFlowLM | {' | '.join(f'{name} (of the roof)' for name in _OWN)} |",
        "|---|---|---|---|---|---|",
    ]
    for model in _MODELS:
        reports = [_report(model, name) for name in _OWN]
        for points in zip(*(report.points for report in reports), strict=True):
            context = points[0].context
            papers, others = _published(model, "decode", context)
            cells = [
                f"{_verdict(point.decode_tokens_per_second, papers, others)} ({point.roof_share:.0%})"
                for point in points
            ]
            lines.append(f"| {model} | {context // 1024}k | {_text(papers)} | {_text(others)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def prefilling() -> str:
    """Prompts the same way, as tokens a second."""
    lines = [f"| model | tokens | papers | FastFlowLM | {' | '.join(_OWN)} |", "|---|---|---|---|---|---|"]
    for model in _MODELS:
        reports = [_report(model, name) for name in _OWN]
        for points in zip(*(report.points for report in reports), strict=True):
            context = points[0].context
            papers, others = _published(model, "prefill", context)
            if papers is None and others is None:
                continue
            cells = [_verdict(point.prefill_tokens_per_second, papers, others) for point in points]
            lines.append(f"| {model} | {context // 1024}k | {_text(papers)} | {_text(others)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sensitivity() -> str:
    """Decode with the split layer where a parameter is worse than assumed."""
    places = [("gemma3-1b", 1), ("gemma3-4b", 1), ("gemma3-4b", 128), ("llama3.2-1b", 1), ("llama3.2-3b", 1)]
    lines = [
        f"| if | {' | '.join(f'{model}, {length}k' for model, length in places)} |",
        "|---|" + "---|" * len(places),
    ]
    worse: dict[str, dict[str, float]] = {
        "as assumed": {},
        "`wait` is 20 us: the tuner's `synchronise`, 35,000 cycles": {"wait": 20e-6},
        "`channel_read` is 4.8 GB/s": {"channel_read": 4.8e9},
        "`memory_read` is 50 GB/s, as micro-benchmarked in arXiv 2512.13282": {"memory_read": 50e9},
        "`dqp_block` is 4500 cycles": {"dqp_block": 4500},
        "the host needs for a logit what the papers' does": {"own_host_per_logit": VALUES["host_per_logit"]},
    }
    for name, change in worse.items():
        cells = []
        for model, length in places:
            context = 1024 * length
            report = predict(model, DEVICES[_DEVICE], DESIGNS["split"], [context], {**VALUES, **change})
            cells.append(_verdict(report.points[0].decode_tokens_per_second, *_published(model, "decode", context)))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


_REPORTS: dict[tuple[str, str], Report] = {}


def _report(model: str, design: str) -> Report:
    if (model, design) not in _REPORTS:
        _REPORTS[model, design] = predict(model, DEVICES[_DEVICE], DESIGNS[design])
    return _REPORTS[model, design]


def _published(model: str, quantity: str, context: int) -> tuple[float | None, float | None]:
    """The papers' number and the later one of FastFlowLM's pages, in tokens a second."""
    found: dict[bool, float] = {}
    for table in TABLES.values():
        for row in table.rows():
            if (row.model, row.context) != (model, context):
                continue
            if table.quantity == quantity:
                found[table.paper] = row.value
            elif (table.quantity, quantity) == ("ttft", "prefill"):
                found[table.paper] = context / row.value
    return found.get(True), found.get(False)


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _verdict(value: float, papers: float | None, others: float | None) -> str:
    """The number; bold where it is what was aimed at: 1.15 times the papers', and the others'."""
    reached = value >= max(_AIM * (papers or 0.0), others or 0.0)
    return f"**{value:.4g}**" if reached else f"{value:.4g}"


SECTIONS = {
    "parameters": parameters,
    "validation": validation,
    "decoding": decoding,
    "prefilling": prefilling,
    "sensitivity": sensitivity,
}


def main() -> int:
    """Writes the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

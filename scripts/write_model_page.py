# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/model.md from the cost model itself; a test checks that the page is up to date."""

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from flownpu.aie.cost.device import DEVICES
from flownpu.aie.cost.parameters import TABLE, VALUES
from flownpu.aie.programs.cost import CHANGES, DISPATCHES, Prices, prompt_runs
from flownpu.npu.models import ENCODERS, MODELS
from flownpu.predict.prices import Prediction
from flownpu.predict.published import CONTEXTS, TABLES, Role
from flownpu.predict.report import Point, predict
from flownpu.predict.target import known
from flownpu.predict.validation import markdown, validate

PAGE = Path(__file__).resolve().parent.parent / "docs" / "model.md"
_SECTION = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
_DEVICE = DEVICES["kraken-350"]
_AIM = 1.15  # the aim, as a factor of the speeds in the papers' tables


def fill(text: str, sections: Mapping[str, Callable[[], str]]) -> str:
    """A page's text with its tables rewritten."""
    return _SECTION.sub(lambda found: f"{found[1]}{sections[found[2]]()}\n{found[3]}", text)


def parameters() -> str:
    """The table of all parameters."""
    lines = ["| parameter | value | unit | source | fitted to |", "|---|---|---|---|---|"]
    for name, parameter in TABLE.items():
        source = f"{parameter.source} (read {parameter.date})"
        lines.append(
            f"| `{name}` | {parameter.value:g} | {parameter.unit} | {source} | {parameter.fitted_from or '–'} |"
        )
    return "\n".join(lines)


def validation() -> str:
    """The tables of validation: every published row, predicted by a fit without its table."""
    return markdown(validate())


def decoding() -> str:
    """The table of predicted decode rates beside the published ones."""
    return _by_context(decoding_rows)


def decoding_rows(model: str) -> list[str]:
    """A model's rows in the table of decode rates: published, predicted, and the memory roof."""
    published, predicted, roof = list[str](), list[str](), list[str]()
    for point in _points(model):
        papers, later = (_of_role(point, "decode", role) for role in (Role.PAPER, Role.LATER))
        aim = max(_AIM * (papers or 0.0), later or 0.0)
        published.append(f"{_text(papers)} / {_text(later)}")
        predicted.append(_bold(point.decode_tokens_per_second, point.decode_tokens_per_second >= aim))
        beyond = " †" if aim > point.roof else ""
        roof.append(f"{point.roof:.3g} ({VALUES['memory_read'] / point.roof / 1e9:.2f}){beyond}")
    return _rows(model, {"papers / FastFlowLM": published, "predicted": predicted, "roof (GB)": roof})


def prompts() -> str:
    """The table of predicted times to the first token beside the published ones."""
    return _by_context(prompt_rows)


def prompt_rows(model: str) -> list[str]:
    """A model's rows in the table of times to the first token."""
    published, predicted, changes = list[str](), list[str](), list[str]()
    for point in _points(model):
        papers, later = (_of_role(point, "ttft", role) for role in (Role.PAPER, Role.LATER))
        papers = papers or _of_role(point, "ttft", Role.HELD_OUT) or _of_role(point, "ttft", Role.FITTED)
        others = [value for value in (papers, later) if value is not None]
        reached = bool(others) and point.ttft_seconds <= min(others) / _AIM
        published.append(f"{_text(papers)} / {_text(later)}")
        predicted.append(_bold(point.ttft_seconds, reached))
        changes.append(str(point.ttft_changes))
    return _rows(model, {"papers' software / later": published, "predicted": predicted, "changes of array": changes})


def _by_context(rows: Callable[[str], list[str]]) -> str:
    lengths = [f"{context // 1024}k" for context in CONTEXTS]
    lines = [f"| model | | {' | '.join(lengths)} |", "|---|---|" + "---|" * len(lengths)]
    decoders = [name for name in MODELS if name not in ENCODERS]
    return "\n".join([*lines, *(row for model in decoders for row in rows(model))])


def _rows(model: str, cells: dict[str, list[str]]) -> list[str]:
    rows = []
    for number, (name, values) in enumerate(cells.items()):
        padded = values + [""] * (len(CONTEXTS) - len(values))
        rows.append(f"| {'' if number else model} | {name} | {' | '.join(padded)} |")
    return rows


def parts() -> str:
    """The table of the parts of a prompt's time."""
    names = ["changes of array", "dispatches", "host", "dequant_engine", "gemm", "flow_qkv", "others"]
    lines = [f"| model | tokens | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for model in ("gemma3-1b", "gemma3-4b", "llama3.2-1b", "llama3.2-3b"):
        for point in _points(model):
            if point.context not in (1024, 32768):
                continue
            seconds = defaultdict[str, float](float)
            for name, value in point.ttft_parts.items():
                operator = name if name in (CHANGES, DISPATCHES) else name.partition(":")[0]
                seconds[operator if operator in names else "others"] += value
            cells = " | ".join(f"{seconds[name]:.3g}" for name in names)
            lines.append(f"| {model} | {point.context // 1024}k | {cells} |")
    return "\n".join(lines)


_WORSE: dict[str, dict[str, float]] = {
    "as assumed": {},
    "`array_change` is 5.8 ms, the most that was published": {"array_change": 5.8e-3},
    "`wait` is 20 us: the tuner's `synchronise`, 35,000 cycles": {"wait": 20e-6},
    "`channel_read` is 4.8 GB/s": {"channel_read": 4.8e9},
    "`memory_read` is 50 GB/s, as micro-benchmarked in arXiv 2512.13282": {"memory_read": 50e9},
    "`dqp_block` is 4500 cycles": {"dqp_block": 4500},
    "`softmax_tile` and `softmax_rows` are 212 and 280 cycles, the most": {"softmax_tile": 212, "softmax_rows": 280},
    "`host_memory` and `host_flush` are 10 GB/s": {"host_memory": 10e9, "host_flush": 10e9},
}


def sensitivity() -> str:
    """The table of decode rates and times to the first token if a parameter differs from its assumed value."""
    lines = [
        "| if | gemma3-1b, 1k: tok/s | first token, s | llama3.2-1b, 1k: tok/s | 8k: first token, s |",
        "|---|---|---|---|---|",
    ]
    gemma, llama = (Prediction(known(model), 8192, _DEVICE, VALUES) for model in ("gemma3-1b", "llama3.2-1b"))
    for name, change in _WORSE.items():
        prices = Prices(_DEVICE, {**VALUES, **change})
        cells = []
        for prediction, tokens in ((gemma, 1024), (llama, 8192)):
            programs = prediction.programs
            cells.append(f"{1 / prices.of_runs([(programs[0], 1023)], before=programs[0]).total:.4g}")
            cells.append(f"{prices.of_runs(list(prompt_runs(programs, tokens)), before=programs[0]).total:.3g}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


@cache
def _points(model: str) -> tuple[Point, ...]:
    return predict(known(model), _DEVICE).points


def _of_role(point: Point, quantity: str, role: Role) -> float | None:
    found = [value for name, value in point.published[quantity].items() if TABLES[name].role is role]
    if not found:
        return None
    return max(found) if quantity == "decode" else min(found)


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _bold(value: float, reached: bool) -> str:
    text = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return f"**{text}**" if reached else text


SECTIONS: dict[str, Callable[[], str]] = {
    "parameters": parameters,
    "validation": validation,
    "decoding": decoding,
    "prompts": prompts,
    "parts": parts,
    "sensitivity": sensitivity,
}


def main() -> int:
    """Writes the page."""
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), SECTIONS), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

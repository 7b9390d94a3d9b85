# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/model.md from the cost models themselves; a test checks that the page is up to date."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

from flownpu.aie.cost.chips import CHIPS
from flownpu.aie.cost.gemm_kernel import PRECISIONS, macs_per_cycle, peak_macs, single_core_kernel
from flownpu.aie.cost.gemm_model import predict_gemm
from flownpu.aie.cost.gemm_parameters import GEMM
from flownpu.aie.cost.gemm_system import GemmSearch
from flownpu.aie.cost.parameters import VALUES
from flownpu.aie.cost.published_gemm import CORES, GEMMS
from flownpu.aie.programs.cost import Prices, prompt_runs
from flownpu.aie.programs.decode import decode_program
from flownpu.npu.models import ENCODERS, MODELS
from flownpu.predict.by_operators import DecoderByOperators, PredictionByOperators
from flownpu.predict.gpu import GPUS, predict_gpu
from flownpu.predict.pair import ANSWER, handed_over_bytes, handed_over_seconds, joules
from flownpu.predict.prices import Prediction
from flownpu.predict.published import CONTEXTS, TABLES, Role
from flownpu.predict.report import Point, predict
from flownpu.predict.target import known
from flownpu.predict.validation import ERRORS, summary, validate

PAGE = Path(__file__).resolve().parent.parent / "docs" / "model.md"
_SECTION = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
_DEVICE = CHIPS["kraken-350"]
_SHOWN = tuple(1024 * thousands for thousands in (1, 4, 32, 128))  # `flownpu predict` has the others
_AIM = 1.15  # the aim, as a factor of the speeds in the papers' tables
# Models of whose layers the host computes a part, and the positions that a table of them is of.
_WITH_STATES = (
    "qwen3.5-0.8b",
    "qwen3.5-2b",
    "qwen3.5-4b",
    "qwen3.5-9b",
    "lfm2-1.2b",
    "gpt-oss-20b",
    "gemma4-e2b",
    "gemma4-e4b",
)
_STATES_CONTEXT = 1024
_DECODERS = [name for name in MODELS if name not in ENCODERS]


def fill(text: str, sections: Mapping[str, Callable[[], str]]) -> str:
    """A page's text with its tables rewritten."""
    return _SECTION.sub(lambda found: f"{found[1]}{sections[found[2]]()}\n{found[3]}", text)


def _table(headings: Iterable[object], lines: Iterable[Iterable[object]]) -> str:
    heading = list(headings)
    rule = "|".join(["---"] * len(heading))
    rows = (f"| {' | '.join(map(str, line))} |" for line in [heading, *lines])
    return "\n".join([next(rows), f"|{rule}|", *rows])


def _lengths(contexts: Iterable[int] = CONTEXTS) -> list[str]:
    return [f"{context // 1024}k" for context in contexts]


# --- Decoders on the NPU ----------------------------------------------------------------------------------------------


def validation() -> str:
    """The table of published decoders' speeds: each row's error with the parameters in use, and the means."""
    lines = []
    for name, compared in validate().items():
        for number, model in enumerate(dict.fromkeys(one.row.model for one in compared)):
            errors = {one.row.context: f"{one.error:+.0%}" for one in compared if one.row.model == model}
            means = ["", ""] if number else [f"{summary(compared)[0]:.1%}", _left_out(name)]
            lines.append(["" if number else name, *means, model, *(errors.get(context, "") for context in CONTEXTS)])
    return _table(["table", "mean", "left out", "model", *_lengths()], lines)


def _left_out(name: str) -> str:
    return "never fitted" if TABLES[name].role is Role.HELD_OUT else f"{ERRORS[name]:.1%}"


def decoding() -> str:
    """The table of predicted decode rates beside the published ones."""
    return _by_context(decoding_rows)


def decoding_rows(model: str) -> list[list[str]]:
    """A model's rows in the table of decode rates."""
    published, predicted = ["papers / FastFlowLM"], ["predicted"]
    for point in (point for point in _points(model) if point.context in _SHOWN):
        papers, later = (_of_role(point, "decode", role) for role in (Role.PAPER, Role.LATER))
        aim = max(_AIM * (papers or 0.0), later or 0.0)
        published.append(f"{_text(papers)} / {_text(later)}")
        predicted.append(_bold(point.decode_tokens_per_second, 0 < aim <= point.decode_tokens_per_second))
    return [[model, *published], ["", *predicted]]


def states() -> str:
    """The table of models whose layers keep states: a token behind 1024, with and without the host's part."""
    headings = ["model", "FastFlowLM", "predicted", "calls", "ms", "of them the host's", "and dispatches"]
    return _table(headings, [row for model in _WITH_STATES for row in state_rows(model)])


def state_rows(model: str) -> list[list[str]]:
    """A model's row in the table of layers with states."""
    decoder, prices = known(model).decoder, Prices(_DEVICE, VALUES)
    if isinstance(decoder, DecoderByOperators):
        cost = PredictionByOperators(decoder, _DEVICE, VALUES).token(_STATES_CONTEXT)
    else:
        token = decode_program(decoder, "npu2", _STATES_CONTEXT, prices=prices).program
        cost = prices.of_runs([(token, _STATES_CONTEXT - 1)], before=token)
    later = next(table.values[model][0] for table in TABLES.values() if model in table.values)
    host = sum(seconds for part, seconds in cost.seconds.items() if part.startswith("host"))
    calls = round(cost.dispatches)
    return [[model, f"{later:.3g}", _bold(1 / cost.total, cost.total <= 1 / later), str(calls),
             f"{1e3 * cost.total:.1f}", f"{1e3 * host:.1f}", f"{1e3 * calls * VALUES['dispatch']:.1f}"]]  # fmt: skip


def prompts() -> str:
    """The table of predicted times to the first token beside the published ones."""
    return _by_context(prompt_rows)


def prompt_rows(model: str) -> list[list[str]]:
    """A model's rows in the table of times to the first token."""
    published, predicted = ["papers' software / later"], ["predicted"]
    for point in (point for point in _points(model) if point.context in _SHOWN):
        papers, later = (_of_role(point, "ttft", role) for role in (Role.PAPER, Role.LATER))
        papers = papers or _of_role(point, "ttft", Role.HELD_OUT) or _of_role(point, "ttft", Role.FITTED)
        others = [value for value in (papers, later) if value is not None]
        reached = bool(others) and point.ttft_seconds <= min(others) / _AIM
        published.append(f"{_text(papers)} / {_text(later)}")
        predicted.append(_bold(point.ttft_seconds, reached))
    return [[model, *published], ["", *predicted]]


def _by_context(rows: Callable[[str], list[list[str]]]) -> str:
    width = len(_SHOWN) + 2
    lines = [row + [""] * (width - len(row)) for model in _DECODERS for row in rows(model)]
    return _table(["model", "", *_lengths(_SHOWN)], lines)


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


# A small model and a large one in the table of two devices; `flownpu predict` has the others.
_SOME = ("gemma3-1b", "llama3.1-8b")
_CHANGED: dict[str, dict[str, float]] = {
    "as assumed": {},
    "`array_change` is 5.8 ms, the most that was published": {"array_change": 5.8e-3},
    "`wait` is 20 us: `synchronise` of GEMM, 35,000 cycles": {"wait": 20e-6},
    "`memory_read` is 50 GB/s, as micro-benchmarked in arXiv 2512.13282": {"memory_read": 50e9},
    "`dqp_block` is 4500 cycles": {"dqp_block": 4500},
    "`host_memory` and `host_flush` are 10 GB/s": {"host_memory": 10e9, "host_flush": 10e9},
}


def sensitivity() -> str:
    """The table of decode rates and times to the first token if a parameter differs from its assumed value."""
    programs = Prediction(known("gemma3-1b"), 8192, _DEVICE, VALUES).programs
    lines = []
    for name, change in _CHANGED.items():
        prices = Prices(_DEVICE, {**VALUES, **change})
        token = prices.of_runs([(programs[0], 1023)], before=programs[0])
        prompt = prices.of_runs(list(prompt_runs(programs, 1024)), before=programs[0])
        lines.append([name, f"{1 / token.total:.4g}", f"{prompt.total:.3g}"])
    return _table(["if", "gemma3-1b, 1k: tok/s", "first token, s"], lines)


# --- GEMM -------------------------------------------------------------------------------------------------------------


def cores() -> str:
    """The optimal single-core kernels of the integer programme beside the paper's table 1."""
    lines = []
    for core in (core for core in CORES if core.source == "table 1"):
        parameters, kind, size = GEMM[core.target], PRECISIONS[core.precision], core.size
        measured = single_core_kernel(parameters, kind, measured=core.macs_per_cycle / peak_macs(parameters, kind))
        rate = macs_per_cycle(parameters, kind, size)
        found = ["the same" if of == size else of for of in (measured, single_core_kernel(parameters, kind))]
        lines.append([core.target, core.precision, size, core.macs_per_cycle, f"{rate:.1f}", *found])
    heading = ["", "precision", "table 1", "MACs/cycle", "predicted", "by measured efficiency", "by predicted"]
    return _table(heading, lines)


def tiles() -> str:
    """The programme's kernels for each k of tables 2 and 3, and the best kernel of the whole search."""
    throughput = {(core.target, core.precision, core.size): core.macs_per_cycle for core in CORES}
    lines = []
    for gemm in (gemm for gemm in GEMMS if gemm.l2):
        search, size = GemmSearch(gemm.target, gemm.precision), gemm.tiling.size
        # The paper's search uses the efficiency of its previous step's kernel, which is a little higher than this
        # one's.
        before = 1.02 * throughput[gemm.target, gemm.precision, size]
        found = [*search.kernels(size.k), *search.kernels(size.k, throughput=before)]
        programme = "the same" if size in found else " or ".join(map(str, found[:1]))
        saturated = search.with_k_mt(size)
        best, of_best = search.candidates()[0]
        predicted = predict_gemm(gemm.target, gemm.precision, *gemm.sizes, gemm.tiling).tops
        lines.append([
            gemm.target, gemm.precision, size, programme, gemm.tiling.k_mt, saturated[0].k_mt if saturated else "–",
            f"{gemm.tops:.2f}", f"{predicted:.2f}", f"{predicted / gemm.tops - 1:+.1%}",
            f"{best.size}: {of_best.tops:.2f}",
        ])  # fmt: skip
    return _table(
        ["", "precision", "tables 2, 3", "largest m n", "k_mt", "saturated at", "TOPS", "predicted", "error",
         "predicted best of all k"], lines,
    )  # fmt: skip


# --- Two devices ------------------------------------------------------------------------------------------------------


def pairs() -> str:
    """The table of one conversation on an NPU, on a GPU, on both, and of a switch between them."""
    headings = ["model", "", "`npu`", "`gpu`", "`npu+gpu`", "`gpu+npu`", "a switch"]
    return _table(headings, [row for model in _SOME for row in pair_rows(model)])


def pair_rows(model: str) -> list[list[str]]:
    """A model's rows in the table of two devices."""
    lines: list[list[str]] = []
    of = known(model)
    on_npu = {point.context: point for point in _points(model)}
    for number, on_gpu in enumerate(predict_gpu(of, GPUS["radeon-890m"], [1024, 8192])):
        points = on_npu[on_gpu.context], on_gpu
        cells = []
        for i, j in ((0, 0), (1, 1), (0, 1), (1, 0)):
            prompt, token = joules(model, points[i])[0], joules(model, points[j])[1]
            energy = "" if prompt is None or token is None else f"; {prompt + ANSWER * token:.3g} J"
            cells.append(f"{points[i].ttft_seconds:.3g} s; {points[j].decode_tokens_per_second:.3g}{energy}")
        lines.append([
            "" if number else model,
            *_lengths([on_gpu.context]),
            *cells,
            f"{handed_over_bytes(of, on_gpu.context) / 1e6:.0f} MB; "
            f"{handed_over_seconds(of, on_gpu.context) * 1e3:.3g} ms",
        ])  # fmt: skip
    return lines


SECTIONS: dict[str, Callable[[], str]] = {
    "validation": validation,
    "decoding": decoding,
    "states": states,
    "prompts": prompts,
    "sensitivity": sensitivity,
    "cores": cores,
    "tiles": tiles,
    "pairs": pairs,
}


def main() -> int:
    """Writes the page."""
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), SECTIONS), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""What may come of a case, and what is a finding.

ONNX Runtime's CPU provider runs the model as it is, unoptimised; ours runs it with a case's options. Then

    both give numbers       types and shapes are equal, and ours lie within bounds (reference.bounds) or equal ONNX Runtime's
    both refuse             at the session or at the run: ours with words that name a node or a value
    ours alone refuses      with such words; with on_unsupported=cpu the same case gives numbers
    ours alone gives some   is not followed up: ours need not make every check that ONNX Runtime makes

and no process ends or hangs. Everything else is a finding. What ends ONNX Runtime's own process is none of ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from tests.fuzz.arrays import is_float
from tests.fuzz.reference import bounds
from tests.fuzz.reference.evaluate import evaluate
from tests.fuzz.worker import Ended, Worker

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.fuzz.graphs import Case
    from tests.fuzz.reference.bounds import Bounds
    from tests.fuzz.sessions import Arrays, Outcome

# Beside the bounds, how near ours must be to ONNX Runtime's number where that is outside of them, in units of it.
NEAR_UNITS = 8


@dataclass
class Finding:
    """What is wrong. `signature`: the same for findings that seem to have one cause; `text`: all that is known."""

    signature: str
    text: str


@dataclass
class Verdict:
    """What came of a case."""

    category: str
    finding: Finding | None = None


class Oracle:
    """Judges cases; `reference` is a worker with ONNX Runtime alone, `ours` one with the library."""

    def __init__(self, reference: Worker, ours: Worker, *, sanitize: bool = False) -> None:
        self._reference, self._ours, self._sanitize = reference, ours, sanitize

    def judge(self, case: Case) -> Verdict:
        """Runs a case on both sides."""
        try:
            expected: Outcome = self._reference.call("tests.fuzz.sessions:run_reference", case.model, case.feeds)
        except Ended:
            return Verdict("ONNX Runtime's own crash")
        verdict = self._judge(case, expected)
        if verdict.finding is not None and case.optimise != "none" and self._is_the_optimiser_s(case, expected):
            return Verdict("ONNX Runtime's optimiser")
        return verdict

    def _judge(self, case: Case, expected: Outcome) -> Verdict:
        try:
            found = self._run(case)
        except Ended as ended:
            return self._ended(case, ended)
        strict = case.options.get("on_unsupported", "error") == "error"
        if found.refusal is not None:
            if problem := _without_a_reason(case, found.refusal):
                return problem
            if expected.refusal is not None:
                return Verdict("both refuse the model")
            if strict:
                return self._as_a_fallback(case, expected, "refused, ", found.refusal)
            return _finding("refuses with on_unsupported=cpu", found.refusal)
        if expected.refusal is not None:
            return Verdict("ONNX Runtime alone refuses the model")
        category = "same"
        for place, (theirs, ours) in enumerate(zip(expected.runs, found.runs, strict=True)):
            if isinstance(ours, str):
                if problem := _without_a_reason(case, ours):
                    return problem
                if isinstance(theirs, str):
                    category = "both refuse a run"
                elif strict:
                    return self._as_a_fallback(case, expected, "refused at a run, ", ours)
                else:
                    return _finding("raises at a run with on_unsupported=cpu", ours)
            elif isinstance(theirs, str):
                category = "ONNX Runtime alone refuses a run"
            elif problem := self._compare(case, place, theirs, ours):
                return problem
        return Verdict(category)

    def _run(self, case: Case) -> Outcome:
        outcome: Outcome = self._ours.call(
            "tests.fuzz.sessions:run_ours", case.model, case.feeds, case.options, case.optimise
        )
        return outcome

    def _as_a_fallback(self, case: Case, expected: Outcome, what: str, reason: str) -> Verdict:
        again = self._judge(replace(case, options={**case.options, "on_unsupported": "cpu"}), expected)
        if again.finding is not None:
            text = f"With on_unsupported=cpu; with error it said: {reason}\n{again.finding.text}"
            return Verdict(again.category, Finding(f"fallback: {again.finding.signature}", text))
        return Verdict(what + again.category)

    def _ended(self, case: Case, ended: Ended) -> Verdict:
        report = ended.report
        if self._sanitize and "SUMMARY: " in report and "flownpu" not in _stack(report):
            return Verdict("ONNX Runtime's own crash")
        return Verdict("ended", Finding(_cause(ended, case), f"{ended.reason}\n{report}"))

    def _is_the_optimiser_s(self, case: Case, expected: Outcome) -> bool:
        """Whether ONNX Runtime's own provider, too, gives something else of the graph that its optimiser made."""
        try:
            optimised: Outcome = self._reference.call(
                "tests.fuzz.sessions:run_reference", case.model, case.feeds, case.optimise
            )
        except Ended:
            return True
        if (optimised.refusal is None) != (expected.refusal is None):
            return True
        for place, (plain, changed) in enumerate(zip(expected.runs, optimised.runs, strict=True)):
            if isinstance(plain, str) or isinstance(changed, str):
                if isinstance(plain, str) != isinstance(changed, str):
                    return True
            elif self._compare(case, place, plain, changed, locate=False):
                return True
        return False

    # --- Numbers -------------------------------------------------------------------------------------------------

    def _compare(self, case: Case, run: int, theirs: Arrays, ours: Arrays, *, locate: bool = True) -> Verdict | None:
        model = onnx.load_from_string(case.model)
        known: dict[str, Bounds | None] | None = None
        makers = {name: node.op_type for node in model.graph.node for name in node.output}
        for name, expected in theirs.items():
            found = ours[name]
            if (found.dtype, found.shape) != (expected.dtype, expected.shape):
                what = f"{name}: expected {expected.dtype} {expected.shape}, got {found.dtype} {found.shape}"
                return _finding(f"type or shape of {makers[name]}", what)
            if found.tobytes() == expected.tobytes() if found.dtype != object else (found == expected).all():
                continue
            if known is None:
                known = evaluate(model, case.feeds[run], case.options)
            wrong = outside(found, expected, known.get(name))
            if wrong.any():
                text = f"run {run}, {name} of {makers[name]}: {describe(found, expected, known.get(name), wrong)}"
                where = self._locate(case, model, run, known) if locate else ""
                return _finding(f"numbers of {where or makers[name] + ' or what it reads'}", text)
        return None

    def _locate(self, case: Case, model: onnx.ModelProto, run: int, known: dict[str, Bounds | None]) -> str:
        """The first operator whose result is wrong where all of them are outputs; none where then all are right."""
        opened = onnx.ModelProto()
        opened.CopyFrom(model)
        del opened.graph.output[:]
        names = [name for node in model.graph.node for name in node.output if known.get(name) is not None]
        opened.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        try:
            shown = replace(case, model=_typed(opened, known), feeds=case.feeds[: run + 1])
            result = self._run(shown)
            reference = self._reference.call("tests.fuzz.sessions:run_reference", shown.model, shown.feeds)
        except Ended:
            return ""
        if result.refusal is not None or reference.refusal is not None:
            return ""
        ours, theirs = result.runs[run], reference.runs[run]
        if isinstance(ours, str) or isinstance(theirs, str):
            return ""
        for node in model.graph.node:
            for name in node.output:
                if name not in ours or ours[name].shape != theirs[name].shape:
                    continue
                if outside(ours[name], theirs[name], known[name]).any():
                    return node.op_type
        return ""


def _typed(model: onnx.ModelProto, known: dict[str, Bounds | None]) -> bytes:
    for value in model.graph.output:
        made = known[value.name]
        assert made is not None
        value.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(made.dtype)
    return model.SerializeToString()


def outside(found: NDArray[Any], expected: NDArray[Any], known: Bounds | None) -> NDArray[np.bool_]:
    """Which elements are neither within their bounds nor what ONNX Runtime has."""
    if found.dtype == object:
        return np.asarray(found != expected, bool)
    # What the reference knows nothing of is not checked.
    if known is None or known.shape != found.shape:
        return np.zeros(found.shape, bool)
    if not is_float(found.dtype):
        return np.asarray(((found < known.low) | (found > known.high)) & (found != expected))
    ours, theirs = found.astype(np.float64), expected.astype(np.float64)
    missing = np.isnan(ours)
    with np.errstate(all="ignore"):
        right = ~missing & (ours >= known.low) & (ours <= known.high)
        near = np.abs(ours - theirs) <= NEAR_UNITS * bounds.unit(found.dtype) * np.abs(theirs)
    if known.nan is not None:
        right = np.select(
            [known.nan == bounds.ALWAYS, known.nan == bounds.NOT_FINITE, known.nan == bounds.PERHAPS],
            [missing, ~np.isfinite(ours), right | missing],
            right,
        )
    return np.asarray(~(right | near | (ours == theirs) | (missing & np.isnan(theirs))))


def describe(found: NDArray[Any], expected: NDArray[Any], known: Bounds | None, wrong: NDArray[np.bool_]) -> str:
    """The first elements that are wrong."""
    lines = [f"{int(wrong.sum())} of {wrong.size} elements of {found.dtype}{list(found.shape)}"]
    for place in np.argwhere(wrong)[:4]:
        at = tuple(int(i) for i in place)
        lines.append(f"  {list(at)}: ours {found[at]!s}, ONNX Runtime's {expected[at]!s}")
        if known is not None:
            nan = "" if known.nan is None else ("", " or NaN", " (NaN)", " (NaN or infinite)")[int(known.nan[at])]
            lines[-1] += f", between {known.low[at]!s} and {known.high[at]!s}{nan}"
    return "\n".join(lines)


def _finding(signature: str, text: str) -> Verdict:
    return Verdict(
        "finding", Finding(f"{signature}: {_shape_of_words(text)}" if "numbers" not in signature else signature, text)
    )


def _shape_of_words(text: str) -> str:
    """A message without its numbers and names, so that those of one cause are equal."""
    line = text.splitlines()[0].rpartition("Status Message: ")[2]
    line = re.sub(r"\b[a-z]\d+(_\d+)?\b", "V", line)
    return re.sub(r"-?\d[\d.e+,x ]*", "#", line)[:160]


def _without_a_reason(case: Case, text: str) -> Verdict | None:
    """A refusal names a node, an operator or a value of the model."""
    if text.startswith("UnicodeDecodeError"):
        return _finding("a refusal that is no UTF-8", text)
    message = text.partition(": ")[2]
    # Names of nodes n0, values v0, x0, c0; operators; what is fused together has a name of ours.
    if re.search(r"\b[nvxc]\d+", message) or "FlowNPU" in message:
        return None
    operators = {node.op_type for node in onnx.load_from_string(case.model).graph.node}
    if any(name in message for name in operators):
        return None
    # ONNX Runtime's own words about the graph, which it says before it asks a provider.
    if re.search(r"/onnxruntime_src/|INVALID_GRAPH|Load model|INVALID_ARGUMENT", message):
        return None
    return _finding("a refusal without a reason", text)


def _stack(report: str) -> str:
    """The frames of a sanitizer's first stack."""
    lines = report[max(0, report.find("==ERROR")) :].splitlines()
    frames = []
    for line in lines:
        if re.match(r"\s+#\d+ ", line):
            frames.append(line)
        elif frames:
            break
    return "\n".join(frames)


def _cause(ended: Ended, case: Case) -> str:
    """A sanitizer's kind of error and our function, or else the operators of the graph."""
    report = ended.report
    if match := re.search(r"([\w/.]+:\d+):\d+: runtime error: (.*)", report):
        return f"UBSan {match[1]}: {_shape_of_words(match[2])}"
    if match := re.search(r"AddressSanitizer: ([\w-]+)", report):
        frame = next((f for f in _stack(report).splitlines() if "flownpu" in f), "")
        place = re.search(r"in (.*?) (/\S+?/)?([\w.]+:\d+)", frame)
        return f"ASan {match[1]} {place[1][:100] if place else ''} {place[3] if place else ''}"
    operators = sorted({node.op_type for node in onnx.load_from_string(case.model).graph.node})
    return f"{ended.reason} {' '.join(operators)}"

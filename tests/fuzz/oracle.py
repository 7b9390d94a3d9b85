# SPDX-License-Identifier: Apache-2.0
"""Distinguishes right outcomes of a case from findings.

ONNX Runtime's CPU provider runs the model as it is, unoptimised; FlowNPU runs it with the case's options. Then

    both give numbers      types and shapes are equal; FlowNPU's are within bounds (reference.samples) or equal ONNX
                           Runtime's
    both refuse            at the session or at the run; FlowNPU with a message that names a node or a value
    FlowNPU alone refuses  with such a message; with on_unsupported=cpu the same case gives numbers
    ONNX Runtime alone     is not examined: FlowNPU need not make every check that ONNX Runtime makes
    refuses

and no process ends or hangs. Everything else is a finding. A crash of ONNX Runtime alone is no finding.
"""

import re
import traceback
from dataclasses import dataclass, replace

import numpy as np
import onnx

from flownpu.ops.definitions.onnx_function import DOMAIN
from tests.fuzz.causes import cause_of_end, has_a_reason, is_elsewhere, words_of
from tests.fuzz.graphs.compare import describe, equal, kinds, outside
from tests.fuzz.graphs.strategy import Case
from tests.fuzz.reference.evaluate import ReferenceFailed, evaluate
from tests.fuzz.reference.samples import Bounds
from tests.fuzz.sessions import TOO_LARGE, Arrays, Outcome
from tests.fuzz.worker import Ended, Worker

REFERENCE_FAILED = ": the reference failed"
# AddressSanitizer's message where without it there would be a bad_alloc, and an error of the run.
OUT_OF_MEMORY = "allocator is out of memory"
REFERENCE, OURS = "tests.fuzz.sessions:run_reference", "tests.fuzz.sessions:run_ours"

# Messages of runs that FlowNPU refuses even with on_unsupported=cpu, and that ONNX Runtime's provider takes.
STATED = (
    # ONNX leaves open what the largest of no elements and the mean of no integers are.
    r"\[ArgMax .*expected elements along axis",
    r"\[ReduceMean .*expected elements, got none",
    # ONNX Runtime broadcasts an axis of no elements with any other, which ONNX forbids.
    r"expected shapes that broadcast, got .*\b0\b",
    # Axes that do not exist, of a scalar or of no elements, which ONNX Runtime does not check.
    r"\[Reduce\w+ .*expected an index in \[-\d+, \d+\)",
    r"\[CumSum .*expected an index in",
    # Batches of indices that differ from those of the data, which ONNX forbids, and ONNX Runtime reads nevertheless.
    r"\[GatherND .*expected data and indices to share",
    # An index beyond a table is an error (docs/operators.md); ONNX Runtime gives zeros.
    r"\[Q4NXGather .*expected indices in",
)


@dataclass
class Finding:
    """A wrong outcome. Findings that seem to have one cause share a `signature`; `text` has all known facts."""

    signature: str
    text: str


@dataclass
class Verdict:
    """The outcome of a case."""

    category: str
    finding: Finding | None = None


class Oracle:
    """Judges cases; `reference` is a worker with ONNX Runtime alone, `ours` one with the library."""

    def __init__(self, reference: Worker, ours: Worker) -> None:
        self._reference, self._ours = reference, ours

    def judge(self, case: Case) -> Verdict:
        """Runs a case on ONNX Runtime and on FlowNPU, and compares."""
        try:
            expected: Outcome = self._reference.call(REFERENCE, case.model, case.feeds)
        except Ended:
            return Verdict("ONNX Runtime's own crash")
        verdict = self._judge(case, expected)
        if verdict.finding is not None and not _is_strict(case) and self._is_left(case, verdict.finding):
            return Verdict("ONNX Runtime's own numbers")
        finding = verdict.finding
        if finding is None or case.optimise == "none" or finding.signature.endswith(REFERENCE_FAILED):
            return verdict
        return Verdict("ONNX Runtime's optimiser") if self._is_the_optimiser_s(case, expected, finding) else verdict

    def _judge(self, case: Case, expected: Outcome) -> Verdict:
        try:
            found = self._run(case)
        except Ended as ended:
            if is_elsewhere(ended) or OUT_OF_MEMORY in ended.report:
                return Verdict("ONNX Runtime's own crash")
            return Verdict("ended", Finding(cause_of_end(ended, case.model), f"{ended.reason}\n{ended.report}"))
        if found.refusal is not None:
            return self._refused(case, expected, found.refusal)
        if expected.refusal is not None:
            return Verdict("ONNX Runtime alone refuses the model")
        verdict = Verdict("same")
        for place in range(len(case.feeds)):
            made = self._judge_run(case, expected, found, place)
            if made.finding is not None:
                return made
            verdict = made if made.category != "same" else verdict
        return verdict

    def _refused(self, case: Case, expected: Outcome, refusal: str) -> Verdict:
        if refusal == expected.refusal:
            return Verdict("both refuse the model")
        if not has_a_reason(case.model, refusal):
            return _finding("a refusal without a reason", refusal)
        if expected.refusal is not None:
            return Verdict("both refuse the model")
        if _is_strict(case):
            return self._as_a_fallback(case, expected, "refused, ", refusal)
        return _finding("refuses with on_unsupported=cpu", refusal)

    def _judge_run(self, case: Case, expected: Outcome, found: Outcome, place: int) -> Verdict:
        theirs, ours = expected.runs[place], found.runs[place]
        if isinstance(ours, str):
            return self._refused_run(case, expected, theirs, ours)
        if theirs == TOO_LARGE:
            return _finding("type or shape", f"ONNX Runtime says {TOO_LARGE}, and FlowNPU's are not")
        if isinstance(theirs, str):
            return Verdict("ONNX Runtime alone refuses a run")
        return self._compare(case, place, theirs, ours) or Verdict("same")

    def _refused_run(self, case: Case, expected: Outcome, theirs: Arrays | str, ours: str) -> Verdict:
        if ours != theirs and not has_a_reason(case.model, ours):
            return _finding("a refusal without a reason", ours)
        if isinstance(theirs, str):
            return Verdict("both refuse a run")
        if any(re.search(words, ours) for words in STATED) or _has_nodes_of_ours(case):
            return Verdict("refused at a run, as is stated")
        if _is_strict(case):
            return self._as_a_fallback(case, expected, "refused at a run, ", ours)
        return _finding("raises at a run with on_unsupported=cpu", ours)

    def _run(self, case: Case) -> Outcome:
        outcome: Outcome = self._ours.call(OURS, case.model, case.feeds, case.options, case.optimise)
        return outcome

    def _as_a_fallback(self, case: Case, expected: Outcome, what: str, reason: str) -> Verdict:
        again = self._judge(replace(case, options={**case.options, "on_unsupported": "cpu"}), expected)
        if again.finding is not None and _is_named(again.finding, reason):
            return Verdict("ONNX Runtime's own numbers")
        if again.finding is not None:
            text = f"{again.finding.text}\nThis is with on_unsupported=cpu; with error it says: {reason}"
            return Verdict(again.category, Finding(again.finding.signature, text))
        return Verdict(what + again.category)

    def _is_left(self, case: Case, finding: Finding) -> bool:
        """Whether wrong numbers come from an operator that was left to ONNX Runtime's CPU provider."""
        try:
            strict = self._run(replace(case, options={**case.options, "on_unsupported": "error"}))
        except Ended:
            return False
        refusals = [strict.refusal, *(run for run in strict.runs if isinstance(run, str))]
        return any(refusal is not None and _is_named(finding, refusal) for refusal in refusals)

    def _is_the_optimiser_s(self, case: Case, expected: Outcome, finding: Finding) -> bool:
        """Whether ONNX Runtime's own provider, too, gives another result after its optimiser has changed the graph."""
        try:
            optimised: Outcome = self._reference.call(REFERENCE, case.model, case.feeds, case.optimise)
        except Ended:
            return True
        if (optimised.refusal is None) != (expected.refusal is None) or _is_text_of(finding, optimised.refusal):
            return True
        for place, (plain, changed) in enumerate(zip(expected.runs, optimised.runs, strict=True)):
            if isinstance(plain, str) or isinstance(changed, str):
                if isinstance(plain, str) != isinstance(changed, str):
                    return True
            elif self._compare(case, place, plain, changed, locate=False):
                return True
        return False

    # --- Numbers -----------------------------------------------------------------------------------------------------

    def _compare(self, case: Case, run: int, theirs: Arrays, ours: Arrays, *, locate: bool = True) -> Verdict | None:
        if all(equal(ours[name], array) for name, array in theirs.items()):
            return None
        model = onnx.load_from_string(case.model)
        try:
            known = evaluate(model, case.feeds[run], case.options)
        except ReferenceFailed as error:
            text = "".join(traceback.format_exception(error))
            return Verdict("finding", Finding(f"{error.op_type}{REFERENCE_FAILED}", text))
        makers = {name: node.op_type for node in model.graph.node for name in node.output}
        for name, array in theirs.items():
            found, expected, bound = ours[name], array, known.get(name)
            if found.shape != expected.shape and bound is None and _is_behind_reduction(model, name):
                continue  # a reduced axis of size 0 stays 0 in ONNX Runtime; ONNX and numpy make it 1 or remove it
            if (found.dtype, found.shape) != (expected.dtype, expected.shape):
                if bound is None or (found.dtype, found.shape) != (bound.dtype, bound.shape):
                    what = f"{name}: expected {expected.dtype} {expected.shape}, got {found.dtype} {found.shape}"
                    where = self._locate(case, model, run, known) if locate else ""
                    return _finding(f"type or shape of {where or makers[name]}", what)
                # A reduced axis of size 0 stays 0 in ONNX Runtime, and becomes 1 in ONNX and numpy.
                expected = np.zeros(found.shape, found.dtype)
            wrong = outside(found, expected, bound)
            if wrong.any():
                text = f"run {run}, {name} of {makers[name]}: {describe(found, expected, bound, wrong)}"
                where = self._locate(case, model, run, known) if locate else ""
                where = where or f"{makers[name]} or what it reads"
                return Verdict("finding", Finding(f"numbers of {where}, {kinds(found, expected, bound, wrong)}", text))
        return None

    def _locate(self, case: Case, model: onnx.ModelProto, run: int, known: dict[str, Bounds | None]) -> str:
        """The first operator whose result is wrong when all results are outputs; "" if all are right then."""
        shown = replace(case, model=_with_all_outputs(model, known), feeds=case.feeds[: run + 1])
        try:
            result = self._run(shown)
            reference: Outcome = self._reference.call(REFERENCE, shown.model, shown.feeds)
        except Ended:
            return ""
        if result.refusal is not None or reference.refusal is not None:
            return ""
        ours, theirs = result.runs[run], reference.runs[run]
        if isinstance(ours, str) or isinstance(theirs, str):
            return ""
        for node in model.graph.node:
            for name in node.output:
                bound = known.get(name)
                if bound is None or name not in ours:
                    continue
                if ours[name].shape != theirs[name].shape:
                    if ours[name].shape != bound.shape:
                        return str(node.op_type)
                elif outside(ours[name], theirs[name], bound).any():
                    return str(node.op_type)
        return ""


def _with_all_outputs(model: onnx.ModelProto, known: dict[str, Bounds | None]) -> bytes:
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    del opened.graph.output[:]
    for node in model.graph.node:
        for name in node.output:
            if (bound := known.get(name)) is not None:
                kind = onnx.helper.np_dtype_to_tensor_dtype(bound.dtype)
                opened.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    return bytes(opened.SerializeToString())


def _is_named(finding: Finding, refusal: str) -> bool:
    """Whether wrong numbers come from an operator in the refusal, which ran on ONNX Runtime's CPU provider."""
    operator = re.match(r"numbers of (\w+)", finding.signature)
    return operator is not None and re.search(rf"\b{operator[1]} '", refusal) is not None


def _is_behind_reduction(model: onnx.ModelProto, name: str) -> bool:
    behind = {name}
    for node in reversed(model.graph.node):
        if behind.intersection(node.output):
            if node.op_type.startswith(("Reduce", "ArgMax")):
                return True
            behind.update(node.input)
    return False


def _is_text_of(finding: Finding, refusal: str | None) -> bool:
    return refusal is not None and finding.text.startswith(refusal)


def _has_nodes_of_ours(case: Case) -> bool:
    """Whether the model has nodes of ai.flownpu, which no other provider runs.

    A refused run is then an error (docs/operators.md). ONNX Runtime may still compute what is refused, with the nodes'
    definitions, whose Concat and MatMul take more shapes.
    """
    return any(node.domain == DOMAIN for node in onnx.load_from_string(case.model).graph.node)


def _is_strict(case: Case) -> bool:
    return case.options.get("on_unsupported", "error") == "error"


def _finding(what: str, text: str) -> Verdict:
    return Verdict("finding", Finding(f"{what}: {words_of(text)}", text))

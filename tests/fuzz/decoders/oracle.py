# SPDX-License-Identifier: Apache-2.0
"""Random small decoders: prompts, chunks, tokens, rewinds, batches, compared with ONNX Runtime's CPU provider.

Bounds that hold for every sum (reference.bounds) are useless after three layers. Here the effect of rounding is
measured instead: ONNX Runtime runs the same model once more, with the activations of products rounded as FlowNPU
rounds them. Its logits then differ from the plain ones by about FlowNPU's error; so FlowNPU's may differ by a multiple
of this (ROUNDINGS), and by the tolerance of float32. A lost key, a wrong angle, scale or weight changes logits by about
as much as they differ from one another, which is several times more.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies
from numpy.typing import NDArray

from tests.decoding import float32_tolerance
from tests.fuzz.causes import cause_of_end, words_of
from tests.fuzz.choices import Choices
from tests.fuzz.decoders.models import CONTEXT, VOCABULARY, DecoderModel, converted, exported, with_rounded_activations
from tests.fuzz.decoders.runs import Turn
from tests.fuzz.graphs.strategy import INSTRUCTION_SETS
from tests.fuzz.oracle import Finding, Verdict
from tests.fuzz.sessions import Outcome
from tests.fuzz.worker import Ended, Worker

BYTES = 160
MOST_STEPS = 6
RUN = "tests.fuzz.decoders.runs:run_decoder"
# FlowNPU also rounds weights and, for prompts on AVX-512, attention's queries and weights, which makes sqrt(3) of the
# measured error. By chance a single row of 80 logits is off by more than all rows together. The largest ratio of 60
# decoders was 2.6.
ROUNDINGS = 6.0


@dataclass
class DecoderCase:
    """A decoder, its calls, and the provider's options.

    `lengths`: lengths of the first prompt's rows. `capacity`: positions of a KV cache that is updated in place; 0: the
    cache grows.
    """

    decoder: DecoderModel
    steps: list[Turn]
    lengths: list[int]
    capacity: int
    options: dict[str, str] = field(default_factory=dict)
    optimise: str = "all"


def build(data: bytes, isas: tuple[str, ...] = INSTRUCTION_SETS) -> DecoderCase:
    """The case that these bytes encode."""
    choices = Choices(data)
    steps, lengths = script(choices)
    longest = max(step.mask.shape[1] for step in steps)
    capacity = longest + choices.pick((0, 1, 7)) if choices.chance(40) else 0
    options = {
        "device": "cpu",
        "cpu_isa": choices.pick(isas),
        "threads": choices.pick(("1", "2")),
        "activations": choices.pick(("bf16", "int8")),
    }
    optimise = choices.pick(("all", "all", "none", "basic"))
    decoder = exported(choices) if choices.chance(50) else converted(choices)
    return DecoderCase(decoder, steps, lengths, capacity, options, optimise)


def cases(isas: tuple[str, ...] = INSTRUCTION_SETS) -> strategies.SearchStrategy[DecoderCase]:
    """Random cases."""
    return strategies.binary(min_size=BYTES, max_size=BYTES).map(lambda data: build(data, isas))


def script(choices: Choices) -> tuple[list[Turn], list[int]]:
    """Calls: a prompt and its continuation; and the lengths of the prompt's rows, which are padded on the right."""
    batch = choices.pick((1, 1, 1, 2, 3))
    tokens = choices.pick((3, 1, 5, 9, 17, 33, 40, 70))
    lengths = [tokens] * batch
    if batch > 1 and choices.chance(60):
        lengths[1:] = [choices.between(1, tokens) for _ in lengths[1:]]
    rng = np.random.default_rng(choices.seed())
    mask = (np.arange(tokens) < np.array(lengths)[:, None]).astype(np.int64)
    steps = [Turn(rng.integers(0, VOCABULARY, (batch, tokens)), mask, 0)]
    total = tokens
    for _ in range(choices.below(MOST_STEPS + 1)):
        new = 1
        if batch == 1:  # ONNX Runtime's provider takes several new tokens after a past in a batch of one only
            if choices.chance(25):
                total = choices.between(1, total)
            new = choices.pick((1, 1, 2, 4, 5, 9, 20))
        if total + new > CONTEXT:
            break
        past, total = total, total + new
        mask = np.concatenate([mask[:, :past], np.ones((batch, new), np.int64)], axis=1)
        steps.append(Turn(rng.integers(0, VOCABULARY, (batch, new)), mask, past))
    return steps, lengths


class DecoderOracle:
    """Judges cases; `reference` is a worker with ONNX Runtime alone, `ours` one with the library."""

    def __init__(self, reference: Worker, ours: Worker) -> None:
        self._reference, self._ours = reference, ours

    def judge(self, case: DecoderCase) -> Verdict:
        """Runs a case on ONNX Runtime and on FlowNPU, and compares."""
        decoder = case.decoder
        try:
            expected, rounded = self.references(case)
        except Ended:
            return Verdict("ONNX Runtime's own crash")
        if expected.refusal is not None or any(isinstance(run, str) for run in expected.runs):
            return Verdict("ONNX Runtime refuses the decoder")
        try:
            found = self._ours.call(RUN, decoder, case.steps, case.capacity, case.options, case.optimise)
        except Ended as ended:
            return Verdict("ended", Finding(cause_of_end(ended, decoder.model), f"{ended.reason}\n{ended.report}"))
        return self.compare(case, expected, rounded, found)

    def references(self, case: DecoderCase) -> tuple[Outcome, Outcome]:
        """ONNX Runtime's logits, and those with rounded activations. Raises Ended."""
        model = with_rounded_activations(case.decoder.model, case.options["activations"])
        rounded = replace(case.decoder, model=model)
        plain, rough = (self._reference.call(RUN, of, case.steps, case.capacity) for of in (case.decoder, rounded))
        return plain, rough

    def compare(self, case: DecoderCase, expected: Outcome, rounded: Outcome, found: Outcome) -> Verdict:
        """Compares FlowNPU's logits (`found`) with both of ONNX Runtime's."""
        if found.refusal is not None:
            return Verdict("finding", Finding(f"refused: {words_of(found.refusal)}", found.refusal))
        category = "same"
        for place, (exact, rough, ours) in enumerate(zip(expected.runs, rounded.runs, found.runs, strict=False)):
            if isinstance(ours, str):
                return Verdict("finding", Finding(f"raises: {words_of(ours)}", f"step {place}: {ours}"))
            assert not isinstance(exact, str)
            assert not isinstance(rough, str)
            a, b, c = (run["logits"] for run in (exact, rough, ours))
            if a.shape != c.shape or a.dtype != c.dtype:
                text = f"step {place}: expected {a.dtype} {a.shape}, got {c.dtype} {c.shape}"
                return Verdict("finding", Finding("shape of logits", text))
            valid = self._valid(case, place, a)
            error, bound = row_errors(a, c, valid), self._bound(case, a, b, valid)
            if bound > np.std(a[valid]) / 2:
                category = "same, as far as roundings let one see"
            if not (error <= bound).all():
                row = int(np.argmax(~(error <= bound)))
                text = (
                    f"step {place} of {len(case.steps)}: row {row} of {len(error)} differs by {error[row]:.3g} (rms), "
                    f"expected at most {bound:.3g}; logits spread by {np.std(a[valid]):.3g}\n{describe(case)}"
                )
                return Verdict("finding", Finding(f"logits, {kind_of(case)}", text))
        return Verdict(category)

    def _valid(self, case: DecoderCase, place: int, logits: NDArray[Any]) -> NDArray[np.bool_]:
        """A mask, bool [B, S or 1], of the rows of logits that are not those of padding."""
        valid = np.ones(logits.shape[:2], bool)
        if place == 0 and case.decoder.all_logits:
            valid = np.arange(logits.shape[1]) < np.array(case.lengths)[:, None]
        return valid

    def _bound(self, case: DecoderCase, exact: NDArray[Any], rough: NDArray[Any], valid: NDArray[np.bool_]) -> float:
        measured = float(np.sqrt(np.square(exact.astype(np.float64) - rough)[valid].mean()))
        return ROUNDINGS * measured + float32_tolerance(exact[valid], case.decoder.layers, 256)


def row_errors(a: NDArray[Any], b: NDArray[Any], valid: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The rms difference of each valid row."""
    return np.asarray(np.sqrt(np.square(a.astype(np.float64) - b)[valid].mean(axis=-1)))


def kind_of(case: DecoderCase) -> str:
    """Properties of a case that tell causes apart, for a finding's signature."""
    words = ["in place" if case.capacity else "growing", f"batch {'1' if len(case.lengths) == 1 else 'of several'}"]
    return ", ".join(words)


def describe(case: DecoderCase) -> str:
    """A case as text."""
    calls = [f"{step.ids.shape[1]} after {step.past}" for step in case.steps]
    return (
        f"options {case.options}, optimise {case.optimise}, capacity {case.capacity}, lengths {case.lengths}, "
        f"calls of {', '.join(calls)}; {case.decoder.layers} layers, {case.decoder.kv_heads} KV heads of "
        f"{case.decoder.head_size}, cache type {case.decoder.cache}"
    )

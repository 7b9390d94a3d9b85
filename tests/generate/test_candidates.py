# SPDX-License-Identifier: Apache-2.0
"""The source and number of candidates, and the models that cannot have them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flownpu.errors import FlowNPUError
from flownpu.generate.language_model import LanguageModel
from flownpu.generate.speculative.budget import CandidateBudget, StepTimes
from flownpu.generate.speculative.lookup import Lookup
from flownpu.generate.speculative.model import Speculation


def test_lookup_continues_longest_latest_match() -> None:
    lookup = Lookup()
    #              0  1  2  3  4  5  6  7  8  9
    tokens = [9, 1, 2, 3, 4, 5, 7, 3, 4, 6]
    assert lookup.propose(tokens, 3) == []
    assert lookup.propose([*tokens, 3, 4], 2) == [6, 3]
    assert lookup.propose([*tokens, 3, 4, 8, 2, 3, 4], 3) == [5, 7, 3]
    assert Lookup().propose([1], 3) == []


def test_lookup_in_repeating_tokens_continues_repetition() -> None:
    assert Lookup().propose([5, 1, 2, 1, 2, 1, 2], 4) == [1, 2, 1, 2]
    assert Lookup().propose([0, 0, 0], 3) == [0, 0, 0]


def test_lookup_forgets_rewound_tokens() -> None:
    lookup = Lookup()
    lookup.propose([1, 2, 3, 4, 1, 2], 2)
    lookup.rewound(2)
    assert lookup.propose([1, 2, 7, 8, 9, 3, 4], 2) == []
    assert lookup.propose([1, 2, 7, 8, 9, 3, 4, 1, 2], 3) == [7, 8, 9]


def play(budget: CandidateBudget, steps: int, kept: float, row_cost: float) -> tuple[float, int]:
    """Seconds and tokens if a step takes 1 s, and `row_cost` s more a candidate; a share `kept` of them is right."""
    seconds, tokens, owed = 0.0, 0, 0.0
    while tokens < steps:
        count = budget.count()
        if count == 0:
            budget.times.add(1, 1.0)
            budget.stepped()
            seconds, tokens = seconds + 1, tokens + 1
            continue
        took = 1 + row_cost * count
        owed += kept * count
        good = min(count, int(owed))
        owed -= good
        budget.times.add(1 + count, took)
        budget.verified(count, good, 0.0)
        seconds, tokens = seconds + took, tokens + 1 + good
    return seconds, tokens


@pytest.mark.parametrize("row_cost", [0.05, 0.3, 1.0])
def test_wrong_candidates_cost_little(row_cost: float) -> None:
    """Candidates take a hundredth of the time. At the start, costs are unknown, and a step and a half and a few tries
    are lost.
    """
    seconds, tokens = play(CandidateBudget(StepTimes(), 3, 0.01), 1000, 0.0, row_cost)
    assert seconds <= 1.01 * tokens + 1.5 + 2 * 3 * row_cost
    # Candidates are still tried now and then.
    assert seconds > 1.002 * tokens


@pytest.mark.parametrize("row_cost", [0.05, 0.3])
def test_budget_tries_all_candidates_if_all_are_right(row_cost: float) -> None:
    seconds, tokens = play(CandidateBudget(StepTimes(), 3, 0.01), 400, 1.0, row_cost)
    assert tokens / seconds > 0.9 * 4 / (1 + 3 * row_cost)


def test_candidates_that_become_right_are_noticed() -> None:
    budget = CandidateBudget(StepTimes(), 3, 0.01)
    play(budget, 500, 0.0, 0.1)
    seconds, tokens = play(budget, 500, 1.0, 0.1)
    assert tokens / seconds > 2


def test_step_delayed_by_others_is_not_believed_at_once() -> None:
    times = StepTimes()
    for _ in range(5):
        times.add(1, 1.0)
    times.add(4, 40.0)
    assert times.cost(4) < 2
    for _ in range(60):
        times.add(4, 3.0)
    assert times.cost(4) == pytest.approx(3.0, rel=0.01)


def copy_of(folder: Path, to: Path, **model: object) -> Path:
    shutil.copytree(folder, to)
    settings = json.loads((to / "genai_config.json").read_text())
    settings["model"] |= model
    (to / "genai_config.json").write_text(json.dumps(settings))
    return to


def refused(folder: Path, *, lookup: bool = False, draft: Path | None = None, device: str | None = None) -> str:
    with pytest.raises(FlowNPUError) as error:
        LanguageModel(folder, speculation=Speculation(lookup, draft), options={"device": device} if device else None)
    return str(error.value)


def test_models_unable_to_verify_are_refused(topics: Path, converted: Callable[..., Path], tmp_path: Path) -> None:
    assert "is a paged model" in refused(converted(paged=True), lookup=True)
    assert "takes images" in refused(copy_of(topics, tmp_path / "seeing", vision={"filename": "v.onnx"}), lookup=True)
    assert "second table of rotations" in refused(copy_of(topics, tmp_path / "phi", type="phi3"), lookup=True)
    for device in ("npu", "emulate"):
        assert f"--device {device}, which computes one token a step" in refused(topics, lookup=True, device=device)


def test_models_unable_to_draft_are_refused(topics: Path, converted: Callable[..., Path], tmp_path: Path) -> None:
    assert "paged model" in refused(topics, draft=converted(paged=True))
    assert "cannot forget wrong candidates" in refused(topics, draft=converted(sliding_window_cache=True))
    assert "no such folder" in refused(topics, draft=tmp_path / "none")
    larger = copy_of(topics, tmp_path / "larger")
    with (larger / "model.onnx.data").open("ab") as data:
        data.write(bytes(4096))
    assert "is larger" in refused(topics, draft=larger)
    other = copy_of(topics, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has another tokenizer than the model" in (text := refused(topics, draft=other))
    assert "2 of 4096 tokens differ" in text


def test_unfit_graph_cannot_verify_candidates(topics: Path, tmp_path: Path) -> None:
    folder = copy_of(topics, tmp_path / "other")
    settings = json.loads((folder / "genai_config.json").read_text())
    import onnx_ir as ir

    model = ir.load(folder / "model.onnx")
    selection = next(node for node in model.graph if node.op_type == "GatherND")
    selection.op_type = "Gather"
    ir.save(model, folder / settings["model"]["decoder"]["filename"])
    assert "cannot verify candidates (expected a product with what a GatherND selects" in refused(folder, lookup=True)

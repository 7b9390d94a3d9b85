# SPDX-License-Identifier: Apache-2.0
"""Earlier findings, and some hundred random graphs; `make fuzz` runs more."""

import random
import re
from pathlib import Path

import onnx
import pytest

from flownpu import _native
from tests.fuzz.campaign import Campaign
from tests.fuzz.conftest import Workers
from tests.fuzz.findings import judge_saved, load_case
from tests.fuzz.graphs.strategy import HEAD_BYTES, INSTRUCTION_SETS, NODE_BYTES, alone, build, cases
from tests.fuzz.operators.table import FAMILIES
from tests.fuzz.oracle import Oracle
from tests.fuzz.worker import ROOT

CORPUS = sorted((Path(__file__).parents[1] / "corpus" / "graphs").glob("*.npz"))
CASES, SEED = 250, 20
# Cases of each operator, of which every fourth has arrays that several threads share. With ONNX's backend suite they
# check the numbers of the CPU's operators; tests/ops/cpu has what both lack: ends of types, roundings, refusals.
EACH = 24
OPERATORS = {f"{name}, {first}": (first, make) for family in FAMILIES for _, name, first, make in family.OPERATORS}


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_graphs_found_before_give_no_finding(path: Path, workers: Workers) -> None:
    case = load_case(path)
    if case.options["cpu_isa"] not in INSTRUCTION_SETS:
        case.options["cpu_isa"] = "auto"
    verdict = judge_saved(case, *workers)
    assert verdict.finding is None, verdict.finding.text


def test_random_graphs_give_no_finding(workers: Workers) -> None:
    found: list[str] = []
    campaign = Campaign(cases(), Oracle(*workers).judge, lambda _, finding: found.append(finding.text))
    campaign.run(CASES, SEED)
    assert not found
    # Most random graphs must run on both providers, or the test would prove little.
    assert campaign.counts["same"] > CASES / 2
    assert campaign.counts["ONNX Runtime's own crash"] < CASES / 20


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_random_graphs_of_one_operator_give_no_finding(name: str, workers: Workers) -> None:
    first, operator = OPERATORS[name]
    rng, oracle = random.Random(name), Oracle(*workers)
    verdicts = [oracle.judge(alone(operator, first, rng, large=i % 4 == 3)) for i in range(EACH)]
    assert not [verdict.finding.text for verdict in verdicts if verdict.finding is not None]
    # ONNX Runtime's CPU provider has no kernel of GroupNorm.
    assert name == "GroupNorm, 7" or sum("same" in verdict.category for verdict in verdicts) >= EACH / 4


def test_random_graphs_have_all_supported_operators() -> None:
    """Random graphs have every operator that the CPU device lists or lowers; a missing one would not be tested."""
    text = (ROOT / "ops/lowering/lowering.cc").read_text()
    taken = {contract.op_type for contract in _native.contracts()}
    taken |= set(re.findall(r'\{"(\w+)", \w+_obstacle\}', text))
    assert len(taken) > 60
    # PagedAttention's lengths and blocks have to agree in their values, which random ones do not; If is taken with
    # constant branches only, and QMoE as exports have it: tests/ops/ has them.
    taken -= {"PagedAttention", "If", "QMoE"}
    rng = random.Random(SEED)
    models = (build(rng.randbytes(HEAD_BYTES), [rng.randbytes(NODE_BYTES) for _ in range(8)]).model for _ in range(400))
    made = {node.op_type for model in models for node in onnx.load_from_string(model).graph.node}
    assert taken <= made, taken - made

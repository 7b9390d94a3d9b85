# SPDX-License-Identifier: Apache-2.0
"""Mistakes planted in the decode layer's plan: the checker or the emulator's numbers reveal each."""

import dataclasses
import re
from collections import Counter
from functools import cache

import numpy as np
import pytest

from flownpu.aie.check import check
from flownpu.aie.designs.decode_layer.design import WAYS, DecodeLayer, Layer
from flownpu.aie.plan.data import Await, Transfer
from tests.aie.designs.decode_layer.cases import case_of, run
from tests.aie.designs.decode_layer.shapes import SMALL, WINDOW, random_call
from tests.aie.designs.mutations import MUTATIONS, caught, ends_that_do_not_wait
from tests.aie.emulation import emulator
from tests.aie.small_programs import with_steps

# Fifos that the host fills: one of each name.
SENT = {"w_0_0", "vectors", "heads", "k_0", "v_0"}


@cache
def mistaken_case(way):
    """A layer at a position beyond its window, in which every stream, and with split keys every tile, has work.

    The tiles of column 0's span share rows of QKV, of gate and up, and of the down projection.
    """
    rng = np.random.default_rng(5)
    shape = dataclasses.replace(SMALL["gemma3, four KV heads"], hidden=800, feed_forward=896)
    if way == "pairs":
        return case_of(random_call(shape, rng, 130, [Layer(WINDOW)]), rng)
    # Four rounds of 70 keys, five a tile. The window begins among those of tile (0, 0), which also has the last three.
    # All tiles share 8 of 64 rows, 7 of 49 and 4 of 32.
    shape = dataclasses.replace(shape, hidden=1024, feed_forward=1568, d=128)
    return case_of(random_call(shape, rng, 212, [Layer(211)], way=way), rng)


# For each way, the mutants that change no result (a pattern of their names), with the reason.
TABLES = {r"heads_task\d+: stride 0 2$": "of a batch that brings a table the first head is read"}
EQUIVALENT = {
    "pairs": TABLES
    | {
        r"k_tile_\d_parameters\[3\]": "the key after the last is hidden as one of the future, too",
        r"k_tile_\d_parameters\[5\]": "a token at the end sees every key, causal or not",
        r"k_tile_\d_parameters\[7\]": "hides one key more of 64 from every second head, whose weight may be small",
    },
    "split": TABLES
    | {
        r"share_tile_\d_\d_parameters\[3\]": "the key after the last is hidden as one of the future, too",
        r"share_tile_0_0_parameters\[8\]": "the keys of its later objects are all seen, some further on, too",
        r"core \(0, [34]\): flow_kv_split_meet 4": "of m and l, which column 0 takes apart: in others it counts",
        r"share_tile_\d_\d_parameters\[[57]\]": "there is one query, which sees no later key: the words are FlowKV's",
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_planted_mistakes_are_caught(mutation, way):
    case = mistaken_case(way)
    sent = {step.name for step in case.plan.sequence.steps if isinstance(step, Transfer) and step.fifo in SENT}
    # Columns after the second differ from it in numbers only.
    columns = DecodeLayer(case.call.design.shape, way).attention.columns
    further = re.compile(rf"core \(([2-{columns - 2}]), ")
    for text, mutant in mutation(case.plan):
        if further.match(text):
            continue
        # A fill may be freed if a drain of its data was awaited: the checker knows when.
        known = mutation is ends_that_do_not_wait and text in sent
        # Projecting tiles differ in the sums and shares that they pass on; otherwise one represents all.
        another = re.match(r"core \((0, [245]|1, .|[67], [34])\)", text)
        another = another and not re.search(r"sum_|add_f32|share_|_meet|_give", text)
        if not known and not another and not any(re.match(name, text) for name in EQUIVALENT[way]):
            assert caught([case], mutant), text


def without_waiting(plan, fifos):
    """The plan with the first drain of each fifo awaited at the end, or the first two of a fifo listed twice."""
    first, left = [], Counter(fifos)
    for step in plan.sequence.steps:
        if isinstance(step, Transfer) and left[step.fifo]:
            left[step.fifo] -= 1
            first.append(Await(step.name))
    return with_steps(plan, *(step for step in plan.sequence.steps if step not in first), *first)


def result(way, plan, seed):
    """The state's bytes after a plan ran under a schedule on a way's case; "deadlock" for any error of the emulator."""
    try:
        state = run(emulator(plan.array), plan, seed=seed, **mistaken_case(way).call.buffers())["state"]
    except RuntimeError:
        return "deadlock"
    return state.tobytes()


@cache
def right_result(way):
    """The bytes that twenty schedules of the plan with all its waits agree on."""
    (right,) = {result(way, mistaken_case(way).plan, seed) for seed in range(20)}
    return right


@pytest.mark.parametrize(
    ("way", "fifos"),
    [
        # The products of QKV: first the rows that a span shares, then the streams' own.
        ("pairs", ("y_0", "y_1", "y_2", "y_3", "y_4")),
        ("pairs", ("key_value", "key_value")),
        ("pairs", ("o_0", "o_1")),
        ("split", tuple(f"y_{column}" for column in range(1, 7))),
    ],
    ids=str,
)
def test_missing_wait_is_caught_by_schedules(way, fifos):
    """Some schedule reads main memory before it is written, which the checker does not test."""
    hasty = without_waiting(mistaken_case(way).plan, fifos)
    assert check(hasty) == []
    assert any(result(way, hasty, seed) != right_result(way) for seed in range(20))

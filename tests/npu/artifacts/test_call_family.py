# SPDX-License-Identifier: Apache-2.0
"""The words of a call at a position: C++'s, from a family, against Python's."""

import numpy as np
import pytest

from flownpu.aie.designs.attention import sweep as design_sweep
from tests.npu.artifacts.folders import CallClass, Sweep, family_words
from tests.ops.device import testing

CallFamily = testing.npu.CallFamily


def test_call_without_position_gives_same_words():
    family = CallFamily.read(family_words([CallClass([7, -1, 2**62])], positions=100, name="rms_norm"))
    assert family.name == "rms_norm"
    assert family.positions == 100
    for position in (0, 99):
        assert family.words(position) == [7, -1, 2**62]
        assert family.patch(position) == []


def test_several_patches_of_word_add_up():
    classes = [CallClass([10, 20, 30], tasks=[1], patches=[(0, 0, 3), (2, 0, -1), (2, 1, 1000), (2, 2, 7)])]
    family = CallFamily.read(family_words(classes, [Sweep(window=8)], positions=64, keys=4, chunks_of_a_task=99))
    # Position 21 sees keys 14..21: chunks 3, 4 and 5.
    assert family.patch(21) == [(0, 10 + 3 * 21), (2, 30 - 21 + 3 * 1000 + 3 * 7)]
    assert family.words(21) == [10 + 3 * 21, 20, 30 - 21 + 3 * 1000 + 3 * 7]


@pytest.mark.parametrize("keys", [1, 16, 48])
@pytest.mark.parametrize(
    "sweeps",
    [
        [Sweep()],
        [Sweep(window=40)],
        [Sweep(queries=64, tokens=64, window=0), Sweep(queries=64, tokens=64, window=100)],
        [Sweep(offset=16 * part, queries=16, tokens=64, window=33) for part in range(4)],
    ],
    ids=["one", "window", "prompt", "parts of a prompt"],
)
def test_call_family_features_equal_sweeps_of_design(keys, sweeps):
    """Word n of every class is feature n."""
    positions, most = 700, 3

    def design_features(position):
        features, tasks = [position], []
        for part in sweeps:
            found = design_sweep(
                position + part.offset, part.queries, position + part.tokens, keys,
                window=part.window or None, causal=True, scale=1.0,
            )  # fmt: skip
            assert found.first_key % keys == 0
            features += [found.first_key // keys, found.chunks]
            tasks.append(-(-found.chunks // most))
        return features, tasks

    count = 1 + 2 * len(sweeps)
    tasks = sorted({tuple(design_features(position)[1]) for position in range(positions)})
    classes = [CallClass([0] * count, tasks=list(t), patches=[(n, n, 1) for n in range(count)]) for t in tasks]
    family = CallFamily.read(family_words(classes, sweeps, positions=positions, keys=keys, chunks_of_a_task=most))
    for position in range(positions):
        features, of_sweeps = design_features(position)
        assert family.words(position) == features
        assert tasks[family.class_of(position)] == tuple(of_sweeps)


def test_positions_without_words_are_refused():
    family = CallFamily.read(family_words([CallClass([1], tasks=[1])], [Sweep()], positions=9, keys=4))
    assert family.class_of(3) == 0
    for position in (-1, 9):
        with pytest.raises(
            RuntimeError, match=rf"call: expected a position of 0\.\.8, got {position}; build .* longer"
        ):
            family.class_of(position)
    with pytest.raises(RuntimeError, match="call has no words for position 4"):  # its sweep takes two tasks
        family.patch(4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (family_words([CallClass([1])])[:-1], "the family of calls ends in the middle"),
        (np.array([1, 2, 3, 4]), "the family of calls: these are no words that FlowNPU wrote"),
        (family_words([CallClass([1], patches=[(1, 0, 1)])]), "expected a number of one of 1 words, got 1"),
        (family_words([CallClass([1], patches=[(0, 1, 1)])]), "expected a number of one of 1 features, got 1"),
        (family_words([CallClass([1])], [Sweep()]), "a class has tasks of 0 sweeps, the call has 1"),
        (family_words([CallClass([1])], keys=0), "expected chunks and tasks of 1 or more, got 0 positions"),
        (family_words([CallClass([1], [1])], [Sweep(window=2**62)]), "a sweep has .* a window of 4611686018427387904"),
        (family_words([CallClass([1])], positions=-1), "expected positions, got -1"),
    ],
)
def test_damaged_family_is_refused(words, message):
    with pytest.raises(RuntimeError, match=message):
        CallFamily.read(words)

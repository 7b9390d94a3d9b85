# SPDX-License-Identifier: Apache-2.0
"""Families of calls: their words at each position are those of the call's program, or the derivation fails."""

from dataclasses import replace

import numpy as np
import pytest

from flownpu.aie.designs.common import RunTimeParameters
from flownpu.aie.designs.decode_layer.design import CalledLayer, DecodeLayer, LayerShape
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.emulator.flatten import flatten_array
from flownpu.aie.plan.limits import LIMITS
from flownpu.aie.programs.call_family import CallSweep, Choices, Positions, constant, derive
from tests.aie.words import read_family

MOST = LIMITS["npu2"].iteration_maximum
SHAPE = LayerShape(128, 4, 2, 32, 128, "swiglu")
FLOW = FlowQKV("npu2", 8, 4, 64)  # chunks of 32 positions; a round: two blocks of 128 tokens for four KV heads
DECODE_KEYS = DecodeLayer(SHAPE).attention.keys
DECODE_CAPACITY = (MOST + 2) * DECODE_KEYS  # sweeps over all keys take one task, later two
FLOW_CAPACITY = (MOST + 8) * FLOW.keys
TOKENS = 256


def decode_layer(position):
    layers = [CalledLayer(100, 0), CalledLayer(None, 1), CalledLayer(100, 0)]
    return DecodeLayer(SHAPE).program(position, DECODE_CAPACITY, layers=layers, vocabulary=256, tables=2)


def flow_qkv(window, **options):
    return lambda position: FLOW.program(TOKENS, position, FLOW_CAPACITY, window=window or None, **options)


def blocks(window):
    return tuple(CallSweep(top, 64, TOKENS, window) for top in range(0, TOKENS, 64))


# By name: a function from a position to the call's program, and the positions of its family.
CALLS = {
    "decode_layer": (
        decode_layer,
        Positions(DECODE_CAPACITY, DECODE_KEYS, MOST, (CallSweep(0, 1, 1, 100), CallSweep(0, 1, 1, 0))),
    ),
    "flow_qkv": (flow_qkv(0), Positions(FLOW_CAPACITY - TOKENS + 1, FLOW.keys, MOST, blocks(0))),
    "flow_qkv, window": (flow_qkv(50), Positions(FLOW_CAPACITY - TOKENS + 1, FLOW.keys, MOST, blocks(50))),
    "flow_qkv of a block": (  # all its queries see keys up to the last query's
        flow_qkv(50, causal=False),
        Positions(
            FLOW_CAPACITY - TOKENS + 1,
            FLOW.keys,
            MOST,
            tuple(CallSweep(top, TOKENS - top, TOKENS, 50) for top in range(0, TOKENS, 64)),
        ),
    ),
}


def words_of(program):
    """A function from a position to the emulator's words."""
    return lambda position: flatten(program(position).resolve_program("call"))


def flatten(plan):
    return flatten_array(plan.array).flatten(plan.sequence)


def boundaries(positions):
    """Positions around each change of a sweep's number of tasks and the first chunk's end, the ends, and others."""
    features = np.array([positions.features(position) for position in range(positions.count)])
    changes = {int(at) for at in np.flatnonzero(np.any(np.diff(positions.tasks(features), axis=0), axis=1))}
    others = np.random.default_rng(7).choice(positions.count, 8).tolist()
    firsts = [0, 1, positions.keys - 1, positions.keys, positions.keys + 1]
    found = {*firsts, *others, positions.count - 1, *changes, *(at + 1 for at in changes)}
    return sorted(at for at in found if at < positions.count)


@pytest.mark.parametrize("name", CALLS)
def test_family_gives_words_of_program(name):
    program, positions = CALLS[name]
    words = words_of(program)
    family = derive(words, positions)
    assert len(family.classes) == {"decode_layer": 2, "flow_qkv": 5}.get(name, 1)
    for position in boundaries(positions):
        np.testing.assert_array_equal(family.at(position), words(position), err_msg=str(position))


@pytest.mark.parametrize("window", [0, 1, 5, 64, 200])
@pytest.mark.parametrize("keys", [16, 64])
def test_features_equal_keys_that_queries_see(window, keys):
    sweeps = (CallSweep(0, 1, 1, window), CallSweep(32, 16, 64, window))
    positions = Positions(500, keys, MOST, sweeps)
    for position in range(0, 500, 7):
        expected = [position]
        for part in sweeps:
            queries = range(position + part.offset, position + part.offset + part.queries)
            total = position + part.tokens
            seen = {key for q in queries for key in range(max(0, q - window + 1) if window else 0, min(q + 1, total))}
            expected += [min(seen) // keys, max(seen) // keys - min(seen) // keys + 1]
        assert positions.features(position) == expected


# --- What is refused --------------------------------------------------------------------------------------------------

SWEPT = Positions(600, 64, 4, (CallSweep(0, 1, 1, 100), CallSweep(0, 1, 1, 0)))


def affine(position):
    _, first, chunks, _, all_chunks = SWEPT.features(position)
    return np.array([7, 3 * position - 5, first * 4096, chunks, -all_chunks, 9])


def test_words_that_follow_feature_are_found():
    family = derive(affine, SWEPT)
    assert {members.tasks for members in family.classes} == {(1, 1), (1, 2), (1, 3)}
    for position in range(SWEPT.count):
        np.testing.assert_array_equal(family.at(position), affine(position))


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (lambda position: position * position, r"expected word 5 to follow one of the features, got 0 at 0, "),
        (lambda position: position // 2, r"expected word 5 to follow one of the features, got 0 at 0, "),
        # This word differs only at the last position of a class, which is a sample or is compared afterwards.
        (lambda position: position == 255, r"expected word 5 to (be 0 at position 255|follow one of the features)"),
    ],
)
def test_word_that_follows_no_feature_is_refused(planted, message):
    def words(position):
        return np.array([*affine(position)[:5], planted(position)])

    with pytest.raises(ValueError, match=message):
        derive(words, SWEPT)


def test_words_follow_each_chosen_expert():
    """Derived from samples, the words of a call of experts are those of its program for any choice."""
    design = DecodeLayer(replace(SHAPE, experts=3))
    choices = Choices.of(9, 3)
    array = flatten_array(design.of_experts([0, 0, 0], 9).resolve_program("experts").array)

    def words(chosen):
        return array.flatten(design.of_experts(chosen, 9).resolve_program("experts").sequence)

    family = derive(lambda sample: words(choices.chosen(sample)), choices)
    (members,) = family.classes
    assert {patch.feature for patch in members.patches} == {1, 2, 3}
    for chosen in ([0, 1, 2], [8, 8, 0], [3, 7, 5]):
        np.testing.assert_array_equal(members.at(np.array([0, *chosen])), words(chosen))


def test_steps_that_differ_are_refused():
    with pytest.raises(ValueError, match="expected 6 words at position 128, as at 0, got 7: their sweeps"):
        derive(lambda position: np.arange(6 + (position > 0)), SWEPT)


def test_parameter_left_out_at_equal_positions_is_refused(monkeypatch):
    """At first, layers with and without a window see the same chunks, so one's parameters would not be written."""
    write = RunTimeParameters.write
    monkeypatch.setattr(RunTimeParameters, "write", lambda self, core, words, **_: write(self, core, words))
    program, positions = CALLS["decode_layer"]
    with pytest.raises(ValueError, match="so their steps must be the same"):
        derive(words_of(program), positions)


def test_position_outside_family_is_refused():
    with pytest.raises(ValueError, match=r"expected a position in 0..599, got 600"):
        derive(affine, SWEPT).at(600)


# --- Compiled words ---------------------------------------------------------------------------------------------------


def compiled(position):
    """Words as a compiler writes them: stride 0 where the last task of the sweep over all keys has a lone chunk."""
    words = affine(position)
    words[0] = 0 if -words[4] % SWEPT.chunks_of_a_task == 1 else 7
    return words


def test_stride_of_lone_chunk_is_taken_from_others():
    with pytest.raises(ValueError, match="expected word 0"):
        derive(compiled, SWEPT)
    family = derive(compiled, SWEPT, lone_chunks=False)
    for position in range(SWEPT.count):
        if position < 512:  # two to four chunks have the same stride, so the stride does not follow their number
            np.testing.assert_array_equal(family.at(position), affine(position))
        else:  # one or two chunks: the stride may follow their number
            np.testing.assert_array_equal(family.at(position), compiled(position))


def test_difference_at_lone_chunk_is_refused():
    """Planted at a position with lone chunks, in a word that follows a feature at all other positions."""

    def words(position):
        found = compiled(position)
        found[3] += position == 63
        return found

    with pytest.raises(ValueError, match="expected word 3"):
        derive(words, SWEPT, lone_chunks=False, checks=1000)


def test_word_explained_by_lone_chunk_alone_is_refused():
    """Without the positions with a lone chunk nothing shows which words follow the second sweep's features."""
    positions = Positions(8, 2, 2, (CallSweep(0, 1, 1, 0), CallSweep(0, 1, 1, 3)))
    with pytest.raises(ValueError, match="expected word 0 to follow one of the features"):
        derive(lambda position: np.array([position in (1, 5)]), positions, lone_chunks=False)


# --- The file ---------------------------------------------------------------------------------------------------------


def test_family_survives_file():
    family = derive(affine, SWEPT)
    name, identity, found = read_family(family.flatten("layers0-5", 1234))
    assert (name, identity, found.positions) == ("layers0-5", 1234, SWEPT)
    for position in range(0, SWEPT.count, 13):
        np.testing.assert_array_equal(found.at(position), affine(position))


def test_call_without_position_has_one_class():
    family = constant(np.array([1, 2, 3]), 512)
    _, _, found = read_family(family.flatten("gemm", 5))
    assert [len(members.patches) for members in found.classes] == [0]
    np.testing.assert_array_equal(found.at(511), [1, 2, 3])

# SPDX-License-Identifier: Apache-2.0
"""Instructions put together from those of a few positions equal a compiler's instructions at each position."""

import numpy as np
import pytest

from flownpu.aie.artifacts.instruction_pieces import InstructionPieces, PieceError
from flownpu.aie.check.sequence import contiguous, descriptor, iteration_stride
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.plan.data import Await, Free, SetBarrier, Transfer, WriteParameter
from flownpu.aie.plan.instructions import (
    BLOCK_WRITE,
    HEADER_WORDS,
    MASK_WRITE,
    PATCH,
    SYNC,
    WORD_BYTES,
    WRITE,
    operations,
    operations_of_step,
    words_of_steps,
)
from flownpu.aie.plan.limits import LIMITS
from flownpu.aie.programs.call_family import CallSweep, Positions, derive
from tests.aie.programs.test_call_family import CALLS
from tests.aie.small_programs import chain

# The most compilations that a call may need; its classes are derived from as many as 363 positions.
FEW = 12


def compiled(plan):
    """Instructions as a compiler would write them that takes the lowest free descriptor of a tile."""
    tiles = {fifo.name: fifo.producer.tile if fifo.producer.tile.row == 0 else fifo.consumers[0].tile
             for fifo in plan.array.fifos}  # fmt: skip
    names = {name: number for number, name in enumerate(sorted(tiles))}
    arguments = {buffer.name: number for number, buffer in enumerate(plan.sequence.buffers)}
    barriers = {barrier.name: number for number, barrier in enumerate(plan.array.barriers)}
    parameters = {buffer.name: number for number, buffer in enumerate(plan.array.buffers)}
    free = {tile: list(range(20)) for tile in tiles.values()}
    live, found = {}, []
    for step in plan.sequence.steps:
        match step:
            case Transfer():
                tile = tiles[step.fifo]
                number = min(free[tile])
                free[tile].remove(number)
                live[step.name] = tile, number, step.fifo
                repeats, walk = descriptor(step.tap)
                length = step.tap.elements // repeats
                layout = [0] * 6
                if not (repeats == 1 and contiguous(walk)):
                    pairs = [(part.size << 20 | part.stride * (part.size > 1)) for part in walk]
                    layout = [0] * (4 - len(pairs)) + pairs + [(repeats - 1) << 20, iteration_stride(step.tap)]
                place = 0x1D000 + 32 * number + (tile.column << 25)
                found.append([BLOCK_WRITE, 0, place, 48, length, step.tap.offset, *layout])
                found.append([PATCH, 48, 0, 0, 0, 0, place + 4, 0, arguments[step.buffer], 0, 2 * step.tap.offset, 0])
                if step.token:
                    found.append([MASK_WRITE, 0, names[step.fifo], 0, 1, 2, 28])
                found.append([WRITE, 0, names[step.fifo], 0, (repeats - 1) << 16 | number, 24])
            case Await() | Free():
                tile, number, fifo = live.pop(step.transfer)
                free[tile].append(number)
                found += [[SYNC, 16, names[fifo], 0]] * isinstance(step, Await)
            case WriteParameter():
                found.append([WRITE, 0, parameters[step.buffer] << 8 | step.index, 0, step.value, 24])
            case SetBarrier():
                found.append([WRITE, 0, 1 << 20 | barriers[step.barrier], 0, step.value, 24])
    words = [word for operation in found for word in operation]
    return np.array([1, 8, len(found), WORD_BYTES * (HEADER_WORDS + len(words)), *words], np.int64)


def pieces_of(name, make=compiled):
    """A call of programs/test_call_family.py: its pieced words, a function from position to plan, its positions."""
    program, positions = CALLS[name]

    def plan(position):
        return program(position).resolve_program("call")

    words = InstructionPieces(plan(0).array, lambda at: plan(at).sequence.steps, lambda at: make(plan(at)))
    return words, plan, positions


@pytest.mark.parametrize("name", CALLS)
def test_pieced_words_equal_compiler_at_all_positions(name):
    words, plan, positions = pieces_of(name)
    words.compile(positions.count - 1)
    family = derive(words, positions, checks=1, lone_chunks=False)
    assert len(words.compiled) <= FEW
    for position in np.random.default_rng(1).choice(positions.count, 6).tolist():
        expected = compiled(plan(position))
        np.testing.assert_array_equal(words(position), expected, err_msg=str(position))
        differ = family.at(position) != expected  # strides of dimensions of size 1, which the compiler leaves 0
        assert not expected[differ].any()


def test_longer_context_costs_one_compilation_more():
    """A call with four times the tasks, in a longer context, needs one compilation more at most."""
    flow = FlowKV("npu2", 8, 4, 64)
    most = LIMITS["npu2"].iteration_maximum
    counts = []
    for capacity in (4 * most * flow.keys, 16 * most * flow.keys):

        def plan(position, capacity=capacity):
            return flow.program(position + 1, capacity).resolve_program("call")

        words = InstructionPieces(plan(0).array, lambda at: plan(at).sequence.steps, lambda at: compiled(plan(at)))
        positions = Positions(capacity, flow.keys, most, (CallSweep(0, 1, 1, 0),))
        words.compile(capacity - 1)
        assert len(derive(words, positions, checks=1, lone_chunks=False).classes) == capacity // most // flow.keys
        counts.append(len(words.compiled))
    assert counts[1] <= counts[0] + 1 <= FEW


def test_unexpected_words_of_compiler_are_refused():
    """Other operations, and words that disagree with the steps' numbers, are errors."""

    def squares(plan):
        words = compiled(plan)
        for code, part in operations(words):
            if code == PATCH:
                part[3] = part[10] ** 2 % 2**31
        return words

    def in_another_order(plan):
        words = compiled(plan)
        return np.concatenate([words[:HEADER_WORDS], words[-4:], words[HEADER_WORDS:-4]])

    for make, message in ((squares, "that follow its numbers"), (in_another_order, "expected operations")):
        words, _, positions = pieces_of("flow_qkv", make)
        with pytest.raises(PieceError, match=message):
            [words.compile(position) for position in range(0, positions.count, positions.count // 7)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda words: words[:-1], "expected .* bytes by the header"),
        (lambda words: words[:2], "expected 8 bytes by the header, got no header"),
        (lambda words: np.where(words == SYNC, 5, words), "expected an operation of .* at word .*, got 5"),
        (lambda words: np.concatenate([words[:2], [3], words[3:]]), "expected .* operations by the header, got 3"),
    ],
)
def test_damaged_streams_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        operations(change(compiled(chain())))


def test_operations_equal_those_of_steps():
    plan = chain()
    codes = [code for step in plan.sequence.steps for code in operations_of_step(step)]
    assert [code for code, _ in operations(compiled(plan))] == codes
    assert words_of_steps(plan.sequence.steps) == len(compiled(plan))

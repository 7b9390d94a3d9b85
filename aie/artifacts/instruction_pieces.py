# SPDX-License-Identifier: Apache-2.0
"""A call's instructions at any position, put together from pieces of those that were compiled at a few positions.

Each step of a sequence becomes the same operations wherever it stands (plan/instructions.py), and a compiler sees few
*numbers* of it: a transfer's offset, sizes, repetitions and descriptor, or a parameter's value. Steps that differ only
in their numbers, fifos, buffers or parameters have one *form*; those that also have the same fifo and buffer, or the
same parameter, are of one *kind*. For two steps of one kind

    words of a step = words of the other + M (numbers of the step - numbers of the other)

with one matrix M for each form. Nothing of M is assumed: it is known only for differences that are combinations of
those seen in compiled positions. A position with a step whose difference is none of these is compiled, too; so each
position's words are either put together from what is known, or compiled. That words follow no such rule is noticed
where compiled positions hold more steps than are needed to find M.

The number of a descriptor is not in a plan. A compiler takes the lowest that is free on its tile, and an await or a
free gives it back (mlir-aie, lib/Dialect/AIEX/Transforms/AIEAssignRuntimeSequenceBDIDs.cpp).
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flownpu.aie.check.sequence import contiguous, descriptor, iteration_stride
from flownpu.aie.plan.data import Await, Free, SetBarrier, Transfer, WriteParameter
from flownpu.aie.plan.instructions import HEADER_WORDS, WORD_BYTES, operations, operations_of_step

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from numpy.typing import NDArray

    from flownpu.aie.plan.data import Array, Step, Tile

    Integers = NDArray[np.int64]


class PieceError(ValueError):
    """A compiler's words do not consist of known pieces; the message describes the finding."""


class _Piece(NamedTuple):
    """A step as a compiler sees it.

    Attributes:
        kind: its form, and the fifo and buffer, the parameter or the barrier that it is for.
        form: all that its words depend on, apart from these and the numbers.
        numbers: what its words change with in proportion.
        codes: the codes of its operations.
    """

    kind: Hashable
    form: Hashable
    numbers: tuple[int, ...]
    codes: tuple[int, ...]


class InstructionPieces:
    """The instructions of a call at any position.

    Attributes:
        compiled: positions that were compiled, in that order.
    """

    def __init__(
        self,
        array: Array,
        steps: Callable[[int], Sequence[Step]],
        compiler: Callable[[int], Integers],
    ) -> None:
        """Compiles nothing yet.

        Args:
            array: the call's array.
            steps: gives the steps of the call's sequence at a position.
            compiler: gives the instructions that are compiled for a position.
        """
        self._fifos = {fifo.name: fifo for fifo in array.fifos}
        self._steps, self._compiler = steps, compiler
        self._examples: dict[Hashable, tuple[tuple[int, ...], Integers]] = {}  # by kind
        self._rules: defaultdict[Hashable, _Rule] = defaultdict(_Rule)  # by form
        self._words: dict[int, Integers] = {}
        self._header = np.zeros(HEADER_WORDS, np.int64)

    @property
    def compiled(self) -> list[int]:
        """Positions that were compiled, in that order."""
        return list(self._words)

    def __call__(self, position: int) -> Integers:
        """The words of a position, which is compiled if they cannot be known.

        Raises:
            PieceError: the compiler's words are not made of pieces that this module knows.
        """
        if position in self._words:
            return self._words[position]
        found = self.known(position)
        return self.compile(position) if found is None else found

    def known(self, position: int) -> Integers | None:
        """The words of a position as they follow from compiled positions; None: they do not."""
        parts, count = [self._header], 0
        for piece in self._pieces(position):
            words = self._known(piece)
            if words is None:
                return None
            parts.append(words)
            count += len(piece.codes)
        found = np.concatenate(parts)
        found[2], found[3] = count, len(found) * WORD_BYTES
        return found

    def compile(self, position: int) -> Integers:
        """The words that the compiler makes of a position; those of other positions may then follow from them.

        Raises:
            PieceError: its operations are not those of the steps, or differ from what follows from other positions.
        """
        words = self._words[position] = self._compiler(position)
        try:
            left = iter(operations(words))
        except ValueError as error:
            raise PieceError(str(error)) from error
        self._header = words[:HEADER_WORDS].copy()
        for piece in self._pieces(position):
            taken = [next(left, (-1, words[:0])) for _ in piece.codes]
            if tuple(code for code, _ in taken) != piece.codes:
                got = [code for code, _ in taken]
                raise PieceError(
                    f"[instruction_pieces] expected operations {list(piece.codes)} of {piece.kind} at position "
                    f"{position}, got {got}"
                )
            if taken:
                self._learn(piece, np.concatenate([part for _, part in taken]), position)
        if (more := next(left, None)) is not None:
            raise PieceError(f"[instruction_pieces] expected no operation behind the last step, got {more[0]}")
        return words

    def _known(self, piece: _Piece) -> Integers | None:
        if not piece.codes:
            return self._header[:0]
        example = self._examples.get(piece.kind)
        if example is None:
            return None
        numbers, words = example
        if numbers == piece.numbers:
            return words
        more = self._rules[piece.form].more(_difference(piece.numbers, numbers))
        return None if more is None else words + more

    def _learn(self, piece: _Piece, words: Integers, position: int) -> None:
        numbers, example = self._examples.setdefault(piece.kind, (piece.numbers, words))
        if not self._rules[piece.form].learn(_difference(piece.numbers, numbers), words - example):
            raise PieceError(
                f"[instruction_pieces] expected words of {piece.kind} at position {position} that follow its numbers "
                f"{piece.numbers}, as elsewhere, got {words.tolist()}"
            )

    def _pieces(self, position: int) -> Iterator[_Piece]:
        """The steps of a position; a transfer takes the lowest descriptor number that is free on its tile."""
        used: defaultdict[Tile, set[int]] = defaultdict(set)
        live: dict[str, tuple[Tile, int]] = {}
        fifos: dict[str, str] = {}
        for step in self._steps(position):
            codes = operations_of_step(step)
            match step:
                case Transfer():
                    tile = self._shim_tile(step.fifo)
                    number = next(n for n in range(len(used[tile]) + 1) if n not in used[tile])
                    used[tile].add(number)
                    live[step.name], fifos[step.name] = (tile, number), step.fifo
                    yield self._transfer(step, number, codes)
                case Await() | Free():
                    if step.transfer in live:
                        tile, number = live.pop(step.transfer)
                        used[tile].discard(number)
                    yield _Piece((type(step).__name__, fifos[step.transfer]), type(step).__name__, (), codes)
                case WriteParameter():
                    yield _Piece((WriteParameter, step.buffer, step.index), WriteParameter, (step.value,), codes)
                case SetBarrier():
                    yield _Piece((SetBarrier, step.barrier), SetBarrier, (step.value,), codes)

    def _transfer(self, step: Transfer, number: int, codes: tuple[int, ...]) -> _Piece:
        """A transfer as mlir/module.py prints it: repetitions, a run of neighbours or dimensions."""
        fifo = self._fifos[step.fifo]
        repeats, walk = descriptor(step.tap)
        run = repeats == 1 and contiguous(walk)
        sizes = (step.tap.elements,) if run else tuple(dimension.size for dimension in walk)
        # A compiler writes a dimension of size 1 without its stride, so whether it has size 1 belongs to the form.
        layout = () if run else tuple((dimension.size == 1, dimension.stride) for dimension in walk)
        between = iteration_stride(step.tap) if repeats > 1 else 0
        form = (Transfer, fifo.type.dtype, step.token, run, layout, repeats == 1, between)
        return _Piece((step.fifo, step.buffer, form), form, (step.tap.offset, *sizes, repeats, number), codes)

    def _shim_tile(self, name: str) -> Tile:
        fifo = self._fifos[name]
        return next(end.tile for end in (fifo.producer, *fifo.consumers) if end.tile.row == 0)


def _difference(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(left, right, strict=True))


class _Rule:
    """The known part of M: the change of words with numbers, for combinations of observed differences.

    Differences are kept in echelon form: each has a number, its pivot, that is 1 in it and 0 in those after it.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, list[Fraction], NDArray[np.object_]]] = []
        self._same: dict[tuple[int, ...], Integers] = {}

    def more(self, numbers: tuple[int, ...]) -> Integers | None:
        """The change of words for a difference of numbers; None if it is not known."""
        if numbers not in self._same:
            left, words = self._reduced(numbers)
            if any(left) or any(word.denominator != 1 for word in words):
                return None
            self._same[numbers] = np.array([int(word) for word in words], np.int64)
        return self._same[numbers]

    def learn(self, numbers: tuple[int, ...], words: Integers) -> bool:
        """Adds an observation; False if it contradicts earlier ones."""
        if not any(numbers):
            return not words.any()
        if (seen := self.more(numbers)) is not None:
            return np.array_equal(seen, words)
        left, known = self._reduced(numbers)
        if not any(left):  # `more` knows the change, but not in whole numbers
            return False
        pivot = next(place for place, value in enumerate(left) if value)
        scale = left[pivot]
        rest = np.array([Fraction(int(word)) for word in words], object) - known
        self._rows.append((pivot, [value / scale for value in left], rest / scale))
        return True

    def _reduced(self, numbers: tuple[int, ...]) -> tuple[list[Fraction], NDArray[np.object_]]:
        """The remainder of `numbers` after subtracting multiples of the rows, and the words of these multiples."""
        left = [Fraction(number) for number in numbers]
        words: NDArray[np.object_] = np.array([Fraction(0)], object)
        for pivot, row, change in self._rows:
            if times := left[pivot]:
                left = [value - times * other for value, other in zip(left, row, strict=True)]
                words = words + times * change
        return left, words

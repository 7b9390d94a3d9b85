# SPDX-License-Identifier: Apache-2.0
"""The words of a call for every position in a context, derived from its programs at some of them.

What the host sends for a call, the *words* (a flat sequence of the emulator, or the instructions of the NPU's
controller), depends on how many tokens came before the call. Only a few words do: offsets and lengths of what is read
of the KV cache, and run-time parameters. A **family** holds the words once for each *class* of positions and says which
of them change with the position, and how:

    word = base + coefficient x feature

The features of a position are the position itself and, for each *sweep* of the call over the cache
(designs/attention.py), the number of its first chunk and how many chunks it has. Positions are of one class if each
sweep takes the same number of tasks, of at most `chunks_of_a_task` chunks: then their programs have the same steps.

Nothing is known here of what a word means. The sample positions of a class are chosen such that no two features that
differ in it are proportional to one another on the samples, so a word that follows one of them follows only that one;
further positions are compared in full. Words that follow none are an error.

Words of a call of experts follow the experts' numbers instead, which the host knows when a token comes (`Choices`).

A compiler omits the stride of a dimension of size one. So where a sweep's last task has a *lone chunk*, some words
differ that do not matter there, and they follow no feature. In compiled words (`lone_chunks=False`) these are derived
from the positions without a lone chunk; at positions with one, they then hold a stride that is not used.

The file (kind FAMILY of words/writer.py), which ops/npu/artifacts/call_family.h reads:

    text name; identity of the array; positions; keys; chunks_of_a_task; choices
    sweeps: offset, queries, tokens, window (0: all keys)
    classes: list of tasks, list of words; patches: word, feature, coefficient
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flownpu.aie.designs.attention import sweep
from flownpu.aie.words.writer import FAMILY, WordWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Integers = NDArray[np.int64]


class CallSweep(NamedTuple):
    """One sweep of a call: with its first token at p, queries from p + offset on attend to keys below p + tokens.

    Attributes:
        offset: tokens from the call's first one to the first query.
        queries: how many queries sweep together.
        tokens: tokens of the call.
        window: keys that a query sees, its own included; 0: all.
    """

    offset: int
    queries: int
    tokens: int
    window: int


@dataclass(frozen=True)
class Positions:
    """The positions that a call's first token may have, and what its words may depend on.

    Attributes:
        count: positions 0 .. count - 1.
        keys: positions of a chunk.
        chunks_of_a_task: the most chunks that a task has.
        sweeps: the call's sweeps.
    """

    count: int
    keys: int = 1
    chunks_of_a_task: int = 1
    sweeps: tuple[CallSweep, ...] = ()

    def features(self, position: int) -> list[int]:
        """[position, then for each sweep its first chunk and its number of chunks]."""
        found = [position]
        for part in self.sweeps:
            chunks = sweep(
                position + part.offset, part.queries, position + part.tokens, self.keys,
                window=part.window or None, causal=True, scale=1.0,
            )  # fmt: skip
            found += [chunks.first_key // self.keys, chunks.chunks]
        return found

    def tasks(self, features: Integers) -> Integers:
        """For the features of positions [..., 1 + 2 sweeps]: the tasks of each sweep [..., sweeps]."""
        return -(-features[..., self.lengths] // self.chunks_of_a_task)

    @property
    def lengths(self) -> slice:
        """The features that are sweeps' numbers of chunks."""
        return slice(2, 2 + 2 * len(self.sweeps), 2)

    @property
    def choices(self) -> int:
        """How many features follow those of the position, which the host gives with each call."""
        return 0


@dataclass(frozen=True)
class Choices(Positions):
    """Samples of the experts that a token may choose, in place of positions, on which the words do not depend.

    The first sample chooses expert 0 only, each of the next ones expert 1 in one place; the last has chosen at random.

    Attributes:
        experts: experts to choose from, two or more.
        places: experts of a choice.
    """

    experts: int = 2
    places: int = 1

    @classmethod
    def of(cls, experts: int, places: int) -> Choices:
        """Choices of `places` among `experts` experts."""
        return cls(places + 2, experts=experts, places=places)

    def chosen(self, sample: int) -> list[int]:
        """The experts of a sample."""
        if sample > self.places:
            return random.Random(0).choices(range(self.experts), k=self.places)  # noqa: S311
        return [int(place == sample - 1) for place in range(self.places)]

    def features(self, position: int) -> list[int]:
        """[0, then the experts]."""
        return [0, *self.chosen(position)]

    @property
    def choices(self) -> int:
        """See `Positions.choices`."""
        return self.places


class Patch(NamedTuple):
    """A word that changes: by `coefficient` with each step of a feature."""

    word: int
    feature: int
    coefficient: int


@dataclass(frozen=True)
class WordClass:
    """The words of the positions of a class.

    Attributes:
        tasks: how many tasks each sweep takes: what the class's positions have in common.
        words: their words; those that `patches` change, as they would be with all features 0.
        patches: the words that change with the position.
    """

    tasks: tuple[int, ...]
    words: Integers
    patches: tuple[Patch, ...]

    def at(self, features: Integers) -> Integers:
        """The words for these features."""
        words = self.words.copy()
        for patch in self.patches:
            words[patch.word] += patch.coefficient * features[patch.feature]
        return words


@dataclass(frozen=True)
class CallFamily:
    """The words of a call for all positions, by class."""

    positions: Positions
    classes: tuple[WordClass, ...]

    def at(self, position: int) -> Integers:
        """The words of a position.

        Raises:
            ValueError: there is no such position.
        """
        if not 0 <= position < self.positions.count:
            raise ValueError(f"[call_family] expected a position in 0..{self.positions.count - 1}, got {position}")
        features = np.array(self.positions.features(position))
        tasks = tuple(self.positions.tasks(features).tolist())
        return next(members for members in self.classes if members.tasks == tasks).at(features)

    def flatten(self, name: str, identity: int) -> Integers:
        """The words of the family's file.

        Args:
            name: the call's name.
            identity: the identity of the array that the call is for.
        """
        words = WordWriter()
        words.text(name)
        positions = self.positions
        words.add(identity, positions.count, positions.keys, positions.chunks_of_a_task, positions.choices)
        words.add(len(positions.sweeps))
        for part in positions.sweeps:
            words.add(*part)
        words.add(len(self.classes))
        for members in self.classes:
            words.list(members.tasks)
            words.list(members.words.tolist())
            words.add(len(members.patches))
            for patch in members.patches:
                words.add(*patch)
        return words.finish(FAMILY, identity)


def constant(words: Integers, count: int) -> CallFamily:
    """The family of a call whose words are the same at all `count` positions."""
    return CallFamily(Positions(count), (WordClass((), words.astype(np.int64), ()),))


def derive(
    words: Callable[[int], Integers], positions: Positions, *, checks: int = 3, lone_chunks: bool = True
) -> CallFamily:
    """Derive a family from what a call's words are at some positions.

    Args:
        words: gives the call's words for the position of its first token.
        positions: all positions of the call.
        checks: positions of each class that are compared besides the samples: its last, and others at random.
        lone_chunks: whether all words matter where a sweep's last task has one chunk, as the emulator's words do; False
            for compiled words.

    Raises:
        ValueError: the words of a class differ in number, or a word follows none of the features: names the word and
            the positions.
    """
    features = np.array([positions.features(position) for position in range(positions.count)])
    tasks, members = np.unique(positions.tasks(features), axis=0, return_inverse=True)
    classes = []
    for number, tasks_of_class in enumerate(tasks.tolist()):
        of_class = np.flatnonzero(members.reshape(-1) == number)
        lone = features[of_class, positions.lengths] % positions.chunks_of_a_task == 1
        lone &= ~lone.all(axis=0) & (not lone_chunks)
        classes.append(_Class(words, of_class, features[of_class], lone).derive(tuple(tasks_of_class), checks))
    return CallFamily(positions, tuple(classes))


@dataclass(frozen=True)
class _Class:
    """The positions of a class.

    Attributes:
        words: gives the call's words at any position.
        positions: [n].
        features: of each position [n, features].
        lone: where a sweep has a lone chunk that it does not always have [n, sweeps]; all False unless the words are
            compiled.
    """

    words: Callable[[int], Integers]
    positions: Integers
    features: Integers
    lone: NDArray[np.bool_]

    def derive(self, tasks: tuple[int, ...], checks: int) -> WordClass:
        """The class's words, derived from samples and compared at some other positions."""
        subsets = self._subsets()
        rows = np.unique([row for subset in subsets.values() for row in subset[_samples(self.features[subset])]])
        values = np.stack(self._equally_many(rows))
        derived, loose = self._fit(rows, values, subsets, tasks)
        left = np.setdiff1d(np.arange(len(self.positions)), rows).tolist()
        # The last position, and others at random, the same ones each time.
        chosen = left[-1:] + random.Random(0).sample(left[:-1], max(0, min(checks, len(left)) - 1))  # noqa: S311
        for row in chosen:
            self._verify(derived, row, loose)
        return derived

    def _subsets(self) -> dict[int, Integers]:
        """Rows from which words are derived: -1, all; sweep number, those where that sweep has no lone chunk.

        A sweep is left out if without its positions of lone chunks fewer features could be told apart.
        """
        subsets = {-1: np.arange(len(self.positions))}
        for number in np.flatnonzero(self.lone.any(axis=0)).tolist():
            rows = np.flatnonzero(~self.lone[:, number])
            if len(_kinds(self.features[rows])) == len(_kinds(self.features)):
                subsets[number] = rows
        return subsets

    def _equally_many(self, rows: Integers) -> list[Integers]:
        """The words of some positions."""
        found = [np.asarray(self.words(position), np.int64) for position in self.positions[rows].tolist()]
        for position, here in zip(self.positions[rows], found, strict=True):
            self._require_as_many(here, len(found[0]), int(position))
        return found

    def _require_as_many(self, words: Integers, count: int, position: int) -> None:
        if len(words) != count:
            raise ValueError(
                f"[call_family] expected {count} words at position {position}, as at {self.positions[0]}, got "
                f"{len(words)}: their sweeps take equally many tasks, so their steps must be the same"
            )

    def _fit(
        self, rows: Integers, values: Integers, subsets: dict[int, Integers], tasks: tuple[int, ...]
    ) -> tuple[WordClass, dict[int, list[int]]]:
        """The class, and for each sweep the words that do not matter if that sweep has a lone chunk."""
        base, patches = values[0].copy(), list[Patch]()
        loose: dict[int, list[int]] = {number: [] for number in subsets}
        features = self.features[rows]
        inside = {number: np.isin(rows, subset) for number, subset in subsets.items()}
        for word in np.flatnonzero((values != values[0]).any(axis=0)).tolist():
            tries = ((number, _follows(values[of, word], features[of])) for number, of in inside.items())
            number, found = next(((number, found) for number, found in tries if found), (-1, None))
            if found is None:
                pairs = zip(values[:, word], self.positions[rows], strict=True)
                listed = ", ".join(f"{value} at {position}" for value, position in pairs)
                raise ValueError(f"[call_family] expected word {word} to follow one of the features, got {listed}")
            loose[number].append(word)
            base[word], feature, coefficient = found
            if coefficient:
                patches.append(Patch(word, feature, coefficient))
        return WordClass(tasks, base, tuple(patches)), loose

    def _verify(self, derived: WordClass, row: int, loose: dict[int, list[int]]) -> None:
        position, expected = int(self.positions[row]), derived.at(self.features[row])
        found = np.asarray(self.words(position), np.int64)
        self._require_as_many(found, len(expected), position)
        differ = found != expected
        for number in np.flatnonzero(self.lone[row]).tolist():
            differ[loose.get(number, [])] = False
        if differ.any():
            word = int(np.argmax(differ))
            raise ValueError(
                f"[call_family] expected word {word} to be {expected[word]} at position {position}, as it follows from "
                f"other positions of the class, got {found[word]}"
            )


def _kinds(features: Integers) -> Integers:
    """Columns of features [n, features] that change, minus their first row [kinds, n]; proportional ones once."""
    distances = (features - features[0]).T
    distances = distances[np.any(distances, axis=1)]
    first = np.argmax(distances != 0, axis=1)
    signs = np.sign(np.take_along_axis(distances, first[:, None], axis=1))
    return np.unique(distances // (np.gcd.reduce(distances, axis=1, keepdims=True) * signs), axis=0)


def _samples(features: Integers) -> list[int]:
    """Rows of features [n, features] on which all kinds change and no two kinds are proportional."""
    kinds, rows = _kinds(features), [0]
    for kind in kinds:
        if not kind[rows].any():
            rows.append(int(np.argmax(np.abs(kind))))
    for place, left in enumerate(kinds):
        pivot = next(row for row in rows if left[row])
        for right in kinds[:place]:
            difference = left * right[pivot] - right * left[pivot]
            if not difference[rows].any():
                rows.append(int(np.argmax(np.abs(difference))))
    return rows


def _follows(values: Integers, features: Integers) -> tuple[int, int, int] | None:
    """(value with all features 0, the feature that values [n] follow, coefficient), of features [n, features].

    (value, 0, 0) if the values are all equal; None if they follow no feature.
    """
    distances = values - values[0]
    if not distances.any():
        return int(values[0]), 0, 0
    for feature, steps in enumerate((features - features[0]).T):
        if steps.any():
            pivot = int(np.argmax(np.abs(steps)))
            coefficient = int(distances[pivot] // steps[pivot])
            if np.array_equal(coefficient * steps, distances):
                return int(values[0] - coefficient * features[0, feature]), feature, coefficient
    return None

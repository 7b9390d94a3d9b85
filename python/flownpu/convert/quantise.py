# SPDX-License-Identifier: Apache-2.0
"""Quantises weights to Q4NX straight from their file: from floats, or from codes, which are kept.

A projection is read, quantised and handed on a few hundred rows at a time: no weight is ever in memory as a whole.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from flownpu.convert.average_bits import AverageBits, ChosenBits
from flownpu.convert.errors import ConversionError
from flownpu.convert.weight_bits import WeightBits
from flownpu.convert.weights import BiasWeight, BlockPart, NormWeight, ProjectionWeight
from flownpu.machine import usable_cores
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from flownpu.convert.weights import HeadOrder, RouterWeight, TensorSource, Weight

# How many weights one task quantises: 2^20 take 4 MB in float32 and some tens of milliseconds, so that there are tasks
# for all threads, Ctrl-C takes effect soon, and even with 16384 columns a task has whole blocks of 32 rows.
_WEIGHTS_AT_ONCE = 1 << 20


_log = logging.getLogger(__name__)


class Stored(NamedTuple):
    """How a weight is stored in the source.

    Attributes:
        kind: the type or method, as messages name it.
        layout: the smallest that keeps what the source has; None: floats, for which any will do.
        keeps_codes: whether rows are `Carried` in that layout.
        again: what happens to a weight whose codes are not kept.
        reason: why codes are not kept.
    """

    kind: str
    layout: q4nx.Layout | None = None
    keeps_codes: bool = False
    again: str = "dequantised, and quantised again"
    reason: str = ""

    @property
    def table(self) -> str:
        """The name of the table that codes are places in, or ""."""
        return self.kind if self.layout is not None and self.layout.table else ""

    def keeps_codes_in(self, layout: q4nx.Layout) -> bool:
        """Whether a weight in that layout has the source's codes."""
        if not self.keeps_codes or self.layout is None:
            return False
        return layout.bits == 8 or (self.layout.bits == 4 and self.layout.table == layout.table)

    def needs_minima(self, bits: int) -> bool:
        """Whether a weight of that many bits, without a table, has minima; what is rounded to 8 bits has none."""
        if self.layout is not None and self.keeps_codes_in(layout_of_bits(bits, minima=True)):
            return self.layout.minima
        return bits == 4

    def treatment(self, layout: q4nx.Layout) -> str:
        """The fate of the weight in that layout in words."""
        if self.keeps_codes_in(layout):
            parts = "scales and minima" if self.layout is not None and self.layout.minima else "scales"
            return f"codes unchanged, {parts} rounded to bf16"
        return f"{self.again} to Q4NX{' of 8 bits' if layout.bits == 8 else ''}{self.reason}"


class Carried(NamedTuple):
    """Rows of a weight that is quantised in the source, with the source's codes.

    Attributes:
        quantized: the rows in Q4NX.
        exact: float32 [rows, columns], their values with scales and minima that are not rounded to bf16.
    """

    quantized: q4nx.Quantized
    exact: NDArray[np.float32]


class Tensors(Protocol):
    """A model's tensors by their names in `weight_plan`'s sources, whatever file and format they are stored in."""

    @property
    def source(self) -> Path:
        """The file or the folder that they are in."""

    def check(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raises ConversionError unless the tensor exists and has that shape."""

    def stored(self, tensor: str) -> Stored:
        """How a weight is stored; reads no rows. `check` must have been called for it."""

    def rows(self, tensor: str, first: int, stop: int) -> NDArray[np.float32] | Carried:
        """Rows first..stop-1 of a weight. Threads may call it at once; raises ValueError or ConversionError."""

    def vector(self, tensor: str, size: int) -> NDArray[np.float32]:
        """A whole one-dimensional tensor; raises ConversionError if a value is not finite."""


class QuantizedWeights:
    """The weights of a decoder, made of its tensors: a `WeightSource`. Codes of a quantised source stay as they are."""

    def __init__(
        self, tensors: Tensors, norm_offset: float = 0.0, bits: WeightBits | AverageBits | None = None
    ) -> None:
        """Takes the tensors, a number that is added to norms' weights, and bits; None: as many as the source has."""
        self._tensors = tensors
        self._bits: WeightBits | AverageBits | ChosenBits | None = bits
        self._offset = np.float32(norm_offset)

    def check(self, plan: Sequence[Weight]) -> None:
        """Raises ConversionError unless every tensor that the plan needs exists and has its shape.

        If an average of bits is asked for, weights are measured and bits chosen.
        """
        for weight in plan:
            columns = () if isinstance(weight, NormWeight | BiasWeight) else (weight.columns,)
            for source in weight.sources:
                self._tensors.check(source.tensor, (source.stored_rows, *columns))
        if isinstance(self._bits, AverageBits):
            self._bits = self._bits.choose(plan, self._tensors)

    def vector(self, weight: NormWeight | BiasWeight) -> NDArray[np.float32]:
        """A norm's weight with offset and scale applied, or a bias, float32 [size].

        Raises:
            ConversionError: the tensor is missing, has another shape, or a value that is not finite.
        """
        values = np.concatenate([self._values(source) for source in weight.sources])
        if isinstance(weight, NormWeight):
            values = (self._offset + values) * np.float32(weight.scale)
        return -np.exp(values) if isinstance(weight, BiasWeight) and weight.minus_exp else values

    def matrix(self, weight: RouterWeight) -> NDArray[np.float32]:
        """A weight that is not quantised, float32 [rows, columns].

        Raises:
            ConversionError: the tensor is missing, has another shape, or a value that is not finite.
        """
        parts = (self._tensors.rows(one.tensor, one.first, one.first + one.rows) for one in weight.sources)
        values = np.concatenate([part.exact if isinstance(part, Carried) else part for part in parts])
        if not np.isfinite(values).all():
            raise ConversionError(f"{self._tensors.source}: {weight.name}: a value that is not finite")
        return values

    def _values(self, source: TensorSource) -> NDArray[np.float32]:
        values = self._tensors.vector(source.tensor, source.stored_rows)[source.first : source.first + source.rows]
        return values if source.order is None else values[_in_order(source.order, 0, source.rows)]

    def layout(self, projection: ProjectionWeight) -> q4nx.Layout:
        """The layout of the bits that were chosen, or else of the most bits that a source has; floats have 4.

        One source that needs minima gives all of them minima. If only some have codes with a table, or not all the same
        one, 8 bits hold what all of them have.
        """
        stored = [self._tensors.stored(source.tensor) for source in projection.sources]
        chosen = self._bits.of(projection.name) if isinstance(self._bits, WeightBits | ChosenBits) else None
        bits = chosen or max(4 if one.layout is None else one.layout.bits for one in stored)
        tables = {one.table for one in stored}
        if bits == 4 and any(tables):
            if len(tables) == 1:
                return q4nx.TABLE
            bits = chosen or 8
        minima = any(one.needs_minima(bits) for one in stored)
        return layout_of_bits(bits, minima=minima)

    def describe(self, plan: Sequence[Weight]) -> dict[str, str]:
        """Logs what becomes of the weights of each kind; returns these texts by kind, for the manifest."""
        counts = Counter[tuple[str, str, bool]]()
        for weight in plan:
            if isinstance(weight, ProjectionWeight):
                layout = self.layout(weight)
                stored = [self._tensors.stored(source.tensor) for source in weight.sources]
                counts.update((one.kind, one.treatment(layout), one.keeps_codes_in(layout)) for one in stored)
        texts: dict[str, str] = {}
        for (kind, treatment, kept), count in sorted(counts.items()):
            text = f"{count} {'weight' if count == 1 else 'weights'}: {treatment}"
            _log.log(logging.INFO if kept else logging.WARNING, "%s: %s", kind, text)
            texts[kind] = f"{texts[kind]}; {text}" if kind in texts else text
        return texts

    def blocks(self, projection: ProjectionWeight) -> Iterator[BlockPart]:
        """Reads and quantises a projection on all cores.

        Raises:
            ConversionError: a tensor is missing, has another type, or a value that cannot be quantised.
        """
        layout = self.layout(projection)
        cores = usable_cores()
        with ThreadPoolExecutor(cores) as pool:
            pending: deque[Future[BlockPart]] = deque()
            try:
                for run, first, stop in _row_parts(projection):
                    pending.append(pool.submit(self._part, projection.name, run, first, stop, layout))
                    if len(pending) > cores:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()

    def _part(self, name: str, run: Sequence[TensorSource], first: int, stop: int, layout: q4nx.Layout) -> BlockPart:
        """Quantises rows first..stop-1 of a run of sources, counted over all of them, one after the other."""
        quantized, squared_error, squares = [], 0.0, 0.0
        start = 0
        for source in run:
            low, high = max(first - start, 0), min(stop - start, source.rows)
            if low < high:
                try:
                    codes, exact = _quantized(self._rows(source, low, high), layout)
                except ValueError as error:
                    raise ConversionError(f"{self._tensors.source}: {name}: {error}") from error
                quantized.append(codes)
                squared_error += _squares(q4nx.dequantize_codes(codes) - exact)
                squares += _squares(exact)
            start += source.rows
        stacked = q4nx.stack(*quantized)
        return BlockPart(q4nx.pack(*stacked, layout), stacked.codes.size, squared_error, squares)

    def _rows(self, source: TensorSource, low: int, high: int) -> NDArray[np.float32] | Carried:
        """Rows low..high-1 of a source, in the order that the graph needs."""
        if source.order is None:
            return self._tensors.rows(source.tensor, source.first + low, source.first + high)
        # Whole heads are read, and the wanted rows taken from them.
        size = source.order.size
        first, last = low // size * size, -(-high // size) * size
        heads = self._tensors.rows(source.tensor, source.first + first, source.first + last)
        wanted = _in_order(source.order, low, high) - first
        if isinstance(heads, Carried):
            return Carried(q4nx.Quantized(*(field[wanted] for field in heads.quantized)), heads.exact[wanted])
        return heads[wanted]


def layout_of_bits(bits: int, *, minima: bool) -> q4nx.Layout:
    """The layout of converted models for codes of that many bits, with or without minima."""
    return q4nx.Layout(1, minima, bits)


def _quantized(rows: NDArray[np.float32] | Carried, layout: q4nx.Layout) -> Carried:
    """Rows in Q4NX for that layout; codes of 4 bits are kept in 8 too."""
    bits = layout.unpacked_bits
    if isinstance(rows, Carried):
        codes, scale, minimum = rows.quantized
        if rows.quantized.bits == bits:
            return rows
        if bits == 8 and q4nx.is_symmetric(rows.quantized):
            return rows._replace(quantized=q4nx.from_affine(codes.astype(np.int8) - 8, scale, bits=8))
        if bits == 8:
            return rows._replace(quantized=q4nx.from_affine(codes, scale, minimum, bits=8))
        rows = rows.exact
    return Carried(q4nx.quantize_bytes(rows) if bits == 8 else q4nx.quantize(rows), rows)


def _in_order(order: HeadOrder, low: int, high: int) -> NDArray[np.int64]:
    """The checkpoint's rows that become rows low..high-1."""
    rows = np.arange(low, high)
    return np.asarray(rows // order.size * order.size + order.rows()[rows % order.size])


def _row_parts(projection: ProjectionWeight) -> Iterator[tuple[Sequence[TensorSource], int, int]]:
    """The rows of a projection as (run, first, stop). Each part fills whole rows of blocks, except a run's last."""
    at_once = max(1, _WEIGHTS_AT_ONCE // (projection.columns * q4nx.BLOCK_ROWS)) * q4nx.BLOCK_ROWS
    for run in projection.runs:
        total = sum(source.rows for source in run)
        for first in range(0, total, at_once):
            yield run, first, min(first + at_once, total)


def _squares(values: NDArray[np.float32]) -> float:
    return float(np.einsum("ij,ij->", values, values, dtype=np.float64))

# SPDX-License-Identifier: Apache-2.0
"""Chooses which of a model's floats get 8 bits and which 4, for an average.

Rounding makes W + E of a projection's weight W. For inputs x of equal energy in all columns, the relative error of its
output is

    t^2 = E |E x|^2 / E |W x|^2 = |E|^2 / |W|^2                                                    (Frobenius norms)

and to first order the divergence of the model's predictions is a sum of a t^2 over the projections, with a constant a
for each ("Pushing the Limits of Large Language Model Quantization via the Linearity Theorem", arXiv 2411.17525). The
constants depend on texts, which a conversion does not have. Here a is the share of the logits' energy that a
projection's output has: 1 for the LM head; 1 / (2 L + 1) for a projection of one of L layers, and for embeddings that
are not the LM head, because the residual stream is a sum of the embedding and of what attention and feed-forward of L
layers add, taken to be alike. So the sum falls most, for a number of bytes, if 8 bits go to the projections with the
largest

    a (t^2 of 4 bits - t^2 of 8 bits) / (number of weights)

one after the other, until the average is reached; one that is too large for what is left is passed over.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flownpu.convert.errors import ConversionError
from flownpu.convert.weight_bits import WeightBits
from flownpu.convert.weights import ProjectionWeight
from flownpu.machine import usable_cores
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from flownpu.convert.quantise import Tensors
    from flownpu.convert.weights import TensorSource, Weight

# Rows of a tensor that are measured: stretches of a row of blocks, evenly apart.
_STRETCHES = 4
_MOST_BITS = 8
_NAMES = {"q4": "4/4/4", "q8": "8/8/8"}


class ChosenBits(NamedTuple):
    """The bits that were chosen for each weight, by its name in `weight_plan`."""

    by_name: dict[str, int]

    def of(self, name: str) -> int | None:
        """The bits of a weight; None: as many as the source has."""
        return self.by_name.get(name)


class AverageBits(NamedTuple):
    """An average of the bits of codes, 4 to 8, over the weights that the source has as floats."""

    average: float

    def choose(self, plan: Sequence[Weight], tensors: Tensors) -> ChosenBits:
        """Measures the weights that are floats in the source, and gives 8 bits to those that gain most."""
        floats = [
            weight
            for weight in plan
            if isinstance(weight, ProjectionWeight)
            and all(tensors.stored(source.tensor).layout is None for source in weight.sources)
        ]
        with ThreadPoolExecutor(usable_cores()) as pool:
            gains = list(pool.map(lambda weight: _share(weight.name, plan) * _gain(weight, tensors), floats))
        left = sum(_size(weight) for weight in floats) * (self.average - 4) / 4
        bits = {}
        for gain, weight in sorted(zip(gains, floats, strict=True), key=lambda pair: -pair[0] / _size(pair[1])):
            takes = gain > 0 and _size(weight) <= left
            bits[weight.name] = 8 if takes else 4
            left -= _size(weight) if takes else 0
        return ChosenBits(bits)


def _size(weight: ProjectionWeight) -> int:
    return sum(source.rows for source in weight.sources) * weight.columns


def _share(name: str, plan: Sequence[Weight]) -> float:
    """The share of the logits' energy that a projection's output has."""
    names = {weight.name for weight in plan}
    if name == ("lm_head" if "lm_head" in names else "embed_tokens"):
        return 1
    layers = {other.split(".")[1] for other in names if other.startswith("layers.")}
    return 1 / (2 * len(layers) + 1)


def _gain(weight: ProjectionWeight, tensors: Tensors) -> float:
    """How much smaller a weight's t^2 is with 8 bits than with 4."""
    gain = squares = 0.0
    for source in weight.sources:
        rows = _sample(source, tensors)
        each = source.rows / len(rows)
        squares += each * float(np.square(rows, dtype=np.float64).sum())
        errors = [
            np.square(q4nx.dequantize_codes(quantise(rows)) - rows, dtype=np.float64).sum()
            for quantise in (q4nx.quantize, q4nx.quantize_bytes)
        ]
        gain += each * float(errors[0] - errors[1])
    return gain / squares if squares else 0.0


def _sample(source: TensorSource, tensors: Tensors) -> NDArray[np.float32]:
    """Some rows of a tensor that is floats."""
    first = np.linspace(0, max(source.rows - q4nx.BLOCK_ROWS, 0), _STRETCHES).astype(int)
    parts = [
        tensors.rows(source.tensor, source.first + start, source.first + min(start + q4nx.BLOCK_ROWS, source.rows))
        for start in dict.fromkeys(first.tolist())
    ]
    return np.concatenate([np.asarray(part, np.float32) for part in parts])


def parse_weight_bits(text: str) -> WeightBits | AverageBits | None:
    """The bits that "q4", "q8" or a text such as "8/4/4" stands for, or an average such as "4.75"; None for "auto".

    The last means as many bits as the source has.

    Raises:
        ConversionError: the text is none of these.
    """
    if text == "auto":
        return None
    numbers = _NAMES.get(text, text)
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", numbers) and 4 <= float(numbers) <= _MOST_BITS:
        return AverageBits(float(numbers))
    if not re.fullmatch("[48]/[48]/[48]", numbers):
        raise ConversionError(
            "expected weights of auto, q4, q8, an average from 4 to 8, or the bits of attention, embedding and "
            f'feed-forward, each 4 or 8, such as 8/4/4, got "{text}"'
        )
    return WeightBits(*map(int, numbers.split("/")))

# SPDX-License-Identifier: Apache-2.0
"""The number of tokens from which a chunk of a prompt is worth its time.

On the array a chunk takes the same time however many of its rows are tokens: every array is changed to, every weight
dequantised, every row multiplied. (The host's steps compute tokens only; they are a tenth of the time, and are priced
as if all rows were tokens.) So the rest of a prompt takes a chunk only if shorter ones and single tokens would take
longer:

    fewest(chunk) = the least t with seconds(chunk) <= best(t)
    best(t)       = the least seconds of t tokens by shorter programs, each taken where it is worth it

The host then takes the longest chunk whose `fewest` is at most the number of remaining tokens
(ops/npu/run/decoder_layers.cc).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flownpu.aie.programs.cost import Prices
    from flownpu.aie.programs.program import Program


def with_fewest(programs: Sequence[Program], price: Callable[[Program], float]) -> list[Program]:
    """The programs of a decoder with `fewest` set, without chunks that are never worth their time.

    Args:
        programs: one of a token and any of chunks, in any order.
        price: gives the seconds of a run.
    """
    (token,) = (program for program in programs if program.tokens == 1)
    chunks = sorted((program for program in programs if program.tokens > 1), key=lambda program: program.tokens)
    spans = [(1, 1, price(token))]  # of each program: the fewest tokens, the most, seconds
    kept, best = [token], [0.0]

    def extend(end: int) -> None:
        for tokens in range(len(best), end + 1):
            _, most, took = next(span for span in reversed(spans) if span[0] <= tokens)
            best.append(took + best[max(0, tokens - most)])

    for chunk in chunks:
        took = price(chunk)
        extend(chunk.tokens)
        fewest = next((tokens for tokens in range(1, chunk.tokens + 1) if took <= best[tokens]), None)
        if fewest is None:
            continue
        kept.append(replace(chunk, fewest=fewest))
        spans.append((fewest, chunk.tokens, took))
        del best[fewest:]
    return kept


def seconds(program: Program, prices: Prices) -> float:
    """The predicted seconds of a run at the beginning of a context."""
    # A chunk begins with a change of array, because any earlier run ended with another array.
    return prices.of(program, 0).total if program.tokens == 1 else prices.of_runs([(program, 0)]).total

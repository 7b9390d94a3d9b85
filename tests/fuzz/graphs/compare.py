# SPDX-License-Identifier: Apache-2.0
"""Finds FlowNPU's wrong elements: neither within their bounds nor (nearly) equal to ONNX Runtime's."""

import numpy as np

from tests.fuzz.arrays import Array, is_float
from tests.fuzz.reference import samples
from tests.fuzz.reference.samples import Bounds

# How near FlowNPU's number must be to ONNX Runtime's if it is outside the bounds, in roundings of ONNX Runtime's.
NEAR_UNITS = 8
# If both numbers are far outside the bounds, and nearer to each other by this factor, FlowNPU's is right, too: it may
# come from the same kernel of ONNX Runtime.
FAR = 4


def outside(found: Array, expected: Array, known: Bounds | None) -> Array:
    """A mask of the wrong elements; none without bounds."""
    if found.dtype == object:
        return np.asarray(found != expected, bool)
    if known is None or known.shape != found.shape:
        return np.zeros(found.shape, bool)
    if not is_float(found.dtype):
        return np.asarray(((found < known.low) | (found > known.high)) & (found != expected))
    with np.errstate(all="ignore"):
        ours, theirs = found.astype(np.float64), expected.astype(np.float64)
        missing = np.isnan(ours)
        right = ~missing & (ours >= known.low) & (ours <= known.high)
        apart = np.abs(ours - theirs)
        near = apart <= NEAR_UNITS * samples.unit(found.dtype) * np.abs(theirs)
        near |= (np.maximum(known.low - theirs, theirs - known.high) > FAR * apart) & np.isfinite(ours)
    if known.nan is not None:
        right = np.select(
            [known.nan == samples.ALWAYS, known.nan == samples.NOT_FINITE, known.nan == samples.PERHAPS],
            [missing, ~np.isfinite(ours), right | missing],
            right,
        )
    return np.asarray(~(right | near | (ours == theirs) | (missing & np.isnan(theirs))))


def equal(a: Array, b: Array) -> bool:
    """Whether arrays are equal, bit by bit."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return bool((a == b).all()) if a.dtype == object else a.tobytes() == b.tobytes()


def kinds(found: Array, expected: Array, known: Bounds | None, wrong: Array) -> str:
    """The kinds of the first wrong element and of the right one: "NaN for a number"."""
    if not is_float(found.dtype):
        return "integers"
    at = tuple(int(i) for i in np.argwhere(wrong)[0])

    def kind(number: float) -> str:
        return "NaN" if np.isnan(number) else "infinity" if np.isinf(number) else "a number"

    must_be_nan = known is not None and known.nan is not None and known.nan[at] == samples.ALWAYS
    return f"{kind(float(found[at]))} for {'NaN' if must_be_nan else kind(float(expected[at]))}"


def describe(found: Array, expected: Array, known: Bounds | None, wrong: Array) -> str:
    """Text with the number of wrong elements, and the first few of them."""
    lines = [f"{int(wrong.sum())} of {wrong.size} elements of {found.dtype}{list(found.shape)}"]
    for place in np.argwhere(wrong)[:4]:
        at = tuple(int(i) for i in place)
        line = f"  {list(at)}: ours {found[at]!s}, ONNX Runtime's {expected[at]!s}"
        if known is not None:
            nan = "" if known.nan is None else ("", " or NaN", " (NaN)", " (NaN or infinite)")[int(known.nan[at])]
            line += f", between {known.low[at]!s} and {known.high[at]!s}{nan}"
        lines.append(line)
    return "\n".join(lines)

# SPDX-License-Identifier: Apache-2.0
"""Main memory as the array sees it: bursts, streams, and the rate that all streams share.

With runs of b contiguous bytes:

    efficiency(b) = b / (64 ceil(b / 64) + 12)
    rate          = min(streams x channel, memory) x efficiency
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.cost.parameters import Values
    from flownpu.aie.plan.data import Tap

STORED_WEIGHT_RUN = 5120  # bytes: a Q4NX block, the run that the streams' rate was fitted with


def burst_efficiency(run: float, values: Values) -> float:
    """The share of main memory's rate that runs of `run` contiguous bytes reach."""
    bursts = math.ceil(run / values["burst_bytes"]) * values["burst_bytes"]
    return run / (bursts + values["run_overhead_bytes"])


def relative_efficiency(run: float, values: Values) -> float:
    """`burst_efficiency` relative to STORED_WEIGHT_RUN's, with which rates were fitted; longer runs gain nothing."""
    return min(burst_efficiency(run, values) / burst_efficiency(STORED_WEIGHT_RUN, values), 1.0)


def read_rate(channels: float, run: float, values: Values) -> float:
    """Bytes a second of `channels` streams together, in runs of `run` contiguous bytes."""
    return min(channels * values["channel_read"], values["memory_read"]) * relative_efficiency(run, values)


def shared_seconds(sizes: Sequence[float], values: Values) -> float:
    """Seconds until streams of these sizes (bytes), which share main memory's rate evenly, have all ended.

    Each is as fast as its channel, or as its share among the unfinished streams. The longest streams are alone in the
    end, and a few streams do not keep memory busy.
    """
    seconds, done = 0.0, 0.0
    for place, size in enumerate(sorted(sizes)):
        streams = len(sizes) - place
        seconds += (size - done) / min(values["channel_read"], values["memory_read"] / streams)
        done = size
    return seconds


def contiguous_bytes(tap: Tap, item_bytes: int) -> int:
    """The length of a tap's runs of neighbours in main memory, in bytes."""
    run = 1
    for dimension in reversed(tap.walk):
        if dimension.size == 1:
            continue
        if dimension.stride != run:
            break
        run *= dimension.size
    return run * item_bytes

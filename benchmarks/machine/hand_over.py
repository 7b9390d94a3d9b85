# SPDX-License-Identifier: Apache-2.0
"""Measures a switch between two devices: the bytes and the time of handing a conversation's keys and values over.

    python -m benchmarks.machine.hand_over --model gemma3-4b --tokens 1000

runs at the root of the repository, with the module flownpu_testing (`make test` builds it). The keys and values are
those of a prompt; they lie as the NPU's programs have them, in memory of the host, so that what an NPU's driver does to
make it visible is not in the times. These are times of the processor, one thread's; tensors are touched for the first
time. Beside them is the prompt's predicted time on an NPU.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import ml_dtypes
import numpy as np

from flownpu.machine import describe_machine
from flownpu.predict.pair import handed_over_bytes, predict_pair
from flownpu.predict.target import known
from tests.npu.decoders import npu
from tests.ops.device import _argument

_TURNS, _TOKENS = 5, 3
_DEVICES = "kraken-350+radeon-890m"


def _seconds(work: Callable[[], object]) -> tuple[float, object]:
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def main() -> None:
    """Prints a line for each direction of a switch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gemma3-4b", help="a name that `flownpu predict` knows")
    parser.add_argument("--tokens", type=int, default=1000, help="of the prompt")
    given = parser.parse_args()
    target = known(given.model)
    shape, layers = target.decoder.shape, len(target.decoder.windows)
    context = given.tokens + 16
    runtimes = [npu.open_emulated_runtime("npu2") for _ in range(2)]
    first, second = (
        npu.KvCaches(one, list(target.decoder.windows), shape.kv_heads, shape.d, context) for one in runtimes
    )
    second.share(first)
    size = (1, shape.kv_heads, context, shape.d)
    times: dict[str, list[float]] = {"to the host": [], "back": [], "to another device": []}
    for _ in range(_TURNS):
        tensors = [_argument(np.zeros(size, ml_dtypes.bfloat16)) for _ in range(2 * layers)]
        first.finish(first.begin(tensors, tensors, 0), tensors, given.tokens)
        seconds, cache = _seconds(lambda tensors=tensors: first.lend(tensors, given.tokens))
        times["to the host"].append(seconds)
        first.take_back(cache, tensors, given.tokens, total := given.tokens + _TOKENS)
        seconds, cache = _seconds(lambda tensors=tensors, total=total: first.begin(tensors, tensors, total))
        times["back"].append(seconds)
        first.finish(cache, tensors, total + _TOKENS)
        seconds, _ = _seconds(
            lambda tensors=tensors, total=total: second.begin(tensors, tensors, total + _TOKENS)
        )  # fmt: skip
        times["to another device"].append(seconds)
    tokens = dict(zip(times, (given.tokens, _TOKENS, given.tokens + 2 * _TOKENS), strict=True))
    (point,) = predict_pair(target, _DEVICES, [given.tokens]).points
    print(describe_machine())
    for what, found in times.items():
        size_of = handed_over_bytes(target, tokens[what], to_host=what != "to another device") / 1e6
        cost = f"{median(found) * 1e3:.1f} ms, least {min(found) * 1e3:.1f}"
        print(f"{what}: {tokens[what]} tokens, {size_of:.1f} MB in {cost}")
    print(f"the prompt, predicted on {_DEVICES.split('+', maxsplit=1)[0]}: {point.ttft_seconds * 1e3:.0f} ms")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Measures a model's speed and memory through the same calls that `flownpu run` makes."""

import resource
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil

from flownpu.errors import FlowNPUError
from flownpu.generation import LanguageModel, Sampling, Timing, Tokens

__all__ = ["Memory", "Result", "Spread", "measure"]


@dataclass(frozen=True)
class Spread:
    """What repeated measurements of one quantity gave."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Memory:
    """Bytes of this process's memory."""

    before: int
    """Resident before the model was opened: Python and the libraries."""
    resident: int
    """Resident after the last repeat; pages of the model's file that were read count, as the kernel counts them."""
    anonymous: int
    """The part of `resident` that no file backs: buffers, the KV cache, copies of weights if there are any."""
    peak: int
    """The most that was resident at any time."""


@dataclass(frozen=True)
class Result:
    """Rates in tokens/s, times in seconds."""

    prefill: Spread
    decode: Spread
    first_token: Spread
    load_seconds: float
    memory: Memory


def measure(
    model: LanguageModel,
    *,
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    resident_before: int,
    progress: Callable[[int], None],
) -> Result:
    """Generates `new_tokens` after a prompt of `prompt_tokens` random tokens, once to warm up and `repeats` times more.

    Args:
        model: the model, opened.
        prompt_tokens: length of the prompt.
        new_tokens: tokens generated, greedily and past any end of text; at least 2, as the first is the prefill's.
        repeats: how often it is measured.
        resident_before: resident bytes before the model was opened.
        progress: called after each run with the number of runs that have ended.

    Raises:
        FlowNPUError: prompt and new tokens do not fit the model's context.
    """
    length = prompt_tokens + new_tokens
    if length > model.context_length:
        raise FlowNPUError(
            f"{prompt_tokens} prompt tokens and {new_tokens} new ones do not fit the model's context of "
            f"{model.context_length}: lower --prompt-tokens or --new-tokens"
        )
    prompt = _random_prompt(prompt_tokens, model.vocabulary_size)
    timings = []
    for run in range(repeats + 1):
        timings.append(_run(model, prompt, length))
        progress(run + 1)
    timings = timings[1:]
    return Result(
        prefill=Spread.of([timing.prefill_rate for timing in timings]),
        decode=Spread.of([timing.decode_rate for timing in timings]),
        first_token=Spread.of([timing.first_token for timing in timings]),
        load_seconds=model.load_seconds,
        memory=_memory(resident_before),
    )


def _run(model: LanguageModel, prompt: Tokens, length: int) -> Timing:
    timing = Timing()
    generator = model.generator(length, Sampling(temperature=0), min_length=length)
    for _ in model.stream(generator, prompt, timing):
        pass
    return timing


def _random_prompt(tokens: int, vocabulary_size: int) -> Tokens:
    # The same on every machine; what the tokens say does not change the work.
    return np.random.default_rng(0).integers(0, vocabulary_size, tokens, dtype=np.int32)


def _memory(resident_before: int) -> Memory:
    now = psutil.Process().memory_info()
    # Linux reports the peak in KiB, and brings it up to date only now and then.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Memory(resident_before, resident=now.rss, anonymous=now.rss - now.shared, peak=max(peak, now.rss))

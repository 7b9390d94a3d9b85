# SPDX-License-Identifier: Apache-2.0
"""The figures that a server counts and times, for Prometheus."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from flownpu.generate.worker import Finished
from flownpu.serve.processes.model_process import ModelProcess

# Buckets of the histograms, in seconds. They range from a small model's cached prompt to a large model's long prompt on
# few cores.
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
WEIGHT_OF_NEW = 0.2
"""Weight of the latest answer in the moving average from which Retry-After is estimated."""


@dataclass
class Times:
    """The times at which one answer was asked for, begun and written: seconds of time.perf_counter(); 0 if not yet."""

    asked: float
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0


class Metrics:
    """The counts and times of a server's answers; used from the event loop's thread only."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._usual: dict[str, float] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"flownpu_{name}", text, ("model", *labels), registry=self._registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"flownpu_{name}_seconds", text, ("model",), buckets=SECONDS, registry=self._registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"flownpu_{name}", text, ("model",), registry=self._registry)

        self._answers = counter("answers", "Answers that ended, by how they ended.", "end")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = counter("cached_prompt_tokens", "Tokens of prompts that were not computed again.")
        self._new_tokens = counter("generated_tokens", "Tokens of answers.")
        self._queue = seconds("queue", "Time from a request to the beginning of its computation.")
        self._first = seconds("time_to_first_token", "Time from a request to its first token.")
        self._between = seconds("time_between_tokens", "Mean time between two tokens of an answer.")
        self._requests = gauge("requests", "Requests that wait or are being computed.")
        self._slots = gauge("slots", "Most requests that are computed at the same time.")
        self._memory = gauge("resident_bytes", "Memory of a model's process.")

    def ended(self, model: str, end: str) -> None:
        """Counts an answer that did not finish; `end` is "refused", "cancelled" or "failed"."""
        self._answers.labels(model, end).inc()

    def answered(self, model: str, finished: Finished, times: Times) -> None:
        """Counts an answer that finished, and its times."""
        self._answers.labels(model, finished.reason).inc()
        self._prompt_tokens.labels(model).inc(finished.prompt_tokens)
        self._cached_tokens.labels(model).inc(finished.cached_tokens)
        self._new_tokens.labels(model).inc(finished.new_tokens)
        if times.started:
            self._queue.labels(model).observe(times.started - times.asked)
        if times.first:
            self._first.labels(model).observe(times.first - times.asked)
            seconds = times.last - (times.started or times.asked)
            self._usual[model] = seconds + (1 - WEIGHT_OF_NEW) * (self._usual.get(model, seconds) - seconds)
        if finished.new_tokens > 1:
            self._between.labels(model).observe((times.last - times.first) / (finished.new_tokens - 1))

    def usual_seconds(self, model: str) -> float:
        """Seconds that an answer takes once it is begun, as a moving average; 1 if the model has given none."""
        return self._usual.get(model, 1.0)

    def page(self, loaded: Mapping[str, ModelProcess]) -> bytes:
        """All figures in Prometheus' text format."""
        for gauge in (self._requests, self._slots, self._memory):
            gauge.clear()
        for name, process in loaded.items():
            self._requests.labels(name).set(process.requests)
            self._slots.labels(name).set(process.facts.slots)
            self._memory.labels(name).set(process.memory())
        return generate_latest(self._registry)

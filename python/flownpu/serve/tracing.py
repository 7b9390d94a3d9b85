# SPDX-License-Identifier: Apache-2.0
"""A span for each answer, by OpenTelemetry's conventions for generative models.

Spans go nowhere, and cost some microseconds, unless the process has OpenTelemetry's SDK with an exporter, as
`opentelemetry-instrument flownpu serve` sets it up. They hold no texts.
"""

from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from flownpu.generate.worker import Finished
from flownpu.serve.metrics import Times
from flownpu.serve.processes.protocol import Question

TRACER = trace.get_tracer("flownpu.serve")


def begin_span(model: str, question: Question) -> Span:
    """The span of an answer to a question."""
    sampling = question.sampling
    operation = "chat" if question.parameter == "messages" else "text_completion"
    known: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "flownpu",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": question.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stop_sequences": list(question.stop) or None,
    }
    attributes = {key: value for key, value in known.items() if value is not None}
    return TRACER.start_span(f"{operation} {model}", kind=SpanKind.SERVER, attributes=attributes)


def end_span(span: Span, finished: Finished, times: Times) -> None:
    """Ends the span of an answer that has finished, or was cancelled."""
    span.set_attributes(
        {
            "gen_ai.response.finish_reasons": [finished.reason],
            "gen_ai.usage.input_tokens": finished.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": finished.cached_tokens,
            "gen_ai.usage.output_tokens": finished.new_tokens,
        }
    )
    if times.first:
        span.set_attribute("gen_ai.response.time_to_first_chunk", times.first - times.asked)
    span.end()


def fail_span(span: Span, error: Exception) -> None:
    """Ends the span of an answer that failed."""
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR, str(error)))
    span.end()

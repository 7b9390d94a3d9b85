# SPDX-License-Identifier: Apache-2.0
"""Reads replies of all APIs, whole or streamed: texts, reasons and calls, or an error."""

import json
from dataclasses import dataclass
from typing import Any, NoReturn

from tests.fuzz.server.exchange import Reply

WHOLE_ENDS = {"stop", "tool_calls", "completed", "end_turn", "tool_use"}  # not cut by max_tokens


class WrongFormError(Exception):
    """A reply that the API's clients could not read; the message says why."""


@dataclass(frozen=True)
class Answer:
    """An answer's text, the reason of its end, its calls as (name, arguments); or the error that ended a stream."""

    text: str = ""
    reason: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    error: str = ""


def strict_json(text: str | bytes) -> Any:
    """JSON by RFC 8259, without NaN and lone bytes. Raises WrongFormError for other texts."""

    def refuse(name: str) -> NoReturn:
        raise WrongFormError(f"the answer has {name}, which JSON has not")

    try:
        text = text if isinstance(text, str) else text.decode()
        return json.loads(text, parse_constant=refuse)
    except ValueError as error:  # of UTF-8 as well
        raise WrongFormError(f"the answer is no JSON: {error}: {text[:80]!r}") from error


def documents_of(reply: Reply) -> tuple[list[Any], bool]:
    """A reply's documents in JSON, and whether it is a stream.

    Raises:
        WrongFormError: a document is no JSON, or a stream of /v1/chat/completions or /v1/completions has no [DONE].
    """
    kind = reply.headers.get("content-type", "").partition(";")[0]
    if kind == "application/x-ndjson":
        return [strict_json(line) for line in reply.body.splitlines()], True
    if kind != "text/event-stream":
        return [strict_json(reply.body)], False
    lines = [line.removeprefix(b"data: ") for line in reply.body.splitlines() if line.startswith(b"data: ")]
    ended = lines[-1:] == [b"[DONE]"]
    documents = [strict_json(line) for line in (lines[:-1] if ended else lines)]
    if not documents:
        raise WrongFormError("the stream is empty")
    last = documents[-1]
    if not (ended or "error" in last or str(last.get("type", "")).startswith(("response.", "message_stop"))):
        raise WrongFormError(f"the stream ends without [DONE]: {lines[-1][:80]!r}")
    return documents, True


def answer_of(path: str, reply: Reply) -> Answer:
    """The first answer of a reply with status 200.

    Raises:
        WrongFormError: it is not what the API's clients read.
    """
    documents, streamed = documents_of(reply)
    last = documents[-1]
    if "error" in last and last["error"] is not None:
        return Answer(error=json.dumps(last["error"]))
    try:
        if path.startswith("/api/"):
            return _ollama(documents)
        if path == "/v1/responses":
            return _response(last["response"] if streamed else last)
        if path == "/v1/messages":
            return _message(documents) if streamed else _message_of(last["content"], last["stop_reason"])
        return _openai(documents, streamed)
    except (KeyError, IndexError, TypeError) as error:
        raise WrongFormError(f"{type(error).__name__} {error} in {json.dumps(last)[:200]}") from error


def _openai(documents: list[Any], streamed: bool) -> Answer:
    texts, reason, calls = [], "", []
    for document in documents:
        for choice in document["choices"]:
            if choice["index"]:
                continue
            message = choice.get("delta" if streamed else "message", choice)
            texts.append(message.get("content") or message.get("text") or "")
            calls += [call["function"] for call in message.get("tool_calls") or []]
            reason = choice["finish_reason"] or reason
    if not reason:
        raise WrongFormError("the answer has no finish_reason")
    return Answer("".join(texts), reason, tuple((call["name"], call["arguments"]) for call in calls))


def _response(document: Any) -> Answer:
    texts = [part["text"] for item in document["output"] for part in item.get("content", ())]
    calls = [(item["name"], item["arguments"]) for item in document["output"] if item["type"] == "function_call"]
    return Answer("".join(texts), document["status"], tuple(calls))


def _message(events: list[Any]) -> Answer:
    blocks: list[Any] = []
    reason = ""
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"])
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    blocks[-1]["input"] = strict_json(delta["partial_json"])
                else:
                    blocks[-1]["text"] += delta["text"]
            case "message_delta":
                reason = event["delta"]["stop_reason"]
    return _message_of(blocks, reason)


def _message_of(blocks: list[Any], reason: str) -> Answer:
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    calls = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
    return Answer("".join(texts), reason, tuple(calls))


def _ollama(documents: list[Any]) -> Answer:
    last = documents[-1]
    if last["done"] is not True:
        raise WrongFormError("the answer does not end with done")
    texts = [one["response"] if "response" in one else one["message"]["content"] for one in documents]
    found = [call["function"] for one in documents for call in one.get("message", {}).get("tool_calls") or []]
    calls = [(call["name"], json.dumps(call["arguments"])) for call in found]
    return Answer("".join(texts), last["done_reason"], tuple(calls))

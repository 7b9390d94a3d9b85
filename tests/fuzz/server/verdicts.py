# SPDX-License-Identifier: Apache-2.0
"""Judges replies by the APIs alone, and describes their faults."""

import re
from typing import Any

import jsonschema

from tests.fuzz.server.answers import WHOLE_ENDS, WrongFormError, answer_of, strict_json
from tests.fuzz.server.exchange import Reply, Request

# Without these, a client does not know when to come again.
_LATER = {429, 503}
# The server may always refuse for lack of time or room.
_NO_TIME = {*_LATER, 504}
# Kinds with possibly invalid HTTP, to which the HTTP parser replies in a form of its own.
_BROKEN_HTTP = {"headers", "routes", "uploads"}
_INTERNALS = re.compile(r"Traceback|File \"|bug of|[a-z]Error: |object at 0x|/python\d|\.cc:\d")


def fault_of(request: Request, reply: Reply) -> str:
    """The fault of a reply; "" if there is none."""
    if reply.status >= 500 and reply.status not in _NO_TIME:
        return _status(reply)
    if reply.left or (fault := _fault_of_http(reply)):
        return "" if reply.left else fault
    if request.succeeds and reply.status not in {200, *_NO_TIME}:
        return f"refused: {_status(reply)}"
    try:
        if reply.status >= 400:
            return _fault_of_error(request, reply)
        return _fault_of_answer(request, reply) if reply.status == 200 and request.method == "POST" else ""
    except WrongFormError as error:
        return str(error)


def _fault_of_http(reply: Reply) -> str:
    if reply.status == 0:
        return f"the connection ended without a status, after {reply.body[:80]!r}"
    if reply.status in _LATER and not reply.headers.get("retry-after", "").isdigit():
        return f"{reply.status} does not say when to come again"
    if not reply.whole:
        return f"the answer with status {reply.status} was cut short after {len(reply.body)} bytes"
    return ""


def _status(reply: Reply) -> str:
    return f"status {reply.status}, {reply.body[:300].decode(errors='replace')}"


def _fault_of_error(request: Request, reply: Reply) -> str:
    if request.method == "HEAD":
        return ""
    if request.kind in _BROKEN_HTTP and reply.headers.get("content-type", "").startswith("text/plain"):
        return ""
    error = strict_json(reply.body).get("error")
    message = error if request.path.startswith("/api/") else error.get("message") if isinstance(error, dict) else None
    if not isinstance(message, str) or not message.strip():
        return f"an error without words: {_status(reply)}"
    if _INTERNALS.search(message):
        return f"an error that tells internals: {_status(reply)}"
    return ""


def _fault_of_answer(request: Request, reply: Reply) -> str:
    if not request.path.endswith(("/completions", "/responses", "/messages", "/chat", "/generate")):
        strict_json(reply.body)
        return ""
    answer = answer_of(request.path, reply)
    if answer.error:
        told = strict_json(answer.error)
        timely = isinstance(told, dict) and told.get("code") == "timeout"
        wrong = "server_error" in answer.error or "the server made a mistake" in answer.error
        return f"the stream ended with {answer.error[:300]}" if wrong and not timely else ""
    if request.schema is not None and answer.reason in WHOLE_ENDS and not answer.calls:
        return _fault_of_json(answer.text, request.schema)
    return ""


def _fault_of_json(text: str, schema: Any) -> str:
    value = strict_json(text)
    try:
        jsonschema.validate(value, schema)
    except jsonschema.ValidationError as error:
        return f"the answer does not satisfy its schema: {error.message[:200]}"
    return ""

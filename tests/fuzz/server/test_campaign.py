# SPDX-License-Identifier: Apache-2.0
"""The short form of the server's campaign, and faults that its judges must find."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fuzz.server import neighbours as asking
from tests.fuzz.server import report
from tests.fuzz.server.answers import Answer
from tests.fuzz.server.campaign import Bounds, Campaign
from tests.fuzz.server.command import command_of
from tests.fuzz.server.exchange import Reply, Request
from tests.fuzz.server.kinds import KINDS, request
from tests.fuzz.server.neighbours import Neighbours, questions
from tests.fuzz.server.process import Memory, served
from tests.fuzz.server.verdicts import fault_of

# Allows for a machine with other work; a server that hangs takes longer.
SECONDS = 30.0
CHAT = Request("plain", "POST", "/v1/chat/completions", body=b"{}", succeeds=True)
ANSWER = b'{"choices": [{"index": 0, "message": {"content": "The loop"}, "finish_reason": "stop"}]}'


def test_campaign_short_form_finds_nothing(tmp_path: Path) -> None:
    async def attack() -> Campaign:
        known = await Neighbours.alone(server.port, questions(), SECONDS)
        campaign = Campaign(server, known, 8, 1, bounds=Bounds(in_time=SECONDS, late=2 * SECONDS))
        await campaign.run(4)
        return campaign

    with served(command_of(tmp_path / "models", embedding=False, request_seconds=20)) as server:
        found = asyncio.run(attack()).report
    report.write(found, tmp_path)
    assert [(finding.request and finding.request.kind, finding.fault) for finding in found.findings] == []
    assert found.statuses["neighbour"].keys() == {"200"}
    assert len(found.statuses) > len(KINDS) / 3
    assert f"{found.requests} requests, 0 findings" in report.text_of(found)


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (500, b'{"error": {"message": "a mistake"}}', "status 500"),
        (400, b'{"error": {"message": "not today"}}', "refused: status 400"),
        (429, b'{"error": {"message": "later"}}', "does not say when to come again"),
        (200, b'{"choices": [NaN]}', "which JSON has not"),
        (200, ANSWER, ""),
    ],
)
def test_faulty_reply_is_found(status: int, body: bytes, fault: str) -> None:
    found = fault_of(CHAT, Reply(status, {}, body, 0.0))
    assert fault in found
    assert bool(fault) == bool(found)


@pytest.mark.parametrize(
    ("message", "fault"),
    [("", "an error without words"), ("Traceback (most recent call last)", "an error that tells internals")],
)
def test_error_without_useful_words_is_found(message: str, fault: str) -> None:
    hostile = Request("wrong", "POST", CHAT.path, body=b"{}")
    assert fault in fault_of(hostile, Reply(400, {}, json.dumps({"error": {"message": message}}).encode(), 0.0))


def test_answer_cut_short_is_found() -> None:
    assert "was cut short after" in fault_of(CHAT, Reply(200, {}, ANSWER[:20], 0.0, whole=False))
    stream = Reply(200, {"content-type": "text/event-stream"}, b'data: {"choices": []}\n\n', 0.0)
    assert "ends without [DONE]" in fault_of(CHAT, stream)


def test_answer_beside_schema_is_found() -> None:
    asked = Request("schema", "POST", CHAT.path, body=b"{}", succeeds=True, schema={"type": "integer"})
    body = ANSWER.replace(b'"The loop"', b'"\\"text\\""')
    assert "does not satisfy its schema" in fault_of(asked, Reply(200, {}, body, 0.0))


def test_changed_or_missing_answer_of_neighbour_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: Any) -> Reply:
        return Reply(200, {}, ANSWER, 0.0)

    async def never(*_: Any) -> Reply:
        await asyncio.sleep(60)
        raise AssertionError

    for exchange, fault in ((answer, "expected Answer(text='Teh loop'"), (never, "no answer within 0 s")):
        monkeypatch.setattr(asking, "exchange", exchange)
        known = Neighbours(((CHAT, Answer("Teh loop", "stop")),))
        chosen = SimpleNamespace(choice=lambda among: among[0])
        _, outcome = asyncio.run(known.ask_one(0, chosen, 0.05))  # type: ignore[arg-type]
        assert outcome.fault.startswith(fault)


def test_growth_of_server_is_found(tmp_path: Path) -> None:
    """Memory, the log, and open files after all clients have gone."""
    log = tmp_path / "log"
    log.write_bytes(bytes(300_000))

    async def none() -> int:
        return 0

    server: Any = SimpleNamespace(log=log, open_files=lambda: 20, requests=none)
    campaign = Campaign(server, Neighbours(()), 1, 0, bounds=Bounds(in_time=0.0, growth=64 << 20, peak=400 << 20))
    campaign.report.memory = [Memory(float(i), {"host": (100 + 50 * i) << 20}) for i in range(10)]
    campaign._judge_memory()
    campaign._judge_log(0)
    asyncio.run(campaign._settle(files=10))
    faults = [finding.fault for finding in campaign.report.findings]
    expected = (
        "the processes had 550 MiB at a time",
        "memory grew from",
        "the log has 300000 bytes",
        "open files more",
    )
    assert all(text in fault for text, fault in zip(expected, faults, strict=True))


def test_request_is_same_whatever_came_before() -> None:
    stream = [request(7, client, number) for client in range(3) for number in range(100)]
    assert request(7, 2, 99) == stream[-1]
    assert {one.kind for one in stream} == set(KINDS)
    assert request(8, 2, 99) != stream[-1]
    assert all(json.dumps(one.document()) for one in stream)  # as a report has it


def test_request_bytes_have_declared_length() -> None:
    chunked = Request("x", "POST", "/x", (("Host", "a"),), b"{}", declared=-1)
    assert chunked.head() == b"POST /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert b"\r\nContent-Length: 9\r\n" in Request("x", "POST", "/x", body=b"{}", declared=9).head()
    assert Request("x", "GET", "/").head().startswith(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")

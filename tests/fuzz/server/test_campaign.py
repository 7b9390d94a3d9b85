# SPDX-License-Identifier: Apache-2.0
"""The short form of the server's campaign, and faults that it must find."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.fuzz.server import report
from tests.fuzz.server.campaign import Bounds, Campaign, Report
from tests.fuzz.server.command import OPTIONS
from tests.fuzz.server.exchange import Request, request_of
from tests.fuzz.server.kinds import KINDS, request
from tests.fuzz.server.models import make_models
from tests.fuzz.server.neighbours import Neighbours, questions
from tests.fuzz.server.planted import FAULTS
from tests.fuzz.server.process import PORT, Served, served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# What a machine with other work needs; a server that hangs takes longer.
SECONDS = 30.0
# Short, so that a fault is found soon; memory grows by less where nothing is planted.
SHORT = Bounds(in_time=2, late=3, growth=64 << 20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = make_models(tmp_path_factory.mktemp("models"))
    named = [f"{name}={folder}" for name, folder in models.items()]
    start = (sys.executable, "-m", "tests.fuzz.server.planted", *named, "--port", PORT, *map(str, OPTIONS))
    with served((*start, "--request-seconds", "20")) as server:
        yield server


@pytest.fixture(scope="module")
def neighbours(server: Served) -> Neighbours:
    return asyncio.run(Neighbours.alone(server.port, questions(seeing=True), SECONDS))


def attack(server: Served, neighbours: Neighbours, seconds: float, bounds: Bounds, clients: int = 8) -> Report:
    server.memory.clear()
    return asyncio.run(Campaign(server, neighbours, clients, 1, bounds=bounds).run(seconds))


def test_campaign_short_form_finds_nothing(server: Served, neighbours: Neighbours, tmp_path: Path) -> None:
    found = attack(server, neighbours, 8, Bounds(in_time=SECONDS, late=2 * SECONDS))
    report.write(found, tmp_path)
    assert [(finding.request and finding.request.kind, finding.fault) for finding in found.findings] == []
    assert found.statuses["neighbour"].keys() == {"200"}
    assert len(found.statuses) > len(KINDS) / 2


FOUND = {
    "mistake": "status 500",
    "refusal": "refused: status 400",
    "no words": "an error without words",
    "internals": "an error that tells internals",
    "never again": "does not say when to come again",
    "no JSON": "which JSON has not",
    "silence": "no answer within 2 s",
    "cut": "was cut short after",
    "other text": "expected Answer(",
    "no end": "ends without [DONE]",
    "leak": "memory grew from",
    "log": "the log has",
    "files": "open files more than before",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(server: Served, neighbours: Neighbours, fault: str) -> None:
    address = f"http://127.0.0.1:{server.port}/planted"
    assert httpx.get(f"{address}/{fault}").is_success
    faults: list[str] = []
    try:
        # On a slow machine the first attacks may end before the server has answered what shows the fault.
        for _ in range(10):
            faults += [finding.fault for finding in attack(server, neighbours, 0.8, SHORT, clients=4).findings]
            if any(FOUND[fault] in one for one in faults):
                return
    finally:
        assert httpx.get(f"{address}/none").is_success
    pytest.fail(f"{FOUND[fault]!r} is not among the findings: {faults}")


def test_request_is_same_whatever_came_before() -> None:
    stream = [request(7, client, number) for client in range(3) for number in range(100)]
    assert request(7, 2, 99) == stream[-1]
    assert {one.kind for one in stream} == set(KINDS)
    assert request(8, 2, 99) != stream[-1]
    again = [request_of(json.loads(json.dumps(one.document()))) for one in stream]
    assert again == stream


def test_request_bytes_have_declared_length() -> None:
    chunked = Request("x", "POST", "/x", (("Host", "a"),), b"{}", declared=-1)
    assert chunked.head() == b"POST /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert b"\r\nContent-Length: 9\r\n" in Request("x", "POST", "/x", body=b"{}", declared=9).head()
    assert Request("x", "GET", "/").head().startswith(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")

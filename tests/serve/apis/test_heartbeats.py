# SPDX-License-Identifier: Apache-2.0
"""Streams of a model that takes long: clients with a short read timeout hear that the server is alive."""

import threading
import time

import psutil
import pytest

SECONDS = 0.2
TIMEOUT, SILENCE = 5.0, 7.0
"""Seconds that a client waits for the next byte, and for which the model says nothing."""
MESSAGES = [{"role": "user", "content": "Tell me about loops."}]
STREAM = {"model": "topics", "stream": True}
ASKED = STREAM | {"messages": MESSAGES}
COMMENT, PING = ": alive", 'data: {"type":"ping"}'
STREAMS = {
    "/v1/chat/completions": (ASKED | {"max_tokens": 3}, COMMENT, "data: [DONE]"),
    "/v1/completions": (STREAM | {"prompt": "loops", "max_tokens": 3}, COMMENT, "[DONE]"),
    "/v1/responses": (
        STREAM | {"input": "loops", "max_output_tokens": 3},
        COMMENT,
        "event: response.incomplete",
    ),
    "/v1/messages": (ASKED | {"max_tokens": 3}, PING, "event: message_stop"),
    "/api/chat": (ASKED | {"options": {"num_predict": 3}}, '"content":""},"done":false', '"done":true'),
}


@pytest.fixture(scope="module")
def server(start_server, topics):
    return start_server(f"topics={topics}", "--heartbeat-seconds", SECONDS, "--slots", len(STREAMS))


def process_of_model(server):
    children = psutil.Process(server.process.pid).children(recursive=True)
    (found,) = [child for child in children if "flownpu.serve.processes.host" in child.cmdline()]
    return found


def test_clients_with_short_timeout_get_answer_of_slow_model(server):
    lines = {}

    def ask(path, body, seconds):
        with server.http() as http, http.stream("POST", path, json=body, timeout=seconds) as response:
            lines[path] = [line for line in response.iter_lines() if line]

    ask("/v1/chat/completions", STREAMS["/v1/chat/completions"][0], 60)  # the template's process starts with the first
    model = process_of_model(server)
    model.suspend()
    try:
        threads = [threading.Thread(target=ask, args=(path, body, TIMEOUT)) for path, (body, _, _) in STREAMS.items()]
        for thread in threads:
            thread.start()
        time.sleep(SILENCE)
    finally:
        model.resume()
    for thread in threads:
        thread.join()
    for path, (_, alive, end) in STREAMS.items():
        beats = [line for line in lines[path] if alive in line]
        # A fourth of those that fit, as the machine may be busy.
        assert len(beats) >= SILENCE / SECONDS / 4, (path, lines[path])
        assert end in "\n".join(lines[path]), path

# SPDX-License-Identifier: Apache-2.0
"""Mistakes of clients, and their errors: the server continues, and others get their answers.

Each fault has its status code and a message that says what is amiss.
"""

import base64
import contextlib
import io
import json
import signal
import socket
import threading
import time

import httpx
import numpy as np
import openai
import psutil
import pytest
from PIL import Image

from flownpu.cli import main

MESSAGES = [{"role": "user", "content": "Tell me about loops."}]
WORD = "xyzzy"  # stands for private text, which no error may repeat and no log may have
# JSON that does not end by itself.
SCHEMA = {"type": "array", "items": {"const": "abc"}, "minItems": 5000}
LONG = {
    "model": "topics",
    "messages": MESSAGES,
    "temperature": 0,
    "max_tokens": 1900,
    # The small model writes 2000 tokens in a second; with these it takes three.
    "logprobs": True,
    "top_logprobs": 20,
    "response_format": {"type": "json_schema", "json_schema": {"name": "endless", "schema": SCHEMA}},
}
LONGER = LONG | {"n": 16}
CHAT = "/v1/chat/completions"
BODY_LIMIT = 2**20


@pytest.fixture(scope="module")
def server(start_server, topics):
    limits = ["--slots", 1, "--queue", 1, "--context", 2048, "--max-body", 1, "--max-images", 2]
    return start_server(topics, *limits)


@pytest.fixture(scope="module")
def http(server):
    with server.http() as http:
        yield http


def refused(response, status, message):
    """Asserts an error's status code, its form, and that its message has a text; returns the error."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert WORD not in response.text
    return error


def wait_for(what, seconds=30):
    """Waits until `what()` is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.02)


def counted(http, name):
    """The sum of Prometheus' metrics whose lines begin with `name`."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def requests_of(http):
    return counted(http, "flownpu_requests{")


def cancelled(http):
    return counted(http, 'flownpu_answers_total{end="cancelled",')


def idle(http):
    return requests_of(http) == 0


def answers(http):
    """Whether the server still answers a chat."""
    response = http.post(CHAT, json=chat())
    assert response.status_code == 200, response.text
    return response.json()["usage"]["completion_tokens"] == 2


def chat(**fields):
    return {"model": "topics", "messages": MESSAGES, "max_tokens": 2, **fields}


def image(url):
    return chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])


def png(content):
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (chat(model="other"), 404, "no model 'other' here; there is topics"),
        (chat(colour="red"), 400, "unknown field colour"),
        (chat(messages=[{"role": "user", "content": "x", "mood": WORD}]), 400, "unknown field messages.0.mood"),
        ({"model": "topics"}, 400, "the field messages is missing"),
        (chat(messages=[]), 400, "messages: List should have at least 1 item"),
        (chat(messages=[{"role": "poet", "content": WORD}]), 400, "messages.0.role"),
        (chat(messages=[{"role": "assistant", "content": WORD}]), 400, "Turns must alternate"),
        (chat(temperature="hot"), 400, "temperature"),
        (chat(temperature=3), 400, "temperature: Input should be less than or equal to 2"),
        (chat(max_tokens=-2), 400, "max_tokens"),
        (chat(n=50), 400, "n times the number of prompts"),
        (chat(logit_bias={"4096": -100}), 400, "logit_bias: expected tokens from 0 to 4095, got 4096"),
        (chat(top_logprobs=2), 400, "top_logprobs wants logprobs"),
        (chat(messages=[{"role": "user", "content": "word " * 3000}]), 400, "the context holds 2048"),
        (image("https://example.com/x.png"), 400, "this server fetches nothing"),
        (image("data:image/png;base64,???"), 400, "base64 is broken"),
        (image(png(b"GIF89a")), 400, "takes no images"),
        (chat(tools=[{"type": "function", "function": {"name": "no spaces"}}]), 400, "tools.0.function.name"),
    ],
)
def test_wrong_request_is_refused_with_reason(http, body, status, message):
    refused(http.post(CHAT, json=body), status, message)
    assert answers(http)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, chat(messages=[{"role": "user", "content": "word " * 3000}]), "messages"),
        (CHAT, chat(messages=[{"role": "user", "content": "word " * 3000}], stream=True), "messages"),
        ("/v1/completions", {"model": "topics", "prompt": "word " * 3000}, "prompt"),
        ("/v1/completions", {"model": "topics", "prompt": [[5], [5] * 3000]}, "prompt"),
        ("/v1/responses", {"model": "topics", "input": "word " * 3000}, "input"),
    ],
)
def test_prompt_too_long_has_code_of_openai(http, path, body, field):
    error = refused(http.post(path, json=body), 400, "the context holds 2048")
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "context_length_exceeded", field)


@pytest.mark.parametrize("prompt", [[2, -1], [2, 5000], [2, 10**30], [[2], [2, -1]]])
def test_unknown_token_is_named(http, prompt):
    wrong = next(token for token in np.hstack(prompt) if token not in range(4096))
    message = f"the prompt: expected tokens from 0 to 4095, got {wrong}"
    refused(http.post("/v1/completions", json={"model": "topics", "prompt": prompt}), 400, message)


@pytest.mark.parametrize("fields", [{"top_k": 10**6}, {"top_k": 10**30}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1e-300}])
def test_sampling_at_its_bounds_is_answered(http, fields):
    assert http.post(CHAT, json=chat(temperature=1, **fields)).status_code == 200


def test_unknown_paths_and_methods_are_refused(http):
    refused(http.get("/v1/nothing"), 404, "/v1/nothing")
    refused(http.get(CHAT), 405, "Method Not Allowed")
    assert http.post("/api/chat", json={"model": "other", "messages": []}).json() == {
        "error": "no model 'other' here; there is topics"
    }


def test_broken_images_are_told_apart(start_server, shapes):
    server = start_server(f"topics={shapes}", "--context", 600, "--max-images", 2)
    with server.http() as http:
        refused(http.post(CHAT, json=image(png(b"no image"))), 400, "messages.0.content.0.image_url is not an image")
        refused(http.post(CHAT, json=image(png(b""))), 400, "messages.0.content.0.image_url")
        file = io.BytesIO()
        Image.effect_noise((64, 64), 50).save(file, "PNG")
        refused(http.post(CHAT, json=image(png(file.getvalue()[:1000]))), 400, "damaged or cut short")
        three = chat(messages=[{"role": "user", "content": image(png(b""))["messages"][0]["content"] * 3}])
        refused(http.post(CHAT, json=three), 400, "has 3 images, and this server takes 2")
        assert answers(http)


def test_100_megabytes_are_refused_before_they_are_sent(http):
    """A body is refused by its length; one without a length, as soon as the limit is reached."""
    started = time.monotonic()
    refused(http.post(CHAT, content=b" " * 2 * BODY_LIMIT), 413, f"larger than {BODY_LIMIT} bytes")

    def endless():
        for _ in range(100):
            yield b" " * 2**20

    refused(http.post(CHAT, content=endless()), 413, "larger than")
    assert time.monotonic() - started < 20
    assert answers(http)


def raw(server, *lines):
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    return connection


def test_slow_sender_blocks_nobody(server, http):
    connection = raw(server, f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Length: 1000")
    for _ in range(3):
        connection.sendall(b" ")
        assert answers(http)
    connection.close()
    assert answers(http)


def test_client_that_leaves_ends_its_answer(http, server):
    """Both streams and whole answers. The slot is free again long before 1900 tokens are written."""
    before = cancelled(http)
    for stream in (True, False):
        body = json.dumps(LONG | {"stream": stream})
        lines = [f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        connection = raw(server, *lines, f"Content-Length: {len(body)}")
        connection.sendall(body.encode())
        wait_for(lambda: requests_of(http) == 1)
        connection.close()
        wait_for(lambda: idle(http))
    assert cancelled(http) == before + 2
    assert answers(http)


def test_full_queue_names_time_to_retry(http, server):
    with contextlib.ExitStack() as stack:
        for number in (1, 2):  # one is computed, one waits
            body = LONG | {"stream": True, "messages": [{"role": "user", "content": f"Story {number}."}]}
            threading.Thread(target=stream_until_closed, args=(stack, server, body), daemon=True).start()
            wait_for(lambda number=number: requests_of(http) == number)
        response = http.post(CHAT, json=chat())
        assert refused(response, 429, "try again later")["type"] == "rate_limit_error"
        assert int(response.headers["Retry-After"]) >= 1
        with pytest.raises(openai.RateLimitError):
            server.openai().chat.completions.create(**chat())
        refused(http.post(CHAT, json=chat(n=3)), 400, "asks for 3 answers, and the server takes 2")
    wait_for(lambda: idle(http))
    assert answers(http)


def stream_until_closed(stack, server, body):
    client = stack.enter_context(httpx.Client(base_url=server.address, timeout=60))
    with contextlib.suppress(httpx.HTTPError, RuntimeError), client.stream("POST", CHAT, json=body) as response:
        for _ in response.iter_bytes():
            pass


def test_answer_beyond_time_limit_is_ended(start_server, topics):
    server = start_server(topics, "--request-seconds", 1, "--context", 2048)
    with server.http() as http:
        # The process that compiles grammars takes a second to start.
        wait_for(lambda: http.post(CHAT, json=LONG | {"max_tokens": 1}).status_code == 200)
        refused(http.post(CHAT, json=LONGER), 504, "took more than 1 s")
        lines = http.post(CHAT, json=LONGER | {"stream": True}).text.splitlines()
        assert "took more than 1 s" in json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
        assert answers(http)


def test_killed_model_process_is_replaced(start_server, topics):
    """Requests that it was computing get an error; the next one gets a new process."""
    server = start_server(topics, "--context", 2048)
    with server.http() as http:
        answered = []
        thread = threading.Thread(target=lambda: answered.append(server.http().post(CHAT, json=LONGER)))
        thread.start()
        wait_for(lambda: requests_of(http) == LONGER["n"])
        children = psutil.Process(server.process.pid).children()
        (child,) = [one for one in children if "flownpu.serve.processes.host" in one.cmdline()]
        child.kill()
        thread.join(30)
        refused(answered[0], 500, "was ended by signal 9")
        assert answers(http)


@pytest.fixture(scope="module")
def guarded(start_server, topics):
    """A server with a key, an origin that may ask, a log of texts, and 1 s for a body to arrive."""
    options = ["--origin", "https://chat.example", "--log-texts", "--body-seconds", 1]
    return start_server(topics, *options, FLOWNPU_API_KEY="open sesame")


SHOWN = {"Authorization": "Bearer open sesame"}


def test_missing_key_is_refused(guarded):
    with guarded.http() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/").status_code == 200
        for key in ("", "Bearer", "Bearer open", "Basic open sesame", "Bearer open sesame2"):
            refused(http.get("/v1/models", headers={"Authorization": key}), 401, "Authorization: Bearer KEY")
        assert http.post("/api/chat", json=chat()).status_code == 401
    assert guarded.openai(api_key="open sesame").models.list().data[0].id == "topics"


def test_slow_body_is_refused(guarded):
    """A slow body is answered with an error; a connection without whole headers is closed."""
    connection = raw(
        guarded, f"POST {CHAT} HTTP/1.1", "Host: a", "Authorization: Bearer open sesame", "Content-Length: 9"
    )
    connection.sendall(b"{")
    silent = socket.create_connection(("127.0.0.1", guarded.port))
    silent.sendall(b"POST / HTTP/1.1\r\nHost:")
    connection.settimeout(20)
    answer = connection.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 1 s" in answer + connection.recv(10_000)
    silent.settimeout(20)
    assert silent.recv(100) == b""
    with guarded.http(headers=SHOWN) as http:
        assert answers(http)


def test_reader_that_reads_nothing_is_cut(guarded):
    """Its answer of some 10 MB would stay in buffers, and its connection open, for as long as it likes."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", guarded.port))
    body = json.dumps(LONGER | {"stream": True, "max_tokens": 400})
    lines = [f"POST {CHAT} HTTP/1.1", "Host: a", "Authorization: Bearer open sesame", "Content-Type: application/json"]
    connection.sendall("\r\n".join([*lines, f"Content-Length: {len(body)}", "", body]).encode())
    port, process = connection.getsockname()[1], psutil.Process(guarded.process.pid)
    for held in (True, False):
        wait_for(lambda held=held: held == any(port in one.raddr for one in process.net_connections()), seconds=120)
    with guarded.http(headers=SHOWN) as http:
        assert answers(http)


def test_public_address_needs_key(capfd, topics):
    assert main(["serve", str(topics), "--host", "0.0.0.0", "--port", "0"]) == 2  # noqa: S104
    assert "FLOWNPU_API_KEY" in capfd.readouterr().err


def test_page_of_other_origin_is_refused(http, guarded):
    assert http.get("/v1/models", headers={"Host": "attacker.example"}).status_code == 400
    asking = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in http.options(CHAT, headers=asking).headers
    with guarded.http() as other:
        assert other.options(CHAT, headers=asking).headers["access-control-allow-origin"] == "https://chat.example"


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_server_finishes_answers_on_signal(start_server, topics, by):
    server = start_server(topics)
    texts = []

    def read():
        with (
            server.http() as http,
            http.stream("POST", CHAT, json=LONG | {"stream": True, "max_tokens": 200}) as response,
        ):
            texts.extend(response.iter_lines())

    thread = threading.Thread(target=read)
    thread.start()
    with server.http() as http:
        wait_for(lambda: requests_of(http) == 1)
    code = server.end(by)
    thread.join()
    assert texts[-2] == "data: [DONE]"
    assert code == (130 if by == signal.SIGINT else 0), server.text()
    assert f"Ending on {by.name}: 1 requests have 30 s to end" in server.text()
    assert "Ended; every request was answered" in server.text()


def test_server_cuts_answers_beyond_time_to_end(start_server, topics):
    server = start_server(topics, "--stopping-seconds", 1, "--context", 2048)
    thread = threading.Thread(target=stream_until_closed, args=(contextlib.ExitStack(), server, LONGER))
    thread.start()
    with server.http() as http:
        wait_for(lambda: requests_of(http) == LONGER["n"])
    assert server.end() == 0
    thread.join()
    assert "16 requests were cut short" in server.text()


def test_log_has_no_text(server, http):
    http.post(CHAT, json=chat(messages=[{"role": "user", "content": WORD}]))
    refused(http.post(CHAT, json=chat(messages=[{"role": "user", "content": WORD}], n="x")), 400, "n: ")
    assert CHAT in server.text()
    assert WORD not in server.text()


def test_texts_are_logged_if_asked(guarded):
    with guarded.http(headers=SHOWN) as http:
        answer = http.post(CHAT, json=chat(messages=[{"role": "user", "content": WORD}])).json()
    text = answer["choices"][0]["message"]["content"]
    wait_for(lambda: f"answered {text!r}" in guarded.text())
    assert WORD in guarded.text()
    assert "open sesame" not in guarded.text()


def test_port_in_use_is_named(capfd, topics, server):
    assert main(["serve", str(topics), "--port", str(server.port)]) == 1
    assert f"cannot listen on 127.0.0.1, port {server.port}" in capfd.readouterr().err


def test_server_without_model_names_reason(capfd, tmp_path):
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    assert "holds no genai_config.json" in capfd.readouterr().err

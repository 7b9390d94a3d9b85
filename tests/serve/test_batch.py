# SPDX-License-Identifier: Apache-2.0
"""`flownpu batch`: all lines are answered, none twice, whatever interrupts it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from flownpu.cli import main
from tests.serve.conftest import COMMAND

LINES = 12


def line(number, **fields):
    body = {"model": "topics", "messages": [{"role": "user", "content": f"Tell me about {number}."}], "max_tokens": 6}
    item = {
        "custom_id": f"request-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body | {"temperature": 0},
    }
    return item | fields


def write(path, items):
    path.write_text("".join(f"{json.dumps(item)}\n" for item in items))
    return path


def read(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "in.jsonl", map(line, range(LINES)))


@pytest.fixture
def run(topics, tmp_path, capfd):
    def run(source, target=tmp_path / "out.jsonl"):
        code = main(["batch", str(source), str(target), "--model", str(topics)])
        return code, capfd.readouterr().err, target

    return run


def test_every_kind_of_request_and_of_error(run, tmp_path):
    chat = line(0)
    prompt = line(1, url="/v1/completions", body={"model": "topics", "prompt": "Strings are", "max_tokens": 4})
    asked = line(2, url="/v1/responses", body={"model": "topics", "input": "Strings", "max_output_tokens": 4})
    wrong = [
        line(3, body=chat["body"] | {"model": "other"}),
        line(4, body=chat["body"] | {"colour": "red"}),
        line(5, url="/v1/embeddings"),
        line(6, body=chat["body"] | {"stream": True}),
    ]
    code, err, target = run(write(tmp_path / "in.jsonl", [chat, prompt, asked, *wrong]))
    assert code == 0
    assert "7 of 7 requests are answered, 4 of them with an error" in err
    answers = {item["custom_id"]: item["response"] for item in read(target)}
    assert [answers[f"request-{number}"]["status_code"] for number in range(7)] == [200, 200, 200, 404, 400, 400, 400]
    assert answers["request-0"]["body"]["usage"]["completion_tokens"] == 6
    assert answers["request-1"]["body"]["choices"][0]["text"]
    assert answers["request-2"]["body"]["output"][0]["content"][0]["text"]
    assert "unknown field colour" in answers["request-4"]["body"]["error"]["message"]


def test_an_interrupted_batch_goes_on(source, run, topics, tmp_path):
    """Killed in the middle, with half a line at the end: nothing is lost, and nothing is done twice."""
    target = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "batch", source, target, "--model", topics, "--slots", "1"]
    )
    end = time.monotonic() + 60
    while not target.exists() or not target.read_bytes().count(b"\n"):
        assert time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    whole = target.read_bytes()
    before = read(target) if whole.endswith(b"\n") else [json.loads(text) for text in whole.splitlines()[:-1]]
    with target.open("ab") as file:
        file.write(b'{"id": "half a li')
    code, err, _ = run(source)
    after = read(target)
    assert code == 0
    assert f"{LINES} of {LINES} requests are answered, {len(before)} of them before" in err or len(before) == LINES
    assert after[: len(before)] == before
    assert sorted(item["custom_id"] for item in after) == sorted(f"request-{number}" for number in range(LINES))
    run(source)
    assert read(target) == after


def test_a_full_disk_leaves_whole_lines(source, run, topics, tmp_path):
    """A limit of the file's size stands in for a full disk: a write is cut short, the next one fails."""
    target = tmp_path / "out.jsonl"
    script = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    script += "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); " + COMMAND
    done = subprocess.run(
        [sys.executable, "-c", script, "batch", source, target, "--model", topics],
        # Under the limit, Python would cut the bytecode that it stores, and nobody could import that module afterwards.
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "the same command goes on from there" in done.stderr
    assert 0 < len(read(target)) < LINES
    assert target.read_bytes().endswith(b"\n")
    assert run(source)[0] == 0
    assert len({item["custom_id"] for item in read(target)}) == len(read(target)) == LINES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "line 1 is not JSON"),
        ('{"body": {}}\n', 'a text "custom_id"'),
        ('{"custom_id": "a"}\n\n{"custom_id": "a"}\n', "line 3: a line before it has the custom_id 'a'"),
    ],
)
def test_a_source_that_is_none(run, tmp_path, text, message):
    (tmp_path / "in.jsonl").write_text(text)
    code, err, target = run(tmp_path / "in.jsonl")
    assert code == 1
    assert message in err
    assert not target.exists()


def test_a_target_that_is_something_else_is_left(run, source, tmp_path):
    target = tmp_path / "notes.txt"
    target.write_text("Notes.\nMore notes.")
    code, err, _ = run(source, target)
    assert code == 1
    assert "something else than answers of a batch" in err
    assert target.read_text() == "Notes.\nMore notes."

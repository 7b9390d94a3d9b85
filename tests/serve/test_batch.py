# SPDX-License-Identifier: Apache-2.0
"""`flownpu batch`: all lines are answered, none twice, whatever interrupts it."""

import asyncio
import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from flownpu.cli import main
from flownpu.errors import FlowNPUError
from flownpu.serve.batch import Batch, _Target, run_batch
from flownpu.serve.errors import ApiError, invalid
from flownpu.serve.service import Service
from flownpu.serve.settings import ServerSettings
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


def test_batch_answers_all_kinds_of_requests_and_errors(run, tmp_path):
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


def test_partly_enforced_schema_sets_header(run, tmp_path):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 1, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}}
    requests = [line(0), line(1, body=line(1)["body"] | {"response_format": form, "max_tokens": 8})]
    code, _, target = run(write(tmp_path / "in.jsonl", requests))
    assert code == 0
    headers = {item["custom_id"]: item["response"].get("headers") for item in read(target)}
    assert headers == {"request-0": None, "request-1": {"FlowNPU-Unenforced": "#/uniqueItems"}}


def test_interrupted_batch_goes_on(source, run, topics, tmp_path):
    """Killed in the middle, with half a line at the end: no answer is lost, and none is computed twice."""
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
        file.write(b'{"id": "batch_req_0a1b2c')
    code, err, _ = run(source)
    after = read(target)
    assert code == 0
    assert f"{LINES} of {LINES} requests are answered, {len(before)} of them before" in err or len(before) == LINES
    assert after[: len(before)] == before
    assert sorted(item["custom_id"] for item in after) == sorted(f"request-{number}" for number in range(LINES))
    run(source)
    assert read(target) == after


def test_full_disk_leaves_whole_lines(source, run, topics, tmp_path):
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
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"{", "line 1 is not JSON: Expecting property name enclosed in double quotes at character 2"),
        (b'{"body": {}}\n', 'line 1: expected an object with a text "custom_id"'),
        (b'{"custom_id": "a"}\n\n{"custom_id": "a"}\n', "line 3: a line before it has the custom_id 'a'"),
        (b'{"custom_id": "a"}\n{"custom_id": "caf\xe9"}\n', "line 2 is not UTF-8: the byte 0xe9 comes after"),
        ('{"custom_id": "a"}\n'.encode("utf-16"), "line 1 is UTF-16: expected UTF-8"),
        ('{"custom_id": "a"}\n'.encode("utf-16-be"), "line 1 is UTF-16: expected UTF-8"),
        (b'{"custom_id": ' + b"[" * 100_000, "line 1 is nested too deeply"),
        (b'{"custom_id": "a", "body": ' + b"[" * 150 + b"]" * 150 + b"}", "line 1 is nested too deeply"),
        (rb'{"custom_id": "\ud800"}', r"line 1 is not text: \ud800 is half of a surrogate pair"),
        (rb'{"custom_id": "a", "body": {"metadata": {"\udc00": 1}}}', r"line 1 is not text: \udc00 is half"),
        (b'{"custom_id": "a", "body": ' + b"7" * 5000 + b"}", "line 1 is not JSON that is read here: an integer has"),
        (b'{"custom_id": "a", "body": NaN}', "line 1 is not JSON: NaN is no number"),
    ],
)
def test_source_of_other_contents_is_refused_with_its_line(run, tmp_path, content, message):
    (tmp_path / "in.jsonl").write_bytes(content)
    code, err, target = run(tmp_path / "in.jsonl")
    assert code == 1
    assert message in err
    assert not target.exists()


def test_source_with_byte_order_mark_is_answered(run, tmp_path):
    """As Windows' editors write it, with their line ends; and with no line end behind the last line."""
    text = "\r\n".join(json.dumps(line(number), ensure_ascii=False) for number in range(2))
    (tmp_path / "in.jsonl").write_bytes(text.encode("utf-8-sig"))
    assert run(tmp_path / "in.jsonl")[0] == 0


FOREIGN = [
    b"Notes.\nMore notes.",
    b'{"my": "notes, one line without a line break"}',
    b'{"id": "mine", "custom_id": "a"',
    json.dumps(line(0)).encode() + b"\n",  # requests, not answers
    b'{"custom_id": ["a"], "response": {}}\n',
    b"[" * 100_000,
    b"\0" * 100,
    b"\xff\xfe",
]


@pytest.mark.parametrize("content", FOREIGN, ids=[content[:20] for content in FOREIGN])
def test_target_of_other_contents_is_left(run, source, tmp_path, content):
    target = tmp_path / "notes.txt"
    target.write_bytes(content)
    code, err, _ = run(source, target)
    assert code == 1
    assert "something else than answers of a batch" in err
    assert target.read_bytes() == content


@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
def test_target_equal_to_source_is_refused(run, tmp_path, link):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line(0)))
    target = source
    if link is not None:
        target = tmp_path / "linked.jsonl"
        getattr(target, link)(source)
    code, err, _ = run(source, target)
    assert code == 1
    assert "is the file of the requests" in err
    assert source.read_text() == json.dumps(line(0))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such devices and pipes")
@pytest.mark.parametrize("kind", ["/dev/full", "/dev/zero", "pipe", "folder"])
def test_devices_and_pipes_are_refused(run, source, tmp_path, kind):
    """A device without an end was read forever, and a pipe is empty at the second reading."""
    place = pathlib.Path(kind)
    if kind == "pipe":
        place = tmp_path / "pipe"
        os.mkfifo(place)
    elif kind == "folder":
        place = tmp_path
    for files in ((source, place), (place, tmp_path / "out.jsonl")):
        code, err, _ = run(*files)
        assert code == 1
        assert f"{place} is no file" in err


@pytest.mark.parametrize("rest", [b'{"id": "batch_r', b'{"id": "batch_req_0a", "custom_id"\0\0\0', b"\0\0\0\0"])
def test_answers_before_cut_one_are_kept(tmp_path, rest):
    """The traces of a power cut: part of a line, or zeros where the file system had not written yet."""
    answer = b'{"id": "batch_req_0", "custom_id": "a", "response": {"body": {}}}\n'
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer + rest)
    assert opened(path) == {"a"}
    assert path.read_bytes() == answer


def test_answer_without_its_line_end_is_kept(tmp_path):
    answer = b'{"id": "batch_req_0", "custom_id": "a", "response": {"body": {}}}'
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer)
    assert opened(path) == {"a"}
    assert path.read_bytes() == answer + b"\n"


def opened(path):
    """The custom_ids of the answers in a target."""
    with path.open("a+b", buffering=0) as file:
        file.seek(0)
        return _Target(path, file).names


def test_answers_are_read_in_blocks(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps({"custom_id": str(n), "response": "x" * 10_000}) + "\n" for n in range(100)))
    reads = []

    class Counted(io.FileIO):
        def readinto(self, buffer):
            reads.append(len(buffer))
            return super().readinto(buffer)

        def read(self, size=-1):
            reads.append(size)
            return super().read(size)

    with Counted(path, "a+b") as file:
        file.seek(0)
        assert len(_Target(path, file).names) == 100
    assert len(reads) < path.stat().st_size / 1000


class Failing(Service):
    """A service whose model fails: always for the request "always", and the first time for all others."""

    def __init__(self, settings):
        super().__init__(settings)
        self.asked = []

    async def complete(self, request):
        first = request.prompt not in self.asked
        self.asked.append(request.prompt)
        if request.prompt == "mistake":
            raise KeyError("a bug")
        if first or request.prompt == "always":
            raise ApiError(500, "the model's process was ended by signal 9", code="model_failed")
        raise invalid("answered")


def test_failing_request_gets_error_as_answer(tmp_path, monkeypatch):
    prompts = ["always", "mistake", "other", "another"]
    items = [line(n, url="/v1/completions", body={"model": "m", "prompt": text}) for n, text in enumerate(prompts)]
    batch = Batch(write(tmp_path / "in.jsonl", items), tmp_path / "out.jsonl")
    monkeypatch.setattr("flownpu.serve.batch.Service", Failing)
    progress = asyncio.run(run_batch(batch, ServerSettings({}), lambda _: None))
    assert (progress.answered, progress.refused) == (4, 4)
    answers = {item["custom_id"]: item["response"] for item in read(batch.target)}
    assert [answers[f"request-{number}"]["status_code"] for number in range(4)] == [500, 500, 400, 400]
    assert "signal 9" in answers["request-0"]["body"]["error"]["message"]
    assert answers["request-1"]["body"]["error"]["type"] == "server_error"
    before = batch.target.read_bytes()
    assert asyncio.run(run_batch(batch, ServerSettings({}), lambda _: None)).answered == 0
    assert batch.target.read_bytes() == before


def test_batch_whose_model_cannot_be_loaded_ends_without_answers(source, tmp_path, monkeypatch):
    class Unloaded(Service):
        async def chat(self, _request):
            raise ApiError(503, "the model topics cannot be loaded", code="model_not_loaded")

    monkeypatch.setattr("flownpu.serve.batch.Service", Unloaded)
    with pytest.raises(FlowNPUError, match="cannot be loaded"):
        asyncio.run(run_batch(Batch(source, tmp_path / "out.jsonl"), ServerSettings({}), lambda _: None))
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_batch_ends_on_signal(topics, tmp_path):
    """SIGTERM while answers are computed: the exit code shows it, and the file has whole lines."""
    target = tmp_path / "out.jsonl"
    endless = [line(n, body=line(n)["body"] | {"max_tokens": 4000}) for n in range(200)]
    source = write(tmp_path / "in.jsonl", endless)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "batch", source, target, "--model", topics, "--slots", "1"]
    )
    end = time.monotonic() + 60
    while not target.exists() or not target.read_bytes().count(b"\n"):
        assert time.monotonic() < end
        time.sleep(0.005)
    process.terminate()
    assert process.wait(30) == 143
    assert target.read_bytes().endswith(b"\n")
    assert len(read(target)) < 200


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that another process could send")
@pytest.mark.parametrize(("command", "by"), [("batch", signal.SIGTERM), ("serve", signal.SIGINT)])
def test_batch_ends_on_signal_while_loading(topics, source, tmp_path, command, by):
    """The model's process is stopped, as if it loaded forever."""
    arguments = (
        ["batch", source, tmp_path / "out.jsonl", "--model", topics] if command == "batch" else ["serve", topics]
    )
    # A shell makes its background commands ignore SIGINT, and Python then ignores it, too.
    heeding = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {COMMAND}"
    process = subprocess.Popen([sys.executable, "-c", heeding, *arguments], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    # Until the child imports modules, which takes a second, its parent may still wait for its start.
    while not (children := psutil.Process(process.pid).children()) or children[0].cpu_times().user < 0.1:
        assert time.monotonic() < end
        time.sleep(0.005)
    children[0].suspend()
    process.send_signal(by)
    try:
        assert process.wait(30) == 128 + by
        assert psutil.wait_procs(children, 10)[1] == []
    finally:
        for one in (process, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

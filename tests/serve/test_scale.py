# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/use/scale.md, on one machine, with Ray in a separate environment: every row is answered once
although processes are killed, and two replicas answer clients."""

import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import httpx
import openai
import pytest

from flownpu.generate.language_model import LanguageModel, Sampling, Timing
from scripts import environments

PAGE = Path(__file__).parents[2] / "docs" / "use" / "scale.md"
PYTHON = environments.python_of("ray")
pytestmark = pytest.mark.skipif(PYTHON is None, reason=environments.reason("ray"))
ROWS = 16
# The worker that has row 5 dies, once; row 13 fails until the file "mended" is there.
MISHAPS = """
import os, sys
from pathlib import Path
import answers

HERE = Path(sys.argv[3]).parent

class Answers(answers.Answers):
    def __call__(self, rows):
        if 5 in rows["id"] and not (HERE / "died").exists():
            (HERE / "died").touch()
            os._exit(1)
        if 13 in rows["id"] and not (HERE / "mended").exists():
            raise RuntimeError("row 13")
        return super().__call__(rows)

answers.Answers = Answers
answers.main(*sys.argv[1:])
"""
WRITE = """
import sys, pyarrow, pyarrow.parquet
for first in range(0, 16, 4):
    ids = list(range(first, first + 4))
    table = pyarrow.table({"id": ids, "prompt": [f"Strings are {number}" for number in ids]})
    pyarrow.parquet.write_table(table, f"{sys.argv[1]}/{first}.parquet")
"""
READ = "import json, sys, pyarrow.parquet; print(json.dumps(pyarrow.parquet.read_table(sys.argv[1]).to_pylist()))"


@pytest.fixture
def environment(tmp_path):
    """Ray's packages come from its environment, all others from this one."""
    answers, replicas = re.findall(r"<!-- tested with Ray -->\n```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (tmp_path / "answers.py").write_text(answers)
    (tmp_path / "replicas.py").write_text(replicas)
    (tmp_path / "mishaps.py").write_text(MISHAPS)
    paths = [tmp_path, *filter(None, sys.path), sysconfig.get_paths()["purelib"]]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def run(environment, *command):
    done = subprocess.run(
        [PYTHON, *map(str, command)], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def test_batch_rows_are_answered_once(environment, genai, topics, tmp_path):  # noqa: ARG001
    (tmp_path / "prompts").mkdir()
    code, _, err = run(environment, "-c", WRITE, tmp_path / "prompts")
    assert code == 0, err
    arguments = (tmp_path / "mishaps.py", topics, tmp_path / "prompts", tmp_path / "out")
    code, _, err = run(environment, *arguments)
    assert (code, "row 13" in err) == (1, True), err
    (tmp_path / "mended").touch()
    code, _, err = run(environment, *arguments)
    assert code == 0, err
    assert (tmp_path / "died").exists()
    code, out, err = run(environment, "-c", READ, tmp_path / "out")
    assert code == 0, err
    rows = sorted(json.loads(out), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(ROWS))
    model = LanguageModel(topics)
    for row in rows:
        tokens = model.tokens_of_text(row["prompt"])
        expected = "".join(model.complete(tokens, 24, Sampling(temperature=0), Timing()))
        assert row["answer"].strip() == expected.strip()


def test_replicas_share_requests(environment, topics, tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(
            [PYTHON, tmp_path / "replicas.py", topics, str(port)], env=environment, stdout=said, stderr=said
        )
        try:
            wait(process, f"http://127.0.0.1:{port}/health", said)
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            ask = {"model": "topics", "prompt": "Strings are", "max_tokens": 8, "temperature": 0}
            texts = {client.completions.create(**ask).choices[0].text for _ in range(4)}
            stream = client.completions.create(**ask, stream=True)
            texts.add("".join(chunk.choices[0].text for chunk in stream if chunk.choices))
            assert len(texts) == 1
            assert texts.pop()
        finally:
            process.terminate()
            process.wait(60)


def wait(process, url, said):
    end = time.monotonic() + 120
    while True:
        assert process.poll() is None, said.seek(0) or said.read()
        assert time.monotonic() < end, said.seek(0) or said.read()
        try:
            if httpx.get(url, timeout=5).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)

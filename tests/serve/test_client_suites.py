# SPDX-License-Identifier: Apache-2.0
"""Installed suites for servers of OpenAI's API: compatcanary and lm-eval."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from scripts import environments

TASKS = Path(__file__).parent / "lm_eval"


@pytest.fixture(scope="module")
def server(start_server, topics):
    # An answer that does not end by itself must not keep the suites waiting; a tool call has 119 tokens.
    return start_server(topics, "--context", 1024, "--max-output", 192)


def test_compatcanary_probes_pass(server):
    """Seven probes pass: models, chat, a stream, a tool that must be called, a schema, responses and their stream."""
    modules = environments.modules_of("compatcanary")
    if modules is None:
        pytest.skip(environments.reason("compatcanary"))
    command = [
        "node",
        modules / "compatcanary" / "src" / "cli.js",
        "scan",
        "--base-url",
        f"{server.address}/v1",
        "--model",
        "topics",
        "--format",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert {result["status"] for result in report["results"]} == {"pass"}
    assert len(report["results"]) == 7


def test_lm_eval_score_equals_answers(server, tmp_path):
    """lm-eval's score equals the score of the answers that OpenAI's client gets."""
    python = environments.python_of("lm-eval")
    if python is None:
        pytest.skip(environments.reason("lm-eval"))
    arguments = f"model=topics,base_url={server.address}/v1/chat/completions,num_concurrent=2,max_retries=1"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [
            *(python, "-m", "lm_eval", "--model", "local-chat-completions", "--apply_chat_template"),
            *("--model_args", arguments, "--tasks", "flownpu_statements", "--include_path", TASKS),
            *("--output_path", tmp_path),
        ],
        cwd=TASKS,
        env={**os.environ, **offline, "HF_HOME": str(tmp_path / "home"), "OPENAI_API_KEY": "none"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "topics").glob("results_*.json")
    score = json.loads(results.read_text())["results"]["flownpu_statements"]["exact_match,statement"]
    client, right = server.openai(), []
    for line in (TASKS / "questions.jsonl").read_text().splitlines():
        item = json.loads(line)
        message = {"role": "user", "content": f"Tell me about {item['question']}."}
        answer = client.chat.completions.create(model="topics", messages=[message], temperature=0, max_tokens=12)
        found = re.search(r'"(\w+)" statement', answer.choices[0].message.content)
        right.append(found is not None and found[1] == item["answer"])
    assert score == pytest.approx(sum(right) / len(right))
    # The model knows some answers and not others, because a constant score would show nothing.
    assert 0 < score < 1

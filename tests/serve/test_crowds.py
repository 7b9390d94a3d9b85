# SPDX-License-Identifier: Apache-2.0
"""The report of `flownpu bench --serve` is consistent; no test here asserts how fast anything is."""

import json
import sys

import numpy as np
import pytest

from flownpu.bench.crowd import Answer, Crowd, prompts_of
from flownpu.bench.crowd_report import CrowdReport
from flownpu.bench.servers import CrowdMeasurement, CrowdMeasurements, CrowdRun, Server, measure_servers
from flownpu.cli import main
from flownpu.errors import FlowNPUError
from flownpu.machine import Machine

NEW = 6


@pytest.fixture
def bench(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(model, *arguments):
        code = main(["bench", str(model), "--serve", "--generate", str(NEW), *map(str, arguments)])
        return code, *capfd.readouterr()

    return run


def test_crowds_measure_two_servers(bench, start_server, paged_topics, tmp_path):
    """One server that the command starts, and one with the same model whose context is too short for 64 tokens."""
    other = start_server(paged_topics, "--context", 60)
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "markdown")}
    code, out, err = bench(
        paged_topics,
        *("--clients", "1,3", "--prompt", "40,64", "--repeats", 1, "--server", f"short={other.address}/v1"),
        *(part for kind, path in files.items() for part in (f"--{kind}", path)),
    )
    assert code == 0, err
    report = json.loads(files["json"].read_text())
    assert report["crowds"] == [{"clients": count, "prompts": [40, 64], "generate": NEW} for count in (1, 3)]
    assert list(report["servers"]) == ["flownpu", "short"]
    for own, short in zip(*(report["servers"][name]["crowds"] for name in ("flownpu", "short")), strict=True):
        clients = own["clients"]
        assert own["answers"] == short["answers"] == 2 * clients
        assert own["failures"] == []
        # The model may end a text earlier.
        assert 2 * clients <= own["new_tokens"] <= 2 * clients * NEW
        assert own["prompt_tokens"] == clients * (40 + 64)
        # The half that all prompts share is two blocks of 16 for 64 tokens, and one for 40. Clients that come first, at
        # the same time, compute them; a client's second prompt finds at least what its first had.
        assert clients * 16 <= own["cached_tokens"] <= clients * (16 + 32) - 16
        assert own["rate"]["minimum"] > 0
        for times in (own["first_token_seconds"], own["between_tokens_seconds"]):
            assert 0 < times["p50"] <= times["p95"]
        assert own["resident"][0] > 2**20
        assert len(short["failures"]) == clients
        assert "the prompt is 64 tokens long and the context holds 60" in short["failures"][0]
        assert clients <= short["new_tokens"] <= clients * NEW
        assert short["resident"] == [0]
    for text in (out, files["markdown"].read_text()):
        for row in ("new tokens/s: 3", "first token, p95, ms: 1", "between tokens, p50, ms: 3", "short, 3 clients: 3"):
            assert row in text


def test_half_of_each_prompt_is_common_to_all():
    crowd = Crowd(4, (10, 64), 1)
    asked = prompts_of(crowd, 1000, seed=1)
    longest = max((prompt for own in asked for prompt in own), key=len)
    for own in asked:
        assert sorted(map(len, own)) == [10, 64]
        for prompt in own:
            half = len(prompt) // 2
            np.testing.assert_array_equal(prompt[:half], longest[:half])
            assert 8 <= prompt.min() <= prompt.max() < 1000
    rests = {tuple(prompt[len(prompt) // 2 :]) for own in asked for prompt in own}
    assert len(rests) == 8
    again = prompts_of(crowd, 1000, seed=1)
    assert all((one == two).all() for own, same in zip(asked, again, strict=True) for one, two in zip(own, same))  # noqa: B905 as many


def test_figures_of_report():
    """Ratios are above 1 where the first server is better; percentiles leave failures out."""

    def run(seconds, *firsts):
        answers = [Answer(10, first, [first / 10, first / 5], 4, 5) for first in firsts]
        return CrowdRun(seconds, [*answers, Answer(10, failure="gone")], 2**20)

    own = CrowdMeasurement("", {2: [run(1.0, 0.1, 0.3), run(2.0, 0.2, 0.2)]})
    peer = CrowdMeasurement("peer 1.0", {2: [run(4.0, 0.4, 0.4)]})
    found = CrowdMeasurements([Crowd(2, (10,), 4)], {"own": own, "peer": peer})
    report = CrowdReport(Machine("", "", 1, 1, "", "", {}), "model", {"repeats": 2}, found)
    rows = {row[0]: row[1:] for section in report.sections() for row in section}
    # 8 tokens in 1 and in 2 seconds: the median of 8 and 4 a second; the peer makes 2 a second.
    assert rows["new tokens/s: 2"] == ["6.0", "2.0", "3.00"]
    assert rows["first token, p50, ms: 2"] == ["200", "400", "2.00"]
    assert rows["of prompts not computed again, %: 2"] == ["50", "50", ""]
    assert rows["memory afterwards, MiB: 2"] == ["1", "1", ""]
    assert report.footer() == ["own, 2 clients: 2 failed, gone", "peer, 2 clients: 1 failed, gone"]


def test_failing_server_is_reported():
    broken = Server("broken", (sys.executable, "-c", "raise SystemExit('no weights')"))
    with pytest.raises(FlowNPUError, match="broken ended with exit code 1: no weights"):
        measure_servers([broken], [Crowd(1, (8,), 2)], repeats=1, vocabulary_size=99)
    nobody = Server("nobody", url="http://127.0.0.1:9/v1")
    with pytest.raises(FlowNPUError, match="expected the models of a server of OpenAI's API"):
        measure_servers([nobody], [Crowd(1, (8,), 2)], repeats=1, vocabulary_size=99)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--server", "here"), 2, "expected NAME=URL"),
        (("--against", "ort-cpu"), 2, "expected some of openvino, llama.cpp, got 'ort-cpu'"),
        (("--clients", "0"), 2, "expected numbers from 1"),
        (("--depth", "10"), 2, "--depth"),
        (("--prompt", "64,9000"), 1, "9000 prompt tokens and 6 new ones do not fit the model's context"),
    ],
)
def test_unknown_bench_arguments_are_refused(bench, paged_topics, arguments, code, message):
    done, _, err = bench(paged_topics, *arguments)
    assert (done, message in err) == (code, True), err

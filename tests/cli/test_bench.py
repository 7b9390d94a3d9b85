# SPDX-License-Identifier: Apache-2.0
"""`flownpu bench`: that what it reports hangs together. How fast is nobody's assertion here."""

import json
import os

import pytest

from flownpu.benchmark import Spread

CPU = ("--provider", "cpu")
SMALL = ("--prompt-tokens", 40, "--new-tokens", 5, "--repeats", 3)


def test_spread():
    assert Spread.of([5.0, 1.0, 3.0]) == Spread(median=3.0, minimum=1.0, maximum=5.0)


def test_json(flownpu, model):
    report = json.loads(flownpu("bench", model, *SMALL, "--json", *CPU).out)
    assert (report["prompt_tokens"], report["new_tokens"], report["repeats"]) == (40, 5, 3)
    for name in ("prefill", "decode", "first_token"):
        spread = report[name]
        assert 0 < spread["minimum"] <= spread["median"] <= spread["maximum"], name
    # The first token cannot come before the prompt's 40 tokens have been read.
    assert report["first_token"]["maximum"] >= 40 / report["prefill"]["maximum"]
    assert report["load_seconds"] > 0
    memory = report["memory"]
    assert memory["before"] < memory["resident"] <= memory["peak"]
    assert 0 < memory["anonymous"] < memory["resident"]
    assert report["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert {"flownpu", "onnxruntime", "onnxruntime-genai"} <= report["machine"]["versions"].keys()


def test_table(flownpu, model):
    done = flownpu("bench", model, *SMALL, *CPU)
    assert done.code == 0
    for text in ("40 prompt tokens, 5 new tokens, 3 repeats", "prefill, tokens/s", "decode, tokens/s", "memory, peak"):
        assert text in done.out


@pytest.mark.parametrize("limit", [2048])
def test_what_does_not_fit_the_context_is_refused(flownpu, model, limit):
    done = flownpu("bench", model, "--prompt-tokens", limit, "--new-tokens", 2, *CPU)
    assert done.code == 1
    assert f"2048 prompt tokens and 2 new ones do not fit the model's context of {limit}" in done.err


def test_an_end_of_text_does_not_end_a_measurement(flownpu, model_copy):
    # All tokens end the text: without a minimum length the reply would be one token long.
    config = json.loads((model_copy / "genai_config.json").read_text())
    config["model"]["eos_token_id"] = list(range(4000))
    (model_copy / "genai_config.json").write_text(json.dumps(config))
    report = json.loads(flownpu("bench", model_copy, *SMALL, "--json", *CPU).out)
    assert report["decode"]["median"] > 0

# SPDX-License-Identifier: Apache-2.0
"""`--lookup` and `--draft` of the commands that generate."""

import json

PROMPT = "The for statement. The for statement. The for statement."


def test_run_reports_kept_candidates(model, flownpu):
    arguments = ["run", model, "-p", PROMPT, "--max-new-tokens", "24", "--temperature", "0"]
    plain = flownpu(*arguments)
    for option in (["--lookup"], ["--draft", model], ["--lookup", "--draft", model]):
        outcome = flownpu(*arguments, *option)
        assert outcome.code == 0, outcome.err
        assert outcome.out == plain.out
        assert " candidates kept" in outcome.err
        document = json.loads(flownpu(*arguments, *option, "--json").out)
        assert document["steps"] + document["kept_candidate_tokens"] >= document["new_tokens"] - 1
    assert " steps" not in plain.err


def test_draft_with_two_models_is_refused(model, flownpu, tmp_path):
    outcome = flownpu("run", model, "-p", PROMPT, "--lookup", "--device", "emulate")
    assert outcome.code == 1
    assert "cannot verify candidates on --device emulate" in outcome.err
    outcome = flownpu("run", model, "-p", PROMPT, "--draft", tmp_path)
    assert outcome.code == 1
    outcome = flownpu("serve", f"one={model}", f"two={model}", "--draft", model)
    assert outcome.code == 2
    assert "got 2 models" in outcome.err
    outcome = flownpu("run", model, "-p", PROMPT, "--lookup", "--draft-device", "gpu")
    assert outcome.code == 2
    assert "expected --draft with the folder of a model" in outcome.err

# SPDX-License-Identifier: Apache-2.0
"""`flownpu compile`: a folder that runs without its source, and names its device."""

import json
import shutil

PROMPT = ("-p", "The with statement", "--no-chat-template", "--max-new-tokens", 20, "--temperature", 0)


def test_compiled_folder_gives_same_text(flownpu, model_copy, tmp_path):
    before = flownpu("run", model_copy, *PROMPT, "--activations", "bf16")
    compiled = tmp_path / "compiled"
    done = flownpu("compile", model_copy, compiled, "--option", "activations=bf16")
    assert done.code == 0, done.err
    shutil.rmtree(model_copy)
    assert not [path.name for path in compiled.iterdir() if path.suffix == ".data"]
    settings = json.loads((compiled / "genai_config.json").read_text())
    session = settings["model"]["decoder"]["session_options"]
    assert session["provider_options"] == [{"FlowNPUExecutionProvider": {"activations": "bf16"}}]
    assert "compiled, in nodes that stand for all of their parts" in flownpu("explain", compiled).out
    after = flownpu("run", compiled, *PROMPT)
    assert after.code == 0, after.err
    assert after.out == before.out  # The same steps on the same numbers.


def test_compiled_folder_is_replaced_with_force_only(flownpu, model, tmp_path):
    output = tmp_path / "compiled"
    assert flownpu("compile", model, output).code == 0
    again = flownpu("compile", model, output)
    assert again.code != 0
    assert "--force" in again.err
    assert flownpu("compile", model, output, "--force").code == 0


def test_provider_refusal_leaves_nothing(flownpu, model, tmp_path):
    done = flownpu("compile", model, tmp_path / "compiled", "--option", "threads=many")
    assert done.code != 0
    assert "option threads = 'many' is not valid" in done.err
    assert list(tmp_path.iterdir()) == []


def test_damaged_partition_names_remedy(flownpu, model, tmp_path):
    output = tmp_path / "compiled"
    assert flownpu("compile", model, output).code == 0
    (file,) = output.glob("*.flownpu")
    file.write_bytes(file.read_bytes()[:5000])
    done = flownpu("run", output, *PROMPT)
    assert done.code != 0
    assert "cannot be read as a compiled partition" in done.err
    assert "compile the model again" in done.err

# SPDX-License-Identifier: Apache-2.0
"""The wheel, in a Python for Windows: its commands give the same results as on this system."""

import json

import numpy as np
import onnx
import pytest

from scripts.release import contents
from tests.windows.installed import FIXTURE, here

IMPORTS = """
import importlib, json, pkgutil, flownpu
failed = {}
names = [module.name for module in pkgutil.walk_packages(flownpu.__path__, "flownpu.")]
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = repr(error)
print(json.dumps({"count": len(names), "failed": failed}))
"""
PROMPT = [
    "--no-chat-template",
    "--temperature",
    "0",
    "--max-new-tokens",
    "24",
    "--prompt",
    'The "for" statement is used to',
]
QUESTIONS = ["What is a list?", "¿Qué es una lista?", "列表是什么?"]


@pytest.fixture(scope="module")
def converted(installed, tmp_path_factory):
    """The trained model, as the Python for Windows converts it."""
    folder = tmp_path_factory.mktemp("windows") / "gemma3-topics"
    installed.flownpu("convert", FIXTURE, folder)
    return folder


def test_modules_are_all_imported(installed):
    done = installed.python("-c", IMPORTS)
    said = json.loads(done.stdout.splitlines()[-1])
    # The module for Linux imports fcntl.
    assert set(said["failed"]) == {"flownpu.system.linux"}
    assert said["count"] > 200


def test_licences_are_in_package(installed):
    (folder,) = installed.folder.glob("Lib/site-packages/flownpu-*.dist-info/licenses")
    assert {file.name for file in folder.iterdir()} == set(contents.licences_of("win_amd64"))


def test_doctor_finds_nothing_wrong(installed):
    found = {check["name"]: check for check in json.loads(installed.flownpu("doctor", "--json"))["checks"]}
    assert {name for name, check in found.items() if check["status"] != "good"} == {"npu", "opencl"}
    assert "win_amd64" in found["provider library"]["found"]
    assert "avx" in found["processor"]["found"]


def test_conversions_write_same_model(converted, model):
    """Equal byte for byte, except the tables of RoPE, because each system has its own pow, cos and sin."""
    assert (converted / "model.onnx").read_bytes() == (model / "model.onnx").read_bytes()
    graph = onnx.load(model / "model.onnx", load_external_data=False).graph
    stored = [tensor for tensor in graph.initializer if tensor.external_data]
    assert len(stored) > 10
    for tensor in stored:
        place = {entry.key: entry.value for entry in tensor.external_data}
        theirs, ours = (
            np.fromfile(folder / place["location"], np.uint8, int(place["length"]), offset=int(place["offset"]))
            for folder in (converted, model)
        )
        if not tensor.name.startswith("rotary."):
            assert np.array_equal(theirs, ours), tensor.name
            continue
        # A frequency may differ in its last bit, and so may its product with the position: float32, 2^-23 each.
        angle = (tensor.dims[0] - 1) * 2.0**-22
        assert np.abs(theirs.view(np.float32) - ours.view(np.float32)).max() <= angle + 2.0**-23


@pytest.mark.parametrize("more", [[], ["--option", "cpu_isa=generic"]], ids=["best", "generic"])
def test_run_continues_prompt_as_here(installed, converted, model, more):
    assert installed.flownpu("run", converted, *PROMPT, *more) == here("run", model, *PROMPT, *more)


def test_batch_answers_in_utf_8(installed, converted, tmp_path):
    """The command runs a model in another process over a socket, locks files, and has texts outside all code pages."""
    source, target = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    bodies = [{"model": converted.name, "prompt": text, "max_tokens": 8, "temperature": 0} for text in QUESTIONS]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    source.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    installed.flownpu("batch", source, target, "--model", converted)
    answers = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert {answer["custom_id"] for answer in answers} == {"0", "1", "2"}
    assert {answer["response"]["status_code"] for answer in answers} == {200}


def test_output_outside_code_page_is_utf8(installed):
    """Output to a pipe is in UTF-8, not in the code page of Wine's locale."""
    done = installed.python("-c", "import flownpu.cli as cli; cli.main(['--version']); print('列表 €')")
    assert done.stdout.splitlines()[-1] == "列表 €"

# SPDX-License-Identifier: Apache-2.0
"""`flownpu convert` and `make-model` as commands; the conversion itself has its tests in tests/convert."""

import json
import signal
import time

import pytest

from flownpu.model.shapes import SHAPES


def test_convert_names_output_and_next_command(flownpu, checkpoint, tmp_path):
    done = flownpu("convert", checkpoint, tmp_path / "out")
    assert (done.code, done.out) == (0, "")
    assert done.err.splitlines()[-1].endswith(f'Next: flownpu run {tmp_path / "out"} -p "some text"')


def test_existing_model_is_replaced_with_force_only(flownpu, checkpoint, model_copy):
    before = (model_copy / "flownpu_manifest.json").read_bytes()
    done = flownpu("convert", checkpoint, model_copy, "--kv-dtype", "fp32")
    assert done.code == 1
    assert "--force" in done.err
    assert (model_copy / "flownpu_manifest.json").read_bytes() == before
    assert flownpu("convert", checkpoint, model_copy, "--kv-dtype", "fp32", "--force").code == 0
    assert json.loads((model_copy / "flownpu_manifest.json").read_text())["settings"]["kv_dtype"] == "fp32"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_nothing_behind(number, code, start, tmp_path):
    output = tmp_path / "models" / "out"
    process = start("make-model", "llama3.2-1b", output, "--random")
    # The folder that is written into, beside the output; it is there once the weights are being drawn.
    while not list(tmp_path.glob("models/.out*/model.onnx.data")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err
    assert not output.parent.exists() or list(output.parent.iterdir()) == []


def test_make_model_has_size_of_family(flownpu, tmp_path):
    done = flownpu("make-model", "qwen3-0.6b", tmp_path / "qwen", "--random", "--context-length", 512)
    assert done.code == 0, done.err
    summary = json.loads(flownpu("inspect", tmp_path / "qwen", "--json").out)
    # The published model has 0.6 B parameters, of which 0.44 B are not the embedding's 151936 x 1024.
    elements = {w["name"]: w["shape"][0] * w["shape"][1] for w in summary["weights"] if w["type"] == "q4nx"}
    assert 0.590e9 < sum(elements.values()) < 0.600e9
    assert sum(elements.values()) - 151936 * 1024 == pytest.approx(0.44e9, rel=0.01)


@pytest.mark.parametrize(("options", "bits"), [((), 5), (("--symmetric",), 4.5)])
def test_made_model_has_requested_weight_bits(flownpu, tmp_path, monkeypatch, options, bits):
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 1, "vocab_size": 320})
    done = flownpu("make-model", "qwen3-0.6b", tmp_path / "qwen", "--random", "--context-length", 64, *options)
    assert done.code == 0, done.err
    summary = json.loads(flownpu("inspect", tmp_path / "qwen", "--json").out)
    elements = sum(w["shape"][0] * w["shape"][1] for w in summary["weights"] if w["type"] == "q4nx")
    assert summary["weight_bytes"]["q4nx"] == elements * bits / 8
    source = json.loads((tmp_path / "qwen" / "flownpu_manifest.json").read_text())["source"]
    assert source["symmetric"] == bool(options)


@pytest.mark.parametrize(("line", "words"), [("gemma9-1b --random", "gemma3-1b"), ("gemma3-1b", "expected --random")])
def test_make_model_without_shape_or_random_is_refused(flownpu, line, words):
    done = flownpu("make-model", *line.split())
    assert done.code == 2
    assert words in done.err

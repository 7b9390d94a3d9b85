# SPDX-License-Identifier: Apache-2.0
"""`flownpu convert` and `make-model` as commands; the conversion itself has its tests in tests/convert."""

import json
import shutil
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from flownpu.model.shapes import SHAPES
from flownpu.ops import q4nx


@pytest.fixture(scope="module")
def large_checkpoint(checkpoint, tmp_path_factory):
    """A checkpoint that takes seconds to convert: the small one with a vocabulary of 400,000."""
    folder = shutil.copytree(checkpoint, tmp_path_factory.mktemp("large") / "large")
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = 400_000
    (folder / "config.json").write_text(json.dumps(config))
    hidden, heads, kv, d = (
        config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    feed_forward = config["intermediate_size"]
    shapes = {"embed_tokens.weight": (400_000, hidden), "norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (heads * d, hidden),
                "self_attn.k_proj": (kv * d, hidden),
                "self_attn.v_proj": (kv * d, hidden),
                "self_attn.o_proj": (hidden, heads * d),
                "self_attn.q_norm": (d,),
                "self_attn.k_norm": (d,),
                "mlp.gate_proj": (feed_forward, hidden),
                "mlp.up_proj": (feed_forward, hidden),
                "mlp.down_proj": (hidden, feed_forward),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "pre_feedforward_layernorm": (hidden,),
                "post_feedforward_layernorm": (hidden,),
            }.items()
        }
    random = np.random.default_rng(3)
    tensors = {
        f"model.{name}": random.standard_normal(shape, dtype=np.float32).astype(q4nx.BFLOAT16)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


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


def test_unsupported_family_is_named(flownpu, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "mamba")
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "mamba2"
    (folder / "config.json").write_text(json.dumps(config))
    done = flownpu("convert", folder, tmp_path / "out")
    assert done.code == 1
    assert "mamba2" in done.err
    assert "gemma3_text" in done.err  # what is supported
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_source_without_model_is_refused(flownpu, tmp_path, name):
    (tmp_path / "empty").mkdir()
    done = flownpu("convert", tmp_path / name, tmp_path / "out")
    assert done.code == 1
    assert str(tmp_path / name) in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_nothing_behind(number, code, start, large_checkpoint, tmp_path):
    output = tmp_path / "models" / "out"
    process = start("convert", large_checkpoint, output)
    # The folder that is written into, beside the output; it is there once the weights are being quantised.
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
def test_bits_of_made_models_weights(flownpu, tmp_path, monkeypatch, options, bits):
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 1, "vocab_size": 320})
    done = flownpu("make-model", "qwen3-0.6b", tmp_path / "qwen", "--random", "--context-length", 64, *options)
    assert done.code == 0, done.err
    summary = json.loads(flownpu("inspect", tmp_path / "qwen", "--json").out)
    elements = sum(w["shape"][0] * w["shape"][1] for w in summary["weights"] if w["type"] == "q4nx")
    assert summary["weight_bytes"]["q4nx"] == elements * bits / 8
    source = json.loads((tmp_path / "qwen" / "flownpu_manifest.json").read_text())["source"]
    assert source["symmetric"] == bool(options)


@pytest.mark.parametrize(("line", "words"), [("gemma9-1b --random", "gemma3-1b"), ("gemma3-1b", "expected --random")])
def test_make_model_wants_shape_and_random(flownpu, line, words):
    done = flownpu("make-model", *line.split())
    assert done.code == 2
    assert words in done.err

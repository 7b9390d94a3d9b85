# SPDX-License-Identifier: Apache-2.0
"""`flownpu verify`: its numbers compared with transformers' own, and planted errors that it has to find."""

import json
import math
import shutil

import ml_dtypes
import numpy as np
import pytest

from flownpu.ops.q4nx import NARROW
from flownpu.verify.comparison import PARAGRAPH, Stage, tokens_of
from flownpu.verify.runs import relative_error

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra verify")

STAGES = ["embedding", *(f"layer {layer}" for layer in range(6)), "head"]
HIDDEN = 256  # columns of the model's projections
SCALES = 64  # bytes of a block's scales, bfloat16; as many of minima follow


@pytest.fixture
def verified(flownpu):
    """Verifies a model; returns the exit code and the document."""

    def run(*arguments):
        done = flownpu("verify", *arguments, "--json", "--device", "cpu")
        assert done.out, done.err
        return done.code, json.loads(done.out)

    return run


@pytest.fixture(scope="module")
def known():
    """Results for the undamaged model by the source of the comparison, kept because they do not change."""
    return {}


@pytest.fixture
def against_checkpoint(verified, model, checkpoint, known):
    """The exit code and the document of the model beside its checkpoint."""
    if "checkpoint" not in known:
        known["checkpoint"] = verified(model, "--against", checkpoint)
    return known["checkpoint"]


@pytest.fixture
def against_itself(verified, model, known):
    """The exit code and the document of the model beside itself."""
    if "itself" not in known:
        known["itself"] = verified(model, "--against", model)
    return known["itself"]


def plant(folder, name, damage):
    """Changes a tensor of the data file in place."""
    place = json.loads((folder / "flownpu_manifest.json").read_text())["tensors"][name]
    data = np.memmap(folder / "model.onnx.data", np.uint8, "r+", place["offset"], (place["bytes"],))
    damage(data)
    data.flush()


def scaled_block(data):
    """Makes half of the blocks 1.5 times as large."""
    fields = data.reshape(-1, NARROW.block_bytes)[:, : 2 * SCALES].view(ml_dtypes.bfloat16)
    fields[: len(fields) // 2 + 1] *= np.asarray(1.5, ml_dtypes.bfloat16)


def one_row(data):
    """Gives the first row of a projection the wrong sign: one neuron of many."""
    blocks = HIDDEN // NARROW.block_columns
    fields = data.reshape(-1, NARROW.block_bytes)[:blocks, : 2 * SCALES].view(ml_dtypes.bfloat16)
    fields[:, ::32] *= -1


def larger_norm(data):
    data.view(np.float32)[:] *= 1.25


@pytest.fixture(scope="module")
def by_transformers(checkpoint, model):
    """Logits [S, V] and perplexity of the paragraph, as transformers has them."""
    torch = pytest.importorskip("torch", reason="needs the extra verify")
    transformers = pytest.importorskip("transformers", reason="needs the extra verify")
    tokens = torch.from_numpy(tokens_of(model, PARAGRAPH, 256)[None])
    net = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        output = net(input_ids=tokens, labels=tokens)
    return output.logits[0].numpy(), math.exp(float(output.loss))


# --- Models that are right --------------------------------------------------------------------------------------------


def test_converted_model_is_within_tolerances(against_checkpoint, by_transformers):
    code, document = against_checkpoint
    assert code == 0
    assert document["first_divergence"] is None
    assert [stage["name"] for stage in document["stages"]] == STAGES
    logits, perplexity = by_transformers
    assert document["tokens"] == len(logits)
    # Two evaluations in float32 of a mean of S logarithms.
    assert document["source_perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert 0 < document["kl_mean"] < document["kl_largest"]
    for stage in document["stages"]:
        assert 0 <= stage["error"] <= stage["tolerance"]
        assert stage["tolerance"] == pytest.approx(stage["from_weights"] + stage["from_roundings"])


def test_model_of_same_checkpoint_has_rounded_weights(against_checkpoint):
    _, document = against_checkpoint
    assert "was made of this checkpoint" in document["basis"]
    assert document["stages"][0]["error"] < 1e-6  # a factor in float32
    assert {stage["from_weights"] for stage in document["stages"]} == {0}
    # Nothing but roundings separates the stages: rounding the weights changes many times as much.
    assert all(stage["error"] < stage["quantisation"] / 10 for stage in document["stages"])


def test_model_of_unknown_origin_has_wider_tolerance(verified, model_copy, checkpoint):
    (model_copy / "flownpu_manifest.json").unlink()
    code, document = verified(model_copy, "--against", checkpoint)
    assert code == 0
    assert "2 x what rounding its weights to Q4NX does" in document["basis"]
    for stage in document["stages"]:
        assert stage["from_weights"] == 2 * stage["quantisation"]
        # The weights are still the checkpoint's in Q4NX. Activations are rounded too, which changes the error by at
        # most the effect of that rounding alone.
        assert abs(stage["error"] - stage["quantisation"]) <= stage["from_roundings"]


def test_changed_checkpoint_is_not_recognised_as_source(verified, model, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1000] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    _, document = verified(model, "--against", folder)
    assert "was made of this checkpoint" not in document["basis"]


def test_model_against_itself_differs_by_roundings_only(against_itself):
    code, document = against_itself
    assert code == 0
    assert "both have 4-bit weights" in document["basis"]
    assert document["stages"][0]["error"] == 0  # the same rows of the same table
    assert document["kl_mean"] < 1e-3
    assert {stage["from_weights"] for stage in document["stages"]} == {0}


def test_int8_activations_have_wider_tolerance(verified, model, against_itself):
    code, document = verified(model, "--against", model, "--activations", "int8")
    _, exact = against_itself
    assert code == 0
    for stage, finer in zip(document["stages"][1:], exact["stages"][1:], strict=True):
        assert stage["error"] > finer["error"]
        assert stage["tolerance"] > finer["tolerance"]


def test_int8_cost_is_beside_weight_cost(verified, flownpu, model, checkpoint, against_checkpoint):
    _, document = against_checkpoint
    cost = document["int8"]
    assert cost["weights_kl_mean"] == document["kl_mean"]
    assert 0 < cost["kl_mean"] < cost["weights_kl_mean"]
    assert not cost["is_large"]
    # The cost does not depend on the activations with which the model itself runs.
    _, other = verified(model, "--against", checkpoint, "--activations", "int8")
    assert other["int8"] == cost
    text = flownpu("verify", model, "--against", checkpoint, "--device", "cpu").out
    assert "int8 activations: KL divergence" in text
    assert "--activations bf16" not in text


def outlier(data):
    """Makes one column of a norm's output far larger than its neighbours, which share its step in int8."""
    data.view(np.float32)[7] = 3000


def test_report_of_inaccurate_int8_recommends_bf16(flownpu, model_copy):
    for layer in range(6):
        plant(model_copy, f"layers.{layer}.pre_feedforward_layernorm", outlier)
    done = flownpu("verify", model_copy, "--against", model_copy, "--device", "cpu")
    assert done.code == 0
    assert "Run it with --activations bf16: int8 costs this model more than 4-bit weights do." in done.out


def test_onnxruntime_provider_equals_itself(flownpu, model):
    done = flownpu("verify", model, "--against", model, "--provider", "cpu", "--json")
    document = json.loads(done.out)
    assert done.code == 0
    assert document["int8"] is None
    assert document["top1_agreement"] == 1
    # Two whole runs are the same. In runs of a layer from given states, a norm of a sum becomes a norm alone, in
    # float32.
    assert {stage["accumulated"] for stage in document["stages"]} == {0}
    # Its error depends on the instruction set, which orders the sums: 1.2e-5 with AVX2.
    assert max(stage["error"] for stage in document["stages"]) < 2e-5


# --- Errors that are planted ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "damage", "stage"),
    [
        ("layers.2.mlp.down_proj", scaled_block, "layer 2"),
        ("layers.0.post_attention_layernorm", larger_norm, "layer 0"),
        ("layers.5.pre_feedforward_layernorm", larger_norm, "layer 5"),
        ("layers.3.self_attn.qkv_proj", one_row, "layer 3"),
        ("norm", larger_norm, "head"),
    ],
)
def test_layer_error_is_found_against_checkpoint(verified, model_copy, checkpoint, tensor, damage, stage):
    plant(model_copy, tensor, damage)
    code, document = verified(model_copy, "--against", checkpoint)
    assert code == 1
    assert document["first_divergence"] == stage
    # No stage before or after it has an error of its own.
    assert [found["name"] for found in document["stages"] if found["diverges"]] == [stage]


@pytest.mark.parametrize(
    ("tensor", "damage", "stage"),
    [("layers.1.mlp.gate_up_proj", scaled_block, "layer 1"), ("layers.3.self_attn.k_norm", larger_norm, "layer 3")],
)
def test_layer_error_is_found_against_same_weights(verified, model, model_copy, tensor, damage, stage):
    plant(model_copy, tensor, damage)
    code, document = verified(model_copy, "--against", model)
    assert code == 1
    assert [found["name"] for found in document["stages"] if found["diverges"]] == [stage]
    assert document["first_divergence"] == stage
    assert document["kl_mean"] > 0


def test_report_names_layer_and_both_numbers(flownpu, model, model_copy):
    plant(model_copy, "layers.1.mlp.gate_up_proj", scaled_block)
    done = flownpu("verify", model_copy, "--against", model, "--text", "The sea is calm and the boats are out.")
    assert done.code == 1
    last = done.out.splitlines()[-1]
    assert last.startswith("layer 1 diverges first: its error is ")
    assert "its tolerance" in last
    for words in ("KL divergence", "same likeliest token", "perplexity", "whole run", "both have 4-bit weights"):
        assert words in done.out


def test_nan_error_diverges():
    assert Stage("layer 0", math.nan, 1.0, 0.5, 0.5, None, 0.0).diverges
    assert not Stage("layer 0", 1.0, 1.0, 0.5, 0.5, None, 0.0).diverges


# --- Texts and errors -------------------------------------------------------------------------------------------------


def test_relative_error_weighs_tokens_alike():
    reference = np.array([[3.0, 4.0], [300.0, 400.0]], np.float32)  # of norms 5 and 500
    value = reference + np.array([[0.0, 1.0], [0.0, 0.0]], np.float32)
    assert relative_error(value, reference) == pytest.approx(math.sqrt((1 / 5) ** 2 / 2))


def test_text_file_is_cut_to_given_tokens(verified, model, checkpoint):
    code, document = verified(model, "--against", model, "--file", checkpoint / "held_out.txt", "--tokens", 32)
    assert (code, document["tokens"]) == (0, 32)


def test_source_of_other_shape_is_refused(flownpu, model, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 5, "layer_types": config["layer_types"][:5]}
    (folder / "config.json").write_text(json.dumps(config))
    done = flownpu("verify", model, "--against", folder, "--device", "cpu", "--tokens", 8)
    assert done.code == 1
    assert "5 layers of 256 numbers a token" in done.err
    assert "6 layers of 256 numbers a token: they are not the same model" in done.err


def test_tokenizer_of_other_model_is_refused(flownpu, model, model_copy):
    words = tokenizers.models.WordLevel({"sea": 1, "calm": 4096})
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(model_copy / "tokenizer.json"))
    done = flownpu("verify", model_copy, "--against", model, "--text", "calm sea")
    assert done.code == 1
    assert "gives token 4096, and there are 4096" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--text", ""], "two tokens or more"), (["--provider", "cpu", "--device", "cpu"], "leave one out")],
)
def test_incomparable_models_are_refused(flownpu, model, arguments, words):
    done = flownpu("verify", model, "--against", model, *arguments)
    assert (done.code, done.out) == (1, "")
    assert words in done.err


def test_text_beside_file_is_refused(flownpu, model, checkpoint):
    done = flownpu("verify", model, "--against", model, "--text", "a", "--file", checkpoint / "held_out.txt")
    assert done.code == 2


def test_model_without_tokenizer_is_refused(flownpu, model, model_copy):
    (model_copy / "tokenizer.json").unlink()
    done = flownpu("verify", model_copy, "--against", model)
    assert done.code == 1
    assert "holds no tokenizer.json, by which texts become tokens" in done.err


def test_path_without_source_is_refused(flownpu, model, tmp_path):
    shutil.copyfile(model / "tokenizer.json", tmp_path / "tokenizer.json")
    done = flownpu("verify", model, "--against", tmp_path)
    assert done.code == 1
    assert "genai_config.json" in done.err

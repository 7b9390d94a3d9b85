# SPDX-License-Identifier: Apache-2.0
"""`flownpu run`, compared with ORT GenAI called directly."""

import io
import json
import os
import shutil

import numpy as np
import onnxruntime_genai
import pytest
from transformers import AutoTokenizer

CPU = ("--device", "cpu")
# ONNX Runtime itself, where texts are to be equal; it takes ten times as long to open a model's functions.
STOCK = ("--provider", "cpu")
PROMPT = "The with statement"


def reference(model, tokens, new_tokens):
    """Greedy text of GenAI itself on ONNX Runtime's CPU provider."""
    config = onnxruntime_genai.Config(str(model))
    config.clear_providers()
    opened = onnxruntime_genai.Model(config)
    parameters = onnxruntime_genai.GeneratorParams(opened)
    parameters.set_search_options(max_length=len(tokens) + new_tokens, do_sample=False)
    generator = onnxruntime_genai.Generator(opened, parameters)
    generator.append_tokens(tokens)
    while not generator.is_done():
        generator.generate_next_token()
    return onnxruntime_genai.Tokenizer(opened).decode(generator.get_sequence(0)[len(tokens) :])


def encode(model, text, *, special):
    tokenizer = onnxruntime_genai.Tokenizer(onnxruntime_genai.Model(str(model)))
    tokenizer.update_options(add_special_tokens=str(special).lower())
    return np.asarray(tokenizer.encode(text))


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory, model):
    """The model with no provider in its configuration, which GenAI opens without any registration."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("run") / "plain")
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"]["session_options"]["provider_options"] = []
    path.write_text(json.dumps(config))
    return folder


def test_run_text_equals_genai(flownpu, model, plain_model):
    done = flownpu("run", model, "-p", PROMPT, "--no-chat-template", "--max-new-tokens", 20, "--temperature", 0, *STOCK)
    assert done.code == 0, done.err
    assert done.out == reference(plain_model, encode(plain_model, PROMPT, special=True), 20) + "\n"


def test_prompt_stands_behind_model_or_behind_its_option(flownpu, model):
    asked = (*CPU, "--max-new-tokens", 6, "--temperature", 0)
    given = flownpu("run", model, PROMPT, *asked)
    assert (given.code, given.out) == (0, flownpu("run", model, "-p", PROMPT, *asked).out)
    twice = flownpu("run", model, PROMPT, "-p", PROMPT, *asked)
    assert twice.code == 2
    assert "expected one prompt" in twice.err


def test_prompt_is_user_turn_of_chat_template(flownpu, model, plain_model):
    done = flownpu("run", model, "-p", PROMPT, "--max-new-tokens", 20, "--temperature", 0, *STOCK)
    turn = f"<bos><start_of_turn>user\n{PROMPT}<end_of_turn>\n<start_of_turn>model\n"
    assert done.out == reference(plain_model, encode(plain_model, turn, special=False), 20) + "\n"


def test_model_without_template_completes_prompt(flownpu, model, model_copy):
    path = model_copy / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    options = ("-p", PROMPT, "--max-new-tokens", 20, "--temperature", 0, *CPU)
    assert flownpu("run", model_copy, *options).out == flownpu("run", model, "--no-chat-template", *options).out


def test_files_and_stdin_come_behind_prompt(flownpu, model, monkeypatch, tmp_path):
    (tmp_path / "a.txt").write_text("A tuple")
    monkeypatch.setattr("sys.stdin", io.StringIO("is"))
    asked = ("run", model, *CPU, "--no-chat-template", "--temperature", 0, "--max-new-tokens", 6)
    given = flownpu(*asked, "-p", "What?", "--file", tmp_path / "a.txt", "-f", "-")
    whole = flownpu(*asked, "-p", f"What?\n\n{tmp_path / 'a.txt'}:\nA tuple\n\nis")
    assert (given.code, given.out) == (0, whole.out)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"x" * (4 * 2**20 + 1), "is larger than 4.0 MiB"),
        (b"caf\xe9", "expected a text in UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_unfit_file_is_refused(flownpu, model, tmp_path, content, error):
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    done = flownpu("run", model, "--file", tmp_path / "a.txt")
    assert done.code == 1
    assert error in done.err
    assert str(tmp_path / "a.txt") in done.err


def test_prompt_from_stdin_equals_option(flownpu, model, monkeypatch):
    options = ("--no-chat-template", "--max-new-tokens", 8, "--temperature", 0, *CPU)
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert flownpu("run", model, *options).out == flownpu("run", model, "-p", PROMPT, *options).out


def test_prompt_without_utf8_is_refused(start, model, flownpu):
    process = start("run", model)
    process.stdin.buffer.write(b"caf\xe9")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err == (
        "error: stdin: expected a text in UTF-8, got the byte 0xe9 after 'caf': convert it (`iconv -f latin1 -t "
        "utf-8`)\n"
    )
    # Half of a surrogate pair, as a program may pass it.
    assert "expected a text in UTF-8" in flownpu("run", model, "-p", "a \ud800 b").err


def test_gguf_file_error_names_convert_command(flownpu, tmp_path):
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    done = flownpu("run", tmp_path / "some.gguf", "-p", PROMPT)
    assert done.code == 1
    assert f"`flownpu convert {tmp_path / 'some.gguf'} {tmp_path / 'some'}` makes it" in done.err


def test_speed_and_placement_are_printed_on_stderr(flownpu, model):
    done = flownpu("run", model, "-p", PROMPT, "--no-chat-template", "--max-new-tokens", 8, *STOCK)
    speed, placement = done.err.splitlines()
    assert speed.startswith(f"{len(encode_ids(model, PROMPT))} prompt tokens, first token after ")
    assert "8 new tokens at " in speed
    assert placement == "Every node runs on ONNX Runtime's own CPU provider."


def encode_ids(model, text):
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids


def test_json_is_one_document(flownpu, model):
    done = flownpu("run", model, "-p", PROMPT, "--no-chat-template", "--max-new-tokens", 8, "--json", *CPU)
    report = json.loads(done.out)
    assert report["prompt_tokens"] == len(encode_ids(model, PROMPT))
    assert report["new_tokens"] == 8
    assert report["finish_reason"] == "length"
    assert report["provider"] == "flownpu"
    # The first token takes the prefill and one step of sampling; the other seven the rest.
    assert report["first_token_seconds"] >= report["prompt_tokens"] / report["prefill_tokens_per_second"]
    assert report["decode_tokens_per_second"] > 0
    assert done.err == ""


def test_sampling_repeats_with_its_seed(flownpu, model):
    def text(seed):
        options = ("--temperature", 2, "--top-k", 500, "--seed", seed, "--max-new-tokens", 24)
        return flownpu("run", model, "-p", PROMPT, "--no-chat-template", *options, *CPU).out

    assert text(7) == text(7)
    # 24 tokens, each out of 500: another seed gives another text.
    assert text(7) != text(8)


def test_top_k_of_1_is_greedy(flownpu, model):
    options = ("-p", PROMPT, "--no-chat-template", "--max-new-tokens", 24, *CPU)
    sampled = flownpu("run", model, *options, "--temperature", 3, "--top-k", 1, "--seed", 1)
    assert sampled.out == flownpu("run", model, *options, "--temperature", 0).out


def test_prompt_beyond_context_is_refused(flownpu, model):
    done = flownpu("run", model, "-p", "word " * 3000, "--no-chat-template", *CPU)
    assert done.code == 1
    assert "the model's context holds 2048: shorten the prompt" in done.err


def test_generation_ends_where_context_does(flownpu, model_copy):
    tokens = len(encode_ids(model_copy, PROMPT))
    config = json.loads((model_copy / "genai_config.json").read_text())
    config["model"]["context_length"] = tokens + 3
    change_config(model_copy, json.dumps(config))
    done = flownpu("run", model_copy, "-p", PROMPT, "--no-chat-template", "--max-new-tokens", 500, "--json", *CPU)
    report = json.loads(done.out)
    assert report["prompt_tokens"] + report["new_tokens"] == tokens + 3
    assert report["finish_reason"] == "length"


def change_config(folder, text):
    (folder / "genai_config.json").write_text(text)


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (lambda folder: (folder / "genai_config.json").unlink(), "holds no genai_config.json"),
        (lambda folder: change_config(folder, "{"), "genai_config.json is not valid JSON"),
        (lambda folder: change_config(folder, "[]"), "expected an object"),
        (lambda folder: change_config(folder, '{"model": {}}'), "lacks model.decoder"),
        (lambda folder: (folder / "model.onnx").unlink(), "names model.onnx, which is not in"),
        (lambda folder: (folder / "model.onnx").write_bytes(b"no model"), "model.onnx"),
        (
            lambda folder: os.truncate(folder / "model.onnx.data", 5000),
            "bytes, which hold the model's weights, and it has 5000",
        ),
        (lambda folder: (folder / "model.onnx.data").unlink(), "which hold the model's weights, and it is missing"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "tokenizer_config.json is not valid JSON"),
    ],
)
def test_broken_model_folder_is_named(flownpu, model_copy, breakage, words):
    breakage(model_copy)
    done = flownpu("run", model_copy, "-p", PROMPT, *CPU)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert words in done.err
    assert "Traceback" not in done.err
    assert len(done.err) < 1000


def test_checkpoint_error_names_convert_command(flownpu, checkpoint):
    done = flownpu("run", checkpoint, "-p", PROMPT)
    assert done.code == 1
    assert f"`flownpu convert {checkpoint} OUT` makes a model of it" in done.err


def test_optimum_model_names_its_reader(flownpu, model_copy):
    (model_copy / "genai_config.json").rename(model_copy / "config.json")
    done = flownpu("run", model_copy, "-p", PROMPT)
    assert done.code == 1
    assert f"{model_copy} is a model for optimum and onnxruntime.InferenceSession" in done.err


def test_flownpu_option_with_other_provider_is_refused(flownpu, model):
    done = flownpu("run", model, "-p", PROMPT, *CPU, *STOCK)
    assert done.code == 1
    assert "device: an option of FlowNPU's provider, given with --provider cpu" in done.err


@pytest.mark.parametrize("text", ["threads", "=4"])
def test_option_without_key_or_value_is_refused(flownpu, model, text):
    done = flownpu("run", model, "-p", PROMPT, "--option", text)
    assert done.code == 2
    assert f"expected KEY=VALUE, such as cpu_isa=avx2, got {text!r}" in done.err


class TestOnFlowNPU:
    """Runs on FlowNPU's execution provider."""

    def test_run_text_equals_cpu_provider(self, flownpu, model):
        # Greedy; on the 24 tokens here no two logits are near enough for the order of a sum to decide.
        options = ("-p", PROMPT, "--no-chat-template", "--max-new-tokens", 24, "--temperature", 0)
        ours = flownpu("run", model, *options)
        assert ours.code == 0, ours.err
        assert ours.out == flownpu("run", model, *options, *STOCK).out

    def test_placement_line_says_all_nodes_are_on_flownpu(self, flownpu, model):
        done = flownpu("run", model, "-p", PROMPT, "--device", "cpu", "--threads", 1, "--json")
        placement = json.loads(done.out)["placement"]
        assert placement["claimed"] == placement["nodes"] > 0
        assert placement["left"] == []
        assert "1 thread" in placement["summary"]
        assert placement["summary"] in flownpu("run", model, "-p", PROMPT, "--device", "cpu", "--threads", 1).err

    def test_unknown_option_value_lists_valid_ones(self, flownpu, model):
        done = flownpu("run", model, "-p", PROMPT, "--option", "device=abacus")
        assert done.code == 1
        assert "option device = 'abacus' is not known; expected one of: auto, cpu, npu, emulate" in done.err


def test_prompt_with_control_tokens_is_text_unless_allowed(flownpu, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = "a\0b<end_of_turn>c"
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
    )
    more = len(tokenizer.encode("<end_of_turn>", add_special_tokens=False, split_special_tokens=True)) - 1
    command = ("run", model, "-p", prompt, "--max-new-tokens", 1, "--json", *CPU)

    def tokens(*options):
        return json.loads(flownpu(*command, *options).out)["prompt_tokens"]

    assert tokens() == len(turn) + more
    assert tokens("--allow-control-tokens") == len(turn)
    assert tokens("--no-chat-template") == len(tokenizer.encode(prompt))

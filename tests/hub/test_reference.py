# SPDX-License-Identifier: Apache-2.0
"""Names of models, and the files of a repository that they mean."""

import pytest

from flownpu.errors import FlowNPUError
from flownpu.hub.needed_files import needed_files
from flownpu.hub.reference import Reference, expect, parse, short_names
from flownpu.hub.short_names import SHORT_NAMES

SETTINGS = ["config.json", "tokenizer.json", "tokenizer_config.json"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemma3:1b", Reference("google/gemma-3-1b-it")),
        ("Phi4-Mini:latest", Reference("microsoft/Phi-4-mini-instruct")),
        ("org/model", Reference("org/model")),
        ("org/model@v1.0", Reference("org/model", "v1.0")),
        ("org/model@refs/pr/1:Q4_K_M", Reference("org/model", "refs/pr/1", "Q4_K_M")),
        ("hf.co/org/model:Q8_0", Reference("org/model", "", "Q8_0")),
        ("https://huggingface.co/org/model", Reference("org/model")),
    ],
)
def test_name_means_repository_revision_and_file(name, expected):
    assert parse(name) == expected
    assert parse(str(expected)) == expected


@pytest.mark.parametrize(
    "name", ["gemma3:7b", "model", "a/b/c", "../model", "org/..", "/org/model", "org/a--b", "a/b:"]
)
def test_malformed_and_unknown_names_parse_to_none(name):
    assert parse(name) is None


def test_error_names_the_sizes_of_a_family_and_near_names():
    with pytest.raises(FlowNPUError, match=r"got 'llama3.2:7b'. Is it one of llama3.2, llama3.2:1b, llama3.2:3b\?"):
        expect("llama3.2:7b")
    with pytest.raises(FlowNPUError, match=r"Is it one of .*smollm2:360m"):
        expect("smolm2:360m")
    with pytest.raises(FlowNPUError, match=r"got 'x'$"):
        expect("x")


def test_short_names_are_repositories_in_order():
    for name, repository in SHORT_NAMES.items():
        assert str(parse(repository)) == repository
        assert name == name.lower()
    assert [name.partition(":")[0] for name in SHORT_NAMES] == sorted(name.partition(":")[0] for name in SHORT_NAMES)
    assert short_names(Reference("google/gemma-3-4b-it")) == ["gemma3", "gemma3:4b"]
    assert short_names(Reference("google/gemma-3-4b-it", "v1")) == []


@pytest.mark.parametrize(
    ("files", "not_needed"),
    [
        # a checkpoint beside its other forms
        (
            [*SETTINGS, *SHARDS, "model.safetensors.index.json", "additional_chat_templates/tool_use.jinja"],
            ["README.md", "original/consolidated.00.pth", "consolidated.safetensors", "pytorch_model.bin",
             "onnx/model.onnx", "model-Q4_K_M.gguf", "original/params.json", "tokenizer.model"],
        ),
        # a model of sentence-transformers
        (
            [*SETTINGS, "modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "model.safetensors",
             "vocab.txt"],
            ["openvino/openvino_model.xml", "rust_model.ot", "2_Dense/pytorch_model.bin", "train_script.py"],
        ),
        # models of GenAI's builder and of optimum
        ([*SETTINGS, "genai_config.json", "model.onnx", "model.onnx.data"], ["README.md"]),
        ([*SETTINGS, "onnx/model.onnx", "onnx/model.onnx_data"], ["onnx/model_q4.onnx", "onnx/model_fp16.onnx_data"]),
    ],
)  # fmt: skip
def test_needed_files_are_those_of_one_form(files, not_needed):
    assert needed_files([*not_needed, *files], Reference("a/b")) == sorted(files)


GGUFS = ["m-IQ4_K_M.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-Q8_0.gguf", "parts/m-F16-00001-of-00002.gguf",
         "parts/m-F16-00002-of-00002.gguf"]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "file"),
    [("Q8_0", "m-Q8_0.gguf"), ("q4_k_m", "m-Q4_K_M.gguf"), ("", "m-Q4_K_M.gguf"), ("m-Q8_0.gguf", "m-Q8_0.gguf")],
)
def test_gguf_file_is_found_by_type_or_name(wanted, file):
    assert needed_files([*GGUFS, "config.json"], Reference("a/b", "", wanted)) == [file]


@pytest.mark.parametrize(
    ("files", "wanted", "message"),
    [
        (GGUFS, "Q5_0", r"a/b:Q5_0: expected one GGUF file Q5_0, found none. a/b has m-IQ4_K_M.gguf, .*after a colon"),
        (GGUFS, "F16", r"its 2 parts are one model, expected a file that is not split"),
        (["config.json", "pytorch_model.bin"], "", r"found pytorch_model.bin$"),
        (["README.md"], "", r"found no weights$"),
        (["README.md"], "Q4_0", r"a/b has no GGUF files"),
    ],
)
def test_repository_without_the_file_is_refused_with_what_it_has(files, wanted, message):
    with pytest.raises(FlowNPUError, match=message):
        needed_files(files, Reference("a/b", "", wanted))

# SPDX-License-Identifier: Apache-2.0
"""The provider's library by itself: generate.cc opens a model with Microsoft's own libraries and generates."""

import pytest

from flownpu import _native

# A prompt that is computed at once, and one of more tokens than a product has rows at a time.
PROMPTS = ('The "for" statement is used to', "A list is a sequence of objects. " * 12)
TOKENS = 32


@pytest.fixture
def program(built):
    return built / "program" / "generate.exe"


def tokens_here(genai, model, prompt, options):
    """The tokens that the program is to print, generated with the library of this system."""
    config = genai.Config(str(model))
    config.clear_providers()
    config.append_provider("FlowNPUExecutionProvider")
    for key, value in options.items():
        config.set_provider_option("FlowNPUExecutionProvider", key, value)
    opened = genai.Model(config)
    given = genai.Tokenizer(opened).encode(prompt)
    parameters = genai.GeneratorParams(opened)
    parameters.set_search_options(do_sample=False, max_length=len(given) + TOKENS)
    generator = genai.Generator(opened, parameters)
    generator.append_tokens(given)
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)]


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "long"])
@pytest.mark.parametrize("isa", _native.instruction_sets())
def test_program_generates_same_tokens(wine, program, model, genai, isa, prompt):
    done = wine.run(program, model, str(TOKENS), prompt, f"cpu_isa={isa}")
    expected = tokens_here(genai, model, prompt, {"cpu_isa": isa})
    assert done.stdout.split() == [str(token) for token in expected], done.stderr


@pytest.mark.parametrize("device", ["npu", "gpu"])
def test_devices_of_linux_alone_are_refused(wine, program, model, device):
    done = wine.run(program, model, "1", "a", f"device={device}")
    assert done.returncode == 1
    assert f"device '{device}': expected Linux, got Windows" in done.stderr


def test_model_below_path_of_260_characters_runs(wine, program, model, genai, tmp_path):
    folder = tmp_path.joinpath(*["a_folder_with_a_long_name_" + "x" * 60] * 4, "model")
    folder.parent.mkdir(parents=True)
    folder.symlink_to(model)
    assert len(str(folder)) > 260
    done = wine.run(program, folder, str(TOKENS), PROMPTS[0])
    assert done.stdout.split() == [str(token) for token in tokens_here(genai, model, PROMPTS[0], {})], done.stderr

# SPDX-License-Identifier: Apache-2.0
"""`flownpu run --image` and `/image` in a chat, compared with ORT GenAI itself and with transformers' processor."""

import io
import json

import numpy as np
import onnxruntime_genai
import pytest
from PIL import Image

from flownpu.errors import FlowNPUError
from flownpu.generate.conversation import Conversation
from flownpu.generate.image_prompts import IMAGE, expand_images, place_images, read_images
from flownpu.generate.language_model import LanguageModel, Sampling, Timing
from flownpu.generate.tokenizer import Tokenizer
from tests.cli.generate.test_chat import fresh, say

CPU = ("--device", "cpu")
STOCK = ("--provider", "cpu")  # GenAI's own texts and summaries
GREEDY = Sampling(temperature=0)
QUESTION = "What is this?"


@pytest.fixture(scope="module")
def pictures_checkpoint(tmp_path_factory):
    from tests.convert.picture_models import write_pictures_checkpoint

    folder = tmp_path_factory.mktemp("pictures") / "checkpoint"
    write_pictures_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def seeing_model(pictures_checkpoint):
    from flownpu.convert import convert

    folder = pictures_checkpoint.parent / "model"
    convert(pictures_checkpoint, folder)
    return folder


@pytest.fixture(scope="module")
def language_model(seeing_model):
    return LanguageModel(seeing_model, provider="cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two different pictures."""
    folder = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "noise.png")
    # PNG as well: GenAI's decoder of JPEG is not Pillow's, and rounds differently.
    Image.radial_gradient("L").save(folder / "disc.png")
    return folder / "noise.png", folder / "disc.png"


def reference(folder, prompt, files, new_tokens):
    """Greedy text of GenAI itself on ONNX Runtime's CPU provider; it decodes and resizes the files too."""
    config = onnxruntime_genai.Config(str(folder))
    config.clear_providers()
    model = onnxruntime_genai.Model(config)
    images = onnxruntime_genai.Images.open(*map(str, files)) if files else None
    inputs = model.create_multimodal_processor()(prompt, images=images)
    parameters = onnxruntime_genai.GeneratorParams(model)
    prompt_tokens = inputs["input_ids"].shape()[1]
    parameters.set_search_options(max_length=prompt_tokens + new_tokens, do_sample=False)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.set_inputs(inputs)
    # A random model writes bytes that are no UTF-8, and GenAI's stream loses text behind them.
    text_of = Tokenizer(folder).text_stream()
    text = ""
    while not generator.is_done():
        generator.generate_next_token()
        text += text_of(int(generator.get_next_tokens()[0]))
    return text


def turn(text):
    return f"<bos><start_of_turn>user\n{text}<end_of_turn>\n<start_of_turn>model\n"


@pytest.mark.parametrize("count", [0, 2])
def test_answer_with_images_equals_genai(flownpu, seeing_model, files, count):
    shown = files[:count]
    options = [argument for file in shown for argument in ("--image", file)]
    done = flownpu("run", seeing_model, "-p", QUESTION, *options, "--max-new-tokens", 12, "--temperature", 0, *STOCK)
    assert done.code == 0, done.err
    assert done.out == reference(seeing_model, turn(IMAGE * count + QUESTION), shown, 12) + "\n"


def test_answer_depends_on_images_and_order(flownpu, seeing_model, files):
    def text(*shown):
        options = [argument for file in shown for argument in ("--image", file)]
        return flownpu("run", seeing_model, "-p", QUESTION, *options, "--max-new-tokens", 8, *CPU).out

    one, other = files
    assert len({text(one), text(other), text(one, other), text(other, one), text()}) == 5


def test_image_marks_in_prompt_place_images(flownpu, seeing_model, files):
    prompt = f"From {IMAGE} to {IMAGE}?"
    options = ("--image", files[0], "--image", files[1], "--max-new-tokens", 8, "--temperature", 0, *STOCK)
    done = flownpu("run", seeing_model, "-p", prompt, *options)
    assert done.out == reference(seeing_model, turn(prompt), files, 8) + "\n"
    done = flownpu("run", seeing_model, "-p", prompt, "--no-chat-template", *options)
    assert done.out == reference(seeing_model, f"<bos>{prompt}", files, 8) + "\n"


def test_tokens_of_image_prompt_equal_transformers(language_model, pictures_checkpoint):
    from transformers import AutoTokenizer, Gemma3ImageProcessorPil, Gemma3Processor

    tokenizer = AutoTokenizer.from_pretrained(
        pictures_checkpoint,
        extra_special_tokens={"image_token": "<image_soft_token>", "boi_token": IMAGE, "eoi_token": "<end_of_image>"},
    )
    processor = Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 128, "width": 128}), tokenizer)
    pictures = [Image.new("RGB", (3, 4)), Image.new("RGB", (5, 6))]
    # The text of Gemma's chat template for a turn of two images and a text.
    prompt = turn(f"{IMAGE}{IMAGE}{QUESTION}")
    expected = processor(text=prompt, images=[pictures], add_special_tokens=False)["input_ids"][0]
    got = language_model.tokens_of_messages([{"role": "user", "content": place_images(QUESTION, 2)}])
    assert got.tolist() == list(expected)


def test_genai_processor_keeps_pixels_of_fitting_image(language_model, seeing_model, files):
    """Images are in the model's size already: the tower gets what transformers' processor makes of a file."""
    from transformers import Gemma3ImageProcessorPil

    processor = language_model._image_processor._processor
    read = read_images(seeing_model, files)
    images = onnxruntime_genai.Images.open_bytes(*(image.png for image in read))
    got = processor("", images=images)["pixel_values"].as_numpy()
    pictures = [Image.open(file).convert("RGB") for file in files]
    expected = Gemma3ImageProcessorPil(size={"height": 128, "width": 128})(pictures)["pixel_values"]
    # Each scales in float32, with two roundings of values up to 1.
    np.testing.assert_allclose(got, np.asarray(expected), rtol=0, atol=4 * np.finfo(np.float32).eps)


def test_json_has_images_tokens_and_times(flownpu, seeing_model, files):
    options = ("--image", files[0], "--image", files[1], "--max-new-tokens", 4, "--json", *STOCK)
    done = flownpu("run", seeing_model, "-p", QUESTION, *options)
    report = json.loads(done.out)
    assert report["images"] == [
        {"file": str(files[0]), "format": "PNG", "width": 90, "height": 60},
        {"file": str(files[1]), "format": "PNG", "width": 256, "height": 256},
    ]
    assert report["image_tokens"] == 512
    assert report["prompt_tokens"] > 512 + 2 * 4  # and the tokens around each image
    times = [report[f"{name}_seconds"] for name in ("vision", "prefill")]
    assert min(times) > 0
    assert report["first_token_seconds"] > sum(times)
    assert report["vision_placement"]["summary"] == report["placement"]["summary"]
    assert done.err == ""


def test_image_sizes_are_on_stderr(flownpu, seeing_model, files):
    done = flownpu("run", seeing_model, "-p", QUESTION, "--image", files[0], "--max-new-tokens", 4, *CPU)
    assert done.err.startswith("1 image in ")
    assert " prompt tokens, first token after " in done.err


def test_placement_lines_name_both_models(flownpu, seeing_model, files):
    options = ("--image", files[0], "--max-new-tokens", 4, "--option", "on_unsupported=cpu")
    done = flownpu("run", seeing_model, "-p", QUESTION, *options)
    assert done.code == 0, done.err
    _, vision, decoder = done.err.splitlines()
    assert vision.startswith("Images: FlowNPU: ")
    assert decoder.startswith("Text: FlowNPU: ")
    placed = json.loads(flownpu("run", seeing_model, "-p", QUESTION, *options, "--json").out)
    assert vision == f"Images: {placed['vision_placement']['summary']}"
    assert decoder == f"Text: {placed['placement']['summary']}"


def test_text_model_refuses_images_before_opening(flownpu, model_copy, files):
    (model_copy / "model.onnx").write_bytes(b"what no one opens")
    done = flownpu("run", model_copy, "-p", QUESTION, "--image", files[0], *CPU)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(
        f"error: the model in {model_copy} takes no images: its genai_config.json names no vision"
    )


def test_empty_image_is_refused_before_opening(flownpu, seeing_model, tmp_path, monkeypatch):
    monkeypatch.setattr("flownpu.cli.options.open_model", None)
    (tmp_path / "empty.png").touch()
    done = flownpu("run", seeing_model, "-p", QUESTION, "--image", tmp_path / "empty.png")
    assert (done.code, done.err) == (1, f"error: {tmp_path / 'empty.png'} is empty (0 bytes); expected an image file\n")


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (None, "lacks image_processor.json, which says how images are resized"),
        ("{", "image_processor.json is not valid JSON"),
        ('{"processor": {}}', "names no Resize of a width, a height and an interpolation"),
        ('{"processor": {"transforms": []}}', "names no Resize"),
        (
            '{"processor": {"transforms": [{"operation": {"type": "Resize", "attrs": {"width": 8}}}]}}',
            "names no Resize",
        ),
    ],
)
def test_broken_image_processor_is_named(flownpu, seeing_model, files, tmp_path, processor, words):
    for file in seeing_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "image_processor.json").unlink()
    if processor is not None:
        (tmp_path / "image_processor.json").write_text(processor)
    done = flownpu("run", tmp_path, "-p", QUESTION, "--image", files[0], *CPU)
    assert done.code == 1
    assert words in done.err


@pytest.mark.parametrize(
    ("prompt", "option", "words"),
    [
        (f"{IMAGE} or {IMAGE}?", (), f"the text has 2 places for images ({IMAGE}), and 1 images were given"),
        ("<image_soft_token>?", ("--no-chat-template",), "the prompt has 257 tokens <image_soft_token>, expected 256"),
        ("<image_soft_token>?", ("--allow-control-tokens",), "the prompt has 257 tokens <image_soft_token>"),
    ],
)
def test_wrong_image_placeholders_are_refused(flownpu, seeing_model, files, prompt, option, words):
    done = flownpu("run", seeing_model, "-p", prompt, "--image", files[0], *option, *CPU)
    assert (done.code, done.out) == (1, "")
    assert words in done.err


def test_images_given_to_text_model_are_error(model):
    text_model = LanguageModel(model)
    answer = text_model.complete(text_model.tokens_of_text("a"), 1, GREEDY, Timing(), images=["an image"])
    with pytest.raises(FlowNPUError, match="takes no images, and 1 were given"):
        next(answer)


def test_missing_pillow_names_package(flownpu, seeing_model, files, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    monkeypatch.delitem(__import__("sys").modules, "flownpu.generate.images")
    done = flownpu("run", seeing_model, "-p", QUESTION, "--image", files[0])
    assert done.code == 1
    assert 'Reading images needs the Python package PIL: pip install "flownpu[genai]"' in done.err


def test_image_mark_expands_as_in_genai():
    soft = "<image_soft_token>" * 256
    assert expand_images(f"a{IMAGE}b") == f"a\n\n{IMAGE}{soft}<end_of_image>\n\nb"


def test_later_turns_reuse_image_in_cache(language_model, seeing_model, files):
    one, other = read_images(seeing_model, files)
    conversation = Conversation(language_model, GREEDY, 1000)
    turns = [("Hello.", []), (QUESTION, [one]), ("Are you sure?", []), ("And this?", [other]), ("Why?", [])]
    for text, images in turns:
        before = [*conversation.messages, {"role": "user", "content": place_images(text, len(images))}]
        seen = [*conversation.images, *images]
        reply, timing = say(conversation, text, 6, images)
        assert reply == fresh(language_model, before, 6, seen)
        assert conversation.images == seen
        # Only a turn with images is computed from the beginning, with the images of earlier turns.
        assert timing.images == (len(seen) if images else 0)
        assert (timing.prompt_tokens > 256) == bool(images)


def test_conversation_with_other_image_is_computed_anew(language_model, seeing_model, files, monkeypatch):
    """All images have the same tokens: a cache that was computed with one must not answer for another."""
    one, other = read_images(seeing_model, files)
    conversation = Conversation(language_model, GREEDY, 1000)
    stream = language_model.stream

    def interrupted(*arguments):
        next(stream(*arguments))
        raise KeyboardInterrupt
        yield

    with monkeypatch.context() as patch:
        patch.setattr(language_model, "stream", interrupted)  # Ctrl-C before the first word
        with pytest.raises(KeyboardInterrupt):
            say(conversation, QUESTION, 6, [one])
    assert conversation.images == []
    asked = [{"role": "user", "content": place_images(QUESTION, 1)}]
    assert say(conversation, QUESTION, 6, [other])[0] == fresh(language_model, asked, 6, [other])


def test_kv_cache_behind_image_is_rewound(language_model, seeing_model, files):
    """A reply's text may become other tokens than those it was generated with."""
    (one, _) = read_images(seeing_model, files)
    conversation = Conversation(language_model, GREEDY, 1000)
    say(conversation, QUESTION, 20, [one])
    conversation.messages[-1]["content"] = "Words that were never said."
    before = [*conversation.messages, {"role": "user", "content": "Why?"}]
    reply, timing = say(conversation, "Why?", 6)
    assert reply == fresh(language_model, before, 6, [one])
    assert timing.prompt_tokens < 50


def test_kv_cache_before_image_is_not_rewound(language_model, seeing_model, files):
    (one, _) = read_images(seeing_model, files)
    conversation = Conversation(language_model, GREEDY, 1000)
    say(conversation, QUESTION, 6, [one])
    conversation.messages[0]["content"] = place_images(f"Other words. {IMAGE}", 1)
    before = [*conversation.messages, {"role": "user", "content": "Why?"}]
    assert say(conversation, "Why?", 6)[0] == fresh(language_model, before, 6, [one])


def test_kv_cache_that_genai_cannot_rewind_is_not_rewound(language_model, seeing_model, files, monkeypatch):
    (one, _) = read_images(seeing_model, files)
    monkeypatch.setattr(language_model, "can_rewind", False)
    conversation = Conversation(language_model, GREEDY, 1000)
    say(conversation, QUESTION, 20, [one])
    conversation.messages[-1]["content"] = "Words that were never said."
    before = [*conversation.messages, {"role": "user", "content": "Why?"}]
    reply, timing = say(conversation, "Why?", 6)
    assert reply == fresh(language_model, before, 6, [one])
    assert timing.images == 1


def test_image_mark_without_image_stays_text(language_model):
    messages = [{"role": "user", "content": f"And {IMAGE}?"}]
    assert not language_model.has_image_tokens(language_model.tokens_of_messages(messages))
    reply, _ = say(Conversation(language_model, GREEDY, 1000), f"And {IMAGE}?", 6)
    assert reply == fresh(language_model, messages, 6, [])


@pytest.fixture
def chat(flownpu, seeing_model, monkeypatch):
    def run(lines, *options, folder=seeing_model):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return flownpu("chat", folder, *CPU, "--temperature", 0, "--context", 1000, *options)

    return run


def test_chat_image_belongs_to_next_message(chat, flownpu, seeing_model, files):
    done = chat([f"/image {files[0]}", f"/image '{files[1]}'", "", QUESTION, "/exit"])
    assert done.code == 0, done.err
    assert "noise.png, 90 x 60: shown with your next message" in done.err
    assert "disc.png, 256 x 256: shown with your next message" in done.err
    assert "2 images in " in done.err
    options = ("--image", files[0], "--image", files[1], "--max-new-tokens", 1000, "--temperature", 0, *CPU)
    answer = flownpu("run", seeing_model, "-p", QUESTION, *options).out
    assert done.out.startswith(answer[:200])


AGAIN = "(A new image has the whole conversation computed again: GenAI takes images with the beginning only.)"


@pytest.fixture
def brief_model(seeing_model, tmp_path):
    """The model with most of its tokens ending a reply, so that a context has room for many turns."""
    for file in seeing_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((seeing_model / "genai_config.json").read_text())
    config["model"]["eos_token_id"] = list(range(10, config["model"]["vocab_size"]))
    (tmp_path / "genai_config.json").unlink()
    (tmp_path / "genai_config.json").write_text(json.dumps(config))
    return tmp_path


def test_later_chat_image_recomputes_whole_conversation(chat, brief_model, files):
    lines = [
        "Hello.",
        f"/image {files[0]}",
        "/reset",
        f"/image {files[0]}",
        QUESTION,
        "Why?",
        f"/image {files[1]}",
        "More?",
    ]
    done = chat(lines, folder=brief_model)
    assert done.code == 0, done.err
    told = [
        line.split(" in ")[0]
        for line in done.err.splitlines()
        if " prompt tokens, " in line or "computed again" in line
    ]
    hello, first, why, again, both = told
    assert (first, again, both) == ("1 image", AGAIN, "2 images")
    assert "prompt tokens" in hello
    assert "prompt tokens" in why


def test_wrong_chat_image_does_not_end_chat(chat, model, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    done = chat(["/image", f"/image {tmp_path / 'text.png'}", "/image ~/none.png", "/help"])
    assert (done.code, done.out) == (0, "")
    assert "error: expected /image and the path of an image file" in done.err
    assert "text.png is not an image that can be read" in done.err
    assert "error: no such image file: " in done.err
    assert "~" not in done.err
    assert done.err.count("/image FILE shows the next message an image") == 2
    done = chat([f"/image {tmp_path / 'text.png'}"], folder=model)
    assert "takes no images: its genai_config.json names no vision model" in done.err

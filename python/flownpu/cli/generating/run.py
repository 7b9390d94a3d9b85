# SPDX-License-Identifier: Apache-2.0
"""`flownpu run`: one prompt, one answer."""

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flownpu.cli import options
from flownpu.cli.generating.prompt_texts import read_prompt
from flownpu.cli.output import print_json, seconds_text, status, waiting
from flownpu.generate.image_prompts import TOKENS_PER_IMAGE, place_images, read_images
from flownpu.generate.language_model import LanguageModel, Timing
from flownpu.generate.tokenizer import Tokens
from flownpu.generate.turns import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flownpu.generate.images import PreparedImage


def run(
    model: options.ModelFolder,
    text: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The prompt. Without it and --file, stdin is read.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt, if it begins with a dash.")
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="A text behind the prompt; - is stdin; 4 MiB at most; may be repeated."
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", metavar="FILE", help="An image that the prompt is about; may be repeated."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")] = 128,
    *,
    sampling: options.SamplingOptions,
    decoding: options.DecodingOptions,
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Take the prompt as it is, not as a turn of a conversation.")
    ] = False,
    session: options.SessionOptions,
    as_json: options.AsJson = False,
) -> None:
    """Answer one prompt, printing the text as it is generated.

    The text goes to stdout; the speed, and what ran where, to stderr.
    """
    if prompt is not None and text is not None:
        raise typer.BadParameter("expected one prompt, got one here and another before it", param_hint="--prompt")
    prompt = read_prompt(text if prompt is None else prompt, file or [])
    # Before the model is opened, so that an error in an image is reported at once, and its memory is freed.
    images = read_images(model, image) if image else []
    language_model = options.open_model(model, session, decoding)
    tokens = _tokens(language_model, prompt, len(images), chat_template=not no_chat_template)
    timing = Timing()
    answer = language_model.complete(tokens, max_new_tokens, sampling.sampling(), timing, images)
    if as_json:
        with waiting(_reading(images)):
            text = "".join(answer)
        print_json({"text": text, **_report(language_model, timing, max_new_tokens, images)})
        return
    print_answer(answer, images)
    status(summary(timing))
    for placement in placements(language_model):
        status(placement)


def placements(language_model: LanguageModel) -> list[str]:
    """A line about the placement, and one for the vision model if there is one."""
    vision, decoder = language_model.vision_placement, language_model.placement
    if vision is None or vision == decoder:
        return [decoder["summary"]]
    return [f"Images: {vision['summary']}", f"Text: {decoder['summary']}"]


CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
"""Characters that would command a terminal, for `str.translate`; a text may have been told to contain them."""


def print_answer(pieces: "Iterator[str]", images: "Sequence[PreparedImage]", *, markdown: bool = False) -> None:
    """Writes an answer to stdout piece by piece; shows that the prompt is being read until the first piece comes.

    A terminal gets no control characters, and Markdown laid out if `markdown` is true.
    """
    with waiting(_reading(images)):
        first = next(pieces, "")
    pieces = itertools.chain([first], pieces)
    if sys.stdout.isatty():
        pieces = (piece.translate(CONTROLS) for piece in pieces)
        console = Console(highlight=False)
        if markdown and not console.is_dumb_terminal:
            from flownpu.cli.generating.shown_markdown import show_markdown  # noqa: PLC0415 imports take 0.1 s

            show_markdown(pieces, console)
            return
    for piece in itertools.chain(pieces, ["\n"]):
        sys.stdout.write(piece)
        sys.stdout.flush()


def _reading(images: "Sequence[PreparedImage]") -> str:
    """The text that is shown until the first token comes."""
    return " ".join(
        ["Reading the prompt", *(["and"] if images else []), ", ".join(image.path.name for image in images)]
    )


def summary(timing: Timing) -> str:
    """The speed of one reply in one line."""
    images = ""
    if timing.images:
        images = f"{timing.images} image{'s' if timing.images > 1 else ''}"
        images += f" in {seconds_text(timing.vision)}, " if timing.vision is not None else ", "
    steps = f" in {timing.steps} steps, {timing.kept} of {timing.candidates} candidates kept" if timing.steps else ""
    return (
        f"{images}{timing.prompt_tokens} prompt tokens, first token after {seconds_text(timing.first_token)}, "
        f"{timing.new_tokens} new tokens at {timing.decode_rate:.1f} tokens/s{steps}"
    )


def _tokens(language_model: LanguageModel, prompt: str, images: int, *, chat_template: bool) -> Tokens:
    content = place_images(prompt, images)
    # A model without a template completes text, so its prompt is taken unchanged.
    if chat_template and language_model.has_chat_template:
        return language_model.tokens_of_messages([{"role": "user", "content": content}])
    return language_model.tokens_of_text(text_of(content))


def _report(
    language_model: LanguageModel, timing: Timing, max_new_tokens: int, images: "Sequence[PreparedImage]"
) -> dict[str, Any]:
    limit = min(max_new_tokens, language_model.context_length - timing.prompt_tokens)
    return {
        "model": str(language_model.folder),
        "provider": language_model.provider,
        "placement": language_model.placement,
        "vision_placement": language_model.vision_placement,
        "images": [
            {"file": str(image.path), "format": image.kind, "width": image.width, "height": image.height}
            for image in images
        ],
        "finish_reason": "length" if timing.new_tokens == limit else "stop",
        "prompt_tokens": timing.prompt_tokens,
        "image_tokens": TOKENS_PER_IMAGE * timing.images,
        "new_tokens": timing.new_tokens,
        "steps": timing.steps or max(0, timing.new_tokens - 1),
        "candidate_tokens": timing.candidates,
        "kept_candidate_tokens": timing.kept,
        "vision_seconds": timing.vision,
        "prefill_seconds": timing.prefill,
        "first_token_seconds": timing.first_token,
        "prefill_tokens_per_second": timing.prefill_rate,
        "decode_seconds": timing.decode,
        "decode_tokens_per_second": timing.decode_rate,
        "load_seconds": language_model.load_seconds,
    }

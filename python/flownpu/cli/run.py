# SPDX-License-Identifier: Apache-2.0
"""`flownpu run`: one prompt, one answer."""

import sys
from typing import Annotated, Any

import typer

from flownpu.cli import options
from flownpu.cli.output import print_json, seconds_text, status
from flownpu.generation import LanguageModel, Sampling, Timing, Tokens


def run(
    model: options.ModelFolder,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt. Without it, stdin is read.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy. [default: the model's own settings]")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample among the likeliest of this total probability."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling: the same one, the same text.")] = None,
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Take the prompt as it is, not as a turn of a conversation.")
    ] = False,
    provider: options.ProviderOption = options.Provider.FLOWNPU,
    device: options.DeviceOption = None,
    activations: options.ActivationsOption = None,
    threads: options.Threads = None,
    option: options.Option = None,
    as_json: options.AsJson = False,
) -> None:
    """Answer one prompt, printing the text as it is generated.

    The text goes to stdout; a line with the speed and one that says what ran where go to stderr.
    """
    if prompt is None:
        if sys.stdin.isatty():
            raise typer.BadParameter('expected -p "some text", or text on stdin', param_hint="--prompt")
        prompt = sys.stdin.read()
    language_model = options.open_model(model, provider, device, activations, threads, option)
    tokens = _tokens(language_model, prompt, chat_template=not no_chat_template)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    timing = Timing()
    pieces = []
    for piece in language_model.complete(tokens, max_new_tokens, sampling, timing):
        pieces.append(piece)
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if as_json:
        print_json({"text": "".join(pieces), **_report(language_model, timing, max_new_tokens)})
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    status(summary(timing))
    status(language_model.placement["summary"])


def summary(timing: Timing) -> str:
    """The speed of one reply in one line."""
    return (
        f"{timing.prompt_tokens} prompt tokens, first token after {seconds_text(timing.first_token)}, "
        f"{timing.new_tokens} new tokens at {timing.decode_rate:.1f} tokens/s"
    )


def _tokens(language_model: LanguageModel, prompt: str, *, chat_template: bool) -> Tokens:
    # A model that has no template completes text: its prompt is taken as it is.
    if chat_template and language_model.has_chat_template:
        return language_model.tokens_of_messages([{"role": "user", "content": prompt}])
    return language_model.tokens_of_text(prompt)


def _report(language_model: LanguageModel, timing: Timing, max_new_tokens: int) -> dict[str, Any]:
    limit = min(max_new_tokens, language_model.context_length - timing.prompt_tokens)
    return {
        "model": str(language_model.folder),
        "provider": language_model.provider,
        "placement": language_model.placement,
        "finish_reason": "length" if timing.new_tokens == limit else "stop",
        "prompt_tokens": timing.prompt_tokens,
        "new_tokens": timing.new_tokens,
        "first_token_seconds": timing.first_token,
        "prefill_tokens_per_second": timing.prefill_rate,
        "decode_tokens_per_second": timing.decode_rate,
        "load_seconds": language_model.load_seconds,
    }

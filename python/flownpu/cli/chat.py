# SPDX-License-Identifier: Apache-2.0
"""`flownpu chat`: a conversation in the terminal."""

import contextlib
import sys
from typing import Annotated

import typer

from flownpu.cli import options
from flownpu.cli.output import status
from flownpu.cli.run import summary
from flownpu.conversation import Conversation
from flownpu.errors import FlowNPUError
from flownpu.generation import Sampling, Timing

HELP = "/reset begins a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops a reply"


def chat(
    model: options.ModelFolder,
    system: Annotated[str, typer.Option(metavar="TEXT", help="What the model is told beforehand.")] = "",
    context: Annotated[
        int, typer.Option(min=2, help="Tokens the conversation may grow to; the KV cache is of this size.")
    ] = 4096,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy. [default: the model's own settings]")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample among the likeliest of this total probability."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling: the same one, the same text.")] = None,
    provider: options.ProviderOption = options.Provider.FLOWNPU,
    device: options.DeviceOption = None,
    activations: options.ActivationsOption = None,
    threads: options.Threads = None,
    option: options.Option = None,
) -> None:
    """Hold a conversation. Ctrl-C stops a reply, /reset begins anew, /exit leaves.

    Reads stdin line by line, one turn a line, also from a pipe.
    """
    language_model = options.open_model(model, provider, device, activations, threads, option)
    conversation = Conversation(
        language_model,
        Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
        min(context, language_model.context_length),
        system,
    )
    status(language_model.placement["summary"])
    status(HELP)
    if not language_model.has_chat_template:
        status("This model has no chat template: it continues the text of your turns and of its own.")
    going_on = True
    while going_on:
        try:
            going_on = _take_turn(conversation)
        except KeyboardInterrupt:
            # While a line is being typed: it is dropped.
            status(f"\n{HELP}")


def _take_turn(conversation: Conversation) -> bool:
    """Reads a line and does what it says; false if that is to leave."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return False
    if line == "/exit":
        return False
    if line == "/reset":
        conversation.reset()
        status("A new conversation.")
    elif line.startswith("/"):
        status(f"unknown command {line.split()[0]}; {HELP}")
    elif line:
        _reply(conversation, line)
    return True


def _reply(conversation: Conversation, text: str) -> None:
    """Streams one reply. Neither Ctrl-C nor a conversation that is full ends the program."""
    timing = Timing()
    try:
        # Closed at once when interrupted, so that the conversation remembers what was said so far.
        with contextlib.closing(conversation.reply(text, timing)) as pieces:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
    except KeyboardInterrupt:
        status("\n(stopped)")
    except FlowNPUError as error:
        status(f"error: {error}")
        return
    if timing.new_tokens:
        status(summary(timing))

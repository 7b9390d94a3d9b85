# SPDX-License-Identifier: Apache-2.0
"""`flownpu chat`: a conversation in the terminal."""

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flownpu.cli import options
from flownpu.cli.output import read_all_bytes, status
from flownpu.cli.run import placements, print_answer, summary
from flownpu.errors import FlowNPUError
from flownpu.generate.conversation import Conversation
from flownpu.generate.image_prompts import read_images
from flownpu.generate.language_model import Timing

if TYPE_CHECKING:
    from flownpu.generate.images import PreparedImage

HELP = (
    "/image FILE shows the next message an image, /reset begins a new conversation, /help shows this, /exit or Ctrl-D "
    "leaves, Ctrl-C stops a reply"
)


def chat(
    model: options.ModelFolder,
    system: Annotated[str, typer.Option(metavar="TEXT", help="System message: what the model is told first.")] = "",
    context: Annotated[
        int, typer.Option(min=2, help="Tokens that the conversation may grow to: the size of the KV cache.")
    ] = 4096,
    *,
    sampling: options.SamplingOptions,
    decoding: options.DecodingOptions,
    session: options.SessionOptions,
) -> None:
    """Hold a conversation. Ctrl-C stops a reply, /reset begins anew, /image FILE shows an image, /exit leaves.

    Reads stdin line by line, also from a pipe. An image belongs to the next message, which may have several.
    """
    language_model = options.open_model(model, session, decoding)
    conversation = Conversation(
        language_model,
        sampling.sampling(),
        min(context, language_model.context_length),
        system,
    )
    for placement in placements(language_model):
        status(placement)
    status(HELP)
    if not language_model.has_chat_template:
        status("This model has no chat template: it continues the text of your turns and of its own.")
    read_all_bytes()
    talk = _Talk(conversation)
    going_on = True
    while going_on:
        try:
            going_on = talk.take_turn()
        except KeyboardInterrupt:
            # Ctrl-C while a line is being typed drops the line.
            status(f"\n{HELP}")


@dataclass
class _Talk:
    """A conversation that a terminal's lines control."""

    conversation: Conversation
    images: "list[PreparedImage]" = field(default_factory=list)
    """Images that go with the next message."""

    def take_turn(self) -> bool:
        """Reads a line and executes it; false if it asks to leave."""
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return False
        command, _, argument = line.partition(" ")
        if line == "/exit":
            return False
        if line == "/reset":
            self.conversation.reset()
            self.images = []
            status("A new conversation.")
        elif line == "/help":
            status(HELP)
        elif command == "/image":
            self._show(argument.strip())
        elif line.startswith("/"):
            status(f"unknown command {command}; {HELP}")
        elif line:
            self._reply(line)
        return True

    def _show(self, name: str) -> None:
        """Keeps an image for the next message."""
        if not name:
            status("error: expected /image and the path of an image file")
            return
        # A terminal may put quotes around the name of a file that is dropped onto it.
        if name[0] == name[-1] and name[0] in "'\"" and len(name) > 2:
            name = name[1:-1]
        try:
            (image,) = read_images(self.conversation.model.folder, [Path(name).expanduser()])
        except FlowNPUError as error:
            status(f"error: {error}")
            return
        self.images.append(image)
        status(f"{image.path.name}, {image.width} x {image.height}: shown with your next message")

    def _reply(self, text: str) -> None:
        """Streams one reply. Neither Ctrl-C nor a conversation that is full ends the program."""
        timing = Timing()
        images, self.images = self.images, []
        if images and self.conversation.has_begun:
            status(
                "(A new image has the whole conversation computed again: GenAI takes images with the beginning only.)"
            )
        try:
            # The stream is closed at once on an interrupt, so that the conversation keeps the text so far.
            with contextlib.closing(self.conversation.reply(text, timing, images)) as pieces:
                print_answer(pieces, images)
        except KeyboardInterrupt:
            status("\n(stopped)")
        except FlowNPUError as error:
            status(f"error: {error}")
            return
        if timing.new_tokens:
            status(summary(timing))

# SPDX-License-Identifier: Apache-2.0
"""`flownpu chat`: a conversation in the terminal."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flownpu.cli import options
from flownpu.cli.generating.conversation_file import load_conversation, save_conversation
from flownpu.cli.generating.run import placements, print_answer, summary
from flownpu.cli.generating.typed import read_message, remember_lines
from flownpu.cli.output import read_all_bytes, status
from flownpu.errors import FlowNPUError
from flownpu.generate.conversation import Conversation
from flownpu.generate.image_prompts import read_images
from flownpu.generate.language_model import Timing

if TYPE_CHECKING:
    from flownpu.generate.images import PreparedImage

HELP = (
    "/image FILE shows the next message an image, /reset begins a new conversation, /system TEXT tells the model "
    'something else first, /save FILE and /load FILE keep a conversation, """ begins and ends a message of several '
    "lines, /help shows this, /exit or Ctrl-D leaves, Ctrl-C stops a reply"
)


def chat(
    model: options.ModelFolder,
    system: Annotated[str, typer.Option(metavar="TEXT", help="System message: what the model is told first.")] = "",
    context: Annotated[
        int, typer.Option(min=2, help="Tokens that the conversation may grow to: the size of the KV cache.")
    ] = 4096,
    plain: Annotated[
        bool, typer.Option("--plain", help="Show answers as they are written, not laid out as Markdown.")
    ] = False,
    *,
    sampling: options.SamplingOptions,
    decoding: options.DecodingOptions,
    session: options.SessionOptions,
) -> None:
    r"""Hold a conversation. Ctrl-C stops a reply, /reset begins anew, /exit leaves; /help shows further commands.

    Reads stdin line by line, also from a pipe; a message of several lines is between two \"\"\". Images belong to the
    next message. A terminal shows answers laid out, as the Markdown that they are. Typed lines are kept in
    ~/.local/state/flownpu/chat_history, for the arrow keys.
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
    remember_lines()
    talk = _Talk(conversation, markdown=not plain)
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
    markdown: bool
    images: "list[PreparedImage]" = field(default_factory=list)
    """Images that go with the next message."""

    def take_turn(self) -> bool:
        """Reads a line and executes it; false if it asks to leave."""
        try:
            line, is_message = read_message()
        except EOFError:
            return False
        if line == "/exit" and not is_message:
            return False
        if line.startswith("/") and not is_message:
            command, _, argument = line.partition(" ")
            try:
                self._obey(command, argument.strip())
            except FlowNPUError as error:
                status(f"error: {error}")
        elif line:
            self._reply(line)
        return True

    def _obey(self, command: str, argument: str) -> None:
        """Executes a command.

        Raises:
            FlowNPUError: it cannot be executed.
        """
        match command:
            case "/reset":
                self.conversation.reset()
                self.images = []
                status("A new conversation.")
            case "/system":
                self.conversation.tell(argument)
                status("The model is told this first." if argument else "The model is told nothing first.")
            case "/image":
                self._show(_path(argument, "/image and the path of an image file"))
            case "/save":
                file = _path(argument, "/save and the path of a file to write")
                save_conversation(self.conversation, file)
                status(f"{file}: {len(self.conversation.messages)} turns")
            case "/load":
                load_conversation(self.conversation, _path(argument, "/load and the path of a file that /save wrote"))
                self.images = []
                status(f"{len(self.conversation.messages)} turns, which go on")
            case "/help":
                status(HELP)
            case _:
                status(f"unknown command {command}; {HELP}")

    def _show(self, file: Path) -> None:
        """Keeps an image for the next message."""
        (image,) = read_images(self.conversation.model.folder, [file])
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
                print_answer(pieces, images, markdown=self.markdown)
        except KeyboardInterrupt:
            status("\n(stopped)")
        except FlowNPUError as error:
            status(f"error: {error}")
            return
        if timing.new_tokens:
            status(summary(timing))


def _path(name: str, expected: str) -> Path:
    """The path that a command names.

    Raises:
        FlowNPUError: it names none.
    """
    if not name:
        raise FlowNPUError(f"expected {expected}")
    # A terminal may put quotes around the name of a file that is dropped onto it.
    if name[0] == name[-1] and name[0] in "'\"" and len(name) > 2:
        name = name[1:-1]
    return Path(name).expanduser()

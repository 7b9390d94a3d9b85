# SPDX-License-Identifier: Apache-2.0
"""A conversation of several turns on one KV cache."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flownpu.errors import FlowNPUError
from flownpu.generate.answer_format import reader_of
from flownpu.generate.cached_sequence import CachedSequence
from flownpu.generate.image_prompts import place_images
from flownpu.generate.language_model import LanguageModel, Message, Sampling, Timing

if TYPE_CHECKING:
    from flownpu.generate.images import PreparedImage


@dataclass
class Conversation:
    """A conversation whose turns compute only what they add.

    At each turn the whole conversation is written in the model's chat template; of its tokens only those are computed
    that the KV cache does not hold.
    """

    model: LanguageModel
    sampling: Sampling
    context: int
    """Tokens that the conversation may grow to."""
    system: str = ""
    """The system message; empty: none."""
    messages: list[Message] = field(init=False)
    images: "list[PreparedImage]" = field(init=False)
    """The images of all messages, in their order."""
    _cached: CachedSequence = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets everything that was said."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.images = []
        self._cached = CachedSequence(self.model, self.context, self.sampling)

    def tell(self, system: str) -> None:
        """Replaces the system message, and keeps what was said; empty: there is none any more."""
        self.system = system
        said = [message for message in self.messages if message["role"] != "system"]
        first: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = first + said

    def restore(self, messages: list[Message], images: "Sequence[PreparedImage]") -> None:
        """Continues from earlier turns, with their images, in the place of this conversation's."""
        self.system = next((str(message["content"]) for message in messages if message["role"] == "system"), "")
        self.messages, self.images = list(messages), list(images)

    @property
    def has_begun(self) -> bool:
        """Whether the KV cache holds anything; a turn with images would have it computed anew."""
        return self._cached.generator is not None

    def reply(self, text: str, timing: Timing, images: "Sequence[PreparedImage]" = ()) -> Generator[str, None, None]:
        """Yields the model's reply to `text` and `images`, a token at a time; keeps the part that was yielded.

        Thoughts that the model marks are neither yielded nor kept.

        Raises:
            FlowNPUError: the conversation has outgrown its context, or the marks in the text are not one for each
                image; the conversation stays as it was before this turn.
        """
        content = place_images(text, len(images))
        messages = [*self.messages, {"role": "user", "content": content}]
        shown = [*self.images, *images]
        tokens = self.model.tokens_of_conversation(messages)
        if len(tokens) >= self.context:
            raise FlowNPUError(
                f"the conversation is {len(tokens)} tokens long and its context holds {self.context}: "
                "/reset begins a new one; --context sets a larger one"
            )
        generator, new, unseen = self._cached.resume(tokens, shown)
        pieces: list[str] = []
        reader = reader_of(self.model.chat_template)
        try:
            for piece in self.model.stream(generator, new, timing, unseen):
                said = piece if reader is None else reader.add(piece).text
                if said or reader is None:
                    pieces.append(said)
                    yield said
            if reader is not None and (rest := reader.finish().text):
                pieces.append(rest)
                yield rest
        finally:
            # This also runs when the caller stops iterating. A turn without any reply is dropped.
            if pieces:
                self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
                self.images = shown

# SPDX-License-Identifier: Apache-2.0
"""A conversation of several turns on one KV cache."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flownpu.errors import FlowNPUError
from flownpu.generate.held_sequence import HeldSequence
from flownpu.generate.image_prompts import mark_images
from flownpu.generate.language_model import LanguageModel, Message, Sampling, Timing

if TYPE_CHECKING:
    from flownpu.generate.images import PreparedImage

__all__ = ["Conversation"]


@dataclass
class Conversation:
    """Computes only what a turn adds.

    At each turn the whole conversation is written in the model's chat template; what of it the KV cache does not hold
    is computed.
    """

    model: LanguageModel
    sampling: Sampling
    context: int
    """Tokens that the conversation may grow to."""
    system: str = ""
    """What the model is told beforehand."""
    messages: list[Message] = field(init=False)
    images: "list[PreparedImage]" = field(init=False)
    """Those of all messages, in the order of their marks."""
    _held: HeldSequence = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets everything that was said."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.images = []
        self._held = HeldSequence(self.model, self.context, self.sampling)

    @property
    def has_begun(self) -> bool:
        """Whether the KV cache holds anything, which a turn with images would have computed anew."""
        return self._held.generator is not None

    def reply(self, text: str, timing: Timing, images: "Sequence[PreparedImage]" = ()) -> Generator[str, None, None]:
        """Yields the model's reply to `text` and `images`, a token at a time; remembers it as far as it came.

        Raises:
            FlowNPUError: the conversation has outgrown its context, or the text marks places for other images; it
                stays as it was before this turn.
        """
        content = mark_images(text, len(images)) if self.model.takes_images else text
        messages = [*self.messages, {"role": "user", "content": content}]
        shown = [*self.images, *images]
        tokens = self.model.tokens_of_conversation(messages)
        if len(tokens) >= self.context:
            raise FlowNPUError(
                f"the conversation is {len(tokens)} tokens long and its context holds {self.context}: "
                "/reset begins a new one; --context sets a larger one"
            )
        generator, new, unseen = self._held.resume(tokens, shown)
        pieces: list[str] = []
        try:
            for piece in self.model.stream(generator, new, timing, unseen):
                pieces.append(piece)
                yield piece
        finally:
            # Also when the reader stops listening. A turn without a reply is as if it had not been said.
            if pieces:
                self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
                self.images = shown

# SPDX-License-Identifier: Apache-2.0
"""A conversation of several turns on one KV cache."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.errors import FlowNPUError
from flownpu.generate.image_prompts import mark_images
from flownpu.generate.language_model import LanguageModel, Message, Sampling, Timing, Tokens

if TYPE_CHECKING:
    from flownpu.generate.images import PreparedImage

__all__ = ["Conversation"]


@dataclass
class Conversation:
    """Computes only what a turn adds.

    At each turn the whole conversation is written in the model's chat template and compared with the tokens that the
    KV cache holds; those behind their common beginning are computed. A turn that brings images has all of it computed,
    earlier images too: GenAI 0.18 takes them with a generator's first prompt only. Later turns keep them in the cache.
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
    _generator: Any = field(init=False)
    _held_images: "list[PreparedImage]" = field(init=False)
    """Those that the KV cache was computed with; their tokens are all alike."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets everything that was said."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.images = []
        self._generator = None
        self._held_images = []

    @property
    def has_begun(self) -> bool:
        """Whether the KV cache holds anything, which a turn with images would have computed anew."""
        return self._generator is not None

    def reply(self, text: str, timing: Timing, images: "Sequence[PreparedImage]" = ()) -> Generator[str, None, None]:
        """Yields the model's reply to `text` and `images`, a token at a time; remembers it as far as it came.

        Raises:
            FlowNPUError: the conversation has outgrown its context, or the text marks places for other images; it
                stays as it was before this turn.
        """
        content = mark_images(text, len(images)) if self.model.takes_images else text
        messages = [*self.messages, {"role": "user", "content": content}]
        shown = [*self.images, *images]
        tokens = self._tokens(messages)
        if len(tokens) >= self.context:
            raise FlowNPUError(
                f"the conversation is {len(tokens)} tokens long and its context holds {self.context}: "
                "/reset begins a new one; --context sets a larger one"
            )
        generator, new, unseen = self._resume(tokens, shown)
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

    def _tokens(self, messages: list[Message]) -> Tokens:
        if self.model.has_chat_template:
            return self.model.tokens_of_messages(messages)
        # A model that was never taught turns continues what has been said so far.
        return self.model.tokens_of_text("\n".join(message["content"] for message in messages))

    def _resume(self, tokens: Tokens, images: "list[PreparedImage]") -> "tuple[Any, Tokens, list[PreparedImage]]":
        """A generator that holds the beginning of `tokens`, and the rest of them (at least one) with their images."""
        if self._generator is not None and self._held_images == images:
            held = self._generator.get_sequence(0)
            common = min(len(held), len(tokens) - 1)
            differing = np.flatnonzero(held[:common] != tokens[:common])
            common = int(differing[0]) if differing.size else common
            if not self.model.has_image_tokens(tokens[common:]) and self._take_back_to(common, len(held)):
                return self._generator, tokens[common:], []
        self._generator = self.model.generator(self.context, self.sampling)
        self._held_images = images
        return self._generator, tokens, images

    def _take_back_to(self, length: int, held: int) -> bool:
        """Makes the KV cache hold exactly the first `length` tokens of the sequence; False if that is not possible."""
        if length == held:
            if not self._generator.is_done():
                # A reply was cut short: its last token is in the sequence and not yet in the KV cache, where
                # append_tokens of GenAI 0.18 would leave its place unwritten. To ask for the logits after it computes
                # it. (The token that ends a reply by itself is not in the sequence; the one before it is computed.)
                self._generator.get_logits()
            return True
        if length == 0 or not self.model.can_rewind:
            return False
        try:
            self._generator.rewind_to(length)
        except RuntimeError:
            # GenAI refuses where a window-sized cache has dropped tokens that are needed again.
            return False
        return True

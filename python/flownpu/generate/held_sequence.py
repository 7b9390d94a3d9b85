# SPDX-License-Identifier: Apache-2.0
"""A generator that is kept for the next prompt: what its KV cache holds of it is not computed again."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.generate.language_model import LanguageModel, Sampling, Tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.generate.images import PreparedImage

__all__ = ["HeldSequence"]


@dataclass
class HeldSequence:
    """One sequence and its KV cache.

    A prompt is compared with the tokens that the cache holds; those behind their common beginning are computed. A
    prompt with other images than the last one's has all of it computed: GenAI 0.18 takes images with a generator's
    first prompt only. Later prompts keep them in the cache.

    GenAI's generators have one sampling and one guidance for life.
    """

    model: LanguageModel
    context: int
    """Tokens that the sequence may grow to."""
    sampling: Sampling
    guidance: tuple[str, str] | None = None
    """As `LanguageModel.generator` takes it."""
    generator: Any = field(default=None, init=False)
    """GenAI's; None: nothing is held."""
    images: "Sequence[PreparedImage]" = field(default=(), init=False)
    """Those that the KV cache was computed with; their tokens are all alike."""

    @property
    def tokens(self) -> int:
        """How many the sequence has."""
        return 0 if self.generator is None else len(self.generator.get_sequence(0))

    def common_tokens(self, tokens: Tokens, images: "Sequence[PreparedImage]") -> int:
        """How many of the first of `tokens` the KV cache holds; the last one does not count, it is computed anew."""
        if self.generator is None or list(self.images) != list(images):
            return 0
        held = self.generator.get_sequence(0)
        common = min(len(held), len(tokens) - 1)
        differing = np.flatnonzero(held[:common] != tokens[:common])
        return int(differing[0]) if differing.size else common

    def resume(
        self, tokens: Tokens, images: "Sequence[PreparedImage]"
    ) -> "tuple[Any, Tokens, Sequence[PreparedImage]]":
        """A generator that holds the beginning of `tokens`, and the rest of them (at least one) with their images."""
        common = self.common_tokens(tokens, images)
        if common and not self.model.has_image_tokens(tokens[common:]):
            common = self._take_back_to(common)
            if common:
                return self.generator, tokens[common:], ()
        self.generator = None  # its KV cache goes before the next one's comes
        self.generator = self.model.generator(self.context, self.sampling, guidance=self.guidance)
        self.images = images
        return self.generator, tokens, images

    def _take_back_to(self, length: int) -> int:
        """Makes the KV cache hold exactly the first tokens of the sequence: `length`, or 0 if it cannot."""
        held = self.tokens
        if length == held:
            if self.generator.is_done():
                # The token that ends a reply by itself is not in the sequence; the one before it is computed.
                return length
            if self.guidance is None:
                # A reply was cut short: its last token is in the sequence and not yet in the KV cache, where
                # append_tokens of GenAI 0.18 would leave its place unwritten. To ask for the logits computes it.
                self.generator.get_logits()
                return length
            length -= 1  # to go back is what has GenAI begin the guidance anew
        if length == 0 or not self.model.can_rewind:
            return 0
        try:
            self.generator.rewind_to(length)
        except RuntimeError:
            # GenAI refuses where a window-sized cache has dropped tokens that are needed again.
            return 0
        return length

# SPDX-License-Identifier: Apache-2.0
"""A generator that is kept for the next prompt, so that tokens in its KV cache are not computed again."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.generate.guidance import Guidance
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.generate.speculative.generator import SpeculativeGenerator
from flownpu.generate.state_generator import StateGenerator
from flownpu.generate.tokenizer import Tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.generate.images import PreparedImage


@dataclass
class CachedSequence:
    """One sequence and its KV cache.

    A prompt is compared with the tokens that the cache holds; only its tokens behind the common beginning are computed.
    A prompt with other images than the last one's is computed anew: GenAI 0.18 takes images with a generator's first
    prompt only. For prompts with the same images, the cache keeps their tokens.

    Sampling and guidance cannot change: they belong to GenAI's generator.
    """

    model: LanguageModel
    context: int
    """Tokens that the sequence may grow to."""
    sampling: Sampling
    guidance: Guidance | None = None
    generator: Any = field(default=None, init=False)
    """GenAI's generator; None: nothing is held."""
    images: "Sequence[PreparedImage]" = field(default=(), init=False)
    """The images that the KV cache was computed with; tokens do not tell them apart, for all image tokens are equal."""

    @property
    def tokens(self) -> int:
        """How many tokens the sequence has."""
        return 0 if self.generator is None else len(self.generator.get_sequence(0))

    def common_tokens(self, tokens: Tokens, images: "Sequence[PreparedImage]") -> int:
        """How many of the first of `tokens` need not be computed; at most all but the last, which always is."""
        if self.generator is None or list(self.images) != list(images):
            return 0
        held = self.generator.get_sequence(0)
        common = min(len(held), len(tokens) - 1)
        differing = np.flatnonzero(held[:common] != tokens[:common])
        common = int(differing[0]) if differing.size else common
        return common if common == len(held) else self._kept_before(common)

    def resume(
        self, tokens: Tokens, images: "Sequence[PreparedImage]"
    ) -> "tuple[Any, Tokens, Sequence[PreparedImage]]":
        """A generator that holds the beginning of `tokens`, the rest of them (at least one), and the rest's images."""
        common = self.common_tokens(tokens, images)
        if common and not self.model.has_image_tokens(tokens[common:]):
            common = self._take_back_to(common)
            if common:
                return self.generator, tokens[common:], ()
        self.generator = None  # frees its KV cache before the next one is allocated
        self.generator = self.model.generator(self.context, self.sampling, guidance=self.guidance)
        self.images = images
        return self.generator, tokens, images

    def _kept_before(self, length: int) -> int:
        """The greatest length up to `length` to which the sequence can be rewound; 0: none, it begins anew."""
        if not self.model.can_rewind:
            return 0
        known = isinstance(self.generator, StateGenerator | SpeculativeGenerator)
        return self.generator.kept_before(length) if known else length

    def _take_back_to(self, length: int) -> int:
        """Makes the KV cache hold exactly the first `length` tokens; returns how many it holds, 0 if it cannot."""
        held = self.tokens
        if length == held:
            if self.generator.is_done():
                # The token with which a model ends its reply is not in the sequence; all tokens before it are computed.
                return length
            if self.guidance is None:
                # A reply was cut short: its last token is in the sequence and not yet in the KV cache, where
                # append_tokens of GenAI 0.18 would leave its place unwritten. Asking for the logits computes it.
                self.generator.get_logits()
                return length
            length = self._kept_before(length - 1)  # only a rewind makes GenAI restart the guidance
        if length == 0:
            return 0
        try:
            self.generator.rewind_to(length)
        except RuntimeError:
            # GenAI refuses if a window-sized cache has dropped tokens that are needed again.
            return 0
        return length

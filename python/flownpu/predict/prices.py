# SPDX-License-Identifier: Apache-2.0
"""The predicted cost of a model on the array: the cost of the programs that `flownpu build` would write.

Everything here is **predicted** by the cost model of `flownpu.aie.cost`; docs/model.md lists the sources, and the
errors of predictions that can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from flownpu.aie.cost.chips import CHIPS
from flownpu.aie.cost.parameters import VALUES
from flownpu.aie.programs.cost import Prices, prompt_runs
from flownpu.aie.programs.encode import encode_program
from flownpu.npu.artifacts import programs_of_decoder

if TYPE_CHECKING:
    from flownpu.aie.cost.chips import Chip
    from flownpu.aie.cost.parameters import Values
    from flownpu.aie.cost.phases import Cost
    from flownpu.aie.programs.decoder_shape import DecoderShape
    from flownpu.aie.programs.program import Program
    from flownpu.npu.operators import LeftOut
    from flownpu.predict.target import Target

_TARGET = "npu2"
_QUESTION_TOKENS = 16  # the length of a short question about an image


@lru_cache(maxsize=4)  # programs take seconds to write, and `flownpu explain` asks more than once; each takes megabytes
def predicted_programs(decoder: DecoderShape, context: int) -> tuple[tuple[Program, ...], tuple[LeftOut, ...]]:
    """The programs for the predicted chip's array, and what they leave out; see `programs_of_decoder`.

    Raises:
        ValueError: the NPU's designs have no place for the decoder.
    """
    programs, left_out = programs_of_decoder(
        decoder, _TARGET, context, prices=_published_prices("kraken-350", decoder, context)
    )
    return tuple(programs), tuple(left_out)


@lru_cache(maxsize=4)
def _published_prices(device: str, decoder: DecoderShape, context: int) -> Prices:
    """Prices with the published values, kept so that the next prediction of the same programs reuses counted calls."""
    del decoder, context  # only a part of the cache's key, because calls of other programs may have the same names
    return Prices(CHIPS[device], VALUES)


@dataclass(frozen=True)
class Prediction:
    """A model's programs and their predicted cost.

    Attributes:
        target: the model.
        context: positions of its KV caches, enough for the longest prompt.
        device: the chip.
        values: values of the cost model's parameters.
    """

    target: Target
    context: int
    device: Chip
    values: Values

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """The program of a token, then those of a prompt's chunks.

        Raises:
            ValueError: the NPU's designs have no place for the decoder.
        """
        return predicted_programs(self.target.whole, self.context)[0]

    @cached_property
    def prices(self) -> Prices:
        """The cost of the programs' calls on the device."""
        if self.values == VALUES and self.device == CHIPS.get(self.device.name):
            return _published_prices(self.device.name, self.target.whole, self.context)
        return Prices(self.device, self.values)

    def token(self, context: int) -> Cost:
        """The cost of a token that sees `context` keys, its own included, after another token's run."""
        return self.prices.of_runs([(self.programs[0], context - 1)], before=self.programs[0])

    def prompt(self, tokens: int) -> Cost:
        """The cost of a prompt from an empty cache to the first token, after another conversation's token."""
        return self.prices.of_runs(list(prompt_runs(self.programs, tokens)), before=self.programs[0])

    def image(self) -> Cost | None:
        """The cost of an image and a short question, to the first token; None: model or programs take no images."""
        if self.target.encoder is None:
            return None
        encoder = encode_program(self.target.encoder, _TARGET)
        block = next((program for program in self.programs if program.kind == "block"), None)
        if block is None:
            return None
        runs = [(encoder, 0), (block, 0), *prompt_runs(self.programs, _QUESTION_TOKENS, block.tokens)]
        return self.prices.of_runs(runs, before=self.programs[0])

    def roof(self, context: int) -> float:
        """Tokens per second if only reading weights, keys and values, and states, from main memory took time."""
        decoder, shape = self.target.whole, self.target.whole.shape
        weights = decoder.weights_before(len(decoder.layers)) + decoder.head.bytes
        weights += shape.experts * sum(shape.expert_bytes(layer.eight_bits) for layer in decoder.layers)  # a token's
        keys = sum(min(window or context, context) for window in decoder.windows)
        weights += decoder.state_bytes
        return self.values["memory_read"] / (weights + keys * shape.kv_heads * 2 * shape.row_bytes)

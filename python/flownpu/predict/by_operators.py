# SPDX-License-Identifier: Apache-2.0
"""The predicted cost of a decoder that the array takes operator by operator, such as Gemma 4 (its layers differ).

Of a token, each product with a Q4NX weight is a dispatch to one array, or the host's, whichever is faster; the host
computes all else (attention, norms, the gates of a layer's own embedding) at the rate at which it reads memory. Of a
prompt, the host's products count alone: an upper bound, since a session may send large ones to the array.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from flownpu.aie.cost.phases import Cost
from flownpu.aie.programs.cost import Prices
from flownpu.aie.programs.operators import longest_row, operator_program
from flownpu.convert.weights import ProjectionWeight, embedding_table, per_layer_table, weight_plan
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from flownpu.aie.cost.chips import Chip
    from flownpu.aie.cost.parameters import Values
    from flownpu.convert.decoder import Decoder, Layer
    from flownpu.convert.weight_bits import WeightBits

_TARGET = "npu2"
# Vectors of a hidden state's size that the operators of a layer other than products read or write, in f32: norms, sums
# with the residual, rotations and gates (the nodes of Gemma 4's E form, two or three vectors each).
_VECTORS_OF_LAYER = 48


@dataclass(frozen=True, eq=False)
class DecoderByOperators:
    """A decoder without layers on the array, and the bits of its weights."""

    model: Decoder
    bits: WeightBits

    @property
    def positions(self) -> int:
        """The longest context that the model is made for."""
        return self.model.context_length

    @cached_property
    def products(self) -> dict[ProjectionWeight, int]:
        """The products of a token with weights that the array takes, and how often each is."""
        return {weight: 1 for weight in self._projections() if not weight.by_expert}

    @cached_property
    def expert_bytes(self) -> float:
        """Bytes of the experts that a token chooses, which are the host's."""
        mixture = self.model.mixture
        share = mixture.experts_per_token / mixture.experts if mixture else 0
        return share * sum(self.bytes_of(weight) for weight in self._projections() if weight.by_expert)

    def _projections(self) -> list[ProjectionWeight]:
        looked_up = [] if self.model.tied_embeddings else [embedding_table(self.model).name]
        looked_up += [per_layer_table(self.model).name] if self.model.per_layer_size else []
        found = [weight for weight in weight_plan(self.model) if isinstance(weight, ProjectionWeight)]
        return [weight for weight in found if weight.name not in looked_up]

    def sizes(self, weight: ProjectionWeight) -> dict[str, int]:
        """The sizes by which a product's program is found (ops/npu/match/array_operator.h)."""
        rows = math.ceil(weight.rows / q4nx.BLOCK_ROWS) * q4nx.BLOCK_ROWS * (1 + weight.gated)
        return {"inner": weight.columns, "columns": rows, "eight_bits": int(self.bits.of(weight.name) == 8)}

    def bytes_of(self, weight: ProjectionWeight) -> float:
        """Bytes of a weight: 5 bits a code of 4, and 9 a code of 8."""
        return weight.size * (9 if self.bits.of(weight.name) == 8 else 5) / 8

    def cache_bytes(self, context: int) -> int:
        """Bytes of keys and values in bf16 that a token reads."""
        return sum(self._cache_bytes(layer, context) for layer in self.model.layers)

    def _cache_bytes(self, layer: Layer, context: int) -> int:
        kv_heads, size = layer.kv_heads or self.model.kv_heads, layer.head_size or self.model.head_size
        return min(layer.window or context, context) * 2 * kv_heads * size * 2


@dataclass(frozen=True)
class PredictionByOperators:
    """Predicted costs of such a decoder; the methods are those of `Prediction`."""

    decoder: DecoderByOperators
    device: Chip
    values: Values

    @cached_property
    def _products(self) -> Cost:
        """All products of a token."""
        of, prices = self.decoder, Prices(self.device, self.values)
        counts = Counter[tuple[tuple[str, int], ...]]()
        sizes = {weight: tuple(of.sizes(weight).items()) for weight in of.products}
        bytes_of = {sizes[weight]: of.bytes_of(weight) for weight in of.products}
        counts.update(sizes.values())
        longest = longest_row(map(dict, counts))
        cost = Cost()
        for one, times in counts.items():
            program = operator_program("q4nx_matmul", dict(one), _TARGET, 1, longest=longest)
            array, host = prices.of(program, 0), self._host("products", bytes_of[one])
            cost = cost + (array if array.total < host.total else host) * times
        return cost

    def _host(self, what: str, count: float) -> Cost:
        return Cost({f"host: {what}": count / self.values["host_memory"]}, host_bytes=count)

    def token(self, context: int) -> Cost:
        """The cost of a token that sees `context` keys, its own included."""
        of = self.decoder
        vectors = len(of.model.layers) * _VECTORS_OF_LAYER * of.model.hidden_size * 4
        return (
            self._products
            + self._host("attention", of.cache_bytes(context))
            + self._host("experts", of.expert_bytes)
            + self._host("norms, sums and gates", vectors)
        )

    def prompt(self, tokens: int) -> Cost:
        """The cost of a prompt from an empty cache to the first token: the host's products, then a token."""
        of, model = self.decoder, self.decoder.model
        shared = tuple(f"layers.{i}." for i, layer in enumerate(model.layers) if layer.shared is not None)
        once = ("embed_tokens", "lm_head", *shared)  # the last token alone passes through these
        mixture = model.mixture
        share = mixture.experts_per_token / mixture.experts if mixture else 0
        adds = sum(
            weight.size * (share if weight.by_expert else 1)
            for weight in of._projections()
            if not weight.name.startswith(once)
        )
        return Cost({"host: products": tokens * adds / self.values["host_products"]}) + self.token(tokens)

    def image(self) -> None:
        """No images: such models are converted without their towers."""

    def roof(self, context: int) -> float:
        """Tokens per second if only reading weights, keys and values from main memory took time."""
        of = self.decoder
        weights = sum(map(of.bytes_of, of.products)) + of.expert_bytes
        return self.values["memory_read"] / (weights + of.cache_bytes(context))

# SPDX-License-Identifier: Apache-2.0
"""What a decoder is predicted to take for a token.

Everything here is **predicted** by the cost model of `flownpu.aie.cost`; docs/model.md says from what, and how far off
it is where it can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flownpu.aie.cost.decode import Cost, DecodeDesign, head_cost, layer_cost
from flownpu.aie.cost.parameters import VALUES, Values
from flownpu.aie.designs.decode_layer_shape import LayerShape
from flownpu.convert.shapes import SHAPES
from flownpu.npu_models import MODELS, Model

if TYPE_CHECKING:
    from flownpu.aie.cost.device import Device

__all__ = ["Decoder", "decode", "decoder"]


@dataclass(frozen=True)
class Decoder:
    """A decoder as the cost model sees it: its sizes, and the window of each layer (None: all keys)."""

    name: str
    model: Model
    windows: tuple[int | None, ...]

    @property
    def shape(self) -> LayerShape:
        """Of one layer."""
        m = self.model
        return LayerShape(
            m.hidden, m.heads, m.kv_heads, m.head_size, m.feed_forward, m.activation,
            post_norms=m.post_norms, qk_norm=m.head_norms,
        )  # fmt: skip

    def layers(self, context: int) -> dict[int, int]:
        """How many layers see how many keys."""
        counts: dict[int, int] = {}
        for window in self.windows:
            keys = context if window is None else min(window, context)
            counts[keys] = counts.get(keys, 0) + 1
        return counts

    @property
    def context(self) -> int:
        """The longest context of the model."""
        return int(SHAPES[self.name]["max_position_embeddings"])


def decoder(name: str) -> Decoder:
    """The decoder of that name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in SHAPES:
        raise ValueError(f"expected a model of {', '.join(SHAPES)}, got {name!r}")
    shape, model = SHAPES[name], MODELS[name]
    pattern = int(shape.get("sliding_window_pattern", 1))
    windows = [
        model.window if model.window and (layer + 1) % pattern else None for layer in range(shape["num_hidden_layers"])
    ]
    return Decoder(name, model, tuple(windows))


def decode(of: Decoder, context: int, design: DecodeDesign, device: Device, values: Values = VALUES) -> Cost:
    """One token with `context` tokens before it."""
    cost = head_cost(of.model.hidden, of.model.vocabulary, design, device, values)
    for keys, count in of.layers(context).items():
        cost = cost + layer_cost(of.shape, keys, design, device, values) * count
    return cost

# SPDX-License-Identifier: Apache-2.0
"""What a decoder-only transformer is made of, free of any model family's names.

`families.py` fills these classes from a Hugging Face configuration; `graph/decoder.py` writes the ONNX graph they
describe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float32]

__all__ = ["Decoder", "FrequencyFactors", "Layer", "LinearScaling", "Llama3Scaling", "Rotary"]


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al., "Extending Context Window via Positional Interpolation", 2023)."""

    factor: float

    def apply(self, frequencies: Floats) -> Floats:
        """The scaled frequencies, float32 [d/2]."""
        return frequencies / np.float32(self.factor)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int

    def apply(self, frequencies: Floats) -> Floats:
        """The scaled frequencies, float32 [d/2]."""
        turns = self.original_context * frequencies / np.float32(2 * math.pi)  # in the original context
        smooth = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        smooth = np.clip(smooth, 0, 1).astype(np.float32)
        scaled: Floats = (1 - smooth) * frequencies / np.float32(self.factor) + smooth * frequencies
        return scaled


@dataclass(frozen=True)
class FrequencyFactors:
    """Each frequency divided by a factor of its own, as GGUF files have Llama 3.1's scaling."""

    factors: tuple[float, ...]

    def apply(self, frequencies: Floats) -> Floats:
        """The scaled frequencies, float32 [d/2]."""
        factors: Floats = np.array(self.factors, np.float32)
        return frequencies / factors


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al., "RoFormer", 2021), halves rotated against each other."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | FrequencyFactors | None = None

    def frequencies(self, head_size: int) -> Floats:
        """Radians a position for each pair of dimensions: theta^(-2i/d), scaled. float32 [d/2]."""
        exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
        frequencies = (1 / np.power(np.float32(self.theta), exponents)).astype(np.float32)
        return self.scaling.apply(frequencies).astype(np.float32) if self.scaling else frequencies

    def caches(self, positions: int, head_size: int) -> tuple[Floats, Floats]:
        """Cos and sin of each position's angles, float32 [positions, d/2].

        Angles are products of float32, as transformers forms them: at position p they are wrong by up to p * 2^-24
        radians, and a model compared with transformers must be wrong in the same way.
        """
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.frequencies(head_size)
        return np.cos(angles), np.sin(angles)


@dataclass(frozen=True)
class Layer:
    """What differs between the layers of a decoder."""

    rotary: Rotary
    window: int | None = None
    """Positions a query sees, its own included; None: all."""


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer with RMS norms, rotary positions, grouped queries and a gated feed-forward.

    Sizes are the papers' D (hidden_size), I (feed_forward_size), H (heads), G (kv_heads) and d (head_size).
    """

    family: str
    """GenAI's model.type: "gemma3_text", "llama", "qwen3"."""
    hidden_size: int
    feed_forward_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary_size: int
    context_length: int
    layers: tuple[Layer, ...]
    gating: Literal["geglu", "swiglu"]
    norm_epsilon: float
    attention_scale: float
    norm_offset: float = 0.0
    """Added to a norm's weight: Gemma stores w of (1 + w)."""
    qk_norm: bool = False
    sandwich_norms: bool = False
    """Norms after attention and feed-forward too, before they are added to the residual stream."""
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    """c of c * tanh(x / c); 0: none. The same for attention_softcap."""
    tied_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    image_token_id: int | None = None
    """The token that stands for a part of a picture. The decoder's graph then takes `inputs_embeds`, and the tokens of
    a picture see one another in both directions."""

    @property
    def window(self) -> int | None:
        """The window of the layers that have one (all have the same), or None."""
        return max((layer.window for layer in self.layers if layer.window is not None), default=None)

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The different rotary embeddings of the layers, in order of first use."""
        return tuple(dict.fromkeys(layer.rotary for layer in self.layers))

# SPDX-License-Identifier: Apache-2.0
"""Describes a decoder-only transformer, without any model family's names.

`families` fills these classes from a Hugging Face configuration; `graph/decoder.py` writes the ONNX graph that they
describe. In shapes, d is the size of a head, and r how many of its dimensions are rotated.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np

from flownpu import _native
from flownpu.convert.errors import ConversionError
from flownpu.convert.layer_parts import DeltaRule
from flownpu.convert.weight_bits import FOUR_BITS, WeightBits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from flownpu.convert.layer_parts import Drafting, Mixer, Mixture

    Floats: TypeAlias = NDArray[np.float32]


class Scaling(Protocol):
    """A change of a rotary embedding's frequencies, for contexts longer than those that a model was trained with."""

    @property
    def magnitude(self) -> float:
        """The factor of cosines and sines."""

    def apply(self, frequencies: Floats, theta: float) -> Floats:
        """The scaled frequencies; they and `frequencies`, theta^(-2i/r), are float32 [r/2]."""


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al., "Extending Context Window via Positional Interpolation", 2023)."""

    factor: float
    magnitude: float = 1.0

    def apply(self, frequencies: Floats, theta: float) -> Floats:  # noqa: ARG002  (Scaling's parameters)
        """The scaled frequencies, float32 [r/2]."""
        return frequencies / np.float32(self.factor)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones kept, those between interpolated."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int
    magnitude: float = 1.0

    def apply(self, frequencies: Floats, theta: float) -> Floats:  # noqa: ARG002
        """The scaled frequencies, float32 [r/2]."""
        turns = self.original_context * frequencies / np.float32(2 * math.pi)  # rotations in the original context
        smooth = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        smooth = np.clip(smooth, 0, 1).astype(np.float32)
        scaled: Floats = (1 - smooth) * frequencies / np.float32(self.factor) + smooth * frequencies
        return scaled


@dataclass(frozen=True)
class YarnScaling:
    """Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023, section 3.

    Pairs of dimensions that turn more than `fast` times in the original context keep their frequency; those that turn
    less than `slow` times have it divided by `factor`; between the two it is interpolated linearly by the pair's index.
    """

    factor: float
    original_context: int
    magnitude: float
    fast: float = 32.0
    slow: float = 1.0
    whole: bool = True
    """Whether the indices between which it is interpolated are rounded outwards to whole pairs."""

    def apply(self, frequencies: Floats, theta: float) -> Floats:
        """The scaled frequencies, float32 [r/2]."""
        size = 2 * len(frequencies)
        low, high = (self._pair_of(turns, size, theta) for turns in (self.fast, self.slow))
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        high += 0.001 if low == high else 0  # as transformers does
        ramp = (np.arange(len(frequencies), dtype=np.float32) - np.float32(low)) / np.float32(high - low)
        kept = 1 - np.clip(ramp, 0, 1).astype(np.float32)
        scaled: Floats = frequencies / np.float32(self.factor) * (1 - kept) + frequencies * kept
        return scaled

    def _pair_of(self, turns: float, size: int, theta: float) -> float:
        """The index of the pair of dimensions that turns `turns` times in the original context."""
        return size * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))


@dataclass(frozen=True)
class FrequencyFactors:
    """Each frequency divided by a factor of its own: Llama 3.1's scaling in GGUF files, each half of LongRoPE."""

    factors: tuple[float, ...]
    magnitude: float = 1.0

    def apply(self, frequencies: Floats, theta: float) -> Floats:  # noqa: ARG002
        """The scaled frequencies, float32 [r/2]."""
        factors: Floats = np.array(self.factors, np.float32)
        return frequencies / factors


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al., "RoFormer", 2021): dimension i is rotated with dimension i + d/2."""

    theta: float
    scaling: Scaling | None = None
    rotated: float = 1.0
    """The fraction of a head's dimensions that is rotated, r / d. In a checkpoint these are the first; in the graph
    `weights.HeadOrder` puts them where they are rotated in halves. 0: positions change nothing (NoPE)."""
    beyond: tuple[int, Scaling] | None = None
    """A number of positions, and the scaling of calls that reach beyond it (LongRoPE: Ding et al., 2024)."""

    def rotated_size(self, head_size: int) -> int:
        """How many of a head's dimensions are rotated, r."""
        return int(head_size * self.rotated)

    def frequencies(self, head_size: int, *, beyond: bool = False) -> Floats:
        """Radians per position for each pair of dimensions, float32 [d/2]: theta^(-2i/r), scaled; 0 if not rotated."""
        size = self.rotated_size(head_size)
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(max(size, 1))
        frequencies = (1 / np.power(np.float32(self.theta), exponents)).astype(np.float32)
        if scaling := self._scaling(beyond=beyond):
            frequencies = scaling.apply(frequencies, self.theta).astype(np.float32)
        return np.pad(frequencies, (0, head_size // 2 - len(frequencies)))

    def caches(self, positions: int, head_size: int) -> tuple[Floats, Floats]:
        """Cos and sin of each position's angles, each float32 [rows(positions), d/2]; the table for `beyond` follows.

        Angles are products in float32, as in transformers: at position p they are off by up to p * 2^-24 radians, and
        to agree with transformers a model must be off in the same way.
        """
        tables = [self._table(self.first_rows(positions), head_size, beyond=False)]
        if self.has_two_tables(positions):
            tables.append(self._table(positions, head_size, beyond=True))
        cos, sin = (np.concatenate(parts) for parts in zip(*tables, strict=True))
        return cos, sin

    def has_two_tables(self, positions: int) -> bool:
        """Whether a model for this many positions ever reaches `beyond`, and so has a table for it."""
        return self.beyond is not None and positions > self.beyond[0]

    def first_rows(self, positions: int) -> int:
        """Rows of the first table, for calls that do not reach `beyond`."""
        return positions if self.beyond is None else min(positions, self.beyond[0])

    def rows(self, positions: int) -> int:
        """Rows of all tables together, in a model for this many positions."""
        return self.first_rows(positions) + (positions if self.has_two_tables(positions) else 0)

    def _scaling(self, *, beyond: bool) -> Scaling | None:
        return self.beyond[1] if beyond and self.beyond is not None else self.scaling

    def _table(self, positions: int, head_size: int, *, beyond: bool) -> tuple[Floats, Floats]:
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.frequencies(head_size, beyond=beyond)
        scaling = self._scaling(beyond=beyond)
        # Dimensions that are not rotated have an angle of 0 and must stay as they are: the factor is 1.
        magnitude = np.ones(head_size // 2, np.float32)
        magnitude[: self.rotated_size(head_size) // 2] = 1.0 if scaling is None else scaling.magnitude
        return np.cos(angles) * magnitude, np.sin(angles) * magnitude


@dataclass(frozen=True)
class ProportionalScaling:
    """The first `kept` of all pairs of dimensions keep their frequency; the others are not rotated.

    Unlike with `Rotary.rotated`, frequencies and pairs are those of the whole head.
    """

    kept: float
    factor: float = 1.0
    magnitude: float = 1.0

    def apply(self, frequencies: Floats, theta: float) -> Floats:  # noqa: ARG002
        """The scaled frequencies, float32 [r/2]."""
        is_kept = np.arange(len(frequencies)) < int(self.kept * len(frequencies))
        return np.where(is_kept, frequencies / np.float32(self.factor), np.float32(0))


@dataclass(frozen=True)
class Layer:
    """The properties that may differ between layers of a decoder."""

    rotary: Rotary
    window: int | None = None
    """How many positions a query sees, its own included; None: all. If the decoder is bidirectional, to each side."""
    mixer: Mixer | None = None
    """The mixer in the place of attention; None: attention."""
    head_size: int = 0
    """d of its attention; 0: the decoder's. The same for the next two."""
    kv_heads: int = 0
    feed_forward_size: int = 0
    shared: int | None = None
    """The layer whose keys and values it reads in the place of its own; None: it has its own. Of a decoder that drafts,
    the place among the other model's caches: 0 with a window, 1 without."""
    keys_are_values: bool = False
    """Values are the keys as they are before their norm and rotation."""


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer with RMS norms, rotary positions, grouped queries and a gated feed-forward.

    Sizes are the papers' D (hidden_size), I (feed_forward_size; of a mixture, each expert's), H (heads), G (kv_heads)
    and d (head_size).
    """

    family: str
    """GenAI's model.type: "gemma3_text", "llama", "phi3"."""
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
    """Added to a norm's stored weight: Gemma stores w and multiplies by 1 + w."""
    qk_norm: bool = False
    value_norm: bool = False
    """A norm of each head's values, without a weight."""
    projection_norms: bool = False
    """A norm over all query heads together, and one over all key heads; qk_norm instead normalises each head."""
    norms_before: bool = True
    """There are norms before attention and feed-forward."""
    sandwich_norms: bool = False
    """There are norms after attention and feed-forward, before their outputs are added to the residual stream."""
    qkv_bias: bool = False
    output_bias: bool = False
    output_gate: bool = False
    """Attention's output is multiplied by sigmoid(gate), whose rows follow those of each query head in q_proj."""
    head_sinks: bool = False
    """Each query head has a learned score of one more key, with value 0, that every query sees."""
    feed_forward_bias: bool = False
    fused_projections: bool = False
    """The checkpoint has the query, key and value projections in one tensor, and gate and up projection in another."""
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    """Tensors of Llama's checkpoints, or parts of their names between dots, and what this one has in their place."""
    mixture: Mixture | None = None
    """The mixture of experts that is every layer's feed-forward; None: a plain feed-forward."""
    per_layer_size: int = 0
    """How many elements each layer's own embedding of a token has; 0: there are none. `graph.per_layer`."""
    layer_scalars: bool = False
    """The output of each layer, with its residual, is multiplied by a number of the checkpoint."""
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    """The factor of the logits; the graph has it in the last norm's weight."""
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    """c in c * tanh(x / c); 0: no cap. The same for attention_softcap."""
    tied_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    bidirectional: bool = False
    """All tokens see one another: the decoder embeds texts and does not generate."""
    prediction_head: bool = False
    """There is a head that proposes the tokens behind the next one (`weights.prediction_head`)."""
    drafting: Drafting | None = None
    """It drafts for another model (`graph.drafter`); None: it generates by itself."""
    image_token_id: int | None = None
    """The token that stands for a part of a picture; None: the model takes text only. With it, the decoder's graph
    takes `inputs_embeds`, and the tokens of a picture see one another in both directions."""

    @property
    def window(self) -> int | None:
        """The window of the layers that have one (all have the same), or None."""
        return max((layer.window for layer in self.layers if layer.window is not None), default=None)

    @property
    def own_layers(self) -> int:
        """How many layers have keys and values of their own: the first ones."""
        return sum(layer.shared is None for layer in self.layers)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have heads of the same number and size, and keys and values of their own."""
        return all((layer.head_size, layer.kv_heads, layer.shared) == (0, 0, None) for layer in self.layers)

    @property
    def has_one_form(self) -> bool:
        """Whether its layers are as devices describe them: uniform, and without further parts."""
        return self.is_uniform and not (self.value_norm or self.per_layer_size or self.layer_scalars)

    def head_size_of(self, rotary: Rotary) -> int:
        """The size of a head in the layers with that rotary embedding."""
        return next(layer.head_size for layer in self.layers if layer.rotary == rotary) or self.head_size

    @property
    def has_states(self) -> bool:
        """Whether a layer has a state in the place of a KV cache."""
        return any(layer.mixer is not None for layer in self.layers)

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The distinct rotary embeddings of the layers with rotation, in order of first use."""
        layers = (layer for layer in self.layers if layer.mixer is None)
        return tuple(dict.fromkeys(layer.rotary for layer in layers if layer.rotary.rotated))

    @property
    def rotated_size(self) -> int:
        """The number of rotated dimensions of a head in layers with rotation; 0 without such layers."""
        return max(layer.rotary.rotated_size(self.head_size) for layer in self.layers)

    def description(
        self, *, images: bool = False, int8_cache: bool = False, bits: WeightBits = FOUR_BITS
    ) -> _native.Decoder:
        """The layers as devices compute them, without the checkpoint's tensors and tokens.

        `images`: tokens of an image see one another in both directions. `int8_cache`: keys and values are kept in int8.
        `bits`: of the weights.

        Raises:
            ConversionError: layers differ in form, or experts have biases, which only the CPU computes.
        """
        if not self.has_one_form:
            raise ConversionError("expected layers of one form and without more: only the CPU computes others")
        if self.has_states and self.mixture:
            raise ConversionError("expected no experts among layers with states: only the CPU computes both")
        attention = (layer for layer in self.layers if layer.mixer is None)
        rotaries = list(dict.fromkeys(layer.rotary if layer.rotary.rotated else None for layer in attention))
        mixture = self.mixture
        experts = mixture and {
            "experts": mixture.experts,
            "experts_per_token": mixture.experts_per_token,
            "normalized_experts": mixture.normalize,
            "expert_vectors": mixture.has_biases,
            **({f"swiglu_{name}": value for name, value in asdict(mixture.swiglu).items()} if mixture.swiglu else {}),
        }
        feed_forward = _native.FeedForward(size=self.feed_forward_size, activation=self.gating, **experts or {})

        def mixer(layer: Layer) -> _native.Attention | _native.GatedDelta | _native.ShortConvolution:
            if isinstance(layer.mixer, DeltaRule):
                of = layer.mixer
                return _native.GatedDelta(
                    key_heads=of.key_heads,
                    value_heads=of.value_heads,
                    key_size=of.key_size,
                    value_size=of.value_size,
                    taps=of.taps,
                )
            if layer.mixer is not None:
                return _native.ShortConvolution(taps=layer.mixer.taps)
            return _native.Attention(
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_size=self.head_size,
                scale=self.attention_scale,
                softcap=self.attention_softcap,
                window=layer.window or 0,
                table=rotaries.index(layer.rotary if layer.rotary.rotated else None),
                int8_cache=int8_cache,
                bidirectional_blocks=images,
                qkv_bias=self.qkv_bias,
                output_bias=self.output_bias,
                sinks=self.head_sinks,
                output_gate=self.output_gate,
                qk_norm="all heads" if self.projection_norms else "each head" if self.qk_norm else "none",
            )

        layers = [
            _native.Layer(mixer(layer), feed_forward, self.sandwich_norms, self.norms_before, bits.eight_bits)
            for layer in self.layers
        ]
        return _native.Decoder(
            layers,
            hidden=self.hidden_size,
            vocabulary=self.vocabulary_size,
            positions=self.context_length,
            epsilon=self.norm_epsilon,
            head_eight_bits=int(bits.embedding == 8),
        )

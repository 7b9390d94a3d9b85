# SPDX-License-Identifier: Apache-2.0
"""What families differ in, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from flownpu.convert.mixture import ExpertTensors

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Biases", "Experts", "Family", "Power"]


class Power(NamedTuple):
    """A factor of a model: a setting of its configuration, to some power."""

    key: str
    exponent: float = 1.0


class Biases(NamedTuple):
    """Which projections have a bias: always, never, or where a setting of that name says so."""

    qkv: bool | str = "attention_bias"
    output: bool | str = "attention_bias"
    feed_forward: bool | str = "mlp_bias"


_EACH_BY_ITSELF = ExpertTensors()


@dataclass(frozen=True)
class Experts:
    """A family whose feed-forwards are mixtures of experts: the settings that say so, and the tensors' names."""

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    """How many there are; of several settings the first that is there."""
    chosen: str = "num_experts_per_tok"
    size: str = "intermediate_size"
    """The rows of an expert's gate."""
    normalize: bool | str = True
    """The weights of the chosen experts are divided by their sum: always, never, or where a setting says so."""
    tensors: ExpertTensors = _EACH_BY_ITSELF


_LLAMA_BIASES = Biases()
_BY_HEAD_SIZE = Power("head_dim", -0.5)


@dataclass(frozen=True)
class Family:
    """A family of decoders. What is not said is as in Llama: plain RMS norms before each part, one RoPE, no windows."""

    model_type: str
    """config.json's."""
    genai_type: str
    """GenAI's model.type."""
    title: str
    """What people call it."""
    gguf: str | None = None
    """A GGUF file's general.architecture; None: not read from such files."""
    gguf_interleaved: bool = False
    """Query and key rows of GGUF files are in the order in which neighbours are rotated against each other."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a configuration means that leaves settings out: those of the family's class in transformers."""
    inner: str | None = None
    """The section of config.json that describes the decoder, of a model with more parts."""
    activation: str = "hidden_act"
    """The setting that names the gate's activation."""
    activations: Mapping[str, str] = field(default_factory=dict)
    """Names that mean another activation in this family."""
    norms: Literal["before", "around", "after"] = "before"
    """Where norms are: before attention and feed-forward, behind them (before they are added), or both."""
    norm_offset: float = 0.0
    """What is added to a checkpoint's norm weights."""
    qk_norm: Literal["heads", "all"] | None = None
    """Norms of queries and keys: of each head, or of all heads at once."""
    biases: Biases = _LLAMA_BIASES
    fused: bool = False
    """The tensors self_attn.qkv_proj and mlp.gate_up_proj are whole."""
    experts: Experts | None = None
    neutral: Mapping[str, Any] = field(default_factory=dict)
    """Settings that FlowNPU has no place for, and the values with which they change nothing."""
    windows: Literal["none", "all", "listed", "behind"] = "none"
    """Layers with a window: none; all, if the configuration has one; those that layer_types lists; those behind the
    first max_window_layers, where use_sliding_window is set."""
    period: int | Power | None = None
    """Without layer_types, every so many layers one sees all tokens (a number, or the setting that has it)."""
    rope_by_kind: bool = False
    """Layers with and without a window have a RoPE each."""
    rope_layers: str | None = None
    """The setting that says of each layer whether it has RoPE (1) or not (0)."""
    rope_period: str | None = None
    """Without that, the setting that says every how many layers one has none."""
    rope_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The RoPE of a configuration that says nothing of it."""
    attention_scale: Power = _BY_HEAD_SIZE
    embedding_scale: Power | None = None
    residual_scale: Power | None = None
    """What attention and feed-forward are multiplied by before they are added to the residual stream."""
    logit_scale: Power | None = None
    attention_softcap: str | None = None
    logit_softcap: str | None = None

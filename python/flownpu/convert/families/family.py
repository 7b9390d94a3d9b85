# SPDX-License-Identifier: Apache-2.0
"""Describes as data how model families differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from flownpu.convert.layer_parts import DeltaRuleTensors, ExpertTensors


class Power(NamedTuple):
    """A factor of a model: the setting `key` of its configuration to the power `exponent`."""

    key: str
    exponent: float = 1.0


class Biases(NamedTuple):
    """Whether each projection has a bias: True, False, or the name of the setting that says so."""

    qkv: bool | str = "attention_bias"
    output: bool | str = "attention_bias"
    feed_forward: bool | str = "mlp_bias"


_EACH_BY_ITSELF = ExpertTensors()


@dataclass(frozen=True)
class Experts:
    """Describes the mixtures of experts of a family: the names of their settings and of their tensors."""

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    """Settings that may have the number of experts; the first that is present counts."""
    chosen: str = "num_experts_per_tok"
    size: str = "intermediate_size"
    """The setting with the number of rows of an expert's gate."""
    normalize: bool | str = True
    """Whether the chosen experts' weights are divided by their sum, or the name of the setting that says so."""
    tensors: ExpertTensors = _EACH_BY_ITSELF
    biased: bool = False
    """See `Mixture.biased`."""
    has_biases: bool = False
    """See `Mixture.has_biases`."""
    beside: str | None = None
    """The setting that says whether there are experts, which are then beside a plain feed-forward (`Mixture.beside`).
    None: there are experts."""
    swiglu: tuple[str, float, str] | None = None
    """The settings with alpha and limit of `Swiglu`, and between them beta; None: it is silu(gate) * up."""
    shared: str | None = None
    """The setting with the number of rows of a shared expert's gate; None: there is none."""
    dense_layers: str | None = None
    """The setting with the number of first layers that have a plain feed-forward instead; None: there are none."""


_LLAMA_BIASES = Biases()
_BY_HEAD_SIZE = Power("head_dim", -0.5)


@dataclass(frozen=True)
class Family:
    """A family of decoders. The defaults are Llama's: plain RMS norms before each part, one RoPE, no windows."""

    model_type: str
    """The value of model_type in config.json."""
    genai_type: str
    """The value of model.type in genai_config.json."""
    title: str
    """The family's usual name."""
    gguf: str | None = None
    """The family's value of general.architecture in GGUF files; None: it has none of its own, or is not read."""
    gguf_interleaved: bool = False
    """In GGUF files, rows 2i and 2i + 1 of a query's or key's head are rotated with each other."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values of settings that a configuration omits: the defaults of the family's class in transformers."""
    inner: str | None = None
    """The section of config.json that describes the decoder, if the model has other parts too."""
    activation: str = "hidden_act"
    """The setting that names the gate's activation."""
    activations: Mapping[str, str] = field(default_factory=dict)
    """Values of that setting that mean another activation in this family, with its usual name."""
    norms: Literal["before", "around", "after"] = "before"
    """The places of norms: before attention and feed-forward; after them, before their outputs are added; or both
    ("around")."""
    norm_offset: float = 0.0
    """A number that is added to a checkpoint's norm weights."""
    qk_norm: Literal["heads", "all"] | None = None
    """Norms of queries and keys: of each head by itself, or of all heads together; None: no such norms."""
    biases: Biases = _LLAMA_BIASES
    fused: bool = False
    """Checkpoints have the query, key and value projections in one tensor, self_attn.qkv_proj, and the gate and up
    projections in another, mlp.gate_up_proj."""
    experts: Experts | None = None
    neutral: Mapping[str, Any] = field(default_factory=dict)
    """Settings that FlowNPU does not support, and the values with which they change nothing."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Llama's tensors, or parts of their names between dots, and what this family's checkpoints have in their place."""
    convolution: str | None = None
    """The setting with the taps of the gated convolutions that stand in the place of attention where layer_types says
    conv; None: there are none."""
    delta_rule: DeltaRuleTensors | None = None
    """Linear attention by the gated delta rule stands in the place of attention where layer_types says
    linear_attention, with tensors stored like this; None: there is none."""
    output_gate: bool = False
    """Attention's output has a gate, in the query projection's tensor."""
    adjusted_size: bool = False
    """Unless block_auto_adjust_ff_dim is off, the feed-forward has two thirds of the rows that the configuration says,
    times block_ffn_dim_multiplier, rounded up to a multiple of block_multiple_of."""
    norm_epsilon: str = "rms_norm_eps"
    """The setting with the norms' epsilon."""
    windows: Literal["none", "all", "listed", "behind"] = "none"
    """The layers with a window: none; all, if the configuration has a window; those that layer_types lists; or, if
    use_sliding_window is set, those after the first max_window_layers ("behind")."""
    period: int | Power | None = None
    """Without layer_types, every `period`-th layer sees all tokens; a Power names the setting with that number."""
    sizes_by_kind: bool = False
    """Layers without a window have heads of another size and number (`layer_forms`), and the last layers may share the
    keys and values of earlier ones and have a wider feed-forward."""
    value_norm: bool = False
    """See `Decoder.value_norm`."""
    layer_scalars: bool = False
    """See `Decoder.layer_scalars`."""
    drafts_for: str | None = None
    """The setting with the hidden size of the model that it drafts for (`layer_parts.Drafting`); None: it does not."""
    per_layer_size: str | None = None
    """The setting with `Decoder.per_layer_size`."""
    rope_by_kind: bool = False
    """Layers with a window have one RoPE, those without another."""
    rope_layers: str | None = None
    """The name of the setting that says for each layer whether it has RoPE (1) or not (0)."""
    rope_period: str | None = None
    """The name of a setting n that counts if that one is missing: every n-th layer has no RoPE."""
    rope_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The settings of RoPE for a configuration that has none."""
    attention_scale: Power | None = _BY_HEAD_SIZE
    embedding_scale: Power | None = None
    residual_scale: Power | None = None
    """The factor of the outputs of attention and feed-forward before they are added to the residual stream."""
    logit_scale: Power | None = None
    head_sinks: bool = False
    """See `Decoder.head_sinks`."""
    attention_softcap: str | None = None
    logit_softcap: str | None = None

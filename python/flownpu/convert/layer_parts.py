# SPDX-License-Identifier: Apache-2.0
"""Describes what layers may have in the place of attention, and of a plain feed-forward.

A mixer in the place of attention remembers earlier tokens in a state. Its size does not grow with the tokens, and it
depends on all of them, so that rows of a batch must not be padded. A mixture of experts is in the feed-forward's place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Convolution:
    """A gated depthwise convolution: out_proj(C * conv(B * x)) with B, C and x = in_proj(h)."""

    taps: int
    """The tokens that it sees, the newest included."""


@dataclass(frozen=True)
class DeltaRuleTensors:
    """How a checkpoint stores the weights of linear attention.

    Fused tensors have the rows of each key head together, and in them those of its queries, keys and values.
    """

    fused_qkvz: bool = False
    """Queries, keys, values and the norm's gate z are one tensor, in_proj_qkvz."""
    fused_ba: bool = False
    """The rates b and a are one tensor, in_proj_ba."""
    logarithms: bool = True
    """A_log has logarithms of the factors of decay, and not these themselves, which are negative."""


_APART = DeltaRuleTensors()


@dataclass(frozen=True)
class DeltaRule:
    """Linear attention by the gated delta rule (Yang et al., "Gated Delta Networks", 2024).

    Queries, keys and values go through a depthwise convolution and SiLU; queries and keys have length 1. The state of a
    head of values is [key_size, value_size], and value heads i * value_heads / key_heads .. share the i-th key.
    """

    taps: int
    """The tokens that the convolution sees, the newest included."""
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    tensors: DeltaRuleTensors = _APART

    @property
    def keys(self) -> int:
        """Elements of all keys of a token, and of all queries."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Elements of all values of a token."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


Mixer = Convolution | DeltaRule


@dataclass(frozen=True)
class ExpertTensors:
    """Names of a layer's tensors, without the layer's prefix.

    {} stands for an expert's number. A tensor without it holds all experts, each one's rows after those of the one
    before it; if gate and up projection have the same name, each expert's gate comes before its up projection.
    """

    router: str = "mlp.gate.weight"
    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"
    bias: str = "mlp.expert_bias"
    logits_bias: str = "mlp.router.bias"
    gate_bias: str = "mlp.experts.gate_up_proj_bias"
    up_bias: str = "mlp.experts.gate_up_proj_bias"
    down_bias: str = "mlp.experts.down_proj_bias"
    router_norm: str = "router.scale"
    scales: str = "router.per_expert_scale"
    in_turns: bool = False
    """Rows of gate and up projection take turns, in stacks of transposed experts or of MXFP4's codes, as gpt-oss has
    them (`sources.experts_in_turns`)."""


STACKED = ExpertTensors(
    gate="mlp.experts.gate_proj.weight",
    up="mlp.experts.up_proj.weight",
    down="mlp.experts.down_proj.weight",
    logits_bias="mlp.gate.bias",
    gate_bias="mlp.experts.gate_proj.bias",
    up_bias="mlp.experts.up_proj.bias",
    down_bias="mlp.experts.down_proj.bias",
)
"""Each projection is one tensor of all experts, as in GGUF files."""


@dataclass(frozen=True)
class Swiglu:
    """The constants of g sigmoid(alpha g) (u + beta) for a gate g = min(gate, limit) and an up projection u likewise.

    u is limited to both sides.
    """

    alpha: float
    beta: float
    limit: float


@dataclass(frozen=True)
class Mixture:
    """Experts, of which a router chooses some for each token; each is a gated feed-forward of the decoder's size."""

    experts: int
    experts_per_token: int
    normalize: bool
    """Whether the chosen experts' weights are the softmax over their own logits, or parts of that over all experts'."""
    tensors: ExpertTensors = ExpertTensors()
    biased: bool = False
    """Experts are chosen by the sigmoids of logits plus a bias, and weighed by these sigmoids divided by their sum."""
    has_biases: bool = False
    """The router's logits and the projections of experts have biases."""
    beside: bool = False
    """The layer has a plain feed-forward too, of `dense_size`, and a norm of its own before and after each; the router
    sees the residual stream through another norm, and each expert's answers have a factor."""
    swiglu: Swiglu | None = None
    """None: the experts' gates are those of the decoder's `gating`."""
    shared_size: int = 0
    """Rows of the gate of an expert that all tokens have, whose output is multiplied by a sigmoid; 0: there is none."""
    dense_layers: int = 0
    """How many of the first layers have a plain feed-forward instead."""
    dense_size: int = 0
    """Rows of the gate of these layers, or of the feed-forward beside experts."""


@dataclass(frozen=True)
class Drafting:
    """A decoder drafts for a larger model: its layers read that model's keys and values, and have none of their own."""

    hidden_size: int
    """D of the model that it drafts for."""
    clusters: int = 0
    """Clusters of as many tokens each, by which the LM head is searched; 0: all tokens are."""
    chosen: int = 0
    """The clusters whose tokens are searched."""

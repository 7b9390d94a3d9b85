# SPDX-License-Identifier: Apache-2.0
"""Describes mixtures of experts, which take the feed-forward's place: sizes, and the names of their tensors."""

from dataclasses import dataclass


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


STACKED = ExpertTensors(
    gate="mlp.experts.gate_proj.weight", up="mlp.experts.up_proj.weight", down="mlp.experts.down_proj.weight"
)
"""Each projection is one tensor of all experts, as in GGUF files."""


@dataclass(frozen=True)
class Mixture:
    """Experts, of which a router chooses some for each token; each is a gated feed-forward of the decoder's size."""

    experts: int
    experts_per_token: int
    normalize: bool
    """Whether the chosen experts' weights are the softmax over their own logits, or parts of that over all experts'."""
    tensors: ExpertTensors = ExpertTensors()

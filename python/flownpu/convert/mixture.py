# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in a feed-forward's place: their sizes, and where checkpoints have their tensors."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STACKED", "ExpertTensors", "Mixture"]


@dataclass(frozen=True)
class ExpertTensors:
    """Names of a layer's tensors, behind the layer's own.

    {} stands for an expert's number. A tensor without it holds all experts, those of an expert below those of the one
    before it; where gate and up projection have the same name, each expert's gate is above its up projection.
    """

    router: str = "mlp.gate.weight"
    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"


STACKED = ExpertTensors(
    gate="mlp.experts.gate_proj.weight", up="mlp.experts.up_proj.weight", down="mlp.experts.down_proj.weight"
)
"""Each projection of all experts in one tensor, as GGUF files have them."""


@dataclass(frozen=True)
class Mixture:
    """Experts of which a router chooses some for each token; each is a gated feed-forward of the decoder's size."""

    experts: int
    experts_per_token: int
    normalize: bool
    """The chosen experts' weights are the softmax of their logits; otherwise of all experts'."""
    tensors: ExpertTensors = ExpertTensors()

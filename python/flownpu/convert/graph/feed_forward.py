# SPDX-License-Identifier: Apache-2.0
"""Writes a layer's feed-forward: a gated one, a mixture of experts, or both, each with norms of its own."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from flownpu.convert.graph.per_layer import PerLayerWriter
from flownpu.convert.graph.writer import MICROSOFT
from flownpu.ops.definitions.onnx_function import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir

    from flownpu.convert.layer_parts import Mixture


class FeedForwardWriter(PerLayerWriter):
    """Writes feed-forwards."""

    def _feed_forward(self, index: int, hidden: ir.Value, residual: ir.Value) -> ir.Value:
        """A layer's feed-forward of `hidden`, which is the residual stream's norm."""
        mixture, layer = self.decoder.mixture, f"layers.{index}"
        if mixture is None or index < mixture.dense_layers:
            return self._mlp(hidden, f"{layer}.mlp")
        if not mixture.beside:
            return self._experts(hidden, f"{layer}.mlp", mixture)
        dense = self._norm(self._mlp(hidden, f"{layer}.mlp"), f"{layer}.post_feedforward_layernorm_1")
        routed = self._norm(residual, f"{layer}.mlp.router.norm")
        logits = self._op("MatMul", [routed, self._weight(f"{layer}.mlp.router")], f"{layer}.mlp.router")
        given = self._norm(residual, f"{layer}.pre_feedforward_layernorm_2")
        chosen = self._experts(given, f"{layer}.mlp", mixture, logits)
        chosen = self._norm(chosen, f"{layer}.post_feedforward_layernorm_2")
        return self._op("Add", [dense, chosen], f"{layer}.mlp.sum")

    def _mlp(self, hidden: ir.Value, module: str) -> ir.Value:
        if not self.decoder.feed_forward_bias:
            hidden = self._project(hidden, f"{module}.gate_up_proj", gating=self.decoder.gating)
            return self._project(hidden, f"{module}.down_proj")
        gate, up = (self._project(hidden, f"{module}.{name}", bias=True) for name in ("gate_proj", "up_proj"))
        if self.decoder.gating == "geglu":
            activated = self._op("Gelu", [gate], f"{module}.activation", approximate="tanh")
        else:
            activated = self._op(
                "Mul", [gate, self._op("Sigmoid", [gate], f"{module}.sigmoid")], f"{module}.activation"
            )
        return self._project(self._op("Mul", [activated, up], f"{module}.gated"), f"{module}.down_proj", bias=True)

    def _experts(self, hidden: ir.Value, module: str, mixture: Mixture, logits: ir.Value | None = None) -> ir.Value:
        """The answers of the experts that a router chooses, or logits that are given."""

        def weight(name: str, is_there: bool = True) -> ir.Value | None:
            return self._weight(f"{module}.{name}") if is_there else None

        inputs = [
            hidden,
            weight("router", logits is None),
            weight("experts.gate_up_proj"),
            weight("experts.down_proj"),
            logits,
            weight("router.bias", mixture.biased),
            weight("experts.gate_up_proj.bias", mixture.has_biases),
            weight("experts.down_proj.bias", mixture.has_biases),
            weight("router.logits_bias", mixture.has_biases),
            weight("router.scales", mixture.beside),
        ]
        while inputs[-1] is None:
            inputs.pop()
        swiglu = mixture.swiglu
        constants = {f"swiglu_{name}": value for name, value in asdict(swiglu).items()} if swiglu else {}
        output = self._op(
            "Q4NXMoE",
            inputs,
            f"{module}.experts",
            domain=DOMAIN,
            num_experts=mixture.experts,
            experts_per_token=mixture.experts_per_token,
            hidden_size=self.decoder.hidden_size,
            expert_size=self.decoder.feed_forward_size,
            normalize_routing_weights=int(mixture.normalize),
            gating=self.decoder.gating,
            **constants,
        )
        if not mixture.shared_size:
            return output
        shared = self._mlp(hidden, f"{module}.shared_expert")
        name = f"{module}.shared_expert_gate"
        gate = self._op("MatMul", [hidden, self._weight(name)], name)
        opened = self._op("Sigmoid", [gate], f"{module}.shared_expert_open")
        return self._op("GatedAdd", [output, shared, opened], f"{module}.sum", domain=MICROSOFT)

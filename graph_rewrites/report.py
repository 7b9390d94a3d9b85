# SPDX-License-Identifier: Apache-2.0
"""The report of a rewrite: what it changed, what it left, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Miss:
    """A place where a rule nearly matched.

    Attributes:
        rule: the rule's name, which is that of its file.
        node: name of the node that the rule would have replaced.
        reason: what the rule expected and what it found.
    """

    rule: str
    node: str
    reason: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.node}: {self.reason}"


@dataclass(frozen=True)
class AttentionGeometry:
    """The sizes of an attention that was folded.

    Attributes:
        heads: query heads, H.
        kv_heads: KV heads, G.
        head_size: d.
        tokens: S, the new tokens of a call; None if the graph does not say how many.
        cached: whether a KV cache comes before the new tokens.
        causal: whether its mask was shown to be causal.
        window: positions that a query sees at most, -1 for all.
        biased: whether a mask or bias is added to the scores.
    """

    heads: int
    kv_heads: int
    head_size: int
    tokens: int | None
    cached: bool
    causal: bool
    window: int
    biased: bool

    @property
    def kind(self) -> str:
        """MHA, MQA or GQA: a KV head for each query head, one for all, or one for each group of query heads."""
        return "MHA" if self.kv_heads == self.heads else "MQA" if self.kv_heads == 1 else "GQA"


@dataclass(frozen=True)
class FoldedAttention:
    """An attention that was folded into one operator.

    Attributes:
        node: name of its softmax.
        geometry: its sizes.
        level: how much of it the target computes in one call: 3 all, 2 all but the product with the values, 1 nothing;
            0 if no target was given.
        reason: why the level is not higher, or what bounds it.
    """

    node: str
    geometry: AttentionGeometry
    level: int
    reason: str


@dataclass
class Report:
    """The outcome of `flownpu.graph_rewrites.rewrite`.

    Attributes:
        before: number of nodes by (domain, operator) before the rewrite.
        after: the same after it.
        applied: how often each rule was applied, in the order of application.
        misses: where a rule nearly matched, and why it did not.
        attentions: attentions of plain graphs that were folded into one operator.
    """

    before: Counter[tuple[str, str]]
    after: Counter[tuple[str, str]] = field(default_factory=Counter)
    applied: dict[str, int] = field(default_factory=dict)
    misses: list[Miss] = field(default_factory=list)
    attentions: list[FoldedAttention] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, for a manifest or `--json`."""
        return {
            "applied": self.applied,
            "operators": {_qualified(*operator): count for operator, count in sorted(self.after.items())},
            "misses": [vars(miss) for miss in self.misses],
            **({"attentions": [_attention(folded) for folded in self.attentions]} if self.attentions else {}),
        }

    def __str__(self) -> str:
        lines = [f"{rule}: {count}" for rule, count in self.applied.items()]
        lines.append(
            "operators: " + ", ".join(f"{count} {_qualified(*name)}" for name, count in self.after.most_common())
        )
        return "\n".join([*lines, *self.left()])

    def left(self) -> list[str]:
        """The nodes that were left and why, one line for each reason, since a model's layers repeat their misses."""
        by_reason: dict[tuple[str, str], list[str]] = {}
        for miss in self.misses:
            by_reason.setdefault((miss.rule, miss.reason), []).append(miss.node)
        return [
            f"left by {rule}: {nodes[0]}{f' and {len(nodes) - 1} more' if len(nodes) > 1 else ''}: {reason}"
            for (rule, reason), nodes in by_reason.items()
        ]


def _attention(folded: FoldedAttention) -> dict[str, Any]:
    geometry = {"kind": folded.geometry.kind, **vars(folded.geometry)}
    return {"node": folded.node, **geometry, "folding_level": folded.level, "reason": folded.reason}


def operators(model: ir.Model) -> Counter[tuple[str, str]]:
    """The number of a graph's nodes by (domain, operator), without Constant nodes."""
    return Counter((node.domain, node.op_type) for node in model.graph if node.op_type != "Constant")


def _qualified(domain: str, operator: str) -> str:
    return f"{domain}.{operator}" if domain else operator

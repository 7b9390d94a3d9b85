# SPDX-License-Identifier: Apache-2.0
"""Bounds of mixtures of experts; the bounds of the logits must decide which experts each row chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.fuzz.reference.bounds import Bounds, Unknown, of, rounded
from tests.fuzz.reference.elementwise import FUNCTION_UNITS, product_of, sum_of
from tests.fuzz.reference.products import gated_product, product, q4nx_product

if TYPE_CHECKING:
    from tests.fuzz.arrays import Array
    from tests.fuzz.reference.evaluate import Node, Table


def q4nx_moe(node: Node) -> Bounds:
    experts, taken, hidden, inner = (
        node.attributes[name] for name in ("num_experts", "experts_per_token", "hidden_size", "expert_size")
    )
    given = node.float(0)
    if min(taken, inner) < 1 or taken > experts or node.has(1) == node.has(4):
        raise Unknown
    if any(node.input(i).shape[0] % experts for i in (2, 3)):
        raise Unknown  # the number of blocks is no multiple of the number of experts
    x = given.map(lambda array: array.reshape(-1, hidden))
    logits = _logits(node, x, experts, hidden)
    chosen, weights = _route(logits, taken, normalize=bool(node.attributes.get("normalize_routing_weights", 1)))
    gate_up, down = (np.split(node.input(i).exact(), experts) for i in (2, 3))
    y = of(np.zeros(x.shape, np.float32))
    for e in range(experts):
        rows = np.flatnonzero(chosen[:, e])
        if not rows.size:
            continue
        is_geglu = node.attributes.get("gating", b"swiglu") == b"geglu"
        taken_rows = x.map(lambda array, rows=rows: array[rows])
        product_rows = gated_product(node, taken_rows, gate_up[e], inner, hidden, is_geglu=is_geglu)
        answer = q4nx_product(node, product_rows, down[e], hidden, inner)
        weight = weights.map(lambda array, rows=rows, e=e: array[rows, e][:, None])
        y = _with_rows(y, rows, sum_of(y.map(lambda array, rows=rows: array[rows]), product_of(answer, weight)))
    return y.map(lambda array: array.reshape(given.shape))


def _logits(node: Node, x: Bounds, experts: int, hidden: int) -> Bounds:
    if node.has(4):
        return node.float(4).map(lambda array: array.reshape(-1, experts))
    router = node.float(1)
    if router.shape != (experts, hidden):
        raise Unknown
    return product(x, router.map(np.transpose)._replace(dtype=x.dtype))


def _route(logits: Bounds, taken: int, *, normalize: bool) -> tuple[Array, Bounds]:
    """The experts that each row chooses, bool [rows, experts], and the weight of each expert if it is chosen."""
    if logits.nan is not None or not (np.isfinite(logits.low).all() and np.isfinite(logits.high).all()):
        raise Unknown
    # An expert is certainly chosen if fewer than k others can be as good.
    better = (logits.high[:, None, :] >= logits.low[:, :, None]).sum(-1) - 1
    chosen = better < taken
    if (chosen.sum(-1) != taken).any():
        raise Unknown
    among = chosen if normalize else np.ones_like(chosen)
    ends = []
    for own, others in ((logits.low, logits.high), (logits.high, logits.low)):
        terms = np.exp(others[:, None, :] - own[:, :, None])
        terms = np.where(np.eye(chosen.shape[1], dtype=bool), 1.0, terms) * among[:, None, :]
        ends.append(1 / terms.sum(-1))
    # A softmax of float32 flushes what is below its smallest numbers.
    spread = np.maximum(np.abs(logits.low), np.abs(logits.high)).sum(-1, keepdims=True)
    return chosen, rounded(*ends, logits.dtype, FUNCTION_UNITS + spread)


def _with_rows(y: Bounds, rows: Array, some: Bounds) -> Bounds:
    """The bounds `y` with those of some rows replaced."""
    low, high = y.low.copy(), y.high.copy()
    low[rows], high[rows] = some.low, some.high
    nan = np.zeros(y.shape, np.uint8) if y.nan is None else y.nan.copy()
    if some.nan is not None:
        nan[rows] = some.nan
    return Bounds(low, high, y.dtype, nan)


TABLE: Table = {("ai.flownpu", "Q4NXMoE"): q4nx_moe}

# SPDX-License-Identifier: Apache-2.0
"""Attention in its parts -> FlowQKVAttention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flownpu.graph_rewrites.plain.attention.emitter import Emitter
from flownpu.graph_rewrites.plain.attention.mask import Visible, visible
from flownpu.graph_rewrites.plain.attention.operand import BY_HEAD, TRANSPOSED, Operand, read_operand
from flownpu.graph_rewrites.plain.attention.scores import MASKED, Scores, read_probabilities, read_scores
from flownpu.graph_rewrites.plain.graph import (
    NoMatchError,
    dimensions,
    fold_each,
    is_operator,
    made_by,
    replace,
    same_size,
    scalar,
)
from flownpu.graph_rewrites.report import AttentionGeometry, FoldedAttention

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir as ir

    from flownpu.graph_rewrites.report import Miss

    # Returns the folding level of an attention (3: all in one call, 2: without the last product, 1: nothing) and the
    # reason.
    Tiler = Callable[[AttentionGeometry], tuple[int, str]]


@dataclass(frozen=True)
class Match:
    """An attention as it was found.

    Attributes:
        softmax: the node of the softmax.
        scores: the softmax's input.
        query: queries, with H heads.
        key: keys, with G heads.
        value: values, with G heads.
        product: the node that multiplies probabilities and values.
        seen: the keys that its mask leaves visible at most.
    """

    softmax: ir.Node
    scores: Scores
    query: Operand
    key: Operand
    value: Operand
    product: ir.Node
    seen: Visible

    @property
    def scale(self) -> float:
        """The factor of the products of queries and keys, wherever the graph applies it."""
        return self.scores.scale * self.query.scale * self.key.scale


def fold_attention(model: ir.Model, tile: Tiler | None = None) -> tuple[int, list[Miss], list[FoldedAttention]]:
    """Folds attentions of any head count, with the nodes around them (Zen-Attention, section III.A, equations 1 to 4).

    MatMul(Softmax(softcap(scale Q K^T) + bias + mask), V)
        -> FlowQKVAttention(query, key, value, past, .., attention_bias, norm weights; causal, window, scale, softcap)

    Q, K and V may be transposed before or after any other node; heads may be many, grouped (expanded before the
    product) or one; the scale may be on the scores, on Q, on K or on both. RoPE and a norm of each head move into the
    operator if Q and K have the same, and so does the concatenation with a KV cache. A mask stays as a bias; if it can
    be shown to be causal, or to have a window, the operator has attributes for that, and skips what is hidden.

    Args:
        model: a plain graph whose norms and RoPE are folded; changed in place.
        tile: returns the folding level of an attention on the target, and the reason.

    Returns:
        How many attentions were folded; the softmaxes that are not part of one, with the reason; what was folded.
    """
    folded, emitter = list[FoldedAttention](), Emitter(model)

    def fold(node: ir.Node) -> bool:
        if not is_operator(node, "Softmax"):
            return False
        match = _read_attention(node)
        output, presents = emitter.emit(match)
        last, joined = _output(match)
        replace(last, output if joined else emitter.by_head(match, output))
        for old, new in zip((match.key.present, match.value.present), presents, strict=True):
            if old is not None and new is not None:
                replace(old, new)
        folded.append(_description(match, tile))
        return True

    count, misses = fold_each(model, "scaled_dot_product_attention", fold)
    if folded:
        model.graph.sort()
    return count, misses, folded


def _read_attention(softmax: ir.Node) -> Match:
    """The attention around a softmax; NoMatchError if it is not one."""
    product = read_probabilities(softmax)
    scores = read_scores(softmax.inputs[0])
    values = product.inputs[1]
    assert values is not None
    query, key, value = _read_sides(scores, values)
    _check_sides(query, key, value)
    seen = Visible(False, -1)
    for addend in scores.addends:
        condition = None if addend.inverted else addend.condition
        masked = made_by(addend.value, "Where")
        if masked is not None and scalar(masked.inputs[1]) == 0 and (scalar(masked.inputs[2]) or 0) <= MASKED:
            condition = masked.inputs[0]
        found = visible(condition, key.past)
        seen = Visible(seen.causal or found.causal, max(seen.window, found.window))
    return Match(softmax, scores, query, key, value, product, seen)


def _read_sides(scores: Scores, values: ir.Value) -> tuple[Operand, Operand, Operand]:
    """Queries, keys and values, followed back as far as queries and keys agree.

    The walk first goes through RoPE and the norm of heads, then through RoPE only, then through neither, until both
    sides have the same. All other nodes stay in the graph before the operator.
    """
    value = read_operand(values, BY_HEAD, cached=True, rotary=False, norm=False, scaled=False)
    reason = NoMatchError()
    for rotary, norm in ((True, True), (True, False), (False, False)):
        try:
            query, key = (
                read_operand(operand, axes, cached=axes is TRANSPOSED, rotary=rotary, norm=norm, scaled=True)
                for operand, axes in ((scores.query, BY_HEAD), (scores.key, TRANSPOSED))
            )
        except NoMatchError as error:
            reason = error
            continue
        same_norm = (query.norm is None) == (key.norm is None) and (
            query.norm is None or key.norm is None or query.norm.epsilon == key.norm.epsilon
        )
        if same_norm and query.rotary == key.rotary:
            return query, key, value
    raise reason


def _check_sides(query: Operand, key: Operand, value: Operand) -> None:
    """Raises NoMatchError if queries, keys and values do not make an attention."""
    if query.repeated != 1:
        raise NoMatchError("the queries' heads are expanded")
    if not query.head_size == key.head_size == value.head_size:
        raise NoMatchError(
            f"heads of {query.head_size}, {key.head_size} and {value.head_size} numbers, expected as many in Q, K and V"
        )
    if key.heads != value.heads or key.repeated != value.repeated:
        raise NoMatchError(f"{key.heads} heads of K and {value.heads} of V, expected as many")
    if query.heads != key.heads * key.repeated and key.heads != 1:
        raise NoMatchError(
            f"{query.heads} query heads and {key.heads} KV heads each {key.repeated} times, expected as many"
        )
    if (key.past is None) != (value.past is None):
        raise NoMatchError("only one of K and V has a KV cache")
    tokens = [_tokens(operand) for operand in (query, key, value)]
    if not all(same_size(tokens[0], other) for other in tokens[1:]):
        raise NoMatchError(
            f"{tokens[0]} queries and {tokens[1]} new keys: FlowQKVAttention has a key for each of its queries, and a "
            "cache before them (attention over another sequence has no operator)"
        )


def _tokens(operand: Operand) -> int | str | None:
    sizes = dimensions(operand.value)
    assert sizes is not None
    return sizes[operand.axes.index("S") if operand.axes else 1]


def _output(match: Match) -> tuple[ir.Value, bool]:
    """The value that the operator's output replaces, and its form: [B, S, H d] if true, else [B, H, S, d]."""
    result = match.product.outputs[0]
    users = [use.node for use in result.uses()]
    if len(users) == 1 and is_operator(users[0], "Transpose") and not result.is_graph_output():
        by_token = users[0]
        joined = [use.node for use in by_token.outputs[0].uses()]
        if (
            tuple(by_token.attributes["perm"].as_ints()) == (0, 2, 1, 3)
            and len(joined) == 1
            and is_operator(joined[0], "Reshape")
            and _joins_heads(match, joined[0].outputs[0])
        ):
            return joined[0].outputs[0], True
    return result, False


def _joins_heads(match: Match, value: ir.Value) -> bool:
    """Whether a Reshape of [B, S, H, d] results in [B, S, H d]: if two sizes are right, the third must be too."""
    sizes = dimensions(value)
    if sizes is None or len(sizes) != 3 or match.query.axes:
        return False
    of = dimensions(match.query.value)
    assert of is not None
    right = [same_size(sizes[axis], of[axis]) for axis in (0, 1)]
    return sum([*right, sizes[2] == match.query.heads * match.query.head_size]) >= 2


def _description(match: Match, tile: Tiler | None) -> FoldedAttention:
    tokens = _tokens(match.query)
    geometry = AttentionGeometry(
        heads=match.query.heads,
        kv_heads=match.key.heads,
        head_size=match.query.head_size,
        tokens=tokens if isinstance(tokens, int) else None,
        cached=match.key.past is not None,
        causal=match.seen.causal,
        window=match.seen.window,
        biased=bool(match.scores.addends),
    )
    level, reason = (0, "no target was given") if tile is None else tile(geometry)
    return FoldedAttention(match.softmax.name or "Softmax", geometry, level, reason)

# SPDX-License-Identifier: Apache-2.0
"""Explains FlowNPU's use of a model: placement with reasons, folded parts, size and possible speed.

Nothing is run, and no NPU is needed. The rules of `flownpu convert` are applied in memory to a model that is not
converted; they give reasons for the nodes that they leave.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.errors import FlowNPUError, require
from flownpu.explain.placement import Placement, layer_of, place_nodes
from flownpu.explain.speed import Speed, speed_of
from flownpu.model.folder import locate_graph, provider_options
from flownpu.model.onnx_file import load_model, reading
from flownpu.model.summary import summarize
from flownpu.ops.contracts import input_position
from flownpu.system.opencl_loader import use_packages_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from flownpu.graph_rewrites import Report
    from flownpu.graph_rewrites.report import AttentionGeometry, Miss

_DOMAIN = "ai.flownpu"
_FOLDED = {"FlowQKVAttention", "FlowKVAttention"}
_UNFOLDED = {"GroupQueryAttention", "MultiHeadAttention", "Attention", "DecoderMaskedMultiHeadAttention"}
_PAST_KEY, _BIAS = (input_position("FlowQKVAttention", name) for name in ("past_key", "attention_bias"))


@dataclass(frozen=True)
class Attention:
    """An attention block and its folding (Zen-Attention, section III).

    Attributes:
        node: the node's name.
        layer: the number of its layer; None: the name does not say.
        kind: "MHA", "MQA" or "GQA"; empty if no rule matched the block.
        heads: query heads.
        kv_heads: KV heads.
        head_size: elements of a head.
        window: positions that a query sees, -1: all.
        prompt_level: folding level of a call with many tokens: 3: all in one call, 2: all but the product with V,
            1: nothing; None: the operator is for single tokens.
        prompt_reason: why the level is not higher, or what bounds it.
        token_level: the same for one token over a KV cache; None: the attention has no cache.
        token_reason: the reason of `token_level`.
    """

    node: str
    layer: int | None
    kind: str
    heads: int
    kv_heads: int
    head_size: int
    window: int
    prompt_level: int | None
    prompt_reason: str
    token_level: int | None = None
    token_reason: str = ""


@dataclass(frozen=True)
class MissedNodes:
    """Nodes that a rule of `flownpu convert` nearly matched: the rule, why it left them, and the nodes' names."""

    rule: str
    reason: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """The report of `flownpu explain`.

    Attributes:
        path: the .onnx file.
        source: "converted" (FlowNPU's operators), "compiled" (what a session made of a model), "genai" (int4 of GenAI's
            builder) or "plain" (any other graph).
        placement: what runs where, in the model as it is.
        attentions: the attention blocks; if the model is not converted, as conversion would make them.
        misses: what the conversion's rules leave, if the model is not converted.
        weight_bytes: bytes of the weights by type, as the file has them.
        converted_weight_bytes: bytes of all weights after conversion.
        kv_bytes_per_token: bytes that a token takes in the KV cache of all layers.
        speed: what the NPU would compute, and the predicted speed.
        other_graphs: .onnx files of the model's other parts, which are not explained here.
    """

    path: str
    source: str
    placement: Placement
    attentions: tuple[Attention, ...]
    misses: tuple[MissedNodes, ...]
    weight_bytes: dict[str, int]
    converted_weight_bytes: int
    kv_bytes_per_token: int
    speed: Speed
    other_graphs: tuple[str, ...] = ()


def explain(path: Path, options: Mapping[str, str], bandwidth: float | None = None) -> Explanation:
    """Explains a model folder, the folder of an export, or an .onnx file.

    Args:
        path: the model.
        options: options of FlowNPU's provider, such as {"device": "cpu"}, beside those of the folder.
        bandwidth: bytes per second at which the CPU reads memory; None: measured.

    Raises:
        FlowNPUError: there is no such model, or it is damaged.
        MissingDependencyError: onnxruntime, or a package of the extra "convert", is not installed.
        RuntimeError: ONNX Runtime or the provider refuses the model or an option; the message is theirs.
    """
    file, settings = locate_graph(path)
    model = load_model(file, purpose="flownpu explain")
    source = _source(model.graph)
    options = provider_options(settings) | dict(options)
    use_packages_of(options)
    placement = place_nodes(file, model.graph, options)
    summary = summarize(path if settings else file)
    with reading(file):
        report = _rewrite(model, source, settings)
        head_size = settings.get("decoder", {}).get("head_size") or 0
        speed = speed_of(model, settings.get("context_length"), head_size, bandwidth)
        tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
        return Explanation(
            path=str(file),
            source=source,
            placement=placement,
            attentions=tuple(_attentions(model.graph, report)),
            misses=tuple(_misses(report)),
            weight_bytes=summary.weight_bytes,
            converted_weight_bytes=sum(tensor.nbytes for tensor in tensors),
            kv_bytes_per_token=summary.kv_bytes_per_token,
            speed=speed,
            other_graphs=tuple(summary.other_graphs),
        )


def _source(graph: Any) -> str:
    operators = {(node.domain, node.op_type) for node in graph}
    if any(domain == _DOMAIN for domain, _ in operators):
        return "converted"
    if ("com.microsoft", "EPContext") in operators:
        return "compiled"
    return "genai" if ("com.microsoft", "MatMulNBits") in operators else "plain"


def _rewrite(model: Any, source: str, settings: dict[str, Any]) -> Report | None:
    """Applies the converter's rules to the model, in place; None if it is converted or compiled already."""
    if source in {"converted", "compiled"}:
        return None
    require("onnxscript", extra="convert", purpose="flownpu explain")
    from flownpu.convert.sources.attention_folding import prompt_folding  # noqa: PLC0415 slow to import
    from flownpu.graph_rewrites import rewrite  # noqa: PLC0415 needs the extra "convert"
    from flownpu.graph_rewrites.plain.rewriter import rewrite_plain  # noqa: PLC0415

    if source == "genai":
        return rewrite(model)
    # RoPE's tables are computed only when they are written, so any number of positions works here.
    return rewrite_plain(model, positions=settings.get("context_length", 1), tile=prompt_folding)


def _misses(report: Report | None) -> list[MissedNodes]:
    """The misses grouped by rule and reason; numbers in reasons are ignored, because layers differ only in names."""
    found: dict[tuple[str, str], list[Miss]] = {}
    for miss in report.misses if report else []:
        found.setdefault((miss.rule, re.sub(r"\d+", "*", miss.reason)), []).append(miss)
    return [MissedNodes(rule, same[0].reason, tuple(miss.node for miss in same)) for (rule, _), same in found.items()]


# --- Attention --------------------------------------------------------------------------------------------------------


def _attentions(graph: Any, report: Report | None) -> list[Attention]:
    """The folded attention blocks, then those that no rule matched."""
    reasons = {miss.node: miss.reason for miss in report.misses} if report else {}
    of_parts = {folded.node: folded for folded in report.attentions} if report else {}
    if of_parts:
        found = [
            _attention(folded.node, folded.geometry, (folded.level, folded.reason)) for folded in of_parts.values()
        ]
    else:
        found = [_of_node(node) for node in graph if node.domain == _DOMAIN and node.op_type in _FOLDED]
    unfolded = [node.name or node.op_type for node in graph if node.op_type in _UNFOLDED]
    unfolded += [node.name or node.op_type for node in graph if node.op_type == "Softmax"]
    for name in unfolded:
        why = reasons.get(name, "no rule matches it")
        found.append(Attention(name, layer_of(name), "", 0, 0, 0, -1, 1, why))
    return found


def _of_node(node: Any) -> Attention:
    from flownpu.graph_rewrites.report import AttentionGeometry  # noqa: PLC0415 needs the extra "convert"

    def integer(name: str, default: int) -> int:
        attribute = node.attributes.get(name)
        return default if attribute is None else int(attribute.as_int())

    heads = integer("num_heads", 1)
    shape = node.inputs[0].shape
    tokens = shape[1] if shape is not None and len(shape) == 3 else None
    geometry = AttentionGeometry(
        heads=heads,
        kv_heads=integer("kv_num_heads", heads),
        head_size=integer("head_size", 0) or _head_size(node),
        tokens=tokens if isinstance(tokens, int) else None,
        cached=len(node.inputs) > _PAST_KEY and node.inputs[_PAST_KEY] is not None,
        causal=bool(integer("causal", 1)),
        window=integer("local_window_size", -1),
        biased=len(node.inputs) > _BIAS and node.inputs[_BIAS] is not None,
    )
    return _attention(node.name, geometry, None, single=node.op_type == "FlowKVAttention")


def _head_size(node: Any) -> int:
    """The head size d of an attention without that attribute, from its cache [B, G, P, d]; else FlowNPUError."""
    cache = node.inputs[_PAST_KEY] if len(node.inputs) > _PAST_KEY else None
    last = cache.shape[3] if cache is not None and cache.shape is not None else None
    if not isinstance(last, int):
        raise FlowNPUError(f"{node.op_type} {node.name} does not say its head_size: convert the model again")
    return last


def _attention(
    name: str, geometry: AttentionGeometry, prompt: tuple[int, str] | None, *, single: bool = False
) -> Attention:
    from flownpu.convert.sources.attention_folding import prompt_folding, token_folding  # noqa: PLC0415 slow to import

    level, reason = (None, "") if single else prompt or prompt_folding(geometry)
    token_level, token_reason = token_folding(geometry) if geometry.cached else (None, "")
    return Attention(
        name, layer_of(name), geometry.kind, geometry.heads, geometry.kv_heads, geometry.head_size, geometry.window,
        level, reason, token_level, token_reason,
    )  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""All rules, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx_ir.passes import common as passes
from onnxscript.rewriter import RewriteRuleSet

from flownpu.graph_rewrites.flow_qkv_attention import FlowQKVAttention
from flownpu.graph_rewrites.gated_projection import GatedProjection
from flownpu.graph_rewrites.kv_dtype import set_kv_dtype
from flownpu.graph_rewrites.last_token_logits import set_logits
from flownpu.graph_rewrites.packed_qkv import PackedQKV
from flownpu.graph_rewrites.q4nx_gather import Q4NXGather
from flownpu.graph_rewrites.q4nx_matmul import Q4NXMatMul
from flownpu.graph_rewrites.qk_norm import QKNorm
from flownpu.graph_rewrites.report import MissCollector, Report, operators
from flownpu.graph_rewrites.signature import unknown_parts
from flownpu.graph_rewrites.sliding_window_cache import set_sliding_window_cache
from flownpu.graph_rewrites.split_qkv import SplitQKV
from flownpu.ops.definitions import add_functions
from flownpu.ops.onnx_function import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir

    from flownpu.graph_rewrites.report import Miss
    from flownpu.graph_rewrites.rule import Rule

# Each rule reads what the ones before it wrote.
RULES: tuple[type[Rule], ...] = (Q4NXMatMul, Q4NXGather, FlowQKVAttention, QKNorm, SplitQKV, PackedQKV, GatedProjection)


def rewrite(
    model: ir.Model, *, kv_dtype: str = "bf16", logits: str = "last", sliding_window_cache: bool | None = None
) -> Report:
    """Turns an exported decoder into FlowNPU's operators.

    Weights are packed when the model is saved, one at a time; until then its external data must stay where it is.

    Args:
        model: a model exported by ORT GenAI's model builder; changed in place. It then carries the operators'
            definitions as model-local functions.
        kv_dtype: type of the KV cache: bf16, fp16 or fp32.
        logits: "last" computes the logits of the last token of a call, "all" those of each.
        sliding_window_cache: whether layers with a window keep a KV cache of its size; None: as it was exported.

    Returns:
        What was rewritten, what was left and why.

    Raises:
        ValueError: an unknown `kv_dtype` or `logits`.
    """
    # Definitions that an earlier rewrite put there are no part of the graph; they come back at the end.
    for identifier in [identifier for identifier in model.functions if identifier[0] == DOMAIN]:
        del model.functions[identifier]
    report = Report(before=operators(model))
    report.misses += unknown_parts(model)
    absent = [value for node in model.graph for value in node.outputs if value.name == ""]
    for rule in RULES:
        report.applied[rule.__module__.rpartition(".")[2]] = apply(rule, model, report.misses)
    if sliding_window_cache is not None:
        report.applied["sliding_window_cache"] = set_sliding_window_cache(model, sliding_window_cache)
    for name, (count, misses) in {
        "kv_dtype": set_kv_dtype(model, kv_dtype),
        "last_token_logits": set_logits(model, logits),
    }.items():
        report.applied[name] = count
        report.misses += misses
    passes.RemoveUnusedNodesPass()(model)
    for value in absent:  # the rewriter names every value, which would ask a node for outputs that it was not asked for
        value.name = ""
    report.after = operators(model)
    add_functions(model)
    return report


def apply(rule: type[Rule], model: ir.Model, misses: list[Miss]) -> int:
    """Applies one rule wherever it matches, and appends its near misses.

    Returns:
        How often it was applied.
    """
    rules = RewriteRuleSet([rule.rule()], commute=True)
    count: int = rules.apply_to_model(model)
    collector = MissCollector()
    rules.apply_to_model(model, tracer=collector)  # with a tracer, nothing changes
    misses += collector.misses
    return count

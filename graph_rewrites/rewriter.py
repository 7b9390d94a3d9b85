# SPDX-License-Identifier: Apache-2.0
"""Applies all rules for graphs of ORT GenAI's builder, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx_ir.passes import common as passes

from flownpu.graph_rewrites.kv_dtype import set_kv_dtype
from flownpu.graph_rewrites.last_token_logits import set_logits
from flownpu.graph_rewrites.native_graph import apply_rules
from flownpu.graph_rewrites.report import Report, operators
from flownpu.graph_rewrites.sliding_window_cache import set_sliding_window_cache
from flownpu.graph_rewrites.upgrades.opset import raise_opset
from flownpu.ops.definitions import add_functions
from flownpu.ops.definitions.onnx_function import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir


def rewrite(
    model: ir.Model, *, kv_dtype: str = "bf16", logits: str = "last", sliding_window_cache: bool | None = None
) -> Report:
    """Turns an exported decoder into FlowNPU's operators.

    Weights are packed when the model is saved, one at a time; until then its external data must stay where it is.

    Args:
        model: a model exported by ORT GenAI's model builder; changed in place. It then carries the operators'
            definitions as model-local functions.
        kv_dtype: type of the KV cache: bf16, fp16, fp32 or int8.
        logits: "last" computes the logits of each row's last token, "all" those of all tokens.
        sliding_window_cache: whether layers with a window keep a KV cache of the window's size; None: as exported.

    Returns:
        What was rewritten, what was left and why.

    Raises:
        ValueError: an unknown `kv_dtype` or `logits`, the graph is damaged, or its opset cannot be converted.
    """
    # Definitions from an earlier rewrite are not part of the graph; they are added again at the end.
    for identifier in [identifier for identifier in model.functions if identifier[0] == DOMAIN]:
        del model.functions[identifier]
    report = Report(before=operators(model))
    raise_opset(model)
    apply_rules(model, report)
    if sliding_window_cache is not None:
        report.applied["sliding_window_cache"] = set_sliding_window_cache(model, sliding_window_cache)
    for name, (count, misses) in {
        "kv_dtype": set_kv_dtype(model, kv_dtype),
        "last_token_logits": set_logits(model, logits),
    }.items():
        report.applied[name] = count
        report.misses += misses
    passes.RemoveUnusedNodesPass()(model)
    report.after = operators(model)
    add_functions(model)
    return report

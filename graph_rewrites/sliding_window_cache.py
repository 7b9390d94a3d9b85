# SPDX-License-Identifier: Apache-2.0
"""Whether layers with a sliding window keep a KV cache of the window's size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from flownpu.graph_rewrites.node import attribute_int
from flownpu.ops.definitions.onnx_function import DOMAIN

if TYPE_CHECKING:
    from collections.abc import Sequence


def set_sliding_window_cache(model: ir.Model, enabled: bool) -> int:
    """Says for every FlowQKVAttention with a window whether its cache holds the window only, or all tokens.

    FlowQKVAttention(...; local_window_size = W > 0, sliding_window_cache)
        -> FlowQKVAttention(...; local_window_size = W > 0, sliding_window_cache = `enabled`)

    The outputs are the same: what a smaller cache lacks, the window hides. Its size is what the caller allocates
    (GenAI, by the section `sliding_window` of genai_config.json). A cache of the window's size cannot be rewound once
    tokens were evicted.

    Args:
        model: changed in place.
        enabled: True for caches of the window's size.

    Returns:
        The number of attentions whose cache changes.
    """
    changed = 0
    for node in _attentions(model):
        if attribute_int(node, "local_window_size", -1) <= 0:
            continue
        changed += attribute_int(node, "sliding_window_cache", 0) != int(enabled)
        node.attributes["sliding_window_cache"] = ir.AttrInt64("sliding_window_cache", int(enabled))
    return changed


def set_windows(model: ir.Model, window: int, layers: Sequence[int]) -> list[int]:
    """Gives layers the window that their KV cache is sized by, where the graph lets them see all tokens.

    GroupQueryAttention(...; local_window_size = -1) -> GroupQueryAttention(...; local_window_size = `window`)

    ORT GenAI's builder (0.18) writes such graphs of families whose configuration does not say the kind of each layer,
    as Mistral's: the cache of every layer then holds a window, and the attention's window is missing.

    Args:
        model: as it was exported; changed in place.
        window: tokens that a query sees, itself included.
        layers: their numbers (an attention's place among all of them); empty for all, as GenAI reads it.

    Returns:
        The layers that were given the window.

    Raises:
        ValueError: the graph has attentions, and none for one of the layers.
    """
    attentions = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    if not attentions:  # of another form, or converted already
        return []
    if outside := [layer for layer in layers if not 0 <= layer < len(attentions)]:
        raise ValueError(f"expected a GroupQueryAttention for layer {outside[0]}, and there are {len(attentions)}")
    changed = [i for i in layers or range(len(attentions)) if attribute_int(attentions[i], "local_window_size", -1) < 0]
    for layer in changed:
        attentions[layer].attributes["local_window_size"] = ir.AttrInt64("local_window_size", window)
    return changed


def windows(model: ir.Model) -> dict[int, int]:
    """The window of each layer that has one, by the number of the layer (its attention's place among all of them)."""
    sizes = (attribute_int(node, "local_window_size", -1) for node in _attentions(model))
    return {layer: size for layer, size in enumerate(sizes) if size > 0}


def _attentions(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, "FlowQKVAttention")]

# SPDX-License-Identifier: Apache-2.0
"""Sets whether layers with a sliding window keep a KV cache of the window's size, and the windows themselves."""

from collections.abc import Sequence

import onnx_ir as ir

from flownpu.graph_rewrites.node import attribute_int
from flownpu.ops.definitions.onnx_function import DOMAIN


def set_sliding_window_cache(model: ir.Model, enabled: bool) -> int:
    """Sets for every FlowQKVAttention with a window whether its cache holds the window only, or all tokens.

    FlowQKVAttention(...; local_window_size = W > 0, sliding_window_cache)
        -> FlowQKVAttention(...; local_window_size = W > 0, sliding_window_cache = `enabled`)

    The outputs are the same: the window hides the tokens that a smaller cache lacks. The caller allocates the cache
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
    """Gives a window to layers whose KV cache has a window's size, but whose attention sees all tokens.

    GroupQueryAttention(...; local_window_size = -1) -> GroupQueryAttention(...; local_window_size = `window`)

    ORT GenAI's builder (0.18) writes such graphs for families whose configuration does not give each layer's kind, such
    as Mistral: the cache of every layer then holds a window, but the attention has none.

    Args:
        model: as it was exported; changed in place.
        window: how many tokens a query sees, itself included.
        layers: the layers' numbers (an attention's index among all attentions); empty: all layers, as in GenAI.

    Returns:
        The layers that were given the window.

    Raises:
        ValueError: the graph has attentions, but none for one of the layers.
    """
    attentions = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    if not attentions:  # the graph has another form, or is converted already
        return []
    if outside := [layer for layer in layers if not 0 <= layer < len(attentions)]:
        raise ValueError(f"expected a GroupQueryAttention for layer {outside[0]}, and there are {len(attentions)}")
    changed = [i for i in layers or range(len(attentions)) if attribute_int(attentions[i], "local_window_size", -1) < 0]
    for layer in changed:
        attentions[layer].attributes["local_window_size"] = ir.AttrInt64("local_window_size", window)
    return changed


def windows(model: ir.Model) -> dict[int, int]:
    """The window of each layer that has one, by the layer's number (its attention's index among all attentions)."""
    sizes = (attribute_int(node, "local_window_size", -1) for node in _attentions(model))
    return {layer: size for layer, size in enumerate(sizes) if size > 0}


def _attentions(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, "FlowQKVAttention")]

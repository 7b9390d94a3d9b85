# SPDX-License-Identifier: Apache-2.0
"""Translates the settings of layers that differ in more than window and RoPE (Gemma 4) from GGUF's metadata.

Arrays have an entry for each layer. Settings that end in _swa are those of layers with a window, the others of layers
that see all tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.convert.errors import ConversionError

if TYPE_CHECKING:
    from flownpu.convert.gguf.file import GgufFile
    from flownpu.convert.gguf.settings import GgufSettings

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with the numbers that rotary frequencies are divided by."""
_NEVER = 1e30
"""llama.cpp's factor of pairs that are not rotated."""


def layer_forms(settings: GgufSettings, layers: int) -> dict[str, Any]:
    """The settings of layers of two forms, with config.json's names.

    Raises:
        ConversionError: a setting is missing, or no configuration can express it.
    """
    local = settings.local_layers(layers, 6)
    shared = int(settings.value("attention.shared_kv_layers", 0))
    # Those that share keys and values may have projections of their own, which are not read.
    full = [i for i in range(layers - shared) if not local[i]]
    if not full or all(local[i] for i in full) or not any(local[: layers - shared]):
        raise settings.error(
            "expected layers with a window and layers without one among those with keys and values of their own"
        )
    sizes = _per_layer(settings, "feed_forward_length", layers)
    kv_heads = _per_layer(settings, "attention.head_count_kv", layers)
    size, is_wide = int(sizes[0]), bool(sizes[-1] == 2 * sizes[0])
    if (sizes != np.where(np.arange(layers) < layers - shared, size, size << is_wide)).any():
        raise settings.error(
            f"expected feed_forward_length to be the same in all layers, or twice as large in the last {shared}"
        )
    return {
        "num_key_value_heads": int(kv_heads[local.index(True)]),
        "num_global_key_value_heads": int(kv_heads[full[0]]),
        "head_dim": settings.integer("attention.key_length_swa"),
        "global_head_dim": settings.integer("attention.key_length"),
        "intermediate_size": size,
        "use_double_wide_mlp": is_wide,
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in settings.file.tensors,
        "hidden_size_per_layer_input": int(settings.value("embedding_length_per_layer_input", 0)),
        "layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in local],
        "sliding_window": settings.integer("attention.sliding_window"),
        "final_logit_softcapping": float(settings.value("final_logit_softcapping", 0.0)),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": settings.value("rope.freq_base", 1e6),
                "partial_rotary_factor": _rotated_part(settings.file),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": settings.value("rope.freq_base_swa", 1e4)},
        },
    }


def _per_layer(settings: GgufSettings, key: str, layers: int) -> np.ndarray[Any, Any]:
    values = np.atleast_1d(settings.value(key))
    if values.size not in (1, layers):
        raise settings.error(f"expected {key} once or for each of {layers} layers, got {values.size}")
    return np.broadcast_to(values, layers)


def _rotated_part(file: GgufFile) -> float:
    """The part of all pairs of a head that is rotated: the first ones, whose factor is 1."""
    if ROPE_FACTORS not in file.tensors:
        raise ConversionError(f"{file.path}: tensor {ROPE_FACTORS} is missing")
    factors = file.read(ROPE_FACTORS, 0, 1).view(np.float32)[0]
    rotated = int((factors == 1).sum())
    if not (factors[:rotated] == 1).all() or not (factors[rotated:] >= _NEVER).all():
        raise ConversionError(
            f"{file.path}: expected {ROPE_FACTORS} to be 1 for the first pairs and {_NEVER:g} for the others, which "
            "are not rotated; such models cannot be converted"
        )
    return rotated / len(factors)

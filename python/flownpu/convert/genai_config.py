# SPDX-License-Identifier: Apache-2.0
"""Writes genai_config.json, which tells ORT GenAI how to run a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flownpu.convert.layer_parts import Convolution, DeltaRule
from flownpu.convert.settings import Settings
from flownpu.ops.definitions.kv_dtypes import KV_DTYPES, cache_columns
from flownpu.registration import get_ep_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.convert.decoder import Decoder

VISION_FILE, EMBEDDING_FILE = "vision.onnx", "embedding.onnx"
# GenAI's default is processor_config.json, but transformers has a file of that name in another form.
PROCESSOR_FILE = "image_processor.json"

# GenAI allocates and zeroes the KV cache for search.max_length tokens as soon as a generator is made. Its own builder
# writes the context's length there, 131072 tokens for many models: 18 GB of cache for Gemma3-4B. A generator that needs
# more sets the option.
DEFAULT_MAX_LENGTH = 4096

# Settings of GenAI's engine.
_DYNAMIC_BATCHING = {
    # Tokens of a block. A prompt's beginning that is already in the cache is reused in whole blocks; the kernels are as
    # fast with any size.
    "block_size": 16,
    # Four sequences of DEFAULT_MAX_LENGTH, or more that are shorter: 436 MB for Gemma3-1B; pages take memory only once
    # they are written to.
    "num_blocks": 4 * DEFAULT_MAX_LENGTH // 16,
    # Sequences at a time; more wait. A run's logits grow with it: 34 MB with a vocabulary of 262144.
    "max_batch_size": 32,
    # Tokens of a run. The other sequences wait while a part of one prompt is computed, 0.6 s at 400 tokens/s. Weights
    # are read once more for every part, but multiplying 256 rows takes some 30 times as long.
    "max_scheduled_tokens": 256,
}


def genai_config(
    decoder: Decoder,
    *,
    filename: str = "model.onnx",
    kv_dtype: str = "bf16",
    sliding_window_cache: bool = False,
    paged: bool = False,
    generation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The contents of genai_config.json.

    Args:
        decoder: the model's decoder.
        filename: the name of the graph's file.
        kv_dtype: the type of the KV cache, a key of KV_DTYPES.
        sliding_window_cache: whether the graph's layers with a window keep a cache of the window's size.
        paged: whether the graph is for GenAI's engine, with a KV cache in blocks.
        generation: the contents of the checkpoint's generation_config.json, for the defaults of sampling.

    Raises:
        ConversionError: a setting in `generation` has a value of another type.
    """
    settings = Settings(generation or {}, "generation_config.json")
    eos = list(decoder.eos_token_ids)
    model: dict[str, Any] = {
        "type": decoder.family,
        "context_length": decoder.context_length,
        "vocab_size": decoder.vocabulary_size,
        "bos_token_id": decoder.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        # GenAI pads batches with this token and takes it for padding in prompts; without one, the end token is used.
        "pad_token_id": decoder.pad_token_id if decoder.pad_token_id is not None else next(iter(eos), None),
        "decoder": {
            "filename": filename,
            "session_options": {"log_id": "onnxruntime-genai", "provider_options": [{get_ep_name(): {}}]},
            "hidden_size": decoder.hidden_size,
            # GenAI uses this setting only as the size of the KV cache's last axis.
            "head_size": cache_columns(KV_DTYPES[kv_dtype], decoder.head_size),
            "num_attention_heads": decoder.heads,
            "num_key_value_heads": decoder.kv_heads,
            # GenAI takes it for the number of KV caches, which layers that share keys and values have not.
            "num_hidden_layers": decoder.own_layers,
            "inputs": {
                "input_ids": "input_ids",
                "attention_mask": "attention_mask",
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
            },
            "outputs": {
                "logits": "logits",
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
            },
        },
    }
    if any(isinstance(layer.mixer, Convolution) for layer in decoder.layers):
        model["decoder"]["layer_types"] = [
            "full_attention" if layer.mixer is None else "conv" for layer in decoder.layers
        ]
    states = ["conv"] if decoder.has_states else []
    if any(isinstance(layer.mixer, DeltaRule) for layer in decoder.layers):
        states.append("recurrent")
    for state in states:
        model["decoder"]["inputs"][f"past_{state}_names"] = f"past.%d.{state}"
        model["decoder"]["outputs"][f"present_{state}_names"] = f"present.%d.{state}"
    if decoder.image_token_id is not None:
        model |= _picture_sections(decoder.image_token_id)
        model["decoder"]["inputs"]["inputs_embeds"] = "inputs_embeds"
    if sliding_window_cache and decoder.window is not None:
        model["decoder"]["sliding_window"] = {
            "window_size": decoder.window,
            # The operator evicts old tokens from the cache (sliding_window_cache=1); GenAI only allocates it, and must
            # not split prompts.
            "slide_key_value_cache": False,
            "slide_inputs": False,
            "layers": [index for index, layer in enumerate(decoder.layers) if layer.window is not None],
        }
    if paged:
        model["decoder"]["inputs"] = {
            "input_ids": "input_ids",
            "cumulative_sequence_lengths": "cumulative_sequence_lengths",
            "past_sequence_lengths": "past_sequence_lengths",
            "block_table": "block_table",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        }
    search = {
        "do_sample": settings.flag("do_sample"),
        "max_length": min(decoder.context_length, DEFAULT_MAX_LENGTH),
        "num_beams": 1,
        "past_present_share_buffer": True,
        "repetition_penalty": settings.number("repetition_penalty", 1.0),
        "temperature": settings.number("temperature", 1.0),
        "top_k": settings.integer("top_k", 50, least=-1),
        "top_p": settings.number("top_p", 1.0),
    }
    engine = {"engine": {"dynamic_batching": _DYNAMIC_BATCHING}} if paged else {}
    return {"model": {key: value for key, value in model.items() if value is not None}, "search": search, **engine}


def _picture_sections(image_token: int) -> dict[str, Any]:
    """The sections on the vision and embedding models, which run before the decoder with its session options."""
    return {
        "image_token_id": image_token,
        "vision": {
            "filename": VISION_FILE,
            "config_filename": PROCESSOR_FILE,
            "inputs": {"pixel_values": "pixel_values"},
            "outputs": {"image_features": "image_features"},
        },
        "embedding": {
            "filename": EMBEDDING_FILE,
            "inputs": {"input_ids": "input_ids", "image_features": "image_features"},
            "outputs": {"inputs_embeds": "inputs_embeds"},
        },
    }

# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3 (Meta), and models of the same form: SmolLM2, Yi, TinyLlama, DeepSeek's distillations."""

from flownpu.convert.families.family import Family

FAMILIES = (
    Family(
        model_type="llama",
        genai_type="llama",
        title="Llama 3",
        gguf="llama",
        gguf_interleaved=True,
        defaults={"max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""Makes model folders that ORT GenAI runs on FlowNPU: from checkpoints, from GenAI models, from random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.convert.errors import ConversionError
from flownpu.convert.progress import Progress, silent

if TYPE_CHECKING:
    from pathlib import Path

    from flownpu.convert.graph import Logits
    from flownpu.convert.progress import ProgressCallback

__all__ = ["ConversionError", "Progress", "convert"]


def convert(
    source: Path,
    output: Path,
    *,
    kv_dtype: str = "bf16",
    logits: Logits = "last",
    sliding_window_cache: bool = False,
    context_length: int | None = None,
    force: bool = False,
    progress: ProgressCallback = silent,
) -> None:
    """Converts a model into a folder that ORT GenAI runs on FlowNPU.

    Args:
        source: a Hugging Face checkpoint folder (config.json, safetensors, tokenizer.json), or an ORT GenAI model
            folder (genai_config.json).
        output: the folder to make.
        kv_dtype: the type of the KV cache, "bf16", "fp16" or "fp32".
        logits: of the "last" token of each row, or of "all".
        sliding_window_cache: layers with a window keep a cache of the window's size, which cannot be rewound once it
            is full.
        context_length: positions that the model is made for; None: as many as the source allows.
        force: replace a model that is at `output`.
        progress: hears how far it is.

    Raises:
        ConversionError: the source cannot be converted, or the output not be written; nothing is left behind.
        MissingDependencyError: a package of the extra "convert" is not installed.
    """
    if not source.is_dir():
        raise ConversionError(f"{source}: {'not a folder' if source.exists() else 'there is no such folder'}")
    # Imported late: they need the packages of the extra "convert".
    from flownpu.convert.model_writer import ModelOptions  # noqa: PLC0415

    options = ModelOptions(kv_dtype, logits, sliding_window_cache)
    if (source / "genai_config.json").is_file():
        from flownpu.convert.genai_folder import convert_genai_folder  # noqa: PLC0415

        convert_genai_folder(source, output, options, context_length=context_length, force=force, progress=progress)
    elif (source / "config.json").is_file():
        from flownpu.convert.huggingface import convert_checkpoint  # noqa: PLC0415

        convert_checkpoint(source, output, options, context_length=context_length, force=force, progress=progress)
    else:
        raise ConversionError(
            f"{source}: expected a Hugging Face checkpoint (a folder with config.json, safetensors files and "
            "tokenizer.json; families gemma3_text, gemma3, llama and qwen3) or an ORT GenAI model (a folder with "
            "genai_config.json), and it is neither"
        )

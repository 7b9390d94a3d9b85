# SPDX-License-Identifier: Apache-2.0
"""Makes model folders that FlowNPU runs: from checkpoints, GGUF files, exported graphs, or random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.convert.errors import ConversionError
from flownpu.convert.progress import Progress, silent
from flownpu.errors import require
from flownpu.model.folder import EXPORTED_GRAPH, check_pipeline_folder, is_pipeline_folder

if TYPE_CHECKING:
    from pathlib import Path

    from flownpu.convert.graph.decoder import Logits
    from flownpu.convert.progress import ProgressCallback

__all__ = ["ConversionError", "Progress", "convert"]


def convert(
    source: Path,
    output: Path,
    *,
    name: str | None = None,
    kv_dtype: str = "bf16",
    logits: Logits = "last",
    sliding_window_cache: bool = False,
    paged: bool = False,
    weights: str = "auto",
    context_length: int | None = None,
    vision_weights: str | None = None,
    encoder_weights: str | None = None,
    force: bool = False,
    progress: ProgressCallback = silent,
) -> None:
    """Converts a model into a folder that runs on FlowNPU: in ORT GenAI, or if it is an optimum export, in optimum.

    Args:
        source: a Hugging Face checkpoint folder (config.json, safetensors, tokenizer.json), a GGUF file, an ORT GenAI
            model folder (genai_config.json), or the folder of an optimum export (model.onnx, config.json; of a pipeline
            of diffusers model_index.json).
        output: the folder to make.
        name: the name that the manifest gives the source; None: that of the file or folder itself.
        kv_dtype: the type of the KV cache, "bf16", "fp16", "fp32" or "int8"; in an optimum export it stays float32.
        logits: whether a run yields the logits of the "last" token of each row or of "all" tokens; an optimum export
            always yields those of all.
        sliding_window_cache: layers with a window keep a cache of the window's size, which cannot be rewound once it
            is full.
        paged: write the graph for GenAI's engine, which `flownpu serve` runs: a KV cache in blocks, and many sequences
            in one run; only from checkpoints and GGUF files.
        weights: bits of the codes of a decoder's weights, 4 or 8: "q4", "q8", or those of attention, embedding with LM
            head, and feed-forward, such as "8/4/4"; an average such as "4.75", for which weights that are floats are
            measured, and those get 8 that gain most; "auto": as many as the source has, 4 if it has floats of 16 or 32
            bits. Only from checkpoints and GGUF files. Of a pipeline of diffusers: "bf16" (also "auto") or "q8".
        context_length: how many positions the model is made for; None: as many as the source allows.
        vision_weights: how the matrices of a checkpoint's vision tower are stored, "bf16", "int8" or "q4nx"; "none"
            omits the tower; None: "bf16" if there is a tower.
        encoder_weights: how the matrices of a text encoder's checkpoint are stored, "bf16", "int8" or "q4nx"; None:
            "bf16".
        force: replace a model that a conversion wrote to `output`.
        progress: called with a `Progress` whenever a part of the work is done.

    Raises:
        ConversionError: the source cannot be converted, or the output cannot be written; nothing is left behind.
        MissingDependencyError: a package of the extra "convert" is not installed.
    """
    if not source.exists():
        raise ConversionError(f"{source}: there is no such file or folder")
    # Imported late: they need the packages of the extra "convert".
    from flownpu.convert.model_writer import ModelOptions  # noqa: PLC0415
    from flownpu.convert.request import Request  # noqa: PLC0415

    is_pipeline = source.is_dir() and is_pipeline_folder(source)
    options = ModelOptions(kv_dtype, logits, sliding_window_cache, paged, "auto" if is_pipeline else weights)
    request = Request(source, name or source.resolve().name, output, options, context_length, force, progress)
    is_checkpoint = (
        source.is_dir() and not is_pipeline and not (source / "genai_config.json").is_file() and not _has_graph(source)
    )
    if vision_weights is not None and not is_checkpoint:
        raise ConversionError(f"{source}: vision weights can be chosen for Hugging Face checkpoints only")
    if encoder_weights is not None and not is_checkpoint:
        raise ConversionError(f"{source}: encoder weights can be chosen for Hugging Face checkpoints only")
    is_graph = source.is_dir() and not is_checkpoint
    for option, given in (("--paged", paged), ("--weights", weights != "auto")):
        if given and is_graph and not (is_pipeline and option == "--weights"):
            raise ConversionError(f"{source}: {option} takes Hugging Face checkpoints and GGUF files, not graphs")
    if is_pipeline:
        check_pipeline_folder(source)
        from flownpu.convert.sources.pipeline_folder import convert_pipeline_folder  # noqa: PLC0415

        convert_pipeline_folder(request, weights)
    elif source.is_file():
        require("gguf", extra="convert", purpose="flownpu convert of a GGUF file")
        from flownpu.convert.sources.gguf import convert_gguf  # noqa: PLC0415

        convert_gguf(request)
    elif (source / "genai_config.json").is_file():
        from flownpu.convert.sources.genai_folder import convert_genai_folder  # noqa: PLC0415

        convert_genai_folder(request)
    elif (source / "config.json").is_file() and _has_graph(source):
        from flownpu.convert.sources.optimum_folder import convert_optimum_folder  # noqa: PLC0415

        convert_optimum_folder(request)
    elif (source / "config.json").is_file():
        from flownpu.convert.sources.huggingface import convert_checkpoint  # noqa: PLC0415

        convert_checkpoint(request, vision_weights, encoder_weights)
    else:
        raise ConversionError(
            f"{source}: expected a Hugging Face checkpoint (a folder with config.json, safetensors files and "
            "tokenizer.json), a GGUF file, an ORT GenAI model "
            "(a folder with genai_config.json), or an optimum export (a folder with model.onnx and config.json), and "
            "it is none of them"
        )


def _has_graph(source: Path) -> bool:
    """Whether a folder holds an exported graph instead of a checkpoint.

    Some checkpoints have one too, in a folder beside their weights: they are checkpoints all the same.
    """
    apart = (source / EXPORTED_GRAPH).is_file() and not any(source.glob("*.safetensors"))
    return apart or any(source.glob("*.onnx"))

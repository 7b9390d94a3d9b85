# SPDX-License-Identifier: Apache-2.0
"""Converts a Hugging Face checkpoint folder into a model folder for ORT GenAI."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING

from flownpu.convert.checkpoint import Checkpoint
from flownpu.convert.errors import ConversionError
from flownpu.convert.families import read_decoder
from flownpu.convert.manifest import sha256, write_manifest
from flownpu.convert.model_writer import ModelOptions, output_bytes, write_model
from flownpu.convert.output import check_output, output_folder
from flownpu.convert.progress import Stage, silent
from flownpu.convert.quantise import CheckpointWeights
from flownpu.convert.weights import weight_plan

if TYPE_CHECKING:
    from pathlib import Path

    from flownpu.convert.decoder import Decoder
    from flownpu.convert.progress import ProgressCallback

__all__ = ["TOKENIZER_FILES", "convert_checkpoint", "limit_context"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)

PACKAGES = ("flownpu", "ml_dtypes", "numpy", "onnx", "onnx-ir", "safetensors")


def convert_checkpoint(
    source: Path,
    output: Path,
    options: ModelOptions,
    *,
    context_length: int | None = None,
    force: bool = False,
    progress: ProgressCallback = silent,
) -> None:
    """Quantises a checkpoint to Q4NX and writes its model folder.

    Args:
        source: folder with config.json, safetensors files and a tokenizer.
        output: folder to make.
        options: see ModelOptions.
        context_length: positions that the model is made for; None: as many as the checkpoint allows.
        force: replace a model that is at `output`.
        progress: hears how far it is.

    Raises:
        ConversionError: the source cannot be converted, or the output not be written; nothing is left behind.
    """
    check_output(output, force=force)
    checkpoint = Checkpoint(source)
    decoder = limit_context(read_decoder(checkpoint.config, checkpoint.generation), context_length)
    weights = CheckpointWeights(checkpoint, decoder)
    weights.check(weight_plan(decoder))
    tokenizer = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not (source / "tokenizer.json").is_file():
        raise ConversionError(
            f"{source}: tokenizer.json is missing, which ORT GenAI reads; download it, or save it with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    size = output_bytes(decoder) + sum(path.stat().st_size for path in tokenizer)
    with output_folder(output, force=force, size=size) as folder:
        errors = write_model(folder, decoder, weights, options, generation=checkpoint.generation, progress=progress)
        for path in tokenizer:
            shutil.copyfile(path, folder / path.name)
        read = [source / "config.json", *checkpoint.files, *tokenizer]
        written = sum(path.stat().st_size for path in folder.iterdir())
        counter = Stage(progress, "sum", written + sum(path.stat().st_size for path in read), "B")
        write_manifest(
            folder,
            source={
                "kind": "huggingface",
                "model_type": checkpoint.config["model_type"],
                "name": source.resolve().name,
                "files": {path.name: {"sha256": sha256(path, counter.advance)} for path in read},
            },
            settings={**options.as_dict(), "context_length": decoder.context_length},
            quantisation={"format": "q4nx", "relative_error": {name: round(e, 6) for name, e in errors.items()}},
            packages=PACKAGES,
            advance=counter.advance,
        )


def limit_context(decoder: Decoder, context_length: int | None) -> Decoder:
    """The decoder made for at most that many positions, of which the rotary caches hold a row each.

    Raises:
        ConversionError: it is less than 1 or more than the model was trained for.
    """
    if context_length is None:
        return decoder
    if not 1 <= context_length <= decoder.context_length:
        raise ConversionError(f"expected a context length of 1 to {decoder.context_length}, got {context_length}")
    return dataclasses.replace(decoder, context_length=context_length)

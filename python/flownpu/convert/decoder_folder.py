# SPDX-License-Identifier: Apache-2.0
"""Makes the model folder of a decoder, whatever source its weights and tokenizer come from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from flownpu.convert.errors import ConversionError
from flownpu.convert.manifest import rounded, write_manifest
from flownpu.convert.model_writer import ModelOptions, output_bytes, write_model
from flownpu.convert.output import output_folder
from flownpu.convert.progress import silent
from flownpu.convert.quick_tokenizer import TOKENIZER, quick_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from flownpu.convert.decoder import Decoder
    from flownpu.convert.progress import ProgressCallback
    from flownpu.convert.vision.pictures import Pictures
    from flownpu.convert.weights import WeightSource

# RoPE's angles are products with the position in float32, which holds whole numbers exactly up to here: 24 bits.
_MOST_POSITIONS = 1 << 24
PACKAGES = ("flownpu", "ml_dtypes", "numpy", "onnx", "onnx-ir", "safetensors")


def make_decoder_folder(
    output: Path,
    decoder: Decoder,
    weights: WeightSource,
    options: ModelOptions,
    *,
    tokenizer: Mapping[str, bytes],
    source: Mapping[str, Any],
    files: Sequence[Path],
    pictures: Pictures | None = None,
    generation: Mapping[str, Any] | None = None,
    quantisation: Mapping[str, Any] | None = None,
    packages: Sequence[str] = PACKAGES,
    force: bool = False,
    progress: ProgressCallback = silent,
) -> None:
    """Quantises and writes a model, its tokenizer and its manifest.

    Args:
        output: the folder to make.
        decoder: what to write.
        weights: where the weights' values come from.
        options: see ModelOptions.
        tokenizer: the contents of the tokenizer's files, by path relative to the folder.
        source: the manifest's entries on the source, except its files.
        files: the source's files, whose checksums the manifest gets; the first lies in the source's own folder.
        pictures: the vision part; only for a decoder with an image token.
        generation: defaults of sampling, as in generation_config.json.
        quantisation: the manifest's entries on the quantisation, except format and errors.
        packages: distributions whose versions the manifest gets.
        force: replace a model that a conversion wrote to `output`.
        progress: called with a `Progress` whenever a part of the work is done.

    Raises:
        ConversionError: a weight is missing or wrong, or the output cannot be written; nothing is left behind.
    """
    if TOKENIZER in tokenizer:
        tokenizer = {**tokenizer, TOKENIZER: quick_tokenizer(tokenizer[TOKENIZER])}
    size = output_bytes(decoder, weights) + sum(map(len, tokenizer.values())) + (pictures.bytes if pictures else 0)
    with output_folder(output, force=force, size=size) as folder:
        errors = write_model(folder, decoder, weights, options, generation=generation, progress=progress)
        vision = {"vision": pictures.write(folder, progress)} if pictures else {}
        for name, contents in tokenizer.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(contents)
        write_manifest(
            folder,
            source=source,
            read={path.relative_to(files[0].parent).as_posix(): path for path in files},
            settings={
                **options.as_dict(),
                "context_length": decoder.context_length,
                **({"vision_weights": pictures.dense_format} if pictures else {}),
            },
            quantisation={
                "format": "q4nx",
                **(quantisation or {}),
                "relative_error": rounded(errors),
                **vision,
            },
            packages=packages,
            progress=progress,
        )


def limit_context(decoder: Decoder, context_length: int | None, source: Path | str) -> Decoder:
    """The decoder made for `context_length` positions; each takes a row of RoPE's tables.

    Args:
        decoder: the decoder as the source describes it.
        context_length: how many positions; None: as many as the model was trained for.
        source: what messages name as the source.

    Raises:
        ConversionError: it is less than 1 or more than the model was trained for; or it is None, and the model was
            trained for more positions than float32 holds exactly.
    """
    if context_length is None:
        if decoder.context_length > _MOST_POSITIONS:
            raise ConversionError(
                f"{source}: expected a model of at most {_MOST_POSITIONS} positions, which is as far as float32 "
                f"counts, got one of {decoder.context_length}: give a context length (--context-length)"
            )
        return decoder
    if not 1 <= context_length <= decoder.context_length:
        raise ConversionError(
            f"{source}: expected a context length of 1 to {decoder.context_length}, got {context_length}"
        )
    return dataclasses.replace(decoder, context_length=context_length)

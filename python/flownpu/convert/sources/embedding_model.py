# SPDX-License-Identifier: Apache-2.0
"""Converts the checkpoint of a model that embeds texts or scores pairs of them, for `flownpu embed`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, get_args

import onnx_ir as ir

from flownpu.convert.checkpoint import Checkpoint
from flownpu.convert.decoder_folder import PACKAGES, limit_context
from flownpu.convert.dense.weights import DenseFormat
from flownpu.convert.dense.writer import stored_bytes, write_weights
from flownpu.convert.encoder.families import is_text_encoder, read_encoder
from flownpu.convert.encoder.graph import build_encoder_model
from flownpu.convert.encoder.weights import TextEncoderCheckpoint, encoder_weight_plan
from flownpu.convert.errors import ConversionError
from flownpu.convert.families import read_decoder
from flownpu.convert.graph.data_file import DataFile
from flownpu.convert.graph.file import DATA_FILE, GRAPH_FILE, SMALL_FILES
from flownpu.convert.graph.hidden_states import build_hidden_states_model
from flownpu.convert.manifest import rounded, write_manifest
from flownpu.convert.model_writer import ModelOptions, output_bytes, write_tensors
from flownpu.convert.output import check_output, output_folder
from flownpu.convert.quantise import QuantizedWeights
from flownpu.convert.sources.checkpoint_weights import CheckpointWeights
from flownpu.convert.sources.sentence_files import has_modules, sentence_files
from flownpu.convert.weights import weight_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from flownpu.convert.request import Request

_DEFAULT_FORMAT: DenseFormat = "bf16"


def is_embedding_model(source: Path, config: dict[str, Any]) -> bool:
    """Whether a checkpoint is of a model that embeds texts or scores pairs of them."""
    return is_text_encoder(config) or has_modules(source)


def convert_embedding_model(request: Request, encoder_weights: str | None = None) -> None:
    """Writes the folder of a model that embeds texts or scores pairs of texts, with the files that say how.

    The graph's output is hidden states or a score. A decoder's matrices are Q4NX.

    Args:
        request: what to convert, and where to.
        encoder_weights: how an encoder's matrices are stored, "bf16", "int8" or "q4nx"; None: "bf16". For a decoder it
            must be None.

    Raises:
        ConversionError: the source cannot be converted, or the output cannot be written; nothing is left behind.
    """
    check_output(request.output, force=request.force)
    if request.options != ModelOptions():
        raise ConversionError(
            f"{request.source}: a model that embeds texts has no KV cache and no logits: leave --kv-dtype, --logits, "
            "--sliding-window-cache, --paged and --weights out"
        )
    checkpoint = Checkpoint(request.source)
    if is_text_encoder(checkpoint.config):
        _convert_encoder(request, checkpoint, encoder_weights)
    else:
        _convert_decoder(request, checkpoint, encoder_weights)


def _convert_encoder(request: Request, checkpoint: Checkpoint, encoder_weights: str | None) -> None:
    formats: dict[str, DenseFormat] = {name: name for name in get_args(DenseFormat)}
    chosen = formats.get(encoder_weights or _DEFAULT_FORMAT)
    if chosen is None:
        raise ConversionError(f'expected encoder weights {", ".join(formats)}, got "{encoder_weights}"')
    if request.context_length is not None:
        raise ConversionError(
            f"{request.source}: an encoder's positions are a table of its own: leave --context-length out"
        )
    encoder = read_encoder(checkpoint.config)
    plan, source = encoder_weight_plan(encoder), TextEncoderCheckpoint(checkpoint)
    source.check(plan)
    source.check_places(plan)

    def write(folder: Path) -> dict[str, float]:
        with DataFile(folder / DATA_FILE) as data:
            tensors, errors = write_weights(data, plan, source, chosen, stage="quantise", progress=request.progress)
        ir.save(build_encoder_model(encoder, tensors, chosen), folder / GRAPH_FILE)
        return errors

    settings = {"encoder_weights": chosen, "context_length": encoder.positions}
    _make_folder(request, checkpoint, write, stored_bytes(plan, chosen) + SMALL_FILES, settings, chosen)


def _convert_decoder(request: Request, checkpoint: Checkpoint, encoder_weights: str | None) -> None:
    if encoder_weights is not None:
        raise ConversionError(
            f"{request.source}: encoder weights were asked for, and a {checkpoint.config.get('model_type')} is a "
            "decoder, whose weights are Q4NX"
        )
    read = read_decoder(checkpoint.config, checkpoint.generation, embeds=True)
    decoder = limit_context(read, request.context_length, request.source)
    if any(rotary.has_two_tables(decoder.context_length) for rotary in decoder.rotaries):
        raise ConversionError(
            f"{request.source}: embeddings are made with one table of RoPE for all lengths, and this model's "
            "frequencies change (LongRoPE): give --context-length "
            f"{decoder.rotaries[0].first_rows(decoder.context_length)} or less"
        )
    # Embeddings need no LM head, so the plan has no weight for tied embeddings.
    decoder = dataclasses.replace(decoder, tied_embeddings=True)
    tensors = CheckpointWeights(checkpoint)
    weights, plan = QuantizedWeights(tensors, decoder.norm_offset), weight_plan(decoder)
    weights.check(plan)
    tensors.check_places(plan)

    def write(folder: Path) -> dict[str, float]:
        written, errors = write_tensors(folder, decoder, weights, progress=request.progress)
        ir.save(build_hidden_states_model(decoder, written), folder / GRAPH_FILE)
        return errors

    settings = {"context_length": decoder.context_length}
    _make_folder(request, checkpoint, write, output_bytes(decoder, weights), settings, "q4nx")


def _make_folder(
    request: Request,
    checkpoint: Checkpoint,
    write: Callable[[Path], dict[str, float]],
    size: int,
    settings: dict[str, Any],
    weight_format: str,
) -> None:
    """Makes the output folder: graph and weights (by `write`, which returns their errors), small files, manifest."""
    source, files = request.source, sentence_files(request.source)
    with output_folder(request.output, force=request.force, size=size + sum(map(len, files.values()))) as folder:
        errors = write(folder)
        for name, contents in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(contents)
        write_manifest(
            folder,
            source={
                "kind": "huggingface",
                "model_type": checkpoint.config["model_type"],
                "name": request.name,
            },
            read={path.name: path for path in checkpoint.files} | {name: source / name for name in files},
            settings=settings,
            quantisation={"format": weight_format, "relative_error": rounded(errors)},
            packages=PACKAGES,
            progress=request.progress,
        )

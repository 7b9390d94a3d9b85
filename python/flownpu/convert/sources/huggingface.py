# SPDX-License-Identifier: Apache-2.0
"""Converts a Hugging Face checkpoint folder into a model folder for ORT GenAI."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from flownpu.convert.checkpoint import Checkpoint, read_json
from flownpu.convert.decoder_folder import limit_context, make_decoder_folder
from flownpu.convert.errors import ConversionError
from flownpu.convert.families import read_decoder
from flownpu.convert.output import check_output
from flownpu.convert.quantise import QuantizedWeights
from flownpu.convert.sources.awq_gptq import AwqGptqWeights
from flownpu.convert.sources.checkpoint_weights import CheckpointWeights
from flownpu.convert.sources.compressed_tensors import CompressedWeights, Float8Weights
from flownpu.convert.sources.embedding_model import convert_embedding_model, is_embedding_model
from flownpu.convert.sources.experts_in_turns import ExpertsInTurns
from flownpu.convert.sources.packing import INSTEAD, Packing, read_packing
from flownpu.convert.sources.tables import BitsAndBytesWeights
from flownpu.convert.sources.tokenizer_settings import readable_by_genai
from flownpu.convert.vision.image_processor import settings_files
from flownpu.convert.vision.pictures import read_pictures
from flownpu.convert.weights import head_plan, unused_tensors, weight_plan
from flownpu.model.folder import template_files

if TYPE_CHECKING:
    from pathlib import Path

    from flownpu.convert.decoder import Decoder
    from flownpu.convert.request import Request

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
)

# The reader of quantised weights for each quant_method.
READERS = {
    "awq": AwqGptqWeights,
    "gptq": AwqGptqWeights,
    "compressed-tensors": CompressedWeights,
    "int8": CompressedWeights,
    "fp8": Float8Weights,
    "bitsandbytes": BitsAndBytesWeights,
}


def tokenizer_paths(source: Path) -> list[Path]:
    """The files of a folder's tokenizer and chat template, which are copied to the same places."""
    return [*(path for name in TOKENIZER_FILES if (path := source / name).is_file()), *template_files(source)]


def _tensors(checkpoint: Checkpoint, decoder: Decoder, packing: Packing | None) -> CheckpointWeights:
    in_turns = decoder.mixture is not None and decoder.mixture.tensors.in_turns
    if packing is not None and (packing.method == "mxfp4") != in_turns:
        raise ConversionError(
            f"{checkpoint.folder}: expected quant_method mxfp4 of gpt-oss's experts, and of no others, got "
            f'"{packing.method}"; {INSTEAD}'
        )
    if in_turns:
        return ExpertsInTurns(checkpoint)
    return CheckpointWeights(checkpoint) if packing is None else READERS[packing.method](checkpoint, packing)


def convert_checkpoint(request: Request, vision_weights: str | None = None, encoder_weights: str | None = None) -> None:
    """Quantises a checkpoint to Q4NX and writes its model folder. Weights that have 4-bit codes keep them.

    The source is a folder with config.json, safetensors files and a tokenizer; embedding_model.py converts it if it is
    of a model that embeds texts.

    Args:
        request: what to convert, and where to.
        vision_weights: see `read_pictures`.
        encoder_weights: see `convert_embedding_model`.

    Raises:
        ConversionError: the source cannot be converted, or the output cannot be written; nothing is left behind.
    """
    source, config = request.source, read_json(request.source / "config.json")
    if is_embedding_model(source, config):
        convert_embedding_model(request, encoder_weights)
        return
    if encoder_weights is not None:
        raise ConversionError(
            f"{source}: encoder weights can be chosen for text encoders only, got a {config.get('model_type')}"
        )
    check_output(request.output, force=request.force)
    checkpoint = Checkpoint(source)
    decoder = limit_context(
        read_decoder(checkpoint.config, checkpoint.generation), request.context_length, request.source
    )
    pictures = read_pictures(checkpoint, decoder, vision_weights)
    if pictures is not None:
        decoder = dataclasses.replace(
            decoder, family=checkpoint.config["model_type"], image_token_id=pictures.image_token_id
        )
    packing = read_packing(checkpoint)
    tensors = _tensors(checkpoint, decoder, packing)
    weights = QuantizedWeights(tensors, decoder.norm_offset, request.options.weight_bits)
    # Configurations name the head whether or not the checkpoint has it: transformers leaves it out when it saves one.
    has_head = "mtp.fc.weight" in checkpoint.names() and decoder.mixture is None
    decoder = dataclasses.replace(decoder, prediction_head=has_head)
    plan = [*weight_plan(decoder), *head_plan(decoder)]
    weights.check(plan)
    tensors.check_places(plan, unused_tensors(decoder))
    tokenizer = tokenizer_paths(source)
    if decoder.drafting is None and not (source / "tokenizer.json").is_file():
        raise ConversionError(
            f"{source}: tokenizer.json is missing, by which texts become tokens; download it, or save it with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    make_decoder_folder(
        request.output,
        decoder,
        weights,
        request.options,
        tokenizer=readable_by_genai({path.relative_to(source).as_posix(): path.read_bytes() for path in tokenizer}),
        source={
            "kind": "huggingface",
            "model_type": checkpoint.config["model_type"],
            "name": request.name,
        },
        files=[source / "config.json", *checkpoint.files, *tokenizer, *(settings_files(source) if pictures else [])],
        pictures=pictures,
        generation=checkpoint.generation,
        quantisation=None if packing is None else {"weights": weights.describe(plan)},
        force=request.force,
        progress=request.progress,
    )

# SPDX-License-Identifier: Apache-2.0
"""Converts a GGUF file into a model folder for ORT GenAI."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from flownpu.convert.decoder import FrequencyFactors
from flownpu.convert.decoder_folder import PACKAGES, limit_context, make_decoder_folder
from flownpu.convert.errors import ConversionError
from flownpu.convert.families import FAMILIES, read_decoder
from flownpu.convert.gguf.configuration import read_configuration
from flownpu.convert.gguf.file import GgufFile
from flownpu.convert.gguf.layer_forms import ROPE_FACTORS
from flownpu.convert.gguf.tokenizer import tokenizer_files
from flownpu.convert.gguf.weights import GgufWeights
from flownpu.convert.layer_parts import STACKED, DeltaRule
from flownpu.convert.output import check_output
from flownpu.convert.quantise import QuantizedWeights
from flownpu.convert.weights import head_plan, weight_plan

if TYPE_CHECKING:
    from flownpu.convert.decoder import Decoder
    from flownpu.convert.layer_parts import Mixer
    from flownpu.convert.request import Request


def convert_gguf(request: Request) -> None:
    """Writes the model folder of a GGUF file. 4-bit types keep their codes; others are quantised, and logged.

    Raises:
        ConversionError: the source cannot be converted, or the output cannot be written; nothing is left behind.
    """
    check_output(request.output, force=request.force)
    source = request.source
    file = GgufFile(source)
    try:
        configuration = read_configuration(file)
        decoder = read_decoder(configuration, where=f"{source}: the metadata")
        decoder = _as_stored(decoder, file)
        drafter = f"blk.{len(decoder.layers)}.nextn.eh_proj.weight"
        has_head = file.drafter_layers == 1 and drafter in file.tensors and decoder.mixture is None
        decoder = dataclasses.replace(decoder, prediction_head=has_head)
        tokenizer = tokenizer_files(file, decoder.vocabulary_size)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        # A value has the wrong type.
        raise ConversionError(f"{source}: the metadata is damaged: {error}") from error
    tensors = GgufWeights(file, decoder, interleaved=FAMILIES[configuration["model_type"]].gguf_interleaved)
    decoder = limit_context(_with_rope_factors(decoder, file, tensors), request.context_length, request.source)
    # No offset: in GGUF files Gemma's norms include it.
    weights = QuantizedWeights(tensors, bits=request.options.weight_bits)
    plan = [*weight_plan(decoder), *head_plan(decoder)]
    weights.check(plan)
    make_decoder_folder(
        request.output,
        decoder,
        weights,
        request.options,
        tokenizer=tokenizer,
        source={"kind": "gguf", "model_type": decoder.family, "name": request.name},
        files=[source],
        quantisation={"weights": weights.describe(plan)},
        packages=[*PACKAGES, "gguf"],
        force=request.force,
        progress=request.progress,
    )


def _as_stored(decoder: Decoder, file: GgufFile) -> Decoder:
    """The decoder with its tensors named and stored as in a GGUF file."""
    mixture = decoder.mixture
    # Experts beside a plain feed-forward have their checkpoint's tensors in most files.
    if mixture and not (mixture.beside and "blk.0.ffn_gate_up_exps.weight" in file.tensors):
        tensors = dataclasses.replace(STACKED, router=mixture.tensors.router) if mixture.beside else STACKED
        mixture = dataclasses.replace(mixture, tensors=tensors)

    def stored(mixer: Mixer | None) -> Mixer | None:
        if not isinstance(mixer, DeltaRule):
            return mixer
        return dataclasses.replace(
            mixer, tensors=dataclasses.replace(mixer.tensors, fused_qkvz=False, logarithms=False)
        )

    layers = tuple(dataclasses.replace(layer, mixer=stored(layer.mixer)) for layer in decoder.layers)
    return dataclasses.replace(decoder, mixture=mixture, layers=layers, tensor_names={})


def _with_rope_factors(decoder: Decoder, file: GgufFile, tensors: GgufWeights) -> Decoder:
    """The decoder with the factors that the file divides its rotary frequencies by, if it has any."""
    if (
        ROPE_FACTORS not in file.tensors or not decoder.is_uniform
    ):  # of layers of two forms, `gguf.layer_forms` has them
        return decoder
    factors = tensors.values(ROPE_FACTORS)
    if factors.size != decoder.head_size // 2 or (factors <= 0).any():
        raise ConversionError(
            f"{file.path}: expected {decoder.head_size // 2} positive values in {ROPE_FACTORS}, got {factors.size}, "
            f"the smallest {factors.min()}"
        )
    if any(layer.rotary.scaling for layer in decoder.layers):
        raise ConversionError(
            f"{file.path}: {ROPE_FACTORS} and a rope.scaling.factor scale the rotary embedding twice; such models "
            "cannot be converted"
        )
    scaling = FrequencyFactors(tuple(map(float, factors)))
    layers = (
        dataclasses.replace(layer, rotary=dataclasses.replace(layer.rotary, scaling=scaling))
        for layer in decoder.layers
    )
    return dataclasses.replace(decoder, layers=tuple(layers))

# SPDX-License-Identifier: Apache-2.0
"""Writes a decoder's files into a folder: model.onnx, model.onnx.data, genai_config.json.

A decoder that takes pictures has embedding.onnx too, whose table is in the decoder's data file, and one with a head for
multi-token prediction mtp.onnx, whose weights are. Of a decoder that drafts for another there is drafter.onnx alone.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from flownpu.convert.average_bits import parse_weight_bits
from flownpu.convert.errors import ConversionError
from flownpu.convert.genai_config import EMBEDDING_FILE, genai_config
from flownpu.convert.graph.data_file import DataFile, aligned
from flownpu.convert.graph.decoder import Logits, build_model, rotary_cache_names
from flownpu.convert.graph.drafter import build_drafter
from flownpu.convert.graph.embedding import build_embedding_model
from flownpu.convert.graph.file import DATA_FILE, GRAPH_FILE, SMALL_FILES
from flownpu.convert.graph.paged_decoder import build_paged_model
from flownpu.convert.graph.prediction_head import build_prediction_head
from flownpu.convert.progress import Stage, silent
from flownpu.convert.weights import (
    BiasWeight,
    FloatWeight,
    ProjectionWeight,
    RouterWeight,
    embedding_table,
    head_plan,
    weight_plan,
)
from flownpu.model.folder import DRAFTER, PREDICTION_HEAD
from flownpu.ops import q4nx
from flownpu.ops.definitions.kv_dtypes import KV_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from flownpu.convert.average_bits import AverageBits
    from flownpu.convert.decoder import Decoder
    from flownpu.convert.progress import ProgressCallback
    from flownpu.convert.weight_bits import WeightBits
    from flownpu.convert.weights import WeightSource


@dataclass(frozen=True)
class ModelOptions:
    """The choices of a conversion that the checkpoint does not determine.

    Raises:
        ConversionError: a value is not known, or two exclude each other.
    """

    kv_dtype: str = "bf16"
    """The type of the KV cache: "bf16", "fp16", "fp32", or "int8" with a scale for each row."""
    logits: Logits = "last"
    """The tokens whose logits a run yields: the last of each row, or all."""
    sliding_window_cache: bool = False
    """Layers with a window keep a cache of the window's size. Off by default, because with it GenAI refuses rewind_to
    once a token was evicted, and neither beams nor caches that grow work."""
    paged: bool = False
    """The graph is for GenAI's engine: a KV cache in blocks, and many sequences in one run. GenAI's generators cannot
    run it."""

    weights: str = "auto"
    """Bits of the weights' codes, for `parse_weight_bits`."""

    def __post_init__(self) -> None:
        parse_weight_bits(self.weights)
        if self.kv_dtype not in KV_DTYPES:
            raise ConversionError(f'expected a KV cache type of {", ".join(KV_DTYPES)}, got "{self.kv_dtype}"')
        if self.logits not in ("last", "all"):
            raise ConversionError(f'expected logits to be "last" or "all", got "{self.logits}"')
        if self.paged and (self.logits == "all" or self.sliding_window_cache):
            raise ConversionError(
                "a paged model has the logits of last tokens only, and a KV cache of all tokens: leave --logits and "
                "--sliding-window-cache out, or --paged"
            )

        if self.paged and self.kv_dtype == "int8":
            raise ConversionError(
                "a paged model keeps its KV cache in bf16, fp16 or fp32, not in int8: leave --kv-dtype int8 out, or "
                "--paged"
            )

    @property
    def weight_bits(self) -> WeightBits | AverageBits | None:
        """Bits of the weights' codes; None: as many as the source has."""
        return parse_weight_bits(self.weights)

    def as_dict(self) -> dict[str, Any]:
        """The options by name, for the manifest."""
        return asdict(self)


def output_bytes(decoder: Decoder, weights: WeightSource) -> int:
    """How many bytes `write_model` writes, rounded up."""
    size = sum(
        aligned(math.prod(w.blocks_shape(weights.layout(w))) if isinstance(w, ProjectionWeight) else 4 * w.size)
        for w in (*weight_plan(decoder), *head_plan(decoder))
    )
    tables = ((one.rows(decoder.context_length), decoder.head_size_of(one)) for one in decoder.rotaries)
    return size + sum(2 * aligned(4 * rows * columns // 2) for rows, columns in tables) + SMALL_FILES


def write_model(
    folder: Path,
    decoder: Decoder,
    weights: WeightSource,
    options: ModelOptions,
    *,
    generation: Mapping[str, Any] | None = None,
    stage: str = "quantise",
    progress: ProgressCallback = silent,
) -> dict[str, float]:
    """Writes the model's files.

    Args:
        folder: an existing folder.
        decoder: what to write.
        weights: where the weights' values come from.
        options: see ModelOptions.
        generation: defaults of sampling, as in generation_config.json.
        stage: the name of the stage that is reported.
        progress: called with a `Progress` whenever a part of the work is done.

    Returns:
        The relative error |W - W'| / |W| (Frobenius norm) of each projection, by name.

    Raises:
        ConversionError: a weight is missing or wrong.
        OSError: the folder cannot be written to.
    """
    if decoder.drafting is not None:
        if options.paged or options.sliding_window_cache or options.logits == "all":
            raise ConversionError(
                "a drafter reads the cache of all tokens of another model, which takes its likeliest token: leave "
                "--paged, --sliding-window-cache and --logits out"
            )
        tensors, errors = write_tensors(folder, decoder, weights, stage=stage, progress=progress)
        ir.save(build_drafter(decoder, tensors, options.kv_dtype), folder / DRAFTER)
        return errors
    if options.paged and decoder.image_token_id is not None:
        raise ConversionError(
            "a paged model takes text only, and this one takes images: add --vision-weights none, or leave --paged out"
        )
    if options.paged and (decoder.has_states or decoder.output_gate):
        raise ConversionError(
            "a paged model has attention without an output gate in each layer, and this one has others: leave --paged "
            "out"
        )
    if options.paged and not decoder.is_uniform:
        raise ConversionError(
            "a paged model has heads of one size, and keys and values in each layer, and this one has others: leave "
            "--paged out"
        )
    if options.paged and decoder.head_sinks:
        raise ConversionError("a paged model has attention without sinks, and this one has them: leave --paged out")
    if options.paged and any(rotary.has_two_tables(decoder.context_length) for rotary in decoder.rotaries):
        raise ConversionError(
            "a paged model has one table of RoPE for all lengths, and this one's frequencies change behind "
            f"{decoder.rotaries[0].first_rows(decoder.context_length)} tokens (LongRoPE): leave --paged out"
        )
    tensors, errors = write_tensors(folder, decoder, weights, stage=stage, progress=progress)
    if options.paged:
        model = build_paged_model(decoder, tensors, kv_dtype=options.kv_dtype)
    else:
        model = build_model(
            decoder,
            tensors,
            kv_dtype=options.kv_dtype,
            logits=options.logits,
            sliding_window_cache=options.sliding_window_cache,
        )
    ir.save(model, folder / GRAPH_FILE)
    if decoder.image_token_id is not None:
        table = tensors[embedding_table(decoder).name]
        ir.save(build_embedding_model(decoder, table), folder / EMBEDDING_FILE)
    if decoder.prediction_head:
        ir.save(build_prediction_head(decoder, tensors, options.kv_dtype), folder / PREDICTION_HEAD)
    settings = genai_config(
        decoder,
        filename=GRAPH_FILE,
        kv_dtype=options.kv_dtype,
        sliding_window_cache=options.sliding_window_cache,
        paged=options.paged,
        generation=generation,
    )
    (folder / "genai_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return errors


def write_tensors(
    folder: Path,
    decoder: Decoder,
    weights: WeightSource,
    *,
    stage: str = "quantise",
    progress: ProgressCallback = silent,
) -> tuple[dict[str, ir.TensorProtocol], dict[str, float]]:
    """Writes model.onnx.data: the weights and the tables of RoPE.

    Args:
        folder: an existing folder.
        decoder: the decoder whose weights are written.
        weights: where their values come from.
        stage: the name of the stage that is reported.
        progress: called with a `Progress` whenever a part of the work is done.

    Returns:
        The tensors by name, and the relative error of each projection, as for `write_model`.

    Raises:
        ConversionError: a weight is missing or wrong.
        OSError: the folder cannot be written to.
    """
    plan = [*weight_plan(decoder), *head_plan(decoder)]
    total = sum(weight.size for weight in plan if isinstance(weight, ProjectionWeight))
    counter = Stage(progress, stage, total, "weights")
    errors: dict[str, float] = {}
    tensors: dict[str, ir.TensorProtocol] = {}
    with DataFile(folder / DATA_FILE) as data:
        for weight in plan:
            if isinstance(weight, ProjectionWeight):
                shape = weight.blocks_shape(weights.layout(weight))
                parts = _measured(weights, weight, errors, counter)
                tensors[weight.name] = data.write(weight.name, ir.DataType.UINT8, shape, parts)
            elif isinstance(weight, RouterWeight):
                matrix = weights.matrix(weight)
                matrix = weight.arranged(matrix) if isinstance(weight, FloatWeight) else _narrowest(matrix)
                dtype = ir.DataType.from_numpy(matrix.dtype)
                tensors[weight.name] = data.write(weight.name, dtype, matrix.shape, [matrix])
            else:
                values = weights.vector(weight)
                values = values.reshape(weight.shape) if isinstance(weight, BiasWeight) else values
                tensors[weight.name] = data.write(weight.name, ir.DataType.FLOAT, values.shape, [values])
        for index, rotary in enumerate(decoder.rotaries):
            caches = rotary.caches(decoder.context_length, decoder.head_size_of(rotary))
            for name, cache in zip(rotary_cache_names(index), caches, strict=True):
                tensors[name] = data.write(name, ir.DataType.FLOAT, cache.shape, [cache])
    return tensors, errors


def _narrowest(values: NDArray[np.float32]) -> NDArray[Any]:
    """The values in bfloat16 if that holds them exactly, else in float32."""
    rounded = values.astype(q4nx.BFLOAT16)
    return rounded if np.array_equal(rounded.astype(np.float32), values) else values


def _measured(
    weights: WeightSource, projection: ProjectionWeight, errors: dict[str, float], counter: Stage
) -> Iterator[NDArray[np.uint8]]:
    """Yields the blocks of a projection, and at the end puts its relative error into `errors`."""
    squared_error = squares = 0.0
    for part in weights.blocks(projection):
        squared_error += part.squared_error
        squares += part.squares
        yield part.blocks
        counter.advance(part.size)
    errors[projection.name] = math.sqrt(squared_error / squares) if squares else 0.0

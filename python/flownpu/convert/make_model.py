# SPDX-License-Identifier: Apache-2.0
"""Makes models of random weights in the shapes of public models, with their size and speed, for benchmarks."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flownpu.convert.decoder_folder import PACKAGES, limit_context
from flownpu.convert.errors import ConversionError
from flownpu.convert.families import read_decoder
from flownpu.convert.manifest import write_manifest
from flownpu.convert.model_writer import ModelOptions, output_bytes, write_model
from flownpu.convert.output import output_folder
from flownpu.convert.progress import silent
from flownpu.convert.weights import BlockPart, NormWeight
from flownpu.model.shapes import SHAPES
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from flownpu.convert.progress import ProgressCallback
    from flownpu.convert.weights import BiasWeight, ProjectionWeight, RouterWeight

# Most positions of the rotary tables by default: as many as benchmarks need. 131072 would take 268 MB for Gemma3-4B.
_CONTEXT = 40960

# Blocks that are drawn at once: 20 MB.
_BLOCKS_AT_ONCE = 32768


class _Codes(NamedTuple):
    """How the random codes are distributed.

    Attributes:
        layout: the layout of the blocks that hold them.
        mean: a code's mean; the minimum is -mean times the scale, so that weights have mean 0.
        deviation: a code's standard deviation.
    """

    layout: q4nx.Layout
    mean: float
    deviation: float


# Codes 0..15 are drawn uniformly: their variance is (16^2 - 1) / 12, their mean 7.5.
_EVEN = _Codes(q4nx.NARROW, 7.5, math.sqrt(255 / 12))
# Without minima a weight is scale (code - 8), so codes need the mean 8: each code 0 becomes 8. Then there are codes
# 1..15, with 8 twice as often as any other, of variance 2 (1 + 4 + 9 + ... + 49) / 16.
_SYMMETRIC = _Codes(q4nx.SYMMETRIC, 8, math.sqrt(280 / 16))
# Maps each byte, which holds two codes, to the byte in which each code 0 is 8.
_EIGHT_FOR_ZERO = np.array(
    [byte | (0 if byte & 0x0F else 0x08) | (0 if byte & 0xF0 else 0x80) for byte in range(256)], np.uint8
)


class RandomWeights:
    """A `WeightSource` of random weights with mean 0 and variance 1/K, where K is a weight's number of columns.

    A product with a normalised vector then has variance 1 whatever K is, so that activations stay finite, attention
    scores neither vanish nor saturate, and logits spread like a standard normal.
    """

    def __init__(self, seed: int, *, symmetric: bool = False) -> None:
        """Takes the seed, and whether every minimum shall be -8 times its scale, as in GGUF's Q4_0."""
        self._codes = _SYMMETRIC if symmetric else _EVEN
        self._random = np.random.Generator(np.random.SFC64(seed))  # numpy's fastest generator

    def vector(self, weight: NormWeight | BiasWeight) -> NDArray[np.float32]:
        """Ones for a norm, zeros for a bias, float32 [size]."""
        return np.full(weight.size, isinstance(weight, NormWeight), np.float32)

    def matrix(self, weight: RouterWeight) -> NDArray[np.float32]:
        """A router's weight [experts, columns] of variance 1/K: experts are equally likely, and bfloat16 holds it."""
        values = self._random.standard_normal((weight.rows, weight.columns), np.float32)
        return (values / np.float32(math.sqrt(weight.columns))).astype(q4nx.BFLOAT16).astype(np.float32)

    def layout(self, projection: ProjectionWeight) -> q4nx.Layout:  # noqa: ARG002  (WeightSource's parameter)
        """The layout of every projection's blocks."""
        return self._codes.layout

    def blocks(self, projection: ProjectionWeight) -> Iterator[BlockPart]:
        """Draws the blocks of a projection, whole rows of blocks at a time."""
        _, across, _ = projection.blocks_shape(self._codes.layout)
        for run in projection.runs:
            rows = sum(source.rows for source in run)
            at_once = max(1, _BLOCKS_AT_ONCE // across) * q4nx.BLOCK_ROWS
            for first in range(0, rows, at_once):
                count = min(at_once, rows - first)
                yield BlockPart(self._draw(count, projection.columns), count * projection.columns)

    def _draw(self, rows: int, columns: int) -> NDArray[np.uint8]:
        layout, mean, deviation = self._codes
        shape = q4nx.blocks_shape(rows, columns, layout)
        blocks = np.empty(shape[:2], layout.dtype)
        codes = self._bytes(blocks["codes"].shape)
        blocks["codes"] = codes if layout.minima else _EIGHT_FOR_ZERO[codes]
        # Scales differ from their mean by up to a quarter, so that neighbouring groups differ as in real weights.
        scale = np.linspace(0.75, 1.25, 256) / (deviation * math.sqrt(columns))
        choice = self._bytes(blocks["scale"].shape)
        for name, table in (("scale", scale), ("minimum", -mean * scale))[: 1 + layout.minima]:
            blocks[name] = table.astype(q4nx.BFLOAT16).view(np.uint16)[choice]
        return _without_padding(blocks.view(np.uint8).reshape(shape), rows, columns, layout)

    def _bytes(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        return np.frombuffer(self._random.bytes(math.prod(shape)), np.uint8).reshape(shape)


def _without_padding(blocks: NDArray[np.uint8], rows: int, columns: int, layout: q4nx.Layout) -> NDArray[np.uint8]:
    """The blocks with zeros as padding, which only the last row and the last column of blocks can have."""
    if over := columns % layout.block_columns:
        blocks[:, -1:] = q4nx.pack(*q4nx.unpack(blocks[:, -1:], blocks.shape[0] * q4nx.BLOCK_ROWS, over), layout)
    if over := rows % q4nx.BLOCK_ROWS:
        blocks[-1:] = q4nx.pack(*q4nx.unpack(blocks[-1:], over, columns), layout)
    return blocks


def make_model(
    shape: str,
    output: Path,
    *,
    kv_dtype: str = "bf16",
    sliding_window_cache: bool = False,
    paged: bool = False,
    context_length: int | None = None,
    layers: int | None = None,
    symmetric: bool = False,
    seed: int = 0,
    force: bool = False,
    progress: ProgressCallback = silent,
) -> None:
    """Writes a model of random weights that ORT GenAI loads; its tokenizer has a token for each byte, and no words.

    Args:
        shape: a key of SHAPES, such as "gemma3-1b".
        output: the folder to make.
        kv_dtype: the type of the KV cache, "bf16", "fp16", "fp32" or "int8".
        sliding_window_cache: layers with a window keep a cache of the window's size.
        paged: write the graph for GenAI's engine, with a KV cache in blocks.
        context_length: how many positions the model is made for; None: the shape's own number, but at most 40960.
        layers: how many of the shape's layers the model has; None: all.
        symmetric: weights have no minima, as in checkpoints in GGUF's Q4_0.
        seed: the seed of the random numbers.
        force: replace a model that a conversion wrote to `output`.
        progress: called with a `Progress` whenever a part of the work is done.

    Raises:
        ConversionError: there is no such shape, a number is out of range, or the output cannot be written; nothing is
            left behind.
    """
    if shape not in SHAPES:
        raise ConversionError(f'expected one of the shapes {", ".join(SHAPES)}, got "{shape}"')
    options = ModelOptions(kv_dtype, "last", sliding_window_cache, paged)
    decoder = read_decoder(SHAPES[shape])
    if not 1 <= (layers or 1) <= len(decoder.layers):
        raise ConversionError(f"{shape}: expected 1 to {len(decoder.layers)} layers, got {layers}")
    decoder = dataclasses.replace(decoder, layers=decoder.layers[:layers])
    decoder = limit_context(decoder, context_length or min(decoder.context_length, _CONTEXT), shape)
    weights = RandomWeights(seed, symmetric=symmetric)
    with output_folder(output, force=force, size=output_bytes(decoder, weights)) as folder:
        write_model(folder, decoder, weights, options, stage="draw", progress=progress)
        _write_byte_tokenizer(folder)
        write_manifest(
            folder,
            source={
                "kind": "random",
                "shape": shape,
                "layers": len(decoder.layers),
                "symmetric": symmetric,
                "seed": seed,
            },
            settings={**options.as_dict(), "context_length": decoder.context_length},
            quantisation={"format": "q4nx"},
            packages=PACKAGES,
            progress=progress,
        )


def _write_byte_tokenizer(folder: Path) -> None:
    """Writes a tokenizer whose tokens are the 256 bytes, for tools that need one."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "▁"])}
    vocabulary.update({f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)})
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": t, **special}
            for t, i in vocabulary.items()
            if t in ("<pad>", "<eos>", "<bos>", "<unk>")
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "vocab": vocabulary, "merges": []},
    }
    settings = {
        "tokenizer_class": "GemmaTokenizer",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    for name, value in (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

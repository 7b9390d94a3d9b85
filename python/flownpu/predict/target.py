# SPDX-License-Identifier: Apache-2.0
"""The model to predict: given by its name, its folder (converted, of GenAI, or a checkpoint), or its config.json."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flownpu.convert.families import read_decoder
from flownpu.convert.weight_bits import FOUR_BITS
from flownpu.errors import FlowNPUError
from flownpu.model.folder import locate_graph, read_json
from flownpu.model.onnx_file import load_model, reading
from flownpu.model.shapes import SHAPES
from flownpu.npu.artifacts import DEFAULT_CONTEXT
from flownpu.npu.layers import decoder_of_model, placing, read_encoder
from flownpu.npu.models import ENCODERS, decoder_of_configuration
from flownpu.predict.by_operators import DecoderByOperators
from flownpu.predict.published import CONTEXTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flownpu._native import EncoderShape
    from flownpu.aie.programs.decoder_shape import DecoderShape
    from flownpu.convert.weight_bits import WeightBits


# Vision towers of known models.
_ENCODERS = {"gemma3-4b": "siglip"}


@dataclass(frozen=True)
class Target:
    """A model whose speed is predicted.

    Attributes:
        name: the model's name; the same as in published tables, if they have it.
        decoder: its layers and LM head; those of a model of which the array takes single operators are described apart.
        encoder: its image encoder; None: it takes no images.
    """

    name: str
    decoder: DecoderShape | DecoderByOperators
    encoder: EncoderShape | None = None

    @property
    def whole(self) -> DecoderShape:
        """The decoder whose layers the array takes whole; FlowNPUError if it takes single operators."""
        if isinstance(self.decoder, DecoderByOperators):
            raise FlowNPUError(
                f"{self.name}: expected layers of one form; others have prices on an NPU alone: predict it for "
                "--device kraken-350"
            )
        return self.decoder

    def lengths(self, asked: Sequence[int] = ()) -> list[int]:
        """Context lengths to predict, in tokens: those of `asked`, or else 1k, 2k, 4k .. up to the model's context.

        Raises:
            FlowNPUError: a length is not in 1 .. the model's longest context.
        """
        longest = self.decoder.positions
        for length in asked:
            if not 0 < length <= longest:
                raise FlowNPUError(f"expected contexts of 1 to {longest} tokens, which {self.name} has, got {length}")
        return list(asked) or [length for length in CONTEXTS if length <= longest] or [longest]


def target(text: str, *, int8_cache: bool = False, bits: WeightBits | None = None) -> Target:
    """The model of a name, a folder or a file.

    `int8_cache`: whether a model that is not converted yet keeps keys and values in int8; a graph has its own type.
    `bits`: of the weights of such a model; None: 4.

    Raises:
        FlowNPUError: there is none (the message has the nearest names), it is a graph whose cache is not in int8 though
            `int8_cache` is set, or `bits` are given for a graph, or the NPU's designs have no place for it.
        MissingDependencyError: a graph is to be read, and onnx_ir is not installed.
    """
    if text in SHAPES:
        return known(text, int8_cache=int8_cache, bits=bits)
    path = Path(text)
    if not path.exists():
        raise FlowNPUError(f"no such model, folder or file: {text}{nearest(text, SHAPES)}")
    if path.is_file() and path.suffix == ".json":
        return _of_file(path, int8_cache=int8_cache, bits=bits)
    if path.is_dir() and not (path / "genai_config.json").is_file() and not (path / "model.onnx").is_file():
        if (path / "config.json").is_file():
            return _of_file(path / "config.json", int8_cache=int8_cache, bits=bits)
        raise FlowNPUError(
            f"{path}: expected a folder with genai_config.json, model.onnx or config.json, found none of them"
        )
    return _of_graph(path, int8_cache=int8_cache, bits=bits)


@cache
def known(name: str, *, int8_cache: bool = False, bits: WeightBits | None = None) -> Target:
    """One of `SHAPES`; FlowNPUError if the NPU's designs have no place for it."""
    encoder = ENCODERS[_ENCODERS[name]] if name in _ENCODERS else None
    tokens = encoder.tokens if encoder else 0
    with placing(name):
        decoder = _described(SHAPES[name], name, tokens, int8_cache=int8_cache, bits=bits or FOUR_BITS)
        # Published tables are of 4 bits.
        return Target(name if bits in (None, FOUR_BITS) else f"{name} {'/'.join(map(str, bits))}", decoder, encoder)


def _described(
    config: Mapping[str, Any], where: str, image_tokens: int, *, int8_cache: bool, bits: WeightBits
) -> DecoderShape | DecoderByOperators:
    """The decoder of a configuration, whole or, where its layers differ in form, by operators."""
    found = read_decoder(config, where=where)
    if found.has_one_form:
        return decoder_of_configuration(config, where, image_tokens, int8_cache=int8_cache, bits=bits)
    if int8_cache:
        raise ValueError("attention by itself reads keys and values in bf16: leave --kv-dtype int8 out")
    return DecoderByOperators(found, bits)


def nearest(text: str, names: Mapping[str, object]) -> str:
    """The end of an error message about an unknown name: the most similar of `names`, or all of them."""
    close = difflib.get_close_matches(text.lower(), names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; known are {', '.join(names)}"


def _of_file(path: Path, *, int8_cache: bool, bits: WeightBits | None) -> Target:
    if path.name == "genai_config.json":
        return _of_graph(path.parent, int8_cache=int8_cache, bits=bits)
    with placing(path):
        decoder = _described(read_json(path), str(path), 0, int8_cache=int8_cache, bits=bits or FOUR_BITS)
    return Target(path.parent.name or str(path), decoder)


def _of_graph(path: Path, *, int8_cache: bool, bits: WeightBits | None) -> Target:
    """The decoder that a session finds in a graph; a graph without FlowNPU's operators is rewritten first."""
    if bits is not None:
        raise FlowNPUError(f"{path}: expected no bits of weights for a graph, which has its own")
    file, settings = locate_graph(path)
    model = load_model(file, purpose="flownpu predict")
    with reading(file):
        if not any(node.domain == "ai.flownpu" for node in model.graph):
            from flownpu.graph_rewrites import rewrite  # noqa: PLC0415 needs the extra "convert"

            rewrite(model)
        with placing(file):
            decoder = decoder_of_model(model, settings.get("context_length") or DEFAULT_CONTEXT)
    if int8_cache and not decoder.shape.int8_cache:
        raise FlowNPUError(f"{path}: expected a KV cache in int8, got another: convert with --kv-dtype int8")
    folder = path if path.is_dir() else path.parent
    return Target(path.name, decoder, read_encoder(folder) if settings.get("vision") else None)

# SPDX-License-Identifier: Apache-2.0
"""Which calls of the NPU's designs a decoder makes, and the folder of artifacts that has them (and an encoder's).

A token is one call, or a few, of `decode_layer` (aie/designs/decode_layer.py). A prompt is prefilled in chunks, for
each size operator by operator:

    rms_norm, then in each layer  dequant_engine, gemm (QKV) -> norm_rope -> flow_qkv -> dequant_engine, gemm (output)
                                  -> residual -> dequant_engine, gemm (gate, up) -> dequant_engine, gemm (down)
                                  -> residual
    residual                      with post-norms rms_norm_add, then rms_norm; without, add_rms_norm

The attributes of each call, by which the host finds it, are those that the functions below give it; floats are the bits
of an f32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from flownpu import __version__
from flownpu.aie.artifact_index import ArtifactCall
from flownpu.aie.artifacts import ArtifactFolder
from flownpu.aie.call_family import CallSweep, Positions
from flownpu.aie.compiled_artifacts import write_compiled
from flownpu.aie.designs.common import TILES, bits, ceil_div, limits_of
from flownpu.aie.designs.decode_layer import DecodeLayer, Layer
from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.norm_rope import NormRope
from flownpu.aie.designs.vector_operators import ResidualRMSNorm, RMSNorm
from flownpu.aie.emulated_artifacts import write_emulated
from flownpu.aie.toolchain import find_toolchain
from flownpu.errors import FlowNPUError
from flownpu.npu_decoder import read_decoder
from flownpu.npu_encoder import read_encoder
from flownpu.npu_encoder_calls import EncoderCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from flownpu.aie.iron_compat import Program
    from flownpu.npu_decoder import Decoder

__all__ = [
    "CHUNKS",
    "DEFAULT_CONTEXT",
    "Built",
    "DecoderCalls",
    "build_artifacts",
    "calls_of_decoder",
    "calls_of_model",
]

# Tokens of a chunk. GEMM's tiles have a fourth of them as rows, 64 at most (designs/gemm.py: what fills L1).
CHUNKS = (64, 256)
DEFAULT_CONTEXT = 4096  # positions, of models that are made for as many
_CORES = 4  # of the operators on rows
_DECODE = "decode_layer"  # the operator of a token's calls
_EPILOGUES = {"none": 0, "geglu": 1, "swiglu": 2}  # values of the attribute `epilogue`


@dataclass(frozen=True)
class DecoderCalls:
    """The calls of a decoder over caches of `context` positions.

    Attributes:
        decoder: whose calls.
        target: npu1 or npu2.
        context: positions of a layer's cache, a multiple of `chunk`.
        weights: what GEMM multiplies by, bf16 or bfp16.
    """

    decoder: Decoder
    target: str
    context: int
    weights: str = "bf16"

    def decode(self) -> Iterator[ArtifactCall]:
        """The calls of one token: of the layers first .. + layers, the last with the LM head.

        Raises:
            ValueError: the target is not npu2, or a layer and the LM head are more than a call takes.
        """
        if self.target != "npu2":
            raise ValueError(f"[decode_layer] expected npu2, got {self.target}")
        decoder, shape = self.decoder, self.decoder.shape
        first, norms = 0, "-post" * shape.post_norms + "-qk" * shape.qk_norm
        array = f"decode_layer-{shape.hidden}-{shape.feed_forward}-{self._heads}-{shape.activation}{norms}"
        for count in DecodeLayer(shape).calls(len(decoder.windows), decoder.vocabulary):
            end = first + count
            windows, vocabulary = decoder.windows[first:end], decoder.vocabulary if end == len(decoder.windows) else 0
            attributes: dict[str, int | tuple[int, ...]] = {
                "hidden": shape.hidden, "heads": shape.heads, "kv_heads": shape.kv_heads, "head_size": shape.d,
                "feed_forward": shape.feed_forward, "geglu": int(shape.activation == "geglu"),
                "post_norms": int(shape.post_norms), "qk_norm": int(shape.qk_norm), "epsilon": bits(decoder.epsilon),
                "scale": bits(decoder.scale), "context": self.context, "first": first, "layers": count,
                "windows": windows, "tables": decoder.tables[first:end], "n_tables": decoder.table_count,
                "vocabulary": vocabulary,
            }  # fmt: skip
            yield self._moving(
                _DECODE, array, f"layers{first}-{end - 1}" + "-head" * bool(vocabulary), attributes,
                partial(self._layers, first, end, vocabulary), 1, shape.keys, [CallSweep(0, 1, 1, w) for w in windows],
            )  # fmt: skip
            first = end

    def _layers(self, first: int, end: int, vocabulary: int, position: int) -> Program:
        decoder = self.decoder
        kinds = zip(decoder.windows[first:end], decoder.tables[first:end], strict=True)
        layers = [Layer(window or None, table) for window, table in kinds]
        return DecodeLayer(decoder.shape).program(
            position, self.context, layers=layers, vocabulary=vocabulary, epsilon=decoder.epsilon, scale=decoder.scale,
            tables=decoder.table_count,
        )  # fmt: skip

    # --- Prefill ------------------------------------------------------------------------------------------------------

    def prefill(self, tokens: int) -> Iterator[ArtifactCall]:
        """The calls of a chunk of so many tokens.

        Raises:
            ValueError: a design has no place for the sizes.
        """
        yield from self._norms(tokens)
        yield from self._projections(tokens)
        yield from self._attention(tokens)

    def _norms(self, tokens: int) -> Iterator[ArtifactCall]:
        n, epsilon, post_norms = self.decoder.shape.hidden, self.decoder.epsilon, self.decoder.shape.post_norms
        attributes = {"rows": tokens, "n": n, "epsilon": bits(epsilon)}
        residual = "rms_norm_add" if post_norms else "add_rms_norm"
        norm, add = RMSNorm(self.target, n, _CORES), ResidualRMSNorm(self.target, n, post_norms, _CORES)
        for operator, design in (("rms_norm", norm), (residual, add)):
            yield self._fixed(operator, f"{operator}-n{n}", f"rows{tokens}", attributes, design, tokens, epsilon)

    def _projections(self, tokens: int) -> Iterator[ArtifactCall]:
        for projection in dict.fromkeys(self.decoder.shape.projections):
            n, k, gated = projection.rows, projection.columns, projection.gated
            engine, kind = DequantEngine(self.target, self.weights), "-gated" * gated
            yield self._fixed(
                "dequant_engine", f"dequant_engine-{self.weights}", f"m{n}-k{k}{kind}",
                {"m": n, "k": k, "gated": int(gated)}, engine, n, k, gated=gated, interleaved=gated,
            )  # fmt: skip
            epilogue = self.decoder.shape.activation if gated else "none"
            gemm = Gemm(self.target, self.weights, epilogue, m=tokens // TILES)
            if n < gemm.width and not gated:
                gemm = Gemm(self.target, self.weights, epilogue, m=tokens // TILES, n=gemm.n // 2)
            yield self._fixed(
                "gemm", f"gemm-{self.weights}-{epilogue}-{gemm.m}x{gemm.n}", f"m{tokens}-k{k}-n{n}",
                {"rows": tokens, "k": k, "n": n, "epilogue": _EPILOGUES[epilogue]}, gemm, tokens, k, n, line=k,
            )  # fmt: skip

    def _attention(self, tokens: int) -> Iterator[ArtifactCall]:
        decoder, shape, target = self.decoder, self.decoder.shape, self.target
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_size": shape.d}
        sizes = {"tokens": tokens, **heads, "context": self.context}
        rope = NormRope(target, shape.heads, shape.kv_heads, shape.d, shape.qk_norm, _CORES)
        rope_array = f"norm_rope-{self._heads}" + "-qk" * shape.qk_norm
        for table in dict.fromkeys(decoder.tables):
            of_rope = {"n_tables": decoder.table_count, "table": table, "qk_norm": int(shape.qk_norm)}
            turn = partial(
                rope.program, tokens, capacity=self.context, tables=decoder.table_count, table=table,
                epsilon=decoder.epsilon,
            )  # fmt: skip
            yield self._moving(
                "norm_rope", rope_array, f"tokens{tokens}-table{table}",
                sizes | of_rope | {"epsilon": bits(decoder.epsilon)}, turn, tokens,
            )  # fmt: skip
        flow = FlowQKV(target, shape.heads, shape.kv_heads, shape.d)
        block = TILES * flow.queries
        for window in dict.fromkeys(decoder.windows):
            attend = partial(flow.program, tokens, capacity=self.context, window=window or None, scale=decoder.scale)
            yield self._moving(
                "flow_qkv", f"flow_qkv-{self._heads}", f"tokens{tokens}-window{window}",
                sizes | {"window": window, "scale": bits(decoder.scale)}, attend, tokens, flow.keys,
                [CallSweep(top, block, tokens, window) for top in range(0, tokens, block)],
            )  # fmt: skip

    # --- What calls share ---------------------------------------------------------------------------------------------

    @property
    def _heads(self) -> str:
        shape = self.decoder.shape
        return f"h{shape.heads}-g{shape.kv_heads}-d{shape.d}"

    def _fixed(
        self, operator: str, array: str, name: str, attributes: Mapping[str, int], design: Any, *sizes: Any,
        **options: Any,
    ) -> ArtifactCall:  # fmt: skip
        """A call that is the same at every position."""

        def program(_position: int) -> Program:
            made: Program = design.program(*sizes, **options)
            return made

        return ArtifactCall(operator, array, name, _lists(attributes), Positions(self.context), program, moves=False)

    def _moving(
        self, operator: str, array: str, name: str, attributes: Mapping[str, int | tuple[int, ...]],
        program: Callable[[int], Program], tokens: int, keys: int = 1, sweeps: Iterable[CallSweep] = (),
    ) -> ArtifactCall:  # fmt: skip
        """A call of so many tokens that depends on the position of the first, and on sweeps over the cache."""
        most = limits_of(self.target).iteration_maximum
        positions = Positions(self.context - tokens + 1, keys, most, tuple(dict.fromkeys(sweeps)))
        return ArtifactCall(operator, array, name, _lists(attributes), positions, program, moves=True)


def _lists(attributes: Mapping[str, int | tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {key: value if isinstance(value, tuple) else (value,) for key, value in attributes.items()}


# --- The folder -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """What `build_artifacts` made.

    Attributes:
        folder: with the artifacts.
        context: positions of its caches; 0 if it has none, without a decoder.
        calls: in the folder.
        made: how many of them were not up to date.
        left_out: what the model has no calls for, and why.
        missing: of the toolchain; if any, xclbins and the index are not there.
    """

    folder: Path
    context: int
    calls: int
    made: int
    left_out: list[str]
    missing: list[str]


def build_artifacts(
    model: Path,
    *,
    kind: Literal["emulate", "xclbin"] = "emulate",
    target: str = "npu2",
    context: int | None = None,
    weights: str = "bf16",
    output: Path | None = None,
    report: Callable[[str, int, int], None] = lambda _call, _done, _all: None,
) -> Built:
    """Makes the artifacts of a converted model, or brings them up to date.

    Args:
        model: folder that `flownpu convert` wrote.
        kind: for the emulator, or for an NPU, which needs AMD's toolchain; without it plans and MLIR are written.
        target: npu1 or npu2.
        context: positions of the KV cache; rounded up to a chunk. None: the model's, 4096 at most.
        weights: what a prompt's matrix products multiply by, bf16 or bfp16.
        output: the folder to make. None: `artifacts/emulate` or `artifacts/<target>` in the model's.
        report: hears which call is done next, how many are done, and of how many.

    Raises:
        FlowNPUError: the model is none, or the NPU's designs have no place for it.
        MissingDependencyError: onnx_ir is not installed.
        ToolchainError: a compiler failed.
        ValueError: the output is something else.
    """
    calls, left_out = calls_of_model(model, target, context, weights)
    output = output or model / "artifacts" / ("emulate" if kind == "emulate" else target)
    done = 0

    def advance(call: ArtifactCall) -> None:
        nonlocal done
        report(f"{call.array} {call.name}", done, len(calls))
        done += 1

    positions = calls[0].positions.count if calls[0].operator == _DECODE else 0
    about = {"versions": {"flownpu": __version__}, "context": positions, "weights": weights}
    if kind == "emulate":
        made, missing = write_emulated(output, target, calls, about=about, report=advance), []
    else:
        toolchain, tools = find_toolchain()
        missing = [str(tool) for tool in tools]
        folder = ArtifactFolder(output, target, toolchain, versions={"flownpu": __version__})
        made = write_compiled(folder, calls, report=advance)
    return Built(output, positions, len(calls), made, left_out, missing)


def calls_of_model(
    model: Path, target: str, context: int | None = None, weights: str = "bf16"
) -> tuple[list[ArtifactCall], list[str]]:
    """The calls that `build_artifacts` makes for a model, those of a token first, and what was left out, and why.

    Of a model that takes images the decoder may be left out, or the encoder, but not both.

    Raises:
        FlowNPUError: the model is none, or the NPU's designs have no place for it.
    """

    def of_decoder() -> tuple[list[ArtifactCall], list[str]]:
        decoder = read_decoder(model)
        try:
            return calls_of_decoder(decoder, target, context or min(decoder.positions, DEFAULT_CONTEXT), weights)
        except ValueError as error:
            raise FlowNPUError(f"{model}: the NPU's designs have no place for it: {error}") from error

    try:
        encoder, reason = read_encoder(model), None
    except FlowNPUError as error:
        encoder, reason = None, error
    if encoder is None and reason is None:
        return of_decoder()
    images = [] if encoder is None else list(EncoderCalls(encoder, target).calls())
    left_out = [] if reason is None else [f"the encoder of images, which stays on the host: {reason}"]
    try:
        calls, chunks = of_decoder()
    except FlowNPUError as error:
        if not images:
            raise
        return images, [f"the decoder, which stays on the host: {error}"]
    return calls + images, left_out + chunks


def calls_of_decoder(decoder: Decoder, target: str, context: int, weights: str) -> tuple[list[ArtifactCall], list[str]]:
    """A decoder's calls, those of one token first, and what was left out: the sizes of chunks, and why.

    Raises:
        ValueError: the NPU's designs have no place for the decoder.
    """
    shape = decoder.shape
    chunk = math.lcm(shape.keys, FlowQKV(target, shape.heads, shape.kv_heads, shape.d).keys)
    context = ceil_div(context, chunk) * chunk
    if context > ceil_div(decoder.positions, chunk) * chunk:
        raise ValueError(
            f"expected a context of {decoder.positions} or less, which the model is made for, got {context}"
        )
    of_decoder = DecoderCalls(decoder, target, context, weights)
    calls, left_out = {(call.array, call.name): call for call in of_decoder.decode()}, []
    for tokens in CHUNKS:
        if tokens > context:
            continue
        try:
            found = [call for call in of_decoder.prefill(tokens) if call.plan(call.last)]
        except ValueError as error:
            # What breaks the limits breaks them on each tile: the first says it.
            reason = " ".join(str(error).splitlines()[:2])
            left_out.append(f"chunks of {tokens} tokens (prompts go token by token): {reason}")
        else:
            calls |= {(call.array, call.name): call for call in found}
    return list(calls.values()), left_out

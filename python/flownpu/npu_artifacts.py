# SPDX-License-Identifier: Apache-2.0
"""The programs of a model, of its decoder and of its encoder of images, and the folder of artifacts that has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flownpu import __version__
from flownpu.aie.artifacts import ArtifactFolder
from flownpu.aie.compiled_artifacts import write_compiled
from flownpu.aie.designs.common import ceil_div
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.emulated_artifacts import write_emulated
from flownpu.aie.programs.decode import decode_program
from flownpu.aie.programs.encode import encode_program
from flownpu.aie.programs.prefill import prefill_program
from flownpu.aie.programs.program import calls_of
from flownpu.aie.toolchain import find_toolchain
from flownpu.errors import FlowNPUError
from flownpu.model_folder import locate_graph, other_graphs, read_genai_config
from flownpu.npu_decoder import read_decoder
from flownpu.npu_encoder import read_encoder
from flownpu.npu_operators import programs_of_graph

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from flownpu.aie.programs.call import ArtifactCall
    from flownpu.aie.programs.decoder import Decoder
    from flownpu.aie.programs.program import Program

__all__ = ["CHUNKS", "DEFAULT_CONTEXT", "Built", "build_artifacts", "programs_of_decoder", "programs_of_model"]

# Tokens of a chunk. GEMM's tiles have a fourth of them as rows, 64 at most (designs/gemm.py: what fills L1).
CHUNKS = (64, 256)
DEFAULT_CONTEXT = 4096  # positions, of models that are made for as many


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
    """Makes the artifacts of a model, or brings them up to date.

    Args:
        model: folder that `flownpu convert` wrote, or an .onnx file.
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
    programs, left_out = programs_of_model(model, target, context, weights)
    output = output or (model if model.is_dir() else model.parent) / "artifacts" / (
        "emulate" if kind == "emulate" else target
    )
    calls, done = calls_of(programs), 0

    def advance(call: ArtifactCall) -> None:
        nonlocal done
        report(f"{call.array} {call.name}", done, len(calls))
        done += 1

    positions = max(program.context for program in programs)
    about = {"versions": {"flownpu": __version__}, "context": positions, "weights": weights}
    if kind == "emulate":
        made, missing = write_emulated(output, target, programs, about=about, report=advance), []
    else:
        toolchain, tools = find_toolchain()
        missing = [str(tool) for tool in tools]
        folder = ArtifactFolder(output, target, toolchain, versions={"flownpu": __version__})
        made = write_compiled(folder, programs, report=advance)
    return Built(output, positions, len(calls), made, left_out, missing)


def programs_of_model(
    model: Path, target: str, context: int | None = None, weights: str = "bf16"
) -> tuple[list[Program], list[str]]:
    """The programs that `build_artifacts` makes for a model, that of a token first, and what was left out, and why.

    Where a decoder or an encoder is none that the NPU computes whole, and for a model that is for ONNX Runtime alone,
    they are those of its operators.

    Raises:
        FlowNPUError: the model is none, or the NPU's designs have no place for anything of it.
    """
    path, settings = locate_graph(model)
    if settings and model.is_dir():
        return _programs_of_parts(model, path, target, context, weights)
    programs, left_out = programs_of_graph(path, target, context or DEFAULT_CONTEXT)
    if not programs:
        raise FlowNPUError(f"{path}: the NPU's designs have no place for it: {_why_none(left_out)}")
    return programs, left_out


def _programs_of_parts(
    model: Path, path: Path, target: str, context: int | None, weights: str
) -> tuple[list[Program], list[str]]:
    """Those of a model for ORT GenAI, whose decoder is `path`."""

    def of_decoder(decoder: Decoder) -> tuple[list[Program], list[str]]:
        try:
            return programs_of_decoder(decoder, target, context or min(decoder.positions, DEFAULT_CONTEXT), weights)
        except ValueError as error:
            raise _NoPlaceError(f"{model}: the NPU's designs have no place for it: {error}") from error

    images: list[Program] = []
    left_out: list[str] = []
    try:
        encoder = read_encoder(model)
        images = [] if encoder is None else [encode_program(encoder, target)]
    except FlowNPUError as error:
        vision = next(iter(other_graphs(model, read_genai_config(model))))
        images, left = programs_of_graph(vision, target, DEFAULT_CONTEXT)
        left_out += [f"the encoder of images as a whole: {error}", *left]
    try:
        programs, left = of_decoder(read_decoder(model))
    except _NoPlaceError as error:
        if not images:
            raise
        programs, left = [], [f"the decoder, which stays on the host: {error}"]
    except FlowNPUError as error:
        programs, left = programs_of_graph(path, target, context or DEFAULT_CONTEXT)
        if not programs and not images:
            raise
        left = [f"the decoder as a whole: {error}", *left]
    return _different(programs + images), left_out + left


class _NoPlaceError(FlowNPUError):
    """A decoder that an NPU computes whole, but not in this context, or not on this target."""


def _different(programs: list[Program]) -> list[Program]:
    """Each once: two graphs may have operators of one size."""
    found = {(program.kind, tuple(program.attributes.items()), program.tokens): program for program in programs}
    return list(found.values())


def _why_none(left_out: list[str]) -> str:
    return "; ".join(left_out) or "it has neither products with weights nor attention of FlowNPU's operators"


def programs_of_decoder(
    decoder: Decoder, target: str, context: int, weights: str = "bf16"
) -> tuple[list[Program], list[str]]:
    """A decoder's programs, that of a token first, and what was left out: the sizes of chunks, and why.

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
    programs, left_out = [decode_program(decoder, target, context)], []
    for tokens in CHUNKS:
        if tokens > context:
            continue
        try:
            programs.append(prefill_program(decoder, target, context, tokens, weights))
        except ValueError as error:
            # What breaks the limits breaks them on each tile: the first says it.
            reason = " ".join(str(error).splitlines()[:2])
            left_out.append(f"chunks of {tokens} tokens (prompts go token by token): {reason}")
    return programs, left_out

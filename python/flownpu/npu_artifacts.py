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
from flownpu.aie.programs.chunks import seconds, with_fewest
from flownpu.aie.programs.decode import decode_program
from flownpu.aie.programs.encode import encode_program
from flownpu.aie.programs.prefill import prefill_program
from flownpu.aie.programs.program import calls_of
from flownpu.aie.toolchain import find_toolchain
from flownpu.errors import FlowNPUError
from flownpu.npu_decoder import read_decoder
from flownpu.npu_encoder import read_encoder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from flownpu.aie.programs.call import ArtifactCall
    from flownpu.aie.programs.decoder import Decoder
    from flownpu.aie.programs.program import Program

__all__ = [
    "CHUNKS",
    "DEFAULT_CONTEXT",
    "Built",
    "build_artifacts",
    "default_weights",
    "programs_of_decoder",
    "programs_of_model",
]

# Tokens of a chunk: GEMM's megatiles have 256 rows, and each size more than the last halves what a prompt's rest leaves
# empty at most. A model of 4 billion weights is predicted to take a fourth of a second for the changes of array of a
# chunk, and as long for the products of 600 tokens; beyond 4096 tokens there is little left to win.
CHUNKS = (256, 512, 1024, 2048, 4096)
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
    weights: str | None = None,
    output: Path | None = None,
    report: Callable[[str, int, int], None] = lambda _call, _done, _all: None,
) -> Built:
    """Makes the artifacts of a converted model, or brings them up to date.

    Args:
        model: folder that `flownpu convert` wrote.
        kind: for the emulator, or for an NPU, which needs AMD's toolchain; without it plans and MLIR are written.
        target: npu1 or npu2.
        context: positions of the KV cache; rounded up to a chunk. None: the model's, 4096 at most.
        weights: what a prompt's matrix products multiply by, bf16 or bfp16. None: what the target multiplies fastest.
        output: the folder to make. None: `artifacts/emulate` or `artifacts/<target>` in the model's.
        report: hears which call is done next, how many are done, and of how many.

    Raises:
        FlowNPUError: the model is none, or the NPU's designs have no place for it.
        MissingDependencyError: onnx_ir is not installed.
        ToolchainError: a compiler failed.
        ValueError: the output is something else.
    """
    weights = weights or default_weights(target)
    programs, left_out = programs_of_model(model, target, context, weights)
    output = output or model / "artifacts" / ("emulate" if kind == "emulate" else target)
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


def default_weights(target: str) -> str:
    """What GEMM multiplies by: XDNA2's matrix unit reads bf16 in block floating point anyway, stored so it is half."""
    return "bf16" if target == "npu1" else "bfp16"


def programs_of_model(
    model: Path, target: str, context: int | None = None, weights: str | None = None
) -> tuple[list[Program], list[str]]:
    """The programs that `build_artifacts` makes for a model, that of a token first, and what was left out, and why.

    Of a model that takes images the decoder may be left out, or the encoder, but not both.

    Raises:
        FlowNPUError: the model is none, or the NPU's designs have no place for it.
    """

    def of_decoder() -> tuple[list[Program], list[str]]:
        decoder = read_decoder(model)
        try:
            return programs_of_decoder(decoder, target, context or min(decoder.positions, DEFAULT_CONTEXT), weights)
        except ValueError as error:
            raise FlowNPUError(f"{model}: the NPU's designs have no place for it: {error}") from error

    try:
        encoder, reason = read_encoder(model), None
    except FlowNPUError as error:
        encoder, reason = None, error
    if encoder is None and reason is None:
        return of_decoder()
    images = [] if encoder is None else [encode_program(encoder, target)]
    left_out = [] if reason is None else [f"the encoder of images, which stays on the host: {reason}"]
    try:
        programs, chunks = of_decoder()
    except FlowNPUError as error:
        if not images:
            raise
        return images, [f"the decoder, which stays on the host: {error}"]
    return programs + images, left_out + chunks


def programs_of_decoder(
    decoder: Decoder, target: str, context: int, weights: str | None = None
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
    programs, reasons = [decode_program(decoder, target, context)], dict[str, list[str]]()
    for tokens in CHUNKS:
        if tokens > context:
            continue
        try:
            programs.append(prefill_program(decoder, target, context, tokens, weights or default_weights(target)))
        except ValueError as error:
            # What breaks the limits breaks them on each tile: the first says it.
            reasons.setdefault(" ".join(str(error).splitlines()[:2]), []).append(str(tokens))
    instead = "" if len(programs) > 1 else " (prompts go token by token)"
    left_out = [f"chunks of {', '.join(sizes)} tokens{instead}: {reason}" for reason, sizes in reasons.items()]
    return with_fewest(programs, seconds), left_out

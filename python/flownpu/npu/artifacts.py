# SPDX-License-Identifier: Apache-2.0
"""Makes the programs of a model's decoder and image encoder, and writes them into a folder of artifacts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flownpu import __version__
from flownpu.aie.artifacts.compiled import write_compiled
from flownpu.aie.artifacts.emulated import write_emulated
from flownpu.aie.artifacts.folder import ArtifactFolder
from flownpu.aie.artifacts.toolchain import find_toolchain
from flownpu.aie.cost.chips import CHIPS
from flownpu.aie.designs.common import ceil_div
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.programs.call import ArtifactCall
from flownpu.aie.programs.chunks import seconds, with_fewest
from flownpu.aie.programs.cost import Prices
from flownpu.aie.programs.decode import DECODE_WAYS, decode_program
from flownpu.aie.programs.dispatches import with_short_dispatches
from flownpu.aie.programs.encode import encode_program
from flownpu.aie.programs.prefill import prefill_program
from flownpu.aie.programs.program import calls_of
from flownpu.errors import FlowNPUError
from flownpu.model.folder import locate_graph, other_graphs, read_genai_config
from flownpu.model.onnx_file import load_model, reading
from flownpu.npu.layers import decoder_of_model, read_decoder, read_encoder
from flownpu.npu.operators import LeftOut, first_of, programs_of_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from flownpu.aie.programs.decoder_shape import DecoderShape
    from flownpu.aie.programs.program import Program

# Tokens of a chunk. 256 are the rows of GEMM's megatiles; each size is twice the one before, so that the chunk for a
# prompt's rest of more than 256 tokens is at least half full. For a model of 4 billion weights, a chunk's changes of
# array are predicted to take a quarter of a second, as long as the products of 600 tokens: beyond 4096 tokens little is
# gained.
CHUNKS = (256, 512, 1024, 2048, 4096)
DEFAULT_CONTEXT = 4096  # positions, for models that are made for at least as many, or do not say


@dataclass(frozen=True)
class Built:
    """The result of `build_artifacts`.

    Attributes:
        folder: the folder with the artifacts.
        context: positions of the KV caches; 0 without a decoder, which alone has caches.
        calls: how many calls the folder has.
        made: how many calls (for the emulator) or files (for an NPU) were not up to date, and were made.
        left_out: parts of the model that there are no calls for.
        missing: tools of the toolchain that were not found; if any, there are no xclbins and no index.
    """

    folder: Path
    context: int
    calls: int
    made: int
    left_out: list[LeftOut]
    missing: list[str]


def build_artifacts(
    model: Path,
    *,
    kind: Literal["emulate", "xclbin"] = "emulate",
    target: str = "npu2",
    context: int | None = None,
    weights: str | None = None,
    output: Path | None = None,
    ways: Sequence[str] = DECODE_WAYS,
    report: Callable[[str, int, int], None] = lambda _call, _done, _all: None,
    say: Callable[[str], None] = lambda _: None,
) -> Built:
    """Makes the artifacts of a model, or brings them up to date.

    Args:
        model: a folder that `flownpu convert` wrote, or an .onnx file.
        kind: "emulate" for the emulator; "xclbin" for an NPU, which needs AMD's toolchain: without it only plans and
            MLIR are written.
        target: the NPU's generation, "npu1" or "npu2".
        context: positions of the KV cache; rounded up to a chunk. None: the model's, 4096 at most.
        weights: the type of the weights in a prompt's matrix products, "bf16" or "bfp16". None: the target's fastest.
        output: the folder to make. None: `artifacts/emulate` or `artifacts/<target>` in the model's folder.
        ways: the ways of decoding to choose from, among DECODE_WAYS.
        report: called before each call is made, with its name, how many are done, and how many there are.
        say: called with lines on what compiling costs, before it starts, and on calls that cost more.

    Raises:
        FlowNPUError: there is no such model, or the NPU's designs have no place for anything of it.
        MissingDependencyError: onnx_ir is not installed.
        ToolchainError: a compiler failed.
        ValueError: `output` exists and holds something else.
    """
    weights = weights or default_weights(target)
    programs, left_out = programs_of_model(model, target, context, weights, ways)
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
        folder = ArtifactFolder(output, target, toolchain, versions={"flownpu": __version__}, say=say)
        made = write_compiled(folder, programs, report=advance, say=say)
    return Built(output, positions, len(calls), made, left_out, missing)


def default_weights(target: str) -> str:
    """The type of GEMM's weights. On XDNA2 it is bfp16: half as large, and GEMM converts bf16 to it anyway."""
    return "bf16" if target == "npu1" else "bfp16"


def programs_of_model(
    model: Path, target: str, context: int | None = None, weights: str | None = None, ways: Sequence[str] = DECODE_WAYS
) -> tuple[list[Program], list[LeftOut]]:
    """The programs that `build_artifacts` makes for a model, the decode program first, and what was left out.

    If the NPU cannot compute a decoder or an encoder as a whole, they are the programs of single operators.

    Raises:
        FlowNPUError: there is no such model, or the NPU's designs have no place for anything of it.
    """
    path, settings = locate_graph(model)
    if settings and model.is_dir():
        return _programs_of_parts(model, path, target, context, weights, ways)
    whole = _programs_of_whole(path, target, context or DEFAULT_CONTEXT, weights, ways)
    if whole is not None:
        return whole
    programs, left_out = programs_of_graph(path, target, context or DEFAULT_CONTEXT)
    if not programs:
        nothing = "it has neither products with weights nor attention of FlowNPU's operators"
        reasons = "; ".join(map(str, left_out)) or nothing
        raise FlowNPUError(f"{path}: the NPU's designs have no place for it: {reasons}")
    return programs, left_out


def _programs_of_whole(
    path: Path, target: str, context: int, weights: str | None, ways: Sequence[str]
) -> tuple[list[Program], list[LeftOut]] | None:
    """The programs of a graph that is for ONNX Runtime alone, such as optimum's, if the NPU computes it as a decoder.

    None: a session places its operators one by one, too.
    """
    model = load_model(path, purpose="flownpu build MODEL")
    with reading(path):
        try:
            decoder = decoder_of_model(model, context)
            return programs_of_decoder(decoder, target, min(context, decoder.model.positions), weights, ways)
        except ValueError:
            return None


def _programs_of_parts(
    model: Path, path: Path, target: str, context: int | None, weights: str | None, ways: Sequence[str]
) -> tuple[list[Program], list[LeftOut]]:
    """The programs of a model for ORT GenAI, whose decoder's graph is `path`."""
    images: list[Program] = []
    left_out: list[LeftOut] = []
    try:
        encoder = read_encoder(model)
        images = [] if encoder is None else [encode_program(encoder, target)]
    except FlowNPUError as error:
        vision = next(iter(other_graphs(model, read_genai_config(model))))
        images, left = programs_of_graph(vision, target, DEFAULT_CONTEXT)
        left_out += [LeftOut("the encoder of images as a whole", str(error)), *left]
    try:
        decoder = read_decoder(model)
        positions = context or min(decoder.positions, DEFAULT_CONTEXT)
        programs, left = programs_of_decoder(decoder, target, positions, weights, ways)
    except FlowNPUError as error:
        programs, left = programs_of_graph(path, target, context or DEFAULT_CONTEXT)
        if not programs and not images:
            raise
        left = [LeftOut("the decoder as a whole", str(error)), *left]
    except ValueError as error:  # an NPU computes it as a whole, but not in this context, or not on this target
        reason = f"{model}: the NPU's designs have no place for it: {error}"
        if not images:
            raise FlowNPUError(reason) from error
        programs, left = [], [LeftOut("the decoder, which stays on the host", reason)]
    # Two graphs may have operators of the same sizes, and each program is kept once.
    different = {(each.kind, tuple(each.attributes.items()), each.tokens): each for each in programs + images}
    return list(different.values()), left_out + left


def programs_of_decoder(
    decoder: DecoderShape,
    target: str,
    context: int,
    weights: str | None = None,
    ways: Sequence[str] = DECODE_WAYS,
    prices: Prices | None = None,
) -> tuple[list[Program], list[LeftOut]]:
    """A decoder's programs, the decode program first, and what was left out: ways of decoding, sizes of chunks, images.

    Args:
        decoder: the decoder's sizes.
        target: npu1 or npu2.
        context: positions of a layer's cache; rounded up to a chunk.
        weights: as in `build_artifacts`.
        ways: as in `build_artifacts`.
        prices: the prices by which ways and chunks are chosen; they keep costs by a call's name, so they must not have
            been used for another decoder. None: prices of the NPU in docs/model.md.

    Raises:
        ValueError: the NPU's designs have no place for the decoder.
    """
    shape = decoder.shape
    designs = [design(target, shape.heads, shape.kv_heads, shape.d) for design in (FlowKV, FlowQKV)]
    chunk = math.lcm(*(design.keys for design in designs))
    context = ceil_div(context, chunk) * chunk
    if context > ceil_div(decoder.positions, chunk) * chunk:
        raise ValueError(
            f"expected a context of {decoder.positions} or less, which the model is made for, got {context}"
        )
    prices = prices or Prices(CHIPS["kraken-350"])
    choice = decode_program(decoder, target, context, ways, prices)
    programs, left_out = (
        [choice.program],
        [LeftOut("a way of decoding (tokens go another)", said, on_host=False) for said in choice.refused],
    )
    weights, reasons = weights or default_weights(target), dict[str, list[str]]()
    calls = dict[tuple[str, str], ArtifactCall]()
    for tokens in CHUNKS:
        if tokens > context:
            continue
        try:
            programs.append(prefill_program(decoder, target, context, tokens, weights, calls=calls, prices=prices))
        except ValueError as error:
            reasons.setdefault(first_of(error), []).append(str(tokens))
    instead = "" if len(programs) > 1 else " (prompts go token by token)"
    left_out += [
        LeftOut(f"chunks of {', '.join(sizes)} tokens{instead}", reason, on_host=False)
        for reason, sizes in reasons.items()
    ]
    programs = with_fewest(programs, lambda program: seconds(program, prices))
    if decoder.block:
        try:
            programs.append(prefill_program(decoder, target, context, decoder.block, weights, block=True, calls=calls))
        except ValueError as error:
            what = f"images of {decoder.block} tokens (prompts with images are refused)"
            left_out.append(LeftOut(what, first_of(error)))
    return [with_short_dispatches(program, prices) for program in programs], left_out

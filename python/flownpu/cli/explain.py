# SPDX-License-Identifier: Apache-2.0
"""`flownpu explain`: the place of each node with its reason, the folded parts, and the expected speed."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flownpu.cli import options
from flownpu.cli.output import bytes_text, console, print_json, print_table
from flownpu.errors import require
from flownpu.machine import describe_threads

if TYPE_CHECKING:
    from flownpu.explain.overview import Attention, Explanation
    from flownpu.explain.program import ProgramPrice

_SHOWN = 3  # names of nodes that share a reason


def explain(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            callback=options.model_folder,
            help="A model folder, a folder that GenAI's builder or optimum wrote, an .onnx file, or a name.",
        ),
    ],
    device: options.DeviceOption = None,
    option: options.Option = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            "--bandwidth", metavar="GB/S", min=0.1, help="Rate at which the CPU reads memory. (default: measured)"
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show which nodes of a model run where and why, without running it and without an NPU.

    Shows in how few calls attention runs on the NPU; the bytes of weights and KV cache; the NPU's programs with
    predicted times; tokens/s that memory allows on this CPU, and that are predicted for an NPU. A model that is not
    converted is converted in memory.
    """
    require("onnx_ir", extra="convert", purpose="flownpu explain")
    from flownpu.explain.overview import explain as explain_model  # noqa: PLC0415 other commands need none of it

    chosen = options.provider_options(device, None, option)
    explanation = explain_model(model, chosen, None if bandwidth is None else 1e9 * bandwidth)
    if as_json:
        document = asdict(explanation)
        document["placement"]["counts"] = explanation.placement.count()
        print_json({**document, "predicted": True})
        return
    _print(explanation)


def _print(explanation: "Explanation") -> None:
    kinds = {
        "converted": "a converted model",
        "compiled": "compiled, in nodes that stand for all of their parts; explain the model that it was made of",
        "genai": "int4 of ORT GenAI's builder; repacked when a session is made, or by `flownpu convert`",
        "plain": "a plain graph, for `flownpu convert`",
    }
    console.print(f"{explanation.path}: {kinds[explanation.source]}")
    if explanation.other_graphs:
        others = ", ".join(explanation.other_graphs)
        console.print(
            f"The model takes pictures; this is its decoder. Its other graphs, to explain by themselves: {others}"
        )
    console.print(explanation.placement.summary)
    console.print(f"CPU threads, unless a session's option says otherwise: {describe_threads()}")
    _print_nodes(explanation)
    for reason in dict.fromkeys(explanation.placement.whole_prompts):
        console.print(f"Long prompts are computed at once: {reason}")
    _print_attentions(explanation)
    _print_misses(explanation)
    _print_bytes(explanation)
    _print_speed(explanation)


def _print_nodes(explanation: "Explanation") -> None:
    """A row for each reason that excludes nodes from the device."""
    reasons: dict[tuple[str, str], Counter[str]] = {}
    for node in explanation.placement.nodes:
        if node.place not in ("flownpu", "folded"):
            reasons.setdefault((node.place, node.reason), Counter())[node.operator] += 1
    rows = [
        (place, ", ".join(f"{name} ({count})" for name, count in operators.most_common()), reason)
        for (place, reason), operators in reasons.items()
    ]
    if rows:
        print_table("not on the device", ("where", "nodes", "why"), (), rows, "fold")


def _print_attentions(explanation: "Explanation") -> None:
    """A row for each group of equal blocks."""
    alike: dict[tuple[str, str, str, str, str], list[Attention]] = {}
    for attention in explanation.attentions:
        window = "all" if attention.window < 0 else str(attention.window)
        heads = f"{attention.heads} heads, {attention.kv_heads} KV, d {attention.head_size}" if attention.kind else ""
        key = (attention.kind or "not matched", heads, window, *_folding(attention))
        alike.setdefault(key, []).append(attention)
    if alike:
        title = "attention on the NPU (3: one call, 2: without the last product, 1: nothing folded)"
        rows = [(_layers(attentions), *key) for key, attentions in alike.items()]
        print_table(title, ("layers", "kind", "sizes", "window", "prompt", "token"), (), rows, "fold")


def _folding(attention: "Attention") -> tuple[str, str]:
    prompt = "" if attention.prompt_level is None else f"{attention.prompt_level}: {attention.prompt_reason}"
    token = "" if attention.token_level is None else f"{attention.token_level}: {attention.token_reason}"
    return prompt, token


def _layers(attentions: "list[Attention]") -> str:
    """The numbers of layers, such as "0-4, 6", or the names of the first nodes."""
    numbers = [attention.layer for attention in attentions]
    layers = [number for number in numbers if number is not None]
    if len(layers) < len(numbers):
        return _some([attention.node for attention in attentions])
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][-1] + 1:
            ranges[-1][1:] = [layer]
        else:
            ranges.append([layer])
    return ", ".join("-".join(map(str, found)) for found in ranges)


def _print_misses(explanation: "Explanation") -> None:
    if explanation.source == "converted":
        return
    if not explanation.misses:
        console.print("`flownpu convert` leaves nothing: every rule that nearly matched matched.")
        return
    rows = [(miss.rule, _some(list(miss.nodes)), miss.reason) for miss in explanation.misses]
    print_table("left by `flownpu convert`", ("rule", "nodes", "why"), (), rows, "fold")


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _print_bytes(explanation: "Explanation") -> None:
    kinds = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in explanation.weight_bytes.items())
    text = f"Weights: {kinds}"
    if explanation.source != "converted":
        text += f"; converted: {bytes_text(explanation.converted_weight_bytes)}"
    console.print(text)
    if explanation.kv_bytes_per_token:
        console.print(
            f"KV cache: {bytes_text(1000 * explanation.kv_bytes_per_token)} for 1000 tokens, in all layers together"
        )


def _print_speed(explanation: "Explanation") -> None:
    speed = explanation.speed
    after = "" if explanation.source == "converted" else " of the converted model"
    console.print(f"NPU ({speed.npu.chip}) would take{after}: {speed.npu.text if speed.npu.takes else 'nothing'}")
    if not speed.npu.takes:
        console.print(f"  for {speed.npu.text}")
    for left in speed.npu.left_out:
        console.print(f"  but not {left}")
    for program in speed.npu.programs:
        _print_program(program)
    if not speed.points or speed.read_bandwidth is None:
        console.print("No tokens/s: the graph has no KV cache, so it decodes nothing.")
        return
    rows = []
    for point in speed.points:
        npu = "" if point.npu_tokens_per_second is None else f"{point.npu_tokens_per_second:.1f}"
        first = "" if point.npu_ttft_seconds is None else f"{point.npu_ttft_seconds:.2f} s"
        cpu = "" if point.cpu_tokens_per_second is None else f"{point.cpu_tokens_per_second:.1f}"
        rows.append((str(point.context), cpu, npu, first))
    title = f"decoding, tokens/s: bounds and predictions, nothing was run{after and ','}{after}"
    print_table(title, ("context", "CPU, at most", "NPU, predicted", "NPU, first token"), (), rows, "fold")
    console.print(
        f"CPU: a step reads {bytes_text(speed.step_bytes)} of weights and its KV cache, at "
        f"{speed.read_bandwidth / 1e9:.1f} GB/s. NPU: the cost model's (docs/model.md), for {speed.npu.chip}."
    )


def _print_program(program: "ProgramPrice") -> None:
    what = f"a chunk of {program.tokens} tokens" if program.kind == "prefill" else "a token"
    console.print(
        f"The program of {what} at position {program.position}: {program.steps} steps in {program.dispatches} "
        f"dispatches, {program.changes} changes of array, {program.instruction_words} instruction words, "
        f"{bytes_text(program.read_bytes)} read and {bytes_text(program.written_bytes)} written; predicted "
        f"{1e3 * program.total_seconds:.2f} ms:"
    )
    console.print("  " + ", ".join(f"{name} {1e3 * value:.2f}" for name, value in program.seconds.items()))
    rows = [
        (str(call.steps), call.operator if call.array != "host" else f"{call.operator} (host)", call.name,
         str(call.instruction_words), bytes_text(call.read_bytes), bytes_text(call.written_bytes),
         f"{1e3 * call.seconds:.3f}")
        for call in program.calls
    ]  # fmt: skip
    headings = "steps", "operator", "call", "words", "read", "written", "ms"
    print_table("its calls, and what one of each is predicted to take", headings, (), rows, "fold")

# SPDX-License-Identifier: Apache-2.0
"""Finds the NPU's part of a decoder, and the most tokens per second of a CPU and an NPU.

CPU: a decode step must read its weights and its KV cache, so the rate of reading memory bounds it:

    tokens/s <= read rate / (bytes of the weights + bytes of the keys and values that are seen)

NPU: predicted by the cost model (docs/model.md), not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.cost.chips import CHIPS
from flownpu.aie.cost.parameters import VALUES
from flownpu.bench.roofline import graph_traffic, read_bandwidth
from flownpu.explain.program import ProgramPrice, price_of
from flownpu.npu.artifacts import DEFAULT_CONTEXT
from flownpu.npu.layers import decoder_of_model
from flownpu.predict.prices import Prediction, predicted_programs
from flownpu.predict.target import Target

if TYPE_CHECKING:
    from flownpu.npu.operators import LeftOut

_CHIP = "kraken-350"
_CONTEXTS = (1024, 4096, 32768)


@dataclass(frozen=True)
class NPU:
    """The work and the predicted speed of an NPU.

    Attributes:
        takes: whether it computes the decoder's layers and head.
        chip: the chip that the prediction is for.
        text: in words, how it computes them, or why not.
        left_out: parts of the model that it has no calls for.
        programs: the programs that the host would run, with their predicted cost: a token, and a chunk of each size.
    """

    takes: bool
    chip: str
    text: str
    left_out: tuple[LeftOut, ...] = ()
    programs: tuple[ProgramPrice, ...] = ()


@dataclass(frozen=True)
class Point:
    """Predictions for one length of the context; tokens per second are those of decoding.

    Attributes:
        context: the context's length in tokens.
        cpu_tokens_per_second: the most that this machine's memory allows; None: the graph is not a decoder.
        npu_tokens_per_second: the cost model's prediction; None: the NPU does not compute the decoder.
        npu_ttft_seconds: the predicted time to the first token after a prompt of `context` tokens; None likewise.
    """

    context: int
    cpu_tokens_per_second: float | None
    npu_tokens_per_second: float | None
    npu_ttft_seconds: float | None


@dataclass(frozen=True)
class Speed:
    """Predicted speed of a converted graph.

    Attributes:
        npu: what the NPU would compute.
        read_bandwidth: bytes per second at which this machine reads memory, measured unless given; None without a KV
            cache.
        step_bytes: bytes that a decode step reads with an empty cache, which are its weights.
        points: predictions; empty for a graph without a KV cache, which has no decode steps.
    """

    npu: NPU
    read_bandwidth: float | None
    step_bytes: int
    points: tuple[Point, ...]


def speed_of(model: Any, context_length: int | None, head_size: int, bandwidth: float | None = None) -> Speed:
    """Predicts the speed of a converted model.

    Args:
        model: an onnx_ir.Model with FlowNPU's operators.
        context_length: how many positions the model is made for; None: not known.
        head_size: the head size for attentions that do not have it as an attribute, or 0.
        bandwidth: bytes per second at which memory is read; None: this machine's is measured.
    """
    traffic = graph_traffic(model.graph, head_size)
    positions = context_length or DEFAULT_CONTEXT
    contexts = [context for context in _CONTEXTS if context <= positions] or [positions]
    prediction, npu = _npu(model, positions, contexts)
    if not traffic.kv_layers:
        return Speed(npu, None, traffic.weights, ())
    rate = bandwidth or read_bandwidth()
    points = tuple(_point(context, rate / traffic.bytes_at(context), prediction) for context in contexts)
    return Speed(npu, rate, traffic.weights, points)


def _npu(model: Any, positions: int, contexts: list[int]) -> tuple[Prediction | None, NPU]:
    try:
        decoder = decoder_of_model(model, positions)
        most = max(*contexts, min(positions, DEFAULT_CONTEXT))
        _, left_out = predicted_programs(decoder, min(positions, DEFAULT_CONTEXT))
        prediction = Prediction(Target("model", decoder), most, CHIPS[_CHIP], VALUES)
        token, *others = prediction.programs
    except ValueError as error:
        return None, NPU(False, _CHIP, f"the NPU's designs have no place for it: {error}")
    chunks = sorted((program for program in others if program.kind == "prefill"), key=lambda program: program.tokens)
    layers, calls = len(decoder.layers), _counted(len(token.steps), "call")
    operators = " and ".join(dict.fromkeys(step.call.operator for step in token.steps))
    words = [f"a token: {layers} layers and the LM head in {calls} of {operators}"]
    if states := layers - len(decoder.windows):
        words[0] += f" (the host computes the states of {_counted(states, 'layer')})"
    if chunks:
        sizes = " and ".join(str(chunk.tokens) for chunk in reversed(chunks))
        arrays = _counted(len({step.call.array for chunk in chunks for step in chunk.steps}), "array")
        words.append(f"a prompt: in chunks of {sizes} tokens, operator by operator ({arrays})")
    else:
        words.append("a prompt: token by token")
    words += [f"an image: its {each.tokens} tokens in a chunk of their own" for each in others if each.kind == "block"]
    words.append("embeddings, token selection and sampling: on the host")
    prices = tuple(
        price_of(program, 0 if program.kind == "prefill" else contexts[0] - 1, prediction.prices)
        for program in prediction.programs
    )
    return prediction, NPU(True, _CHIP, "; ".join(words), tuple(left_out), prices)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _point(context: int, cpu: float, prediction: Prediction | None) -> Point:
    if prediction is None:
        return Point(context, cpu, None, None)
    return Point(context, cpu, 1 / prediction.token(context).total, prediction.prompt(context).total)

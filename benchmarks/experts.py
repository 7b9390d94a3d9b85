# SPDX-License-Identifier: Apache-2.0
"""Times a mixture of experts, in turn with dense products that multiply a row by as many weights.

    python -m benchmarks.experts qwen3-30b-a3b

runs at the root of the repository, with the module flownpu_testing (`make test` builds it). The products are a gated
one and a plain one of `experts_per_token` times an expert's size: the time that the mixture takes longer is the cost of
routing. Each call has other rows, which choose other experts, and the products use other parts of the same weights, so
that no cache holds them. For one row, the rate of reading the weights (and the mixture's router) is shown as a share of
the memory read roof.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from flownpu.bench.roofline import read_bandwidth
from flownpu.convert.decoder import Decoder
from flownpu.convert.families import read_decoder
from flownpu.convert.make_model import RandomWeights
from flownpu.convert.mixture import Mixture
from flownpu.convert.weights import ProjectionWeight, RouterWeight, weight_plan
from flownpu.model.shapes import SHAPES
from flownpu.ops import q4nx
from tests.ops.device import Node

_CALLS = 64


@dataclass(frozen=True)
class Weights:
    """Random weights of one layer's mixture: the router in bf16, the experts' projections as Q4NX blocks."""

    router: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


def weights_of(decoder: Decoder) -> Weights:
    """Random weights for the decoder's first layer."""
    random, found = RandomWeights(0), {}
    for weight in weight_plan(replace(decoder, layers=decoder.layers[:1])):
        if isinstance(weight, RouterWeight):
            found["router"] = random.matrix(weight).astype(q4nx.BFLOAT16)
        elif isinstance(weight, ProjectionWeight) and weight.by_expert:
            blocks = np.concatenate([part.blocks for part in random.blocks(weight)])
            found["gate_up" if weight.gated else "down"] = blocks
    return Weights(**found)


def mixture_calls(
    decoder: Decoder, mixture: Mixture, weights: Weights, rows: int, options: dict[str, str]
) -> list[Callable[[], None]]:
    """Runs of Q4NXMoE, each on other rows."""
    given = [weights.router, weights.gate_up, weights.down]
    states = _states(decoder, rows)
    node = Node(
        "Q4NXMoE",
        [states[0], *given],
        constants=(1, 2, 3),
        options=options,
        num_experts=mixture.experts,
        experts_per_token=mixture.experts_per_token,
        hidden_size=decoder.hidden_size,
        expert_size=decoder.feed_forward_size,
        normalize_routing_weights=int(mixture.normalize),
    )
    y = np.empty_like(states[0])
    return [node.bound([x, *given], [y]) for x in states]


def product_calls(
    decoder: Decoder, mixture: Mixture, weights: Weights, rows: int, options: dict[str, str]
) -> list[Callable[[], None]]:
    """Runs of the two products, each with other weights."""
    hidden, inner = decoder.hidden_size, mixture.experts_per_token * decoder.feed_forward_size
    parts = mixture.experts // mixture.experts_per_token
    height, width = inner // q4nx.BLOCK_ROWS, inner // q4nx.GROUP
    ups = weights.gate_up.reshape(-1)[: parts * 2 * inner * weights.gate_up.shape[1] * 20]
    ups = ups.reshape(parts, 2 * height, *weights.gate_up.shape[1:])
    downs = weights.down.reshape(-1)[: parts * hidden // q4nx.BLOCK_ROWS * width * 640]
    downs = downs.reshape(parts, hidden // q4nx.BLOCK_ROWS, width, 640)
    states, inside, y = (
        _states(decoder, rows),
        np.empty((rows, inner), np.float32),
        np.empty((rows, hidden), np.float32),
    )
    first = Node("Q4NXMatMul", [states[0], ups[0]], constants=(1,), options=options, M=inner, K=hidden, gating="swiglu")
    second = Node("Q4NXMatMul", [inside, downs[0]], constants=(1,), options=options, M=hidden, K=inner)
    pairs = [
        (first.bound([x, up], [inside]), second.bound([inside, down], [y]))
        for x, up, down in zip(states, cycle(ups), cycle(downs), strict=False)
    ]
    return [partial(_run_both, *pair) for pair in pairs]


def _run_both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _states(decoder: Decoder, rows: int) -> np.ndarray:
    count = max(1, _CALLS // rows)
    return np.random.default_rng(rows).standard_normal((count, rows, decoder.hidden_size), dtype=np.float32)


def main(
    shape: Annotated[str, typer.Argument(help="A shape of `flownpu make-model` with experts.")],
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,512",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of both.")] = 12,
    activations: Annotated[str, typer.Option(help="bf16 or int8.")] = "int8",
) -> None:
    """Times both in turn."""
    decoder = read_decoder(SHAPES[shape])
    if decoder.mixture is None:
        raise typer.BadParameter(f"{shape} has no experts")
    weights, roof = weights_of(decoder), read_bandwidth()
    size = sum(w.nbytes for w in (weights.gate_up, weights.down)) * decoder.mixture.experts_per_token
    size //= decoder.mixture.experts
    table = Table("rows", "what", "median, us", "fastest tenth, us", "GB/s", "of roof")
    for count in map(int, rows.split(",")):
        times: dict[str, list[float]] = {"mixture": [], "products": []}
        calls = {
            "mixture": mixture_calls(decoder, decoder.mixture, weights, count, {"activations": activations}),
            "products": product_calls(decoder, decoder.mixture, weights, count, {"activations": activations}),
        }
        for _ in range(repeats):
            for name, several in calls.items():
                for call in islice(several, _CALLS):
                    started = perf_counter()
                    call()
                    times[name].append(perf_counter() - started)
        for name, found in times.items():
            fast, bytes_read = (
                float(np.quantile(found, 0.1)),
                size + (weights.router.nbytes if name == "mixture" else 0),
            )
            rate = bytes_read / fast
            told = (f"{rate / 1e9:.1f}", f"{rate / roof:.0%}") if count == 1 else ("", "")
            table.add_row(str(count), name, f"{median(found) * 1e6:.0f}", f"{fast * 1e6:.0f}", *told)
    console = Console()
    console.print(f"{shape}, {activations}; memory read roof {roof / 1e9:.1f} GB/s")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)

# SPDX-License-Identifier: Apache-2.0
"""Random graphs over every operator that the CPU device takes, as a strategy of hypothesis."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies
from numpy.typing import NDArray

from tests.fuzz.choices import Choices
from tests.fuzz.graphs.builder import Builder
from tests.fuzz.operators.table import operators_of

MOST_NODES = 12
# Bytes of a node's choices and of the graph's own; when they have run out, further choices are the simplest ones.
NODE_BYTES, HEAD_BYTES = 64, 64


def instruction_sets() -> tuple[str, ...]:
    """Names of the kernels' instruction sets that this processor supports, the best first."""
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    needs: dict[str, set[str]] = {"avx512": {"avx512_bf16", "avx512_vnni"}, "avx2": {"avx2", "fma"}, "generic": set()}
    return tuple(name for name, needed in needs.items() if needed <= flags)


INSTRUCTION_SETS = instruction_sets()


@dataclass
class Case:
    """A model, the inputs of its runs, and how its session is made.

    `feeds`: the inputs of each run. `options`: the provider's options. `optimise`: how far ONNX Runtime optimises the
    graph first ("none", "basic", "all").
    """

    model: bytes
    feeds: list[dict[str, NDArray[Any]]]
    options: dict[str, str] = field(default_factory=dict)
    optimise: str = "none"


def build(head: bytes, nodes: list[bytes], isas: tuple[str, ...] = INSTRUCTION_SETS) -> Case:
    """The case that these bytes encode."""
    choices = Choices(head)
    builder = Builder(choices)
    operators = operators_of(builder.opset)
    for data in nodes:
        builder.choices = Choices(data)
        builder.choices.weighted(operators)(builder)
    if not builder.nodes:
        operators[0][1](builder)
    return _case(builder, choices, isas)


def alone(operator: Callable[[Builder], None], first: int, rng: random.Random, *, large: bool) -> Case:
    """A case of one operator, whose first opset is `first`; `large`: with arrays for several threads."""
    choices = Choices(rng.randbytes(HEAD_BYTES))
    builder = Builder(choices)
    builder.opset, builder.large = max(builder.opset, first), large
    builder.choices = Choices(rng.randbytes(NODE_BYTES))
    operator(builder)
    return _case(builder, choices, INSTRUCTION_SETS)


def _case(builder: Builder, choices: Choices, isas: tuple[str, ...]) -> Case:
    builder.choices = choices
    options = {
        "device": "cpu",
        "cpu_isa": choices.pick(isas),
        "threads": choices.pick(("1", "2")),
        "activations": choices.pick(("bf16", "int8")),
        "on_unsupported": choices.pick(("error", "cpu")),
        "claim": "all",
    }
    optimise = choices.pick(("none", "all", "all", "basic"))
    feeds = [{name: source.array() for name, source in feed.items()} for feed in builder.feeds()]
    return Case(builder.model(), feeds, options, optimise)


def cases(isas: tuple[str, ...] = INSTRUCTION_SETS) -> strategies.SearchStrategy[Case]:
    """Random cases."""
    node = strategies.binary(min_size=NODE_BYTES, max_size=NODE_BYTES)
    head = strategies.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES)
    return strategies.builds(
        lambda head, nodes: build(head, nodes, isas), head, strategies.lists(node, min_size=1, max_size=MOST_NODES)
    )

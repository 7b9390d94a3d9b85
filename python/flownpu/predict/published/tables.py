# SPDX-License-Identifier: Apache-2.0
"""The rows. A context of 1k is 1024 tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CONTEXTS", "TABLES", "Power", "Role", "Row", "Table", "power"]

CONTEXTS = tuple(1024 << place for place in range(8))  # 1k .. 128k


class Role(Enum):
    """What the cost model makes of a table: its parameters are fitted to `PAPER` and `FITTED`, never to others."""

    PAPER = "the papers'"
    FITTED = "of the papers' software"
    HELD_OUT = "of the papers' software, left out of every fit"
    LATER = "of later software: what is to be beaten, not reproduced"


@dataclass(frozen=True)
class Row:
    """One number of a table."""

    table: str
    model: str
    context: int
    value: float


@dataclass(frozen=True)
class Table:
    """A table or figure as published.

    Attributes:
        name: ours.
        source: where it was published.
        read: when we read it.
        device: the chip, a name of `flownpu.aie.cost.device.DEVICES`.
        quantity: "decode" (tokens/s), "prefill" (tokens/s), "ttft" or "vision_ttft" (seconds).
        values: by model, from 1k up, each context twice the one before; None where nothing is printed.
        label: what columns call it: whose numbers, of which version.
        role: what the cost model makes of it.
    """

    name: str
    source: str
    read: str
    device: str
    quantity: str
    values: dict[str, tuple[float | None, ...]] = field(repr=False)
    label: str = "papers"
    role: Role = Role.PAPER

    def rows(self) -> Iterator[Row]:
        """All numbers."""
        for model, values in self.values.items():
            for context, value in zip(CONTEXTS, values, strict=False):
                if value is not None:
                    yield Row(self.name, model, context, value)


_MAPPING = "arXiv 2602.06063 (Mapping Gemma3 onto an Edge Dataflow Architecture)"
_DECODING = "Xu et al., Efficient LLM Decoding on Ryzen AI NPUs"
_FLM = "FastFlowLM, docs/docs/benchmarks"

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        Table(
            "gemma3-1b-ttft", f"{_MAPPING}, table 1", "2026-11", "kraken-350", "ttft",
            {"gemma3-1b": (1.02, 1.64, 2.7, 4.9, 9.74, 21)},
        ),
        Table(
            "gemma3-4b-ttft", f"{_MAPPING}, table 2", "2026-11", "kraken-350", "ttft",
            {"gemma3-4b": (1.98, 3.27, 5.82, 11.1, 22.9, 50.9)},
        ),
        Table(
            "gemma3-4b-vision", f"{_MAPPING}, section 4.2: one image", "2026-11", "kraken-350", "vision_ttft",
            {"gemma3-4b": (4.41,)},
        ),
        Table(
            "gemma3-1b-decode", f"{_MAPPING}, table 3", "2026-11", "kraken-350", "decode",
            {"gemma3-1b": (34.3, 33.7, 32.6, 31.4, 28.3, 23.1)},
        ),
        Table(
            "gemma3-4b-decode", f"{_MAPPING}, table 4", "2026-11", "kraken-350", "decode",
            {"gemma3-4b": (14.4, 14.4, 14.1, 13.7, 13.0, 11.9, 10.8, 9.2)},
        ),
        Table(
            "llama-decode",
            f"the numbers of {_DECODING}, figure 8 (printed without numbers; its table I has the ratios, its table II "
            "the same powers): docs.fastflowlm.com/benchmarks/llama3_results.html, first version",
            "2026-11", "kraken-340", "decode",
            {
                "llama3.2-1b": (36.7, 35.8, 33.2, 29.6, 24.0, 17.7, 11.5, 6.8),
                "llama3.2-3b": (16.1, 15.4, 14.3, 12.4, 9.9, 7.0, 4.4, 2.6),
                "llama3.1-8b": (7.6, 7.4, 7.1, 6.5, 5.7, 4.4, 3.1, 2.0),
            },
        ),
        Table(
            "qwen3-decode", f"{_DECODING}, table III", "2026-11", "kraken-340", "decode",
            {
                "qwen3-0.6b": (50.4, 45.3, 36.0, 25.7, 16.4, 9.6),
                "qwen3-1.7b": (27.8, 26.1, 22.7, 18.3, 13.1, 8.3),
                "qwen3-4b": (14.0, 13.3, 11.9, 10.1, 7.7, 5.3),
                "qwen3-8b": (8.1, 7.9, 7.4, 6.6, 5.5, 4.1),
            },
        ),
        Table(
            "flm-gemma3-decode", f"{_FLM}/gemma3_results.md, v0.9.20; first of each: release notes of v0.9.31",
            "2026-11", "kraken-350", "decode",
            {
                "gemma3-1b": (41.1, 39.3, 38.1, 35.8, 32.6, 27.9),
                "gemma3-4b": (18.2, 17.8, 17.6, 17.1, 16.1, 14.5, 13.2, 11.2),
            },
            label="FastFlowLM 0.9.20", role=Role.LATER,
        ),
        Table(
            "flm-llama-decode", f"{_FLM}/llama3_results.md, v0.9.30", "2026-11", "kraken-350", "decode",
            {
                "llama3.2-1b": (64.5, 62.2, 58.9, 53.9, 45.5, 35.0, 24.1, 13.6),
                "llama3.2-3b": (26.3, 25.5, 24.1, 21.7, 18.0, 13.6, 9.0),
                "llama3.1-8b": (12.8, 12.6, 12.2, 11.5, 10.2, 8.5),
            },
            label="FastFlowLM 0.9.30", role=Role.LATER,
        ),
        Table(
            "flm-qwen3-decode", f"{_FLM}/qwen3_results.md, v0.9.22", "2026-11", "kraken-350", "decode",
            {
                "qwen3-0.6b": (66.5, 57.5, 44.5, 31.0, 19.6, 14.1),
                "qwen3-1.7b": (40.2, 35.8, 30.8, 23.7, 16.4, 12.5),
                "qwen3-4b": (19.6, 18.1, 16.3, 13.7, 10.6, 8.5),
                "qwen3-8b": (11.9, 11.5, 11.1, 10.4, 8.7, 7.2),
            },
            label="FastFlowLM 0.9.22", role=Role.LATER,
        ),
        Table(
            "flm-gemma3-prefill", f"{_FLM}/gemma3_results.md, v0.9.31; 1b from 1k to 16k, 4b at 1k and 2k: v0.9.20",
            "2026-11", "kraken-350", "prefill",
            {
                "gemma3-1b": (1004, 1321, 1528, 1645, 1657, 1755),
                "gemma3-4b": (528, 654, 771, 881, 936, 926),
            },
            label="FastFlowLM 0.9.31", role=Role.LATER,
        ),
        Table(
            "flm-llama-prefill", f"{_FLM}/llama3_results.md, v0.9.30", "2026-11", "kraken-350", "prefill",
            {
                "llama3.2-1b": (1686, 2136, 2339, 2212, 1706, 1157),
                "llama3.2-3b": (766, 910, 991, 933, 721, 500),
                "llama3.1-8b": (403, 472, 495, 467, 381, 281),
            },
            label="FastFlowLM 0.9.30", role=Role.LATER,
        ),
        Table(
            "flm-qwen3-prefill", f"{_FLM}/qwen3_results.md, v0.9.22 and v0.9.28: before the attention of v0.9.31",
            "2026-11", "kraken-350", "prefill",
            {
                "qwen3-0.6b": (1280, 1356, 1128, 779, 444, 236),
                "qwen3-1.7b": (939, 1029, 916, 674, 408, 225),
                "qwen3-4b": (509, 574, 543, 435, 282, 164),
                "qwen3-8b": (357, 420, 408, 345, 243, 150),
            },
            label="FastFlowLM 0.9.22", role=Role.FITTED,
        ),
        Table(
            "flm-qwen3-prefill-later", "release notes of FastFlowLM v0.9.31", "2026-11", "kraken-350", "prefill",
            {
                "qwen3-0.6b": (None, None, None, None, None, 1496),
                "qwen3-1.7b": (None, None, None, None, None, 768),
                "qwen3-4b": (None, None, None, None, None, 303),
                "qwen3-8b": (None, None, None, None, None, 260),
            },
            label="FastFlowLM 0.9.31", role=Role.LATER,
        ),
        Table(
            "flm-llama-decode-0.9.8", f"{_FLM}/llama3_results.md, v0.9.8: the version of the Gemma3 tables",
            "2026-11", "kraken-350", "decode",
            {
                "llama3.2-1b": (41.5, 40.6, 38.1, 33.2, 25.6, 18.6, 12.2, 8.9),
                "llama3.2-3b": (18.3, 17.8, 15.9, 13.6, 10.5, 7.3, 6.3),
                "llama3.1-8b": (9.1, 9.0, 8.3, 7.5, 6.2, 4.6),
            },
            label="FastFlowLM 0.9.8", role=Role.HELD_OUT,
        ),
        Table(
            "flm-llama-ttft-0.9.8", f"{_FLM}/llama3_results.md, v0.9.8: the version of the Gemma3 tables",
            "2026-11", "kraken-350", "ttft",
            {
                "llama3.2-1b": (0.76, 1.16, 2.41, 5.76, 16.93, 57.02),
                "llama3.2-3b": (1.81, 2.64, 5.56, 14.05, 43.88, 152.91),
                "llama3.1-8b": (3.04, 4.53, 9.32, 21.79, 61.46, 195.65),
            },
            label="FastFlowLM 0.9.8", role=Role.HELD_OUT,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Power:
    """Average watts while the NPU works: the NPU's, and those of CPU and iGPU beside it. Main memory is in neither."""

    npu: float
    others: float
    source: str

    @property
    def total(self) -> float:
        """Both."""
        return self.npu + self.others


_POWER_GEMMA = f"{_MAPPING}, table 5"
_POWER_LLAMA = f"{_DECODING}, table II"
_POWERS: dict[tuple[str, str], Power] = {
    ("gemma3-1b", "decode"): Power(1.8, 2.8, _POWER_GEMMA),
    ("gemma3-4b", "decode"): Power(1.6, 2.9, _POWER_GEMMA),
    ("gemma3-1b", "prefill"): Power(1.2, 3.1, _POWER_GEMMA),
    ("gemma3-4b", "prefill"): Power(1.1, 3.4, _POWER_GEMMA),
    ("llama3.2-1b", "decode"): Power(1.57, 0.07, _POWER_LLAMA),
    ("llama3.2-3b", "decode"): Power(1.33, 0.06, _POWER_LLAMA),
    ("llama3.1-8b", "decode"): Power(1.17, 0.07, _POWER_LLAMA),
}


def power(model: str, phase: str) -> Power | None:
    """What was published of a model in a phase ("decode", "prefill"); None: nothing."""
    return _POWERS.get((model, phase))

# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/gpu-model.md from the cost model itself; a test checks that the page is up to date."""

import sys
from collections.abc import Callable
from pathlib import Path

from flownpu.npu.models import ENCODERS, MODELS
from flownpu.predict.gpu import GPUS, GpuPoint, predict_gpu
from flownpu.predict.target import known
from scripts.write_model_page import fill

PAGE = Path(__file__).resolve().parent.parent / "docs" / "gpu-model.md"
CONTEXTS = (1024, 4096, 8192, 32768)


def gpus() -> str:
    """The table of GPUs: their known properties, and the rates that follow."""
    lines = [
        "| GPU | lanes x clock | float, Tops | dots of integers, Tops | memory, GB/s | of which it reads |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {gpu.description} | {gpu.lanes} x {gpu.clock / 1e9:g} GHz | {gpu.floats / 1e12:.1f} | "
        f"{gpu.dots / 1e12:.1f} | {gpu.memory / 1e9:g} | {gpu.read / 1e9:.0f} |"
        for gpu in GPUS.values()
    ]
    return "\n".join(lines)


def decoding() -> str:
    """The table of decoded tokens per second, and in brackets the memory roof."""
    return _table(lambda point: f"{_rate(point.decode_tokens_per_second)} ({_rate(point.roof)})")


def prompts() -> str:
    """The table of a prompt's tokens per second, and in brackets the seconds to the first token."""
    return _table(lambda point: f"{_rate(point.prefill_tokens_per_second)} ({_rate(point.ttft_seconds)} s)")


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _table(cell: Callable[[GpuPoint], str]) -> str:
    lines = [
        f"| model | GPU | {' | '.join(f'{context // 1024}k' for context in CONTEXTS)} |",
        "|---|---|" + "---|" * len(CONTEXTS),
    ]
    for model in (name for name in MODELS if name not in ENCODERS):
        found = known(model)
        contexts = [context for context in CONTEXTS if context <= found.decoder.positions]
        for number, (name, gpu) in enumerate(GPUS.items()):
            cells = [cell(point) for point in predict_gpu(found, gpu, contexts)]
            cells += [""] * (len(CONTEXTS) - len(cells))
            lines.append(f"| {'' if number else model} | {name.removeprefix('radeon-')} | {' | '.join(cells)} |")
    return "\n".join(lines)


SECTIONS: dict[str, Callable[[], str]] = {"gpus": gpus, "decoding": decoding, "prompts": prompts}


def main() -> int:
    """Writes the page."""
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), SECTIONS), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

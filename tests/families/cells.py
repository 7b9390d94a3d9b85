# SPDX-License-Identifier: Apache-2.0
"""Cells of the matrix of families: a form out of a source on a device, beside transformers with the same weights."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch
import transformers
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from flownpu.errors import FlowNPUError
from flownpu.npu.artifacts import build_artifacts
from flownpu.npu.layers import decoder_of_model, read_decoder
from tests.decoding import DecoderSession
from tests.end_to_end.test_numbers import logit_error
from tests.families.checkpoints import make_checkpoint
from tests.families.sources import SOURCES, WITHIN, RefusedError, told
from tests.npu.rounding import array_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tests.convert.conftest import TinyModel

    Calls = Sequence[tuple[int, int]]

DEVICES = ("cpu", "emulate")
RECORD = Path(__file__).parent / "recorded.json"
# A prompt beyond the window of 8, a second part, in which LongRoPE's second table begins, and single tokens.
CALLS = ((0, 20), (20, 28), *((i, i + 1) for i in range(28, 31)))
SHORT_CALLS = ((0, 5), *((i, i + 1) for i in range(5, 8)))
IDS = np.random.default_rng(5).integers(4, 260, (1, CALLS[-1][1]))
NO_PLACE = "no place for its layers: "
_OF_LAYERS = {"FlowQKVAttention", "GroupQueryAttention", "MatMulNBits", "Q4NXMatMul", "Q4NXMoE"}
CONTEXT = 64  # positions of the emulated array's cache


@dataclass(frozen=True)
class Cell:
    """What became of it.

    Attributes:
        refused: the sentence with which it was refused; empty: it ran.
        error: rms error of the logits.
        bound: what it may be.
        spread: standard deviation of transformers' logits.
        within: what texts were no longer than; empty: they were longer than all that a form has.
    """

    refused: str = ""
    error: float = 0.0
    bound: float = 0.0
    spread: float = 0.0
    within: str = ""


def run_form(
    form: str, folder: Path, devices: Sequence[Any], sources: Sequence[str] = tuple(SOURCES)
) -> dict[str, dict[str, Cell]]:
    """A form's cells, by source and device."""
    tiny = make_checkpoint(form, folder / "checkpoint")
    cells: dict[str, dict[str, Cell]] = {}
    for number, source in enumerate(sources):
        own = folder / str(number)
        own.mkdir()
        try:
            model, export = SOURCES[source](form, tiny, own)
        except RefusedError as error:
            cells[source] = dict.fromkeys(DEVICES, Cell(refused=str(error)))
            continue
        within = WITHIN.get((form, source), "")
        calls = SHORT_CALLS if within else CALLS
        cells[source] = {}
        for device in DEVICES:
            cell = _checked(_run(tiny, model, device, devices, own, calls), tiny, export, calls)
            cells[source][device] = cell if cell.refused else replace(cell, within=within)
    return cells


def _checked(cell: Cell, tiny: TinyModel, export: Path | None, calls: Calls) -> Cell:
    """The cell; where it is beyond its bound, and so is the export in ONNX Runtime's own provider, refused as such."""
    if export is None or cell.error <= cell.bound:
        return cell
    try:
        error = rms(logits_of(DecoderSession(export), calls), of_transformers(tiny, calls))
    except RuntimeError:  # ONNX Runtime does not run it: there is nothing to compare
        return cell
    # Nothing but roundings is between the two.
    if abs(error - cell.error) > cell.bound:
        return cell
    off = f"{100 * error / cell.spread:.0f} % of the logits' standard deviation"
    return Cell(refused=f"the exporter makes another model: in ONNX Runtime itself it is off by {off}")


def _run(tiny: TinyModel, model: Path, device: str, devices: Sequence[Any], folder: Path, calls: Calls) -> Cell:
    """A model on a device; it counts as refused where anything of it is computed elsewhere."""
    report = folder / f"{device}.json"
    options = {"device": device, "activations": "bf16", "placement": str(report)}
    try:
        if device == "emulate":
            _check_decoder(model)
            build_artifacts(model, context=CONTEXT, output=folder / "artifacts")
            options["artifacts"] = str(folder / "artifacts")
        decoder = DecoderSession(model, devices[:1], options)
    except FlowNPUError as error:
        return Cell(refused=array_refusal(error))
    except Fail as error:  # ONNX Runtime's, with the provider's reasons
        lacking = dict.fromkeys(re.findall(r"device has no ai\.onnx::(\w+)", str(error)))
        return Cell(refused=f"the CPU device has no {', '.join(lacking)}" if lacking else told(str(error)))
    logits = logits_of(decoder, calls)
    placed = json.loads(report.read_text())
    assert (placed["left"], placed["partitions"]) == ([], 1), placed
    if device == "emulate":  # no layer is its host's
        assert not {item["op_type"] for item in placed["on_host"]} & _OF_LAYERS, placed
    expected = of_transformers(tiny, calls)
    bound = _bound(tiny, calls, device, expected)
    return Cell("", rms(logits, expected), bound, float(expected.std()))


def _check_decoder(model: Path) -> None:
    """Raises FlowNPUError where the array has no place for the layers: operators alone would be built, too."""
    if (model / "genai_config.json").is_file():
        read_decoder(model)
        return
    try:
        decoder_of_model(ir.load(model / "model.onnx"), CONTEXT)
    except ValueError as error:
        raise FlowNPUError(f"{model}: {NO_PLACE}{error}") from error


def array_refusal(error: FlowNPUError) -> str:
    """Why the NPU's designs have no place for a model's layers, without the node's name."""
    reason = told(str(error)).rpartition(NO_PLACE)[2]
    return re.sub(r"^\w+ '[^']*': ", "", reason)


def logits_of(decoder: Callable[[NDArray[np.int64]], NDArray[np.float32]], calls: Calls) -> NDArray[np.float32]:
    """Logits [calls, V] of the last token of each call."""
    return np.array([decoder(IDS[:, start:stop])[0, -1] for start, stop in calls])


def of_transformers(tiny: TinyModel, calls: Calls) -> NDArray[np.float32]:
    """The same, call by call: LongRoPE looks at how far each reaches."""
    cache = transformers.DynamicCache(config=tiny.reference.config)
    return logits_of(lambda ids: tiny.logits(ids, cache), calls)


def rms(logits: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """The root of their mean squared difference."""
    return float(np.sqrt(np.square(logits.astype(np.float64) - expected).mean()))


def _bound(tiny: TinyModel, calls: Calls, device: str, expected: NDArray[np.float32]) -> float:
    """How far logits may be off, in rms.

    Of the CPU device 6 times what rounding activations does, as in tests/end_to_end/test_families.py; of the array
    twice what its roundings do, put into transformers' model, as in tests/npu/run/test_decoder_layers.py.
    """
    if device == "cpu":
        return 6 * logit_error("bf16", tiny.reference.config.num_hidden_layers, expected)
    with torch.no_grad():
        ids = IDS[0, : calls[-1][1]]
        return 2 * array_error(tiny.reference, ids, [stop - 1 for _, stop in calls], prompt=True)


def read_record() -> dict[str, Any]:
    """What was recorded: `versions` by package, and `cells` by form, source and device."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {"versions": {}, "cells": {}}


def recorded_cells() -> dict[str, dict[str, dict[str, Cell]]]:
    """The recorded cells by form, source and device."""
    return {
        form: {source: {device: Cell(**cell) for device, cell in row.items()} for source, row in of_form.items()}
        for form, of_form in read_record()["cells"].items()
    }


def write_record(versions: dict[str, str], cells: dict[str, dict[str, dict[str, Cell]]]) -> None:
    """Writes them; numbers in three digits."""
    kept = {
        form: {source: {device: _kept(cell) for device, cell in row.items()} for source, row in of_form.items()}
        for form, of_form in sorted(cells.items())
    }
    text = json.dumps({"versions": versions, "cells": kept}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")


def _kept(cell: Cell) -> dict[str, Any]:
    empty = asdict(Cell())
    given = {name: value for name, value in asdict(cell).items() if value != empty[name]}
    return {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in given.items()}

# SPDX-License-Identifier: Apache-2.0
"""Cells of the matrix of families: a form from a source on a device, beside transformers with the same weights."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import transformers
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

from flownpu.aie.programs.decode import DECODE_WAYS, HOST_EXPERTS
from flownpu.aie.programs.decoder_shape import DecoderShape
from flownpu.errors import FlowNPUError
from flownpu.npu.artifacts import build_artifacts
from flownpu.npu.layers import decoder_of_model, read_decoder
from tests.convert.conftest import TinyModel
from tests.convert.running import error_bound
from tests.decoding import DecoderSession
from tests.families.checkpoints import make_checkpoint
from tests.families.sources import RECIPE_SIZES, RECIPE_SOURCES, SOURCES, WITHIN, RefusedError, told
from tests.npu.rounding import array_error

Calls = Sequence[tuple[int, int]]

DEVICES = ("cpu", "emulate")
RECORD = Path(__file__).parent / "recorded.json"
# Where calls start and stop: a prompt longer than the window of 8, a second part, in which LongRoPE's second table
# begins, and single tokens.
CALLS = ((0, 20), (20, 28), *((i, i + 1) for i in range(28, 31)))
SHORT_CALLS = ((0, 5), *((i, i + 1) for i in range(5, 8)))
IDS = np.random.default_rng(5).integers(4, 260, (1, CALLS[-1][1]))
NO_PLACE = "no place for its layers: "
_OF_LAYERS = {"FlowQKVAttention", "GroupQueryAttention", "MatMulNBits", "Q4NXMatMul", "Q4NXMoE"}
CONTEXT = 64  # positions of the emulated array's cache


@dataclass(frozen=True)
class Cell:
    """The result of running a form from a source on a device.

    Attributes:
        refused: the reason why it was refused; empty: it ran.
        error: rms error of the logits.
        bound: the largest error that is allowed.
        spread: standard deviation of transformers' logits.
        within: what limited the length of texts; empty: they went beyond the form's windows and first context.
    """

    refused: str = ""
    error: float = 0.0
    bound: float = 0.0
    spread: float = 0.0
    within: str = ""


Table = dict[str, dict[str, dict[str, Cell]]]


def run_form(
    form: str, folder: Path, devices: Sequence[Any], sources: Sequence[str] = tuple(SOURCES),
    names: Sequence[str] = DEVICES,
) -> dict[str, dict[str, Cell]]:  # fmt: skip
    """A form's cells, by source and device; `names`: some of DEVICES."""
    tiny = make_checkpoint(form, folder / "checkpoint", RECIPE_SIZES if set(sources) <= set(RECIPE_SOURCES) else None)
    cells: dict[str, dict[str, Cell]] = {}
    for number, source in enumerate(sources):
        own = folder / str(number)
        own.mkdir()
        try:
            model, export = (SOURCES | RECIPE_SOURCES)[source](form, tiny, own)
        except RefusedError as error:
            cells[source] = dict.fromkeys(names, Cell(refused=str(error)))
            continue
        within = WITHIN.get((form, source), "")
        calls = SHORT_CALLS if within else CALLS
        cells[source] = {}
        for device in names:
            beside = export if source in RECIPE_SOURCES else None
            cell = run_on(tiny, model, device, devices, own, calls, beside)
            cell = cell if beside else _checked(cell, tiny, export, calls)
            cells[source][device] = cell if cell.refused else replace(cell, within=within)
    return cells


def _checked(cell: Cell, tiny: TinyModel, export: Path | None, calls: Calls) -> Cell:
    """The cell. If it is beyond its bound because the export itself is wrong, a cell that says so."""
    if export is None or cell.error <= cell.bound:
        return cell
    try:
        error = rms(logits_of(DecoderSession(export), calls), of_transformers(tiny, calls))
    except RuntimeError:  # ONNX Runtime does not run it: there is nothing to compare
        return cell
    # Where the exporter is at fault, nothing but roundings is between the two errors.
    if abs(error - cell.error) > cell.bound:
        return cell
    off = f"{100 * error / cell.spread:.0f} % of the logits' standard deviation"
    return Cell(refused=f"the exporter makes another model: in ONNX Runtime itself it is off by {off}")


def run_on(
    tiny: TinyModel, model: Path, device: str, devices: Sequence[Any], folder: Path, calls: Calls,
    export: Path | None = None,
) -> Cell:  # fmt: skip
    """Runs a model on a device; it counts as refused where the device does not take all of it.

    The reference is transformers' model, or an export of it in ONNX Runtime itself, whose recipe rounds weights.
    """
    report = folder / f"{device}.json"
    options = {"device": device, "activations": "bf16", "placement": str(report)}
    try:
        if device == "emulate":
            plain = _array_decoder(model).has_plain_experts
            # Experts this small would be the host's; others than plain ones always are.
            ways = [way for way in DECODE_WAYS if way not in HOST_EXPERTS or not plain]
            build_artifacts(model, context=CONTEXT, output=folder / "artifacts", ways=ways)
            options["artifacts"] = str(folder / "artifacts")
        decoder = DecoderSession(model, devices[:1], options)
    except FlowNPUError as error:
        return Cell(refused=array_refusal(error))
    except InvalidArgument:
        return Cell(refused="ONNX Runtime does not load the model")
    except Fail as error:  # ONNX Runtime's, with the provider's reasons
        lacking = dict.fromkeys(re.findall(r"device has no ai\.onnx::(\w+)", str(error)))
        return Cell(refused=f"the CPU device has no {', '.join(lacking)}" if lacking else told(str(error)))
    logits = logits_of(decoder, calls)
    placed = json.loads(report.read_text())
    assert (placed["left"], placed["partitions"]) == ([], 1), placed
    if device == "emulate":  # the host computes no part of the layers
        assert not {item["op_type"] for item in placed["on_host"]} & _OF_LAYERS, placed
    expected = logits_of(DecoderSession(export), calls) if export else of_transformers(tiny, calls)
    bound = _bound(tiny, calls, device, expected)
    return Cell("", rms(logits, expected), bound, float(expected.std()))


def _array_decoder(model: Path) -> DecoderShape:
    """Raises FlowNPUError if the array does not support the layers; without this, single operators would be built."""
    if (model / "genai_config.json").is_file():
        return read_decoder(model)
    try:
        return decoder_of_model(ir.load(model / "model.onnx"), CONTEXT)
    except ValueError as error:
        raise FlowNPUError(f"{model}: {NO_PLACE}{error}") from error


def array_refusal(error: FlowNPUError) -> str:
    """The reason why the NPU's designs do not support a model's layers, without the node's name."""
    reason = told(str(error)).rpartition(NO_PLACE)[2]
    return re.sub(r"^\w+ '[^']*': ", "", reason)


def logits_of(decoder: Callable[[NDArray[np.int64]], NDArray[np.float32]], calls: Calls) -> NDArray[np.float32]:
    """Logits [calls, V] of the last token of each call."""
    return np.array([decoder(IDS[:, start:stop])[0, -1] for start, stop in calls])


def of_transformers(tiny: TinyModel, calls: Calls) -> NDArray[np.float32]:
    """transformers' logits [calls, V], call by call: LongRoPE's factors depend on the length so far."""
    cache = transformers.DynamicCache(config=tiny.reference.config)
    return logits_of(lambda ids: tiny.logits(ids, cache), calls)


def rms(logits: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """The root of their mean squared difference."""
    return float(np.sqrt(np.square(logits.astype(np.float64) - expected).mean()))


def _bound(tiny: TinyModel, calls: Calls, device: str, expected: NDArray[np.float32]) -> float:
    """How far logits may be off, in rms.

    On the CPU device several times what rounding activations does, as in tests/convert/running.py; on the array
    twice what its roundings do in transformers' model, as in tests/npu/run/test_decoder_layers.py.
    """
    if device == "cpu":
        return error_bound(tiny, IDS, [stop - 1 for _, stop in calls], expected)
    with torch.no_grad():
        ids = IDS[0, : calls[-1][1]]
        return 2 * array_error(tiny.reference, ids, [stop - 1 for _, stop in calls], prompt=True)


def read_record() -> dict[str, Any]:
    """The recorded results: `versions` by package, and `cells` and `recipes` by form, source and device."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {"versions": {}}


def recorded_cells(table: str = "cells") -> Table:
    """The recorded cells of a table by form, source and device."""
    return {
        form: {source: {device: Cell(**cell) for device, cell in row.items()} for source, row in of_form.items()}
        for form, of_form in read_record().get(table, {}).items()
    }


def write_record(versions: dict[str, str], tables: dict[str, Table]) -> None:
    """Writes the record, with numbers in three digits, and a line for each form from each source."""
    kept = {
        table: {
            form: {source: {device: _kept(cell) for device, cell in row.items()} for source, row in of_form.items()}
            for form, of_form in sorted(cells.items())
        }
        for table, cells in tables.items()
    }
    text = json.dumps({"versions": versions, **kept}, indent=1)
    RECORD.write_text(re.sub(r"\n(?: {4,}|   (?=\}))", " ", text) + "\n", encoding="utf-8")


def _kept(cell: Cell) -> dict[str, Any]:
    empty = asdict(Cell())
    given = {name: value for name, value in asdict(cell).items() if value != empty[name]}
    return {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in given.items()}

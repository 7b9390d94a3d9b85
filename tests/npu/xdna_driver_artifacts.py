# SPDX-License-Identifier: Apache-2.0
"""Artifacts as for a real NPU, for the double of its driver: the emulator's words replace aiecc's output."""

from collections.abc import Sequence
from pathlib import Path

from flownpu.aie.artifacts.index import Index
from flownpu.aie.emulator import flatten_array
from flownpu.aie.programs.program import Program, calls_of
from flownpu.npu.artifacts import programs_of_model
from tests.npu.xrt import halves, write_xclbin


def build_for_xdna_driver(model: Path, folder: Path, context: int, most_buffers: int | None = None) -> Path:
    """A folder that `device=npu` takes, with the programs of a model; see `write_for_xdna_driver`."""
    return write_for_xdna_driver(folder, programs_of_model(model, "npu2", context)[0], most_buffers)


def write_for_xdna_driver(folder: Path, programs: Sequence[Program], most_buffers: int | None = None) -> Path:
    """Writes such a folder for any programs; kernels take `most_buffers` at most, even if their calls have more."""
    files: dict[str, str] = {}
    calls = calls_of(programs)
    for call in calls:
        flat = flatten_array(call.last_plan.array)
        file = f"{call.array}/array.xclbin"
        for name in (file, call.family_file):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if call.array not in files:
            buffers = max(len(other.buffers) for other in calls if other.array == call.array)
            write_xclbin(folder / file, flat.words, min(buffers, most_buffers or buffers))
        files[call.array] = file
        family = call.family(lambda position, call=call, flat=flat: halves(flat.flatten(call.sequence(position))))
        (folder / call.family_file).write_bytes(family.flatten(call.name, flat.identity).tobytes())
    Index(folder, "npu2", emulated=False, programs=programs, array_files=files).write()
    return folder

# SPDX-License-Identifier: Apache-2.0
"""Parameters of the cost model that were measured on an NPU, to replace published ones.

They come from a JSON file: an object from parameters' names to values in the units of `flownpu.aie.cost.parameters`, or
the report of `flownpu selftest`, which has such an object as "measured".
"""

import json
import math
from pathlib import Path

from flownpu.aie.cost.parameters import TABLE, VALUES, Values
from flownpu.errors import FlowNPUError
from flownpu.predict.target import nearest

_REPORT = "measured"  # no parameter has this name


def measured_values(path: Path) -> Values:
    """All parameters of the cost model: those of a file, and the published values of the others.

    Raises:
        FlowNPUError: the file cannot be read, or has an unknown parameter or a value that is no positive number.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FlowNPUError(f"{path}: expected a JSON file of measured parameters: {error}") from error
    measured = document.get(_REPORT, document) if isinstance(document, dict) else document
    if not isinstance(measured, dict):
        expected = f"{_REPORT!r} to be an object" if isinstance(document, dict) else "an object"
        kind = type(measured).__name__
        raise FlowNPUError(f"{path}: expected {expected} of parameters and their values, got {kind}")
    for name, value in measured.items():
        if name not in TABLE:
            raise FlowNPUError(f"{path}: {name!r} is no parameter of the cost model{nearest(name, TABLE)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise FlowNPUError(f"{path}: expected {name} to be a positive number of {TABLE[name].unit}, got {value!r}")
    return {**VALUES, **{name: float(value) for name, value in measured.items()}}

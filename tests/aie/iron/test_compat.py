# SPDX-License-Identifier: Apache-2.0
"""The source of IRON's names in designs: the recorder, or an installed mlir-aie of generation C."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# The names that flownpu.aie.iron.compat imports of mlir-aie, without content; {layout} is `to_stream` in generation C.
MLIR_AIE = {
    "aie/__init__.py": "",
    "aie/helpers/__init__.py": "",
    "aie/helpers/taplib.py": "class TensorAccessPattern: pass",
    "aie/helpers/util.py": "class v8bfp16ebs8: pass",
    "aie/iron/__init__.py": """
        class ObjectFifo:
            def __init__(self, obj_type, *, depth=2, {layout}=None): pass
        class Buffer: pass
        class Kernel: pass
        class Program: pass
        class Runtime: pass
        class Worker: pass
        class WorkerRuntimeBarrier: pass
    """,
    "aie/iron/controlflow.py": "def range_(*bounds): pass",
    "aie/iron/dataflow.py": "class ObjectFifoHandle: pass",
    "aie/iron/device.py": """
        class NPU1: pass
        class NPU2: pass
        class Tile: pass
    """,
}


def imported(choice, folder, code="print(c.ObjectFifo.__module__, c.range_.__module__)"):
    """Import the compat module in a separate Python, with the packages of `folder` installed."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "FLOWNPU_IRON": choice, "PYTHONPATH": path}
    code = f"import flownpu.aie.iron.compat as c; {code}"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def install(folder, layout):
    for name, text in MLIR_AIE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).format(layout=layout), encoding="utf-8")


def test_recorder_is_default_beside_mlir_aie(tmp_path):
    install(tmp_path, "to_stream")
    done = imported("recorder", tmp_path)
    assert done.stdout.split() == ["flownpu.aie.iron.fifo", "flownpu.aie.iron.symbolic"], done.stderr


def test_mlir_aie_of_generation_c_is_imported_beside_ours(tmp_path):
    """Upstream's package is `aie`, ours `flownpu.aie`.

    Neither hides the other, not even in the root of this repository: its folder aie/ has no __init__.py, and so a real
    package goes before it.
    """
    install(tmp_path, "to_stream")
    done = imported("mlir-aie", tmp_path, "print(c.ObjectFifo.__module__, c.range_.__module__, c.object_file('gemm'))")
    assert done.stdout.split() == ["aie.iron", "aie.iron.controlflow", "gemm.o"], done.stderr


@pytest.mark.parametrize(
    ("choice", "layout", "message"),
    [
        ("mlir-aie", None, "mlir-aie of generation C (1.4.5 or newer) is not installed"),
        ("mlir-aie", "dims_to_stream", "expected mlir-aie of generation C (1.4.5 or newer, ObjectFifo(to_stream=...))"),
        ("iron", None, "expected recorder or mlir-aie, got 'iron'"),
    ],
)
def test_unknown_choice_of_iron_is_refused(choice, layout, message, tmp_path):
    if layout:
        install(tmp_path, layout)
    done = imported(choice, tmp_path)
    assert done.returncode == 1
    assert f"ImportError: [FLOWNPU_IRON] {message}" in done.stderr

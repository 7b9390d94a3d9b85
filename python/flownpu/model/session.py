# SPDX-License-Identifier: Apache-2.0
"""Opens a graph in ONNX Runtime, with FlowNPU's provider or ONNX Runtime's own."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flownpu.errors import FlowNPUError
from flownpu.registration import get_ep_name, register

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

_CPU = "Every node runs on ONNX Runtime's own CPU provider."


def open_session(
    onnxruntime: ModuleType, path: Path, provider: str, options: Mapping[str, str], threads: int | None
) -> tuple[Any, str]:
    """Makes a session of a graph.

    Args:
        onnxruntime: the module.
        path: the graph's file.
        provider: "flownpu", or "cpu" for ONNX Runtime's own CPU provider.
        options: options of FlowNPU's provider by key.
        threads: threads of the CPU kernels; None leaves the number to the provider.

    Returns:
        The session, and one line that says which nodes run where.

    Raises:
        FlowNPUError: FlowNPU's options are given to another provider.
        RuntimeError: ONNX Runtime or the provider refuses the model or an option; the message is theirs.
    """
    session_options = onnxruntime.SessionOptions()
    session_options.log_severity_level = 3  # only errors are logged: the placement has the content of warnings
    if provider != "flownpu":
        if options:
            raise FlowNPUError(
                f"{', '.join(sorted(options))}: an option of FlowNPU's provider, given with --provider {provider}; "
                "leave one of the two out"
            )
        session_options.intra_op_num_threads = threads or 0
        return onnxruntime.InferenceSession(str(path), session_options, providers=["CPUExecutionProvider"]), _CPU
    register()
    defaults = {"threads": str(threads)} if threads else {}
    with tempfile.TemporaryDirectory(prefix="flownpu-") as scratch:
        report = Path(scratch) / "placement.json"
        given = {**defaults, **options, "placement": str(report)}
        session = onnxruntime.InferenceSession(str(path), session_options, providers=[(get_ep_name(), given)])
        return session, str(json.loads(report.read_text(encoding="utf-8"))["summary"])

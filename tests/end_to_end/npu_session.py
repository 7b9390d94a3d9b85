# SPDX-License-Identifier: Apache-2.0
"""Sessions of the small model with device=npu, over the double of XRT, one after the other in one process.

    python -m tests.end_to_end.npu_session LIBRARY MODEL ARTIFACTS IDS

prints a JSON document: for each scenario the logits' tokens, the errors, and what of XRT was alive at its end. The
library is a copy with the plugin beside it; a process that has registered it is of no further use.
"""

from __future__ import annotations

import gc
import json
import sys
from errno import EACCES, EINVAL, ENODEV, ENOMEM
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from tests.decoding import Decoder
from tests.npu.xrt import Double

PROMPT, STEPS = 70, 6  # beyond the window of 64, and one chunk
ERROR = 5  # a state of a command (ert.h)


def main(library: str, model: str, artifacts: str, ids: str) -> None:
    double = Double()
    onnxruntime.register_execution_provider_library("FlowNPUExecutionProvider", library)
    devices = [d for d in onnxruntime.get_ep_devices() if d.ep_name == "FlowNPUExecutionProvider"][:1]
    tokens = np.array(json.loads(ids))
    options = {"device": "npu", "artifacts": artifacts, "activations": "bf16"}

    def open_session(**more: str) -> Decoder:
        return Decoder(Path(model), devices, options | more)

    def generate(decoder: Decoder, before: Any = lambda _step: None) -> dict[str, Any]:
        """The prompt and some tokens of the text; a step that fails is tried once more."""
        found: dict[str, Any] = {"top": [], "errors": []}
        steps = [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + STEPS))]
        for step, (first, end) in enumerate(steps):
            before(step)
            for _ in range(2):
                try:
                    logits = decoder(tokens[None, first:end], np.ones((1, end), np.int64))
                    found["top"].append(logits[0, -1].tolist())
                    break
                except Exception as error:  # noqa: BLE001 (whatever ORT raises)
                    found["errors"].append(str(error))
        return found

    def scenario(run: Any) -> dict[str, Any]:
        double.reset()
        double.use_kernels("npu2")
        try:
            found: dict[str, Any] = run()
        except Exception as error:  # noqa: BLE001 (the session could not be made)
            found = {"refused": str(error)}
        gc.collect()
        double.end_hung_calls()  # What they used is kept until then.
        return found | {"alive": double.alive(), "violations": double.violations()}

    def failing(fault: str, amount: int = 0, **more: str) -> dict[str, Any]:
        decoder = open_session(**more)
        return generate(decoder, lambda step: double.inject(fault, amount) if step == 3 else None)

    def refused(fault: str, amount: int, after: int = 0) -> dict[str, Any]:
        double.inject(fault, amount, after=after)
        return generate(open_session())

    document = {
        "cpu": scenario(lambda: generate(open_session(device="cpu"))),
        "well": scenario(lambda: generate(open_session())),
        "error": scenario(lambda: failing("error", ERROR)),
        "error, cpu": scenario(lambda: failing("error", ERROR, on_unsupported="cpu")),
        "hang": scenario(lambda: failing("hang", 10**7, on_unsupported="cpu")),
        "submit": scenario(lambda: failing("submit", EINVAL, on_unsupported="cpu")),
        "lost": scenario(lambda: failing("lost", ENODEV, on_unsupported="cpu")),
        "no device": scenario(lambda: refused("devices", 0)),
        "permission": scenario(lambda: refused("open", EACCES)),
        "memory": scenario(lambda: refused("allocate", ENOMEM, after=2)),
        "well again": scenario(lambda: generate(open_session())),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""Sessions of the small model with device=npu, over XRT, one after the other in one process of a machine with an NPU.

    python -m tests.end_to_end.npu_session LIBRARY MODEL ARTIFACTS IDS ARTIFACTS_WITH_KERNELS_THAT_TAKE_TOO_FEW_BUFFERS

prints a JSON document: for each scenario the logits' tokens, the errors, and what was open in the driver at its end.
The library is a copy with the plugin beside it; a process that has registered it is of no further use.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from errno import EACCES, EAGAIN, EINVAL, ENODEV, ENOMEM, ENOSPC, EOPNOTSUPP
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from tests.decoding import DecoderSession
from tests.npu.xrt import FIRMWARE, Driver

PROMPT, STEPS = 70, 6  # beyond the window of 64, and one chunk
ERROR = 5  # a state of a command (ert.h)
WATCHDOG_MS = 50
# What goes wrong in a run, with the driver's number for it; and at which step, after how many calls of it.
FAULTS = {"error": ERROR, "hang": WATCHDOG_MS, "lost": 0, "submit": EINVAL}
PLACES = {"first": (0, 0), "middle": (3, 0), "in a list": (0, 3)}
# What goes wrong when a session is made; after how many times that it goes well, and with which firmware.
REFUSED = {
    "no device": ("open", ENODEV, 0, FIRMWARE),
    "permission": ("open", EACCES, 0, FIRMWARE),
    "no memory": ("allocate", ENOMEM, 2, FIRMWARE),
    "no context": ("context", ENOSPC, 0, FIRMWARE),
    "firmware": ("context", EOPNOTSUPP, 0, "1.0.0.63"),
    "locked memory": ("lock memory", EAGAIN, 0, FIRMWARE),
}


def main(library: str, model: str, artifacts: str, ids: str, too_few_buffers: str) -> None:
    driver = Driver()
    onnxruntime.register_execution_provider_library("FlowNPUExecutionProvider", library)
    devices = [d for d in onnxruntime.get_ep_devices() if d.ep_name == "FlowNPUExecutionProvider"][:1]
    tokens = np.array(json.loads(ids))
    options = {"device": "npu", "artifacts": artifacts, "activations": "bf16"}

    def open_session(**more: str) -> DecoderSession:
        return DecoderSession(Path(model), devices, options | more)

    def generate(decoder: DecoderSession, before: Any = lambda _step: None) -> dict[str, Any]:
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
        driver.reset()
        driver.use_kernels("npu2")
        try:
            found: dict[str, Any] = run()
        except Exception as error:  # noqa: BLE001 (the session could not be made)
            found = {"refused": str(error)}
        gc.collect()
        driver.end_hung_calls()  # What they used is kept until then, and until the device is opened again.
        if found.get("errors"):
            time.sleep(0.05)  # until the driver's threads have seen that
        return found | {"alive": driver.alive(), "violations": driver.violations()}

    def failing(fault: str, amount: int = 0, *, step: int = 3, after: int = 0, **more: str) -> dict[str, Any]:
        decoder = open_session(**more)
        return generate(decoder, lambda at: driver.inject(fault, amount, after=after) if at == step else None)

    def refused(fault: str, amount: int, after: int, firmware: str) -> dict[str, Any]:
        driver.use_firmware(firmware)
        driver.inject(fault, amount, after=after)
        return generate(open_session())

    document = {
        "cpu": scenario(lambda: generate(open_session(device="cpu"))),
        "well": scenario(lambda: generate(open_session())),
        "error": scenario(lambda: failing("error", ERROR)),
        "never ends": scenario(lambda: failing("hang", -1, on_unsupported="cpu")),
    }
    for fault, amount in FAULTS.items():
        for place, (step, after) in PLACES.items():
            document[f"{fault}, {place}"] = scenario(
                lambda fault=fault, amount=amount, step=step, after=after: failing(
                    fault, amount, step=step, after=after, on_unsupported="cpu"
                )
            )
    for name, arguments in REFUSED.items():
        document[name] = scenario(lambda arguments=arguments: refused(*arguments))
    document["too few buffers"] = scenario(lambda: generate(open_session(artifacts=too_few_buffers)))
    document["well again"] = scenario(lambda: generate(open_session()))
    print(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:])

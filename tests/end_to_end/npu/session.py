# SPDX-License-Identifier: Apache-2.0
"""Sessions of the small model with device=npu, over XRT, one after the other in one process of a machine.

    python -m tests.end_to_end.npu.session LIBRARY MODEL ARTIFACTS IDS ARTIFACTS_WITH_KERNELS_THAT_TAKE_TOO_FEW_BUFFERS

prints a JSON document: for each scenario the logits of each step's last token, the errors, the placement report, and
what was open in the driver at its end.
With names of scenarios as further arguments, only these run. The library is a copy with the plugin beside it; a process
that has registered it can be used for nothing else.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from errno import EACCES, EAGAIN, ENODEV, ENOMEM, ENOSPC, EOPNOTSUPP
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from tests.decoding import DecoderSession
from tests.npu.firmware import DEVELOPED, FIRST
from tests.npu.machine import BUSY, TIME_LIMIT
from tests.npu.xrt import Driver

PROMPT, STEPS = 70, 4  # beyond the window of 64, and one chunk
ERROR = 5  # a state of a command (ert.h)
# Faults in a run: what the driver's double injects, with its number (a state, milliseconds, or an errno). The other
# errors of a call are in tests/npu/over_xrt/test_runtime.py; a session treats all of them alike.
FAULTS = {"error": ("error", ERROR), "hang": ("hang", -1), "lost": ("lost", 0), "firmware": ("submit", EOPNOTSUPP)}
MIDDLE = 3
PLACES = {"first": (0, 0), "middle": (MIDDLE, 0), "in a list": (0, 3)}
# Each fault, and one of them at every place.
FAILURES = [(fault, place) for fault in FAULTS for place in PLACES if place == "middle" or fault == "error"]
# The array computes the prompt only, where place "first" fails.
PAIR = {"device": "npu+cpu", "prompt_threshold": "2"}
# Errors of the allocation of a conversation's cache, when the conversation begins.
CACHES = {"no memory": ENOMEM}
# Faults when a session is made: the injected fault, its errno, and the number of successful calls before it.
REFUSED = {
    "no device": ("open", ENODEV, 0),
    "permission": ("open", EACCES, 0),
    "no memory": ("allocate", ENOMEM, 2),
    "no context": ("context", ENOSPC, 0),
    "firmware": ("context", EOPNOTSUPP, 0),
    "locked memory": ("lock memory", EAGAIN, 0),
}
# Faults of a session that is made while another one computes, which has the device open.
BESIDE = ("no context",)
# The machine's firmware is an old one for the fault that is the firmware's: it does not take the request.
FIRMWARE = {"firmware": FIRST}


def generate(tokens: np.ndarray, decoder: DecoderSession, before: Any = lambda _step: None) -> dict[str, Any]:
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


def main(library: str, model: str, artifacts: str, ids: str, too_few_buffers: str, *names: str) -> None:
    driver = Driver()
    onnxruntime.register_execution_provider_library("FlowNPUExecutionProvider", library)
    devices = [d for d in onnxruntime.get_ep_devices() if d.ep_name == "FlowNPUExecutionProvider"][:1]
    tokens = np.array(json.loads(ids))
    report = Path(artifacts).with_name("placement.json")
    options = {"device": "npu", "artifacts": artifacts, "activations": "bf16", "placement": str(report)}

    def open_session(**more: str) -> DecoderSession:
        return DecoderSession(Path(model), devices, options | more)

    def scenario(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        driver.reset()
        driver.use_kernels("npu2")
        os.environ[TIME_LIMIT] = BUSY
        report.unlink(missing_ok=True)
        try:
            found = run()
        except Exception as error:  # noqa: BLE001 (the session could not be made)
            found = {"refused": str(error)}
        found["placement"] = report.read_text(encoding="utf-8") if report.is_file() else ""
        gc.collect()
        driver.end_hung_calls()  # Their buffers are kept until then, and until the device is opened again.
        driver.settle()
        return found | {"alive": driver.alive(), "violations": driver.violations()}

    def failing(fault: str, place: str, **more: str) -> dict[str, Any]:
        (what, amount), (step, after) = FAULTS[fault], PLACES[place]
        driver.use_firmware(FIRMWARE.get(fault, DEVELOPED))
        if fault == "hang":  # users wait, so the fault has to be found in this time
            del os.environ[TIME_LIMIT]
        decoder = open_session(**more)
        return generate(tokens, decoder, lambda at: driver.inject(what, amount, after=after) if at == step else None)

    def refused(fault: str, **more: str) -> dict[str, Any]:
        what, amount, after = REFUSED[fault]
        driver.use_firmware(FIRMWARE.get(fault, DEVELOPED))
        driver.inject(what, amount, after=after)
        return generate(tokens, open_session(**more))

    def without_cache(error: int, **more: str) -> dict[str, Any]:
        decoder = open_session(**more)
        driver.inject("allocate", error)
        return generate(tokens, decoder)

    def beside(fault: str) -> dict[str, Any]:
        what, amount, after = REFUSED[fault]
        driver.use_firmware(FIRMWARE.get(fault, DEVELOPED))
        decoder, other = open_session(), []

        def open_another(step: int) -> None:
            if step != MIDDLE:
                return
            driver.inject(what, amount, after=after)
            try:
                open_session(artifacts=f"{artifacts}/.")  # sessions share arrays if the names of folders are equal
            except Exception as error:  # noqa: BLE001 (whatever ORT raises)
                other.append(str(error))

        return generate(tokens, decoder, open_another) | {"other": other}

    scenarios: dict[str, Callable[[], dict[str, Any]]] = {
        "cpu": lambda: generate(tokens, open_session(device="cpu")),
        "well": lambda: generate(tokens, open_session()),
        "well or cpu": lambda: generate(tokens, open_session(on_unsupported="cpu")),
        "error": lambda: failing("error", "middle"),
        "too few buffers": lambda: generate(tokens, open_session(artifacts=too_few_buffers)),
        **{f"{fault}, {place}": partial(failing, fault, place, on_unsupported="cpu") for fault, place in FAILURES},
        **{name: partial(refused, name) for name in REFUSED},
        **{f"{name}, cpu": partial(refused, name, on_unsupported="cpu") for name in REFUSED},
        **{f"{name} for a cache": partial(without_cache, error) for name, error in CACHES.items()},
        **{
            f"{name} for a cache, cpu": partial(without_cache, error, on_unsupported="cpu")
            for name, error in CACHES.items()
        },
        **{f"{name}, beside": partial(beside, name) for name in BESIDE},
        "pair": lambda: generate(tokens, open_session(**PAIR)),
        **{f"{fault}, pair": partial(failing, fault, "first", **PAIR) for fault in ("error", "lost")},
        "no memory, warn": partial(refused, "no memory", on_unsupported="warn"),
        "well again": lambda: generate(tokens, open_session()),
    }
    gc.freeze()  # each scenario collects garbage, and modules are none
    print(json.dumps({name: scenario(run) for name, run in scenarios.items() if not names or name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])

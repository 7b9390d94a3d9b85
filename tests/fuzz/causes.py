# SPDX-License-Identifier: Apache-2.0
"""Words by which findings of one cause are known, and whether a refusal has a reason."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import onnx

if TYPE_CHECKING:
    from tests.fuzz.worker import Ended


# In a frame of a stack: our library, or our sources.
OURS = re.compile(r"flownpu|/(ops|ep|aie)/")


def words_of(text: str) -> str:
    """A message without its numbers and names."""
    line = text.splitlines()[0].rpartition("Status Message: ")[2]
    line = re.sub(r"\b[a-z]\d+(_\d+)?\b", "V", line)
    line = re.sub(r"\[[-\d, ]*\]", "[#]", line)
    return re.sub(r"-?\d[\d.e+,x ]*", "#", line)[:160]


def has_a_reason(model: bytes, text: str) -> bool:
    """Whether a refusal names a node, an operator or a value of the model, or is ONNX Runtime's own."""
    message = text.partition(": ")[2]
    # Names of nodes are n0, of values v0, x0, c0.
    if re.search(r"\b[nvxc]\d+", message) or "FlowNPU" in message:
        return True
    if any(node.op_type in message for node in onnx.load_from_string(model).graph.node):
        return True
    # What ONNX Runtime finds in a graph or a feed before it asks a provider; and what its kernels say of a node that
    # was left to it, of which its optimiser may have made one without a name: it begins with a line of its sources.
    its_own = r"/onnxruntime_src/|Status Message: \w+\.(?:h|cc):\d+ |INVALID_GRAPH|Load model|INVALID_ARGUMENT"
    return bool(re.search(its_own, message))


def first_stack(report: str) -> str:
    """The frames of the first stack of a sanitizer's report: where it happened."""
    frames: list[str] = []
    for line in report[max(0, report.find("==ERROR")) :].splitlines():
        if re.match(r"\s+#\d+ ", line):
            frames.append(line)
        elif frames:
            break
    return "\n".join(frames)


def is_elsewhere(ended: Ended) -> bool:
    """Whether a sanitizer says that it happened in code that is not ours, or that we left a run to."""
    if "SUMMARY: " not in ended.report:
        return False
    ours = [
        frame for frame in first_stack(ended.report).splitlines() if OURS.search(frame) and "Api::call" not in frame
    ]
    return not ours or "CpuProvider::run" in ours[0]


def cause_of_end(ended: Ended, model: bytes) -> str:
    """A sanitizer's kind of error and our function; without a sanitizer, the operators of the graph."""
    report = ended.report
    if match := re.search(r"([\w/.]+:\d+):\d+: runtime error: (.*)", report):
        return f"UBSan {match[1]}: {words_of(match[2])}"
    if match := re.search(r"AddressSanitizer: ([\w-]+)", report):
        frame = next((frame for frame in first_stack(report).splitlines() if OURS.search(frame)), "")
        place = re.search(r" in ([\w:~<>]+).*?([\w.]+:\d+)$", frame)
        return f"ASan {match[1]}" + (f" in {place[1]} {place[2]}" if place else "")
    operators = sorted({node.op_type for node in onnx.load_from_string(model).graph.node})
    return f"{ended.reason}, {' '.join(operators)}"

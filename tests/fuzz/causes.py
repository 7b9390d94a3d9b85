# SPDX-License-Identifier: Apache-2.0
"""Signatures that are equal for findings of the same cause, and a test whether a refusal gives a reason."""

import re

import onnx

from tests.fuzz.worker import Ended

# Matches stack frames in FlowNPU's library or sources.
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
    # ONNX Runtime's own errors. It finds some in a graph or a feed before it asks a provider. Others come from its
    # kernels: their nodes may have no name after the optimiser, and the errors begin with a line of its sources.
    its_own = r"/onnxruntime_src/|Status Message: \w+\.(?:h|cc):\d+ |INVALID_GRAPH|Load model|INVALID_ARGUMENT"
    return bool(re.search(its_own, message))


def first_stack(report: str) -> str:
    """The frames of the first stack in a sanitizer's report, where the error happened."""
    frames: list[str] = []
    for line in report[max(0, report.find("==ERROR")) :].splitlines():
        if re.match(r"\s+#\d+ ", line):
            frames.append(line)
        elif frames:
            break
    return "\n".join(frames)


def is_elsewhere(ended: Ended) -> bool:
    """Whether a sanitizer's error is outside FlowNPU's code, or in a run that FlowNPU left to ONNX Runtime."""
    if "SUMMARY: " not in ended.report:
        return False
    ours = [
        frame for frame in first_stack(ended.report).splitlines() if OURS.search(frame) and "Api::call" not in frame
    ]
    return not ours or "CpuProvider::run" in ours[0]


def cause_of_end(ended: Ended, model: bytes) -> str:
    """A signature: a sanitizer's kind of error and FlowNPU's function; without a sanitizer, the graph's operators."""
    report = ended.report
    if match := re.search(r"([\w/.]+:\d+):\d+: runtime error: (.*)", report):
        return f"UBSan {match[1]}: {words_of(match[2])}"
    if match := re.search(r"AddressSanitizer: ([\w-]+)", report):
        frame = next((frame for frame in first_stack(report).splitlines() if OURS.search(frame)), "")
        place = re.search(r" in ([\w:~<>]+).*?([\w.]+:\d+)$", frame)
        return f"ASan {match[1]}" + (f" in {place[1]} {place[2]}" if place else "")
    operators = sorted({node.op_type for node in onnx.load_from_string(model).graph.node})
    return f"{ended.reason}, {' '.join(operators)}"

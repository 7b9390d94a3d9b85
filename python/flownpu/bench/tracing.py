# SPDX-License-Identifier: Apache-2.0
"""`flownpu trace`: ONNX Runtime's profile of a generation, with the dispatches to the NPU.

ONNX Runtime writes the profile; the provider adds its steps, its dispatches and what the host computes between these
(ep/run/profiling.cc). The table has for each design the time that its calls are estimated to take on an NPU
(`flownpu.aie.cost.phases`). The duration of an emulated dispatch is that of the emulation on this machine.
"""

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flownpu.aie.cost.chips import Chip
from flownpu.aie.cost.phases import Cost, call_cost
from flownpu.aie.plan.limits import LIMITS
from flownpu.aie.programs.program import calls_of
from flownpu.bench.roofline import decode_traffic
from flownpu.generate.language_model import LanguageModel, Sampling, Timing
from flownpu.model.folder import read_json
from flownpu.npu.artifacts import programs_of_model

_DISPATCH, _HOST_STEP, _HAND_OVER = "dispatch", "host step", "hand-over"
# The events of a GPU's kernels have this in the field "array" (ops/gpu/context/observed_run.h).
_GPU = "gpu"


@dataclass
class OperatorTime:
    """The total time of one operator's steps or dispatches.

    Attributes:
        operator: an operator of the graph (Q4NXMatMul), or the stem of a design (gemm) or of a program's step
            (rms_norm).
        place: cpu, emulate or npu: a step of the graph; "array (estimate)": a design's estimated time; host: computed
            between dispatches; "gpu kernel": kernels of decoded tokens, by the device's clock; "KV cache": keys and
            values that a device takes over from another.
        count: how many there were.
        seconds: their total time.
        bytes: bytes that they must read from and write to main memory; 0 if not known.
    """

    operator: str
    place: str
    count: int = 0
    seconds: float = 0.0
    bytes: int = 0

    @property
    def rate(self) -> float:
        """Bytes per second; 0 if no time was measured."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Profile:
    """The profile of a generation.

    Attributes:
        events: ONNX Runtime's events, in Chrome's trace format.
        placement: the provider's placement report.
        prompt_tokens: tokens of the prompt, which was computed in one run.
    """

    events: list[dict[str, Any]]
    placement: dict[str, Any]
    prompt_tokens: int


@dataclass
class Trace:
    """The document that `write_trace` writes, in Chrome's trace format, and the operators' times."""

    document: dict[str, Any]
    operators: list[OperatorTime]
    counts: dict[str, float] = field(default_factory=dict)
    """Dispatches, and bytes between host and device, per decoded token."""


def record(folder: Path, prompt: str, new_tokens: int, options: dict[str, str], threads: int | None = None) -> Profile:
    """Generates greedily with ONNX Runtime's profiler on.

    Raises:
        FlowNPUError: the model cannot be opened, see `LanguageModel`.
    """
    with tempfile.TemporaryDirectory(prefix="flownpu-") as scratch:
        prefix = Path(scratch) / "profile"
        model = LanguageModel(folder, options=options, threads=threads, profile=prefix)
        tokens = model.tokens_of_text(prompt)
        for _ in model.complete(tokens, new_tokens, Sampling(temperature=0), Timing()):
            pass
        placement = model.placement
        del model  # The session writes the profile when it is deleted.
        (path,) = prefix.parent.glob(f"{prefix.name}*.json")
        return Profile(json.loads(path.read_text(encoding="utf-8")), placement, len(tokens))


def make_trace(folder: Path, profile: Profile, artifacts: Path | None) -> Trace:
    """Adds the operators' times to a profile.

    Args:
        folder: the model's folder.
        profile: what `record` returned.
        artifacts: the folder of the device's compiled designs; None for the cpu device.
    """
    ours = [event for event in profile.events if event.get("args", {}).get("provider") == "FlowNPUExecutionProvider"]
    of_kind: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in ours:
        name = event["args"].get("op_name")
        of_kind[name if name in (_DISPATCH, _HOST_STEP, _HAND_OVER) else ""].append(event)
    dispatches = of_kind[_DISPATCH]
    operators = _steps(folder, [event for event in of_kind[""] if "device" in event["args"]], profile.prompt_tokens)
    operators += _by_operator(of_kind[_HOST_STEP], "host")
    operators += _by_operator(of_kind[_HAND_OVER], "KV cache")
    kernels = [event for event in dispatches if event["args"]["array"] == _GPU]
    operators += _by_operator([event for event in kernels if _is_of_token(event)], "gpu kernel")
    document: dict[str, Any] = {"traceEvents": list(profile.events), "displayTimeUnit": "ns", "otherData": {}}
    calls = [event for event in dispatches if event["args"]["array"] != _GPU]
    if artifacts is not None and calls:
        operators += _Plans(folder, artifacts).operators(calls)
    return Trace(document, operators, _per_token(dispatches))


def write_trace(trace: Trace, path: Path) -> None:
    """Writes the document; compressed if the path ends in .gz, which Perfetto reads as well."""
    text = json.dumps(trace.document | {"otherData": trace.document["otherData"] | {"operators": _table(trace)}})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")


def _table(trace: Trace) -> list[dict[str, Any]]:
    return [asdict(operator) for operator in trace.operators]


# --- Steps of the graph ---------------------------------------------------------------------------------------------


def _steps(folder: Path, steps: list[dict[str, Any]], prompt_tokens: int) -> list[OperatorTime]:
    """Times of decode steps by operator. A prompt's steps are left out, because memory does not limit them."""
    traffic = decode_traffic(folder)
    runs: defaultdict[str, int] = defaultdict(int)
    sums: dict[str, OperatorTime] = {}
    for event in sorted(steps, key=lambda event: event["ts"]):
        name, operator = event["name"], event["args"]["op_name"]
        run = runs[name]
        runs[name] += 1
        if run == 0:
            continue
        total = sums.setdefault(operator, OperatorTime(operator, event["args"]["device"]))
        total.count += 1
        total.seconds += event["dur"] * 1e-6
        total.bytes += traffic.node_bytes_at(name, prompt_tokens + run)
    return sorted(sums.values(), key=lambda total: -total.seconds)


def _by_operator(events: list[dict[str, Any]], place: str) -> list[OperatorTime]:
    """Times of the host's work between dispatches, of a GPU's kernels, or of what is handed over, by their labels."""
    sums: dict[str, OperatorTime] = {}
    for event in events:
        operator = event["name"].partition(",")[0]
        total = sums.setdefault(operator, OperatorTime(operator, place))
        total.count += 1
        total.seconds += event["dur"] * 1e-6
        if event["args"]["op_name"] == _HAND_OVER:
            total.bytes += sum(int(event["args"][key]) for key in ("bytes_to_device", "bytes_to_host"))
    return sorted(sums.values(), key=lambda total: -total.seconds)


# --- Dispatches -----------------------------------------------------------------------------------------------------


class _Plans:
    """The calls of a model's programs, for the target of a folder of artifacts, and their estimated times."""

    def __init__(self, folder: Path, artifacts: Path) -> None:
        manifest = read_json(artifacts / "manifest.json")
        limits = LIMITS[manifest["target"]]
        self._device = Chip(limits.name, limits, "")
        programs, _ = programs_of_model(folder, manifest["target"], manifest["context"], manifest["weights"])
        self._calls = {call.family_file: call for call in calls_of(programs)}
        self._costs: dict[tuple[str, int], Cost] = {}

    def _keys(self, event: dict[str, Any]) -> Iterator[tuple[str, int]]:
        """The calls of a dispatch, as pairs of the call family's file and the position."""
        files, positions = (event["args"][key].split("; ") for key in ("files", "positions"))
        for file, position in zip(files, positions, strict=True):
            yield file, int(position) if self._calls[file].moves else 0

    def _cost(self, key: tuple[str, int]) -> Cost:
        if key not in self._costs:
            self._costs[key] = call_cost(self._calls[key[0]].plan(key[1]), self._device)
        return self._costs[key]

    def operators(self, dispatches: list[dict[str, Any]]) -> list[OperatorTime]:
        """Estimated times of the designs, and the bytes that their transfers move."""
        sums: dict[str, OperatorTime] = {}
        for key in (key for event in dispatches for key in self._keys(event)):
            operator, cost = self._calls[key[0]].operator, self._cost(key)
            total = sums.setdefault(operator, OperatorTime(operator, "array (estimate)"))
            total.count += 1
            total.seconds += cost.total
            total.bytes += round(cost.read_bytes + cost.written_bytes)
        return sorted(sums.values(), key=lambda total: -total.seconds)


def _is_of_token(event: dict[str, Any]) -> bool:
    return "position " in event["name"]


def _per_token(dispatches: list[dict[str, Any]]) -> dict[str, float]:
    """Dispatches, and bytes over the boundary between host and device, of one decoded token."""
    decoding = [event for event in dispatches if _is_of_token(event)]
    if decoding and decoding[0]["args"]["array"] != _GPU:
        del decoding[0]  # The first dispatch also reads back the prompt's results.
    if not decoding:
        return {}
    tokens = len({event["name"].rpartition("position ")[2] for event in decoding})
    keys = ("bytes_to_device", "bytes_to_host", "word_bytes")
    return {"dispatches": len(decoding) / tokens} | {
        key: sum(int(event["args"][key]) for event in decoding) / tokens for key in keys
    }

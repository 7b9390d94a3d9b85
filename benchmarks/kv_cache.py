# SPDX-License-Identifier: Apache-2.0
"""Times decode steps at long contexts, for types of the KV cache in turn.

    python -m benchmarks.kv_cache qwen3-0.6b --depth 16384,32768

makes a model of the shape with random weights for each type, and runs single tokens in ONNX Runtime with caches of
random keys and values: a prompt, which takes minutes, is not read. All types of one depth are loaded at once and step
in turn, round after round, so that disturbances of the machine affect all. Sessions with a context of 16 tokens take
turns with them; subtracting their time leaves that of attention to the long context. The table shows minimum and median
times, and the bytes that a step reads.
"""

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import onnxruntime
import typer
from rich.console import Console
from rich.table import Table

import flownpu
from flownpu.bench.roofline import decode_traffic
from flownpu.convert.make_model import make_model
from flownpu.machine import describe_machine

_NUMPY = {"tensor(bfloat16)": np.uint16, "tensor(float16)": np.float16, "tensor(float)": np.float32}
_BFLOAT16 = 16  # ONNX's number for the type
_SHALLOW = 16
_BLOCK = 64


@dataclass
class Stepper:
    """A session with `depth` tokens in its KV cache, the bytes that a step reads, and the seconds of its steps."""

    kv_dtype: str
    depth: int
    bytes: int
    session: onnxruntime.InferenceSession
    binding: Any
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Runs one token, always at the last position of the context."""
        started = time.perf_counter()
        self.session.run_with_iobinding(self.binding)
        self.seconds.append(time.perf_counter() - started)


def random_rows(value: Any, depth: int) -> onnxruntime.OrtValue:
    """A cache of `depth` positions with normal random numbers; a block of rows is repeated."""
    rng = np.random.default_rng(0)
    _, heads, _, columns = value.shape
    if value.type == "tensor(int8)":
        rows = rng.integers(-127, 128, (1, heads, _BLOCK, columns), dtype=np.int8)
        rows[..., -4:] = np.array([2.0**-6], np.float32).view(np.int8)
    else:
        rows = rng.standard_normal((1, heads, _BLOCK, columns), dtype=np.float32)
        if value.type == "tensor(bfloat16)":
            rows = (rows.view(np.uint32) >> 16).astype(np.uint16)
        rows = rows.astype(_NUMPY[value.type])
    array = np.ascontiguousarray(np.resize(rows.swapaxes(1, 2), (1, depth, heads, columns)).swapaxes(1, 2))
    if value.type == "tensor(bfloat16)":
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def stepper(folder: Path, kv_dtype: str, depth: int, options: dict[str, str]) -> Stepper:
    """A session whose caches, shared by past and present, are full up to the token that each step computes."""
    settings = onnxruntime.SessionOptions()
    name = flownpu.get_ep_name()
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == name][:1]
    settings.add_provider_for_devices(devices, options)
    session = onnxruntime.InferenceSession(folder / "model.onnx", settings)
    binding = session.io_binding()
    binding.bind_cpu_input("input_ids", np.array([[5]]))
    binding.bind_cpu_input("attention_mask", np.ones((1, depth), np.int64))
    for value in session.get_inputs():
        if value.name.startswith("past_key_values."):
            cache = random_rows(value, depth)
            binding.bind_ortvalue_input(value.name, cache)
            binding.bind_ortvalue_output(value.name.replace("past_key_values", "present"), cache)
    binding.bind_output("logits")
    return Stepper(kv_dtype, depth, decode_traffic(folder).bytes_at(depth), session, binding)


def main(
    shape: Annotated[str, typer.Argument(help="A shape of `flownpu make-model`.")] = "qwen3-0.6b",
    depth: Annotated[str, typer.Option(help="Tokens of the context, several separated by commas.")] = "16384,32768",
    kv_dtype: Annotated[str, typer.Option(help="Types of the cache; the first is what others are compared with.")] = (
        "bf16,int8"
    ),
    rounds: Annotated[int, typer.Option(min=3)] = 15,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Measures the types in turn."""
    flownpu.register()
    options = {"device": "cpu", **({} if threads is None else {"threads": str(threads)})}
    machine = describe_machine()
    print(f"{machine.cpu}, {machine.isa}, {machine.system}")
    kinds = kv_dtype.split(",")
    with tempfile.TemporaryDirectory(prefix="flownpu-") as scratch:
        folders = {kind: Path(scratch) / kind for kind in kinds}
        for kind, folder in folders.items():
            make_model(shape, folder, kv_dtype=kind, context_length=max(map(int, depth.split(","))))
        shallow = {kind: stepper(folder, kind, _SHALLOW, options) for kind, folder in folders.items()}
        for tokens in map(int, depth.split(",")):
            deep = {kind: stepper(folder, kind, tokens, options) for kind, folder in folders.items()}
            for _ in range(rounds):
                for kind in kinds:
                    deep[kind].step()
                    shallow[kind].step()
            _print(shape, tokens, [(deep[kind], shallow[kind]) for kind in kinds])


def _print(shape: str, depth: int, measured: list[tuple[Stepper, Stepper]]) -> None:
    table = Table(title=f"{shape}, a token behind {depth}: {len(measured[0][0].seconds)} rounds")
    for heading in ("KV cache", "MB read", "ms, least", "median", "GB/s", "times", "its context alone, ms", "times"):
        table.add_column(heading, justify="left" if heading == "KV cache" else "right")

    def paired(ours: list[float], first: list[float]) -> str:
        return f"{median(a / b for a, b in zip(first, ours, strict=True)):.2f}"

    alone = {deep.kv_dtype: [a - median(shallow.seconds) for a in deep.seconds] for deep, shallow in measured}
    first = measured[0][0]
    for deep, _ in measured:
        least, own = min(deep.seconds), alone[deep.kv_dtype]
        row = [f"{deep.bytes / 1e6:.0f}", f"{least * 1e3:.1f}", f"{median(deep.seconds) * 1e3:.1f}"]
        row += [f"{deep.bytes / least / 1e9:.1f}", paired(deep.seconds, first.seconds)]
        row += [f"{min(own) * 1e3:.1f}", paired(own, alone[first.kv_dtype])]
        table.add_row(deep.kv_dtype, *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)

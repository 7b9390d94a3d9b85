# SPDX-License-Identifier: Apache-2.0
"""Times the CPU kernels one by one, beside the machine's limits; checks each kernel's result before it is timed.

    python -m benchmarks.machine.kernels gemma3-1b --isa avx512 --activations int8

runs at the root of the repository, with the module flownpu_testing (`make test` builds it). Weights are copied until
no cache holds all copies, as in a model, where a weight is read once per step. Beside each time stand the least times
for reading the bytes and for the operations; the share of the roof is the longer of the two divided by the time.

    python -m benchmarks.machine.kernels gemma3-1b --activations int8 --contexts "" --symmetric --rows 1,2,4,8,16,32,64

times the products of decode steps for 1 to 64 sequences.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Annotated

import ml_dtypes
import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine.roofs import Roofs, measure_roofs
from flownpu.convert.decoder import Decoder
from flownpu.convert.families import read_decoder
from flownpu.machine import usable_cores
from flownpu.model.shapes import SHAPES
from flownpu.ops import q4nx
from tests.ops.device import ISAS, Node

# Four times the largest last-level cache of common desktop processors.
_WORKING_SET = 256 << 20
_REPEATS = 7
# Most rows for which the LM head is timed: a prompt needs the logits of one row only.
_SEQUENCES = 64
# New tokens of a short second turn behind a long context.
_TURN = 32
# Columns of the result that are checked.
_CHECKED = 64


@dataclass(frozen=True)
class Kernel:
    """One measurement to make.

    Attributes:
        name: the kernel's role in a model.
        shape: its sizes, for people.
        rows: new tokens.
        isa: the kernels' instruction set.
        activations: the type to which products round activations; "": no product with weights.
        bytes: bytes that must be read.
        operations: multiplications and additions.
        make: prepares it and checks its result (AssertionError); returns functions that each run it once, on different
            copies of its data.
    """

    name: str
    shape: str
    rows: int
    isa: str
    activations: str
    bytes: int
    operations: int
    make: Callable[[], list[Callable[[], None]]]


@dataclass(frozen=True)
class Timing:
    """A kernel's median time, beside the least times for its bytes and for its operations."""

    name: str
    shape: str
    rows: int
    isa: str
    activations: str
    microseconds: float
    memory_microseconds: float
    operations_microseconds: float
    gigabytes_per_second: float
    gigaoperations_per_second: float
    share_of_roof: float


def products(
    decoder: Decoder,
    rows: int,
    isa: str,
    activations: str,
    threads: int,
    layout: q4nx.Layout,
) -> Iterator[Kernel]:
    """Every product of a decoder's layer, and the LM head for up to `_SEQUENCES` rows.

    Each runs in turn on so many copies of its weight that no cache holds them.
    """
    heads, kv_heads = decoder.heads * decoder.head_size, decoder.kv_heads * decoder.head_size
    hidden, feed_forward = decoder.hidden_size, decoder.feed_forward_size
    weights = {
        "qkv": (heads + 2 * kv_heads, hidden, "none"),
        "output": (hidden, heads, "none"),
        "gate/up": (feed_forward, hidden, decoder.gating),
        "down": (hidden, feed_forward, "none"),
        **({"LM head": (decoder.vocabulary_size, hidden, "none")} if rows <= _SEQUENCES else {}),
    }
    options = {"cpu_isa": isa, "activations": activations, "threads": str(threads)}
    for name, (m, k, gating) in weights.items():
        blocks = int(np.prod(q4nx.blocks_shape(m, k, layout, gated=gating != "none")))
        operations = 2 * rows * k * m * (2 if gating != "none" else 1)

        def make(m: int = m, k: int = k, gating: str = gating, size: int = blocks) -> list[Callable[[], None]]:
            return _make_product(m, k, gating, rows, options, layout, copies=-(-_WORKING_SET // size))

        yield Kernel(name, f"{m} x {k}", rows, isa, activations, blocks, operations, make)


def _make_product(
    m: int, k: int, gating: str, rows: int, options: dict[str, str], layout: q4nx.Layout, *, copies: int
) -> list[Callable[[], None]]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, k), dtype=np.float32)
    parts = 2 if gating != "none" else 1
    blocks = np.concatenate([_random_blocks(m, k, layout, rng) for _ in range(parts)])
    arrays = [blocks, *(blocks.copy() for _ in range(copies - 1))]
    nodes = [
        Node("Q4NXMatMul", [x, array], constants=(1,), options=options, M=m, K=k, gating=gating) for array in arrays
    ]
    (y,) = nodes[0](x, blocks)
    assert y is not None
    if parts == 1:  # an activation has no simple bound; the tests have one
        _check_product(x, blocks, y, m, k, options["activations"])
    return [n.bound([x, array], [y]) for n, array in zip(nodes, arrays, strict=True)]


def _random_blocks(m: int, k: int, layout: q4nx.Layout, rng: np.random.Generator) -> np.ndarray:
    """Blocks of random weights of variance 1/k; see RandomWeights of `flownpu make-model`."""
    if layout.bits == 8:
        return q4nx.pack(
            *q4nx.quantize_bytes(rng.standard_normal((m, k), dtype=np.float32) / np.float32(k**0.5)), layout
        )
    codes = rng.integers(0, 16, (m, k), dtype=np.uint8)
    scale = rng.uniform(0.75, 1.25, (m, -(-k // q4nx.GROUP))) / (4.6 * k**0.5)
    scale = scale.astype(q4nx.BFLOAT16)
    minimum = (-7.5 if layout.minima else -8) * scale.astype(np.float32)
    return q4nx.pack(codes, scale, minimum.astype(q4nx.BFLOAT16), layout)


def _check_product(x: np.ndarray, blocks: np.ndarray, y: np.ndarray, m: int, k: int, activations: str) -> None:
    """Checks a product within a bound of its roundings; tests/ops/cpu/test_q4nx_matmul.py has tighter bounds.

    bf16: an activation is off by half an ulp, 2^-8 of it. int8: by half a step, 1/254 of the row's largest activation,
    and weights likewise, by 1/254 of a weight row's largest. Both have K + 4 float32 roundings.
    """
    count = min(m, _CHECKED) // q4nx.BLOCK_ROWS * q4nx.BLOCK_ROWS
    weights = q4nx.dequantize(blocks[: count // q4nx.BLOCK_ROWS], count, k).astype(np.float64)
    exact = x.astype(np.float64)
    magnitudes = np.abs(exact) @ np.abs(weights).T
    bound = (k + 4) * 2.0**-24 * magnitudes
    if activations == "bf16":
        bound += 2.0**-8 * magnitudes
    else:
        largest_x, largest_w = np.abs(exact).max(1)[:, None], np.abs(weights).max(1)[None]
        bound += largest_x / 254 * np.abs(weights).sum(1)[None] + largest_w / 254 * np.abs(exact).sum(1)[:, None]
    error = np.abs(y[:, :count] - exact @ weights.T)
    assert np.all(error <= bound), f"expected an error of at most {bound.max()}, got {error.max()}"


def attentions(decoder: Decoder, rows: int, isa: str, context: int, threads: int) -> Iterator[Kernel]:
    """The attention of each kind of layer, with `context` tokens in a bf16 cache, `rows` of them new."""
    operator = "FlowKVAttention" if rows == 1 else "FlowQKVAttention"
    g, d = decoder.kv_heads, decoder.head_size
    for window in sorted({layer.window or -1 for layer in decoder.layers}):
        if window >= context:
            continue
        positions = np.arange(context - rows, context) + 1
        seen = int((positions if window < 0 else np.minimum(positions, window)).sum())
        read = context if window < 0 else min(context, window + rows - 1)
        # Two products, with keys and with values.
        operations, size = 4 * seen * decoder.heads * d, 2 * read * g * d * 2

        def make(window: int = window) -> list[Callable[[], None]]:
            return _make_attention(decoder, operator, rows, context, window, isa, threads)

        shape = f"{context} tokens" + (f", window {window}" if window >= 0 else "")
        yield Kernel(operator, shape, rows, isa, "", size, operations, make)


def _make_attention(
    decoder: Decoder, operator: str, rows: int, context: int, window: int, isa: str, threads: int
) -> list[Callable[[], None]]:
    h, g, d = decoder.heads, decoder.kv_heads, decoder.head_size
    rng = np.random.default_rng(0)
    query = rng.standard_normal((1, rows, (h + 2 * g) * d), dtype=np.float32)
    # For few tokens, several KV caches, up to one per layer, so that the processor's caches do not hold them.
    copies = max(1, min(len(decoder.layers), _WORKING_SET // (4 * context * g * d))) if rows <= _TURN else 1
    caches = [[rng.standard_normal((1, g, context, d), dtype=np.float32).astype(ml_dtypes.bfloat16) for _ in range(2)]]
    caches += [[array.copy() for array in caches[0]] for _ in range(copies - 1)]
    lengths = (np.array([context - 1], np.int32), np.array(context, np.int32))
    attributes = {"num_heads": h, "kv_num_heads": g, "head_size": d, "local_window_size": window}
    inputs = [query, None, None, *caches[0], *lengths, *[None] * 6]
    options = {"cpu_isa": isa, "threads": str(threads)}
    node = Node(operator, inputs, ("float", "bfloat16", "bfloat16"), options=options, **attributes)
    output, keys, values = node(*inputs, into={1: caches[0][0], 2: caches[0][1]})
    assert output is not None
    assert keys is not None
    assert values is not None
    _check_attention(query, keys, values, output, h, window)

    rest = [*lengths, *[None] * 6]
    return [node.bound([query, None, None, *cache, *rest], [output, *cache]) for cache in caches]


def _check_attention(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, output: np.ndarray, heads: int, window: int
) -> None:
    """Checks the last token's output against the definition in float64.

    Probabilities and queries may be rounded to bf16 (2^-8 of each); a score's error moves the output by at most twice
    that error times the largest value.
    """
    _, groups, tokens, d = keys.shape
    first = 0 if window < 0 else max(0, tokens - window)
    for head in range(heads):
        group = head * groups // heads
        k, v = (cache[0, group, first:].astype(np.float64) for cache in (keys, values))
        q = query[0, -1, head * d : (head + 1) * d].astype(np.float64)
        scores = k @ q / d**0.5
        p = np.exp(scores - scores.max())
        expected = p @ v / p.sum()
        score_error = 2.0**-8 * (np.abs(k) @ np.abs(q)).max() / d**0.5
        bound = np.abs(v).max() * (2 * score_error + 2.0**-7)
        error = np.abs(output[0, -1, head * d : (head + 1) * d] - expected).max()
        assert error <= bound, f"expected an error of at most {bound}, got {error}"


def measure_seconds(kernel: Kernel) -> float:
    """Checks and times a kernel: the median of several rounds."""
    runs = kernel.make()
    for run in runs:
        run()
    times = []
    for _ in range(_REPEATS):
        started = perf_counter()
        for run in runs:
            run()
        times.append((perf_counter() - started) / len(runs))
    return median(times)


def time_kernel(kernel: Kernel, roofs: Roofs) -> Timing:
    """Checks and times a kernel, beside its roofs."""
    seconds = measure_seconds(kernel)
    arithmetic = {"int8": roofs.int8_dot, "bf16": roofs.bf16_dot}.get(kernel.activations) or roofs.float_fma
    if not kernel.activations:
        arithmetic = roofs.bf16_dot or roofs.float_fma
    memory, operations = kernel.bytes / roofs.read, kernel.operations / arithmetic if arithmetic else 0.0
    return Timing(
        kernel.name,
        kernel.shape,
        kernel.rows,
        kernel.isa,
        kernel.activations,
        microseconds=seconds * 1e6,
        memory_microseconds=memory * 1e6,
        operations_microseconds=operations * 1e6,
        gigabytes_per_second=kernel.bytes / seconds / 1e9,
        gigaoperations_per_second=kernel.operations / seconds / 1e9,
        share_of_roof=max(memory, operations) / seconds,
    )


def main(
    models: Annotated[list[str] | None, typer.Argument(metavar="SHAPE...", help=f"Of {', '.join(SHAPES)}.")] = None,
    rows: Annotated[str, typer.Option(help="New tokens.")] = "1,4,192",
    contexts: Annotated[str, typer.Option(help="Tokens in the KV cache; empty: no attention.")] = "1024,4096,16384",
    isa: Annotated[str, typer.Option(help=f"Instruction sets, of {', '.join(ISAS)}.")] = ISAS[0],
    activations: Annotated[str, typer.Option(help="bf16, int8.")] = "int8,bf16",
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Weights without minima.")] = False,
    eight_bits: Annotated[bool, typer.Option("--eight-bits", help="Weights of 8 bits without minima.")] = False,
    threads: Annotated[int, typer.Option(min=1)] = usable_cores(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Times the CPU's kernels at the shapes of models."""
    roofs = measure_roofs(threads)
    decoders = [read_decoder(SHAPES[name]) for name in models or ["gemma3-1b"]]
    counts = [int(part) for part in rows.split(",")]
    layout = q4nx.EIGHT_BITS if eight_bits else q4nx.SYMMETRIC if symmetric else q4nx.NARROW
    kernels: list[Kernel] = []
    for decoder in decoders:
        for name in isa.split(","):
            for rounding in activations.split(","):
                for count in counts:
                    kernels += products(decoder, count, name, rounding, threads, layout)
            for context in [int(part) for part in contexts.split(",") if part]:
                # Decoding, a short second turn, a slice of a prompt, and a whole prompt.
                for count in sorted({1, _TURN, max(counts), context}):
                    if count <= context:
                        kernels += attentions(decoder, count, name, context, threads)
    errors = Console(stderr=True)
    shown = track(kernels, "measuring", console=errors, transient=True, disable=not errors.is_terminal)
    timings = [time_kernel(kernel, roofs) for kernel in shown]
    if as_json:
        print(
            json.dumps({"roofs": asdict(roofs), "threads": threads, "kernels": [asdict(t) for t in timings]}, indent=2)
        )
        return
    print(
        f"{threads} threads: reads {roofs.read / 1e9:.1f} GB/s, int8 dot products {roofs.int8_dot / 1e9:.0f} GOP/s, "
        f"bf16 {roofs.bf16_dot / 1e9:.0f} GFLOP/s, float32 FMA {roofs.float_fma / 1e9:.0f} GFLOP/s"
    )
    table = Table()
    for heading in ("kernel", "shape", "rows", "isa", "activations", "us", "memory", "dots", "of roof"):
        table.add_column(heading, justify="left" if heading in ("kernel", "shape", "isa", "activations") else "right")
    for t in timings:
        times = [f"{x:.0f}" for x in (t.microseconds, t.memory_microseconds, t.operations_microseconds)]
        share = f"{100 * t.share_of_roof:.0f} %"
        table.add_row(t.name, t.shape, str(t.rows), t.isa, t.activations, *times, share)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)

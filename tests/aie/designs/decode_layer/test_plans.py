# SPDX-License-Identifier: Apache-2.0
"""The decode layer's plans for every model, seen by the checker, mlir-opt and the order of the sequence."""

from dataclasses import replace

import numpy as np
import pytest

from flownpu.aie.check import check
from flownpu.aie.designs.decode_layer.design import WAYS, CalledLayer, DecodeLayer, LayerShape
from flownpu.aie.designs.decode_layer.shape import Projection, interleave
from flownpu.aie.mlir.module import to_mlir
from flownpu.aie.plan.data import Await, Transfer
from tests.aie.designs.decode_layer.shapes import SHAPES
from tests.aie.designs.test_plans import prototypes
from tests.aie.mlir.test_module import called, needs_mlir_opt, opt


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("position", "capacity", "window"), [(0, 1024, None), (16, 1024, 512), (1022, 1024, 512), (32767, 32768, None)]
)
def test_plan_passes_checker(name, position, capacity, window, way):
    layers = [CalledLayer(window, eight_bits=0b1111 * (position == 16))]
    plan = DecodeLayer(SHAPES[name], way).program(position, capacity, layers=layers).resolve_program("layer")
    assert [str(violation) for violation in check(plan)] == []


@pytest.mark.parametrize("name", SHAPES)
def test_plan_with_int8_cache_passes_checker(name):
    shape = replace(SHAPES[name], int8_cache=True)
    plan = DecodeLayer(shape, "split").program(32767, 32768).resolve_program("layer")
    assert [str(violation) for violation in check(plan)] == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gemma3-1b", "qwen3-0.6b"])
def test_all_calls_share_one_array(name, way):
    design = DecodeLayer(SHAPES[name], way)
    arrays = [
        design.program(position, capacity, **options).resolve_program("layer").array
        for position, capacity, options in [
            (0, 1024, {}),
            (700, 4096, {"layers": [CalledLayer(512, 1), CalledLayer()], "tables": 2}),
            (5, 1024, {"vocabulary": 4096, "epsilon": 1e-5, "scale": 1.0}),
            (
                9,
                1024,
                {"vocabulary": 4096, "head_eight_bits": True, "layers": [CalledLayer(eight_bits=5), CalledLayer()]},
            ),
        ]
    ]
    assert all(array == arrays[0] for array in arrays)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "layers", "vocabulary", "calls"),
    [
        ("gemma3-1b", 26, 262144, 1),
        ("gemma3-4b", 34, 262208, 2),
        ("llama3.2-1b", 16, 128256, 1),
        ("llama3.2-3b", 28, 128256, 1),
        ("llama3.1-8b", 32, 128256, 3),
        ("qwen3-0.6b", 28, 151936, 1),
        ("qwen3-1.7b", 28, 151936, 1),
        ("qwen3-4b", 36, 151936, 2),
        ("qwen3-8b", 36, 151936, 3),
    ],
)
def test_token_has_expected_dispatches(name, layers, vocabulary, calls, way):
    """As docs/npu.md counts them; and the call with the LM head passes the checker."""
    design = DecodeLayer(SHAPES[name], way)
    counts = design.calls([CalledLayer()] * layers, Projection(vocabulary, SHAPES[name].hidden))
    assert (sum(counts), len(counts)) == (layers, calls)
    plan = design.program(1000, 1024, layers=[CalledLayer()] * counts[-1], vocabulary=vocabulary).resolve_program(
        "token"
    )
    assert [str(violation) for violation in check(plan)] == []
    with pytest.raises(ValueError, match="with at most 2147483648 bytes of weights"):
        design.program(0, 1024, layers=[CalledLayer()] * 250)


@pytest.mark.parametrize("way", WAYS)
def test_layer_has_expected_waits(way):
    """Counts the waits: a drain that is awaited before a transfer that may read its result."""
    plan = DecodeLayer(SHAPES["gemma3-1b"], way).program(700, 1024).resolve_program("layer")
    drained = {fifo.name for fifo in plan.array.fifos if any(end.tile.row == 0 for end in fifo.consumers)}
    transfers, waits, waiting = {}, 0, False
    for step in plan.sequence.steps:
        if isinstance(step, Transfer):
            transfers[step.name] = step.fifo
            # Transfers of weights read nothing that a drain wrote, wherever they stand.
            reads = step.fifo not in drained and not step.fifo.startswith("w_")
            waits += waiting and reads
            waiting = waiting and not reads
        elif isinstance(step, Await) and transfers[step.transfer] in drained - {"hidden"}:
            waiting = True
    assert waits + waiting == DecodeLayer(SHAPES["gemma3-1b"], way).attention.waits == {"pairs": 6, "split": 5}[way]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gemma3-1b", "llama3.1-8b"])
def test_next_weights_are_sent_before_products_are_awaited(name, way):
    """Each stream starts the next projection's first weights before the products of one are awaited."""
    shape, design = SHAPES[name], DecodeLayer(SHAPES[name], way)
    steps = design.program(700, 1024).resolve_program("layer").sequence.steps
    places = {step.name: place for place, step in enumerate(steps) if isinstance(step, Transfer)}
    awaited = {step.transfer: place for place, step in enumerate(steps) if isinstance(step, Await)}
    starts = np.cumsum([0, *(projection.bytes for projection in shape.projections)])
    regions = [design.regions[region].offset for region in ("qkv", "attended", "activated", "update")]
    for stream in ("w_0_0", "w_3_1"):
        phases = [
            next(
                places[s.name]
                for s in steps
                if isinstance(s, Transfer) and (s.fifo, s.buffer) == (stream, "weights") and s.tap.offset >= start
            )
            for start in starts[:4]
        ]
        # With split keys, keys follow the first projection on a stream.
        for phase, region in list(enumerate(regions[:3]))[way == "split" :]:
            drain = next(s for s in steps if isinstance(s, Transfer) and s.fifo == "y_0" and s.tap.offset == region)
            assert phases[phase + 1] < awaited[drain.name]


@pytest.mark.parametrize(("way", "int8"), [*((way, False) for way in WAYS), ("split", True)])
def test_kernels_of_header_are_all_called(way, int8):
    known = prototypes()
    for name in ("gemma3-1b", "llama3.2-1b", "qwen3-0.6b"):
        array = DecodeLayer(replace(SHAPES[name], int8_cache=int8), way).program(0, 1024).resolve_program("layer").array
        for kernel in array.kernels:
            assert known[kernel.entry] == [(kind.dtype, kind.shape != ()) for kind in kernel.arguments]
        assert called(array) == {kernel.entry for kernel in array.kernels}


@needs_mlir_opt
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gemma3-1b", "llama3.1-8b", "gemma3-topics"])
def test_mlir_opt_parses_decode_layer(name, way):
    done = opt(to_mlir(DecodeLayer(SHAPES[name], way).program(600, 1024, vocabulary=4096).resolve_program("layer")))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerShape(1152, 4, 1, 256, 6912, "relu"), "expected activation geglu or swiglu, got 'relu'"),
        (
            lambda: LayerShape(288, 4, 2, 32, 416, "swiglu", int8_cache=True),
            "expected d in multiples of 64 with an int8 cache, got 32",
        ),
        (
            lambda: DecodeLayer(LayerShape(288, 4, 2, 64, 416, "swiglu", int8_cache=True)),
            "expected a KV cache in bf16, got one in int8",
        ),
        (lambda: LayerShape(1152, 4, 3, 256, 6912, "geglu"), "heads in multiples of the KV heads"),
        (lambda: LayerShape(1150, 4, 1, 256, 6912, "geglu"), "rows in multiples of 32, 128 or more, got 1150"),
        (lambda: DecodeLayer(SHAPES["gemma3-1b"]).program(0, 1000), "a capacity in multiples of 32"),
        (lambda: DecodeLayer(SHAPES["gemma3-1b"]).program(1024, 1024), "got position 1024 of 1024"),
        (lambda: DecodeLayer(SHAPES["gemma3-1b"]).program(9, 1024, positions=9), "got position 9 of 1024 and 9"),
        (
            lambda: DecodeLayer(SHAPES["gemma3-1b"]).program(0, 1024, layers=[CalledLayer(table=1)]),
            r"table in 0..0, got \[1",
        ),
        (lambda: DecodeLayer(SHAPES["gemma3-1b"]).program(0, 1024, layers=[]), "expected one layer or more"),
        (lambda: DecodeLayer(SHAPES["gemma3-1b"], "all"), "a way of attention of pairs, split, got 'all'"),
        (lambda: DecodeLayer(LayerShape(288, 4, 2, 96, 544, "swiglu"), "split"), "a head size that divides 256 and"),
        (lambda: DecodeLayer(LayerShape(1280, 10, 1, 128, 544, "swiglu"), "split"), "8 query heads or fewer a KV head"),
        (
            lambda: DecodeLayer(SHAPES["llama3.1-8b"]).calls([CalledLayer()] * 32, Projection(1 << 20, 4096)),
            "a layer and the LM head in 2147483648 bytes",
        ),
    ],
)
def test_layer_beyond_limits_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_interleaved_gate_and_up_alternate(rng):
    gate, up = (rng.integers(0, 256, (3, 2, 5120), np.uint8) for _ in range(2))
    turns = interleave(np.concatenate([gate, up]))
    np.testing.assert_array_equal(turns[1], [gate[1], up[1]])

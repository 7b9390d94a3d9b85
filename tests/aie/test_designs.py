# SPDX-License-Identifier: Apache-2.0
"""Every design at the shapes of the models it is for: the plan passes the checker; shapes do not change the array.

That the numbers are right is for the emulator to say, and for the kernels' own tests.
"""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from flownpu.aie.access_pattern import indices
from flownpu.aie.checker import check, require_valid
from flownpu.aie.designs.attention import ALL_KEYS, sweep
from flownpu.aie.designs.common import bits, tiled, untiled
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.vector_operators import RMSNorm, RotaryEmbedding, gated_activation
from flownpu.aie.plan import Call, Release, Transfer, WriteParameter
from flownpu.aie.symbolic import RecordingError
from tests.aie.programs import with_array

KERNELS = Path(__file__).parents[2] / "aie" / "kernels" / "kernels.h"

# D, I, H, G, d, window of the models (their public configurations).
MODELS = {
    "gemma3-1b": (1152, 6912, 4, 1, 256, 512),
    "gemma3-4b": (2560, 10240, 8, 4, 256, 1024),
    "siglip": (1152, 4304, 16, 16, 72, None),
    "llama3.2-1b": (2048, 8192, 32, 8, 64, None),
    "llama3.2-3b": (3072, 8192, 24, 8, 128, None),
    "llama3.1-8b": (4096, 14336, 32, 8, 128, None),
    "qwen3-0.6b": (1024, 3072, 16, 8, 128, None),
    "qwen3-1.7b": (2048, 6144, 16, 8, 128, None),
    "qwen3-4b": (2560, 9728, 32, 8, 128, None),
    "qwen3-8b": (4096, 12288, 32, 8, 128, None),
}
DECODERS = [name for name in MODELS if name != "siglip"]
VOCABULARIES = [(262144, 1152), (262208, 2560), (128256, 2048), (128256, 4096), (151936, 1024), (151936, 4096)]


def plan_of(program):
    return program.resolve_program("design")


def violations(program):
    return [str(violation) for violation in check(plan_of(program))]


def projections(name):
    """(M, K, gated) of a decoder's projections: packed QKV, output, gate and up, down."""
    hidden, feed_forward, heads, kv_heads, size, _ = MODELS[name]
    qkv = ((heads + 2 * kv_heads) * size, hidden, False), (hidden, heads * size, False)
    return [*qkv, (feed_forward, hidden, True), (hidden, feed_forward, False)]


# --- Shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [16, 32])
@pytest.mark.parametrize("name", DECODERS)
def test_fused_dqp(name, tiles):
    k_max = -(-max(k for _, k, _ in projections(name)) // 256) * 256
    for m, k, gated in projections(name):
        assert violations(FusedDQP("npu2", k_max, tiles, "swiglu" if gated else "none").program(m, k)) == []


@pytest.mark.parametrize("tiles", [16, 32])
@pytest.mark.parametrize(("m", "k"), VOCABULARIES)
def test_fused_dqp_makes_logits(m, k, tiles):
    assert violations(FusedDQP("npu2", -(-k // 256) * 256, tiles).program(m, k)) == []


@pytest.mark.parametrize("name", MODELS)
def test_gemm(name):
    for m, k, gated in projections(name):
        for weights, tokens in (("bf16", 1023), ("bfp16", 17)):
            gemm = Gemm("npu2", weights, "geglu" if gated else "none")
            assert violations(gemm.program(tokens, k, -(-m // 32) * 32)) == []


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(("total", "capacity"), [(1, 1024), (17, 1024), (1023, 1024), (32768, 32768)])
def test_flow_kv(name, total, capacity):
    _, _, heads, kv_heads, size, window = MODELS[name]
    design = FlowKV("npu2", heads, kv_heads, size)
    assert violations(design.program(total, capacity)) == []
    assert violations(design.program(total, capacity, window=window or 512)) == []


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("tokens", "past", "capacity"), [(1, 0, 1024), (17, 1000, 1024), (1023, 0, 1024), (64, 4000, 8192)]
)
def test_flow_qkv(name, tokens, past, capacity):
    _, _, heads, kv_heads, size, window = MODELS[name]
    design = FlowQKV("npu2", heads, kv_heads, size)
    assert violations(design.program(tokens, past, capacity)) == []
    assert violations(design.program(tokens, past, capacity, window=window or 512)) == []
    assert violations(design.program(tokens, past, capacity, causal=False)) == []


@pytest.mark.parametrize("target", ["npu1", "npu2"])
@pytest.mark.parametrize("name", MODELS)
def test_vector_operators(name, target):
    hidden, feed_forward, heads, kv_heads, size, _ = MODELS[name]
    for tokens in (1, 17, 1023):
        assert violations(RMSNorm(target, hidden, 4).program(tokens, 1e-6)) == []
        assert violations(RotaryEmbedding(target, heads + kv_heads, size // 32 * 32, cores=4).program(tokens)) == []
        for activation in ("geglu", "swiglu"):
            assert (
                violations(gated_activation(target, activation, tokens * -(-feed_forward // 256) * 256, cores=4)) == []
            )


def test_xdna():
    """What fits XDNA's 4 columns: 16 tiles of FusedDQP, GEMM in bf16, FlowQKV, and FlowKV of up to four KV heads."""
    programs = [
        FusedDQP("npu1", 6912, 16).program(1536, 1152),
        FusedDQP("npu1", 6912, 16, "geglu").program(6912, 1152),
        Gemm("npu1").program(1023, 1152, 6912),
        Gemm("npu1", epilogue="geglu").program(1023, 4096, 14336),
        FlowKV("npu1", 4, 1, 256).program(1000, 1024),
        FlowKV("npu1", 8, 4, 256).program(1000, 1024, window=512),
        FlowQKV("npu1", 8, 4, 256).program(17, 0, 1024),
        FlowQKV("npu1", 32, 8, 128).program(17, 0, 1024),
    ]
    for program in programs:
        assert violations(program) == []


# --- Array time and call time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "programs",
    [
        lambda: [FusedDQP("npu2", 6912).program(m, k) for m, k in ((1536, 1152), (1152, 6912), (262144, 1024))],
        lambda: [Gemm("npu2").program(*shape) for shape in ((1, 1152, 1536), (1023, 6912, 1152))],
        lambda: [
            FlowKV("npu2", 8, 4, 256).program(t, 4096, window=w) for t, w in ((1, None), (4000, None), (4000, 512))
        ],
        lambda: [
            FlowQKV("npu2", 8, 4, 256).program(s, p, 4096, window=w, causal=c)
            for s, p, w, c in ((1, 0, None, True), (512, 3000, 1024, True), (512, 0, None, False))
        ],
        lambda: [RMSNorm("npu2", 1152, 4).program(rows, 1e-6) for rows in (1, 17, 1023)],
    ],
)
def test_shapes_do_not_change_the_array(programs):
    arrays = [plan_of(program).array for program in programs()]
    assert all(array == arrays[0] for array in arrays)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FusedDQP("npu1", 6912, 32), "expected 16 tiles or, on npu2, 32, got 32 on npu1"),
        (lambda: FusedDQP("npu2", 1000), "k_max in multiples of 256, got 'none' and 1000"),
        (lambda: FusedDQP("npu2", 1024).program(1024, 2048), r"expected K of 1..1024 \(k_max\), got 2048"),
        (lambda: FusedDQP("npu2", 1024).program(96, 1024), "expected M in multiples of 32, 128 or more, got 96"),
        (lambda: Gemm("npu1", "bfp16"), "expected weights in bf16 or, on npu2, bfp16, got 'bfp16' on npu1"),
        (lambda: Gemm("npu2", epilogue="relu"), "expected an epilogue of none, gelu, geglu, swiglu, got 'relu'"),
        (lambda: Gemm("npu2").program(1, 64, 256), r"N in multiples of 32, 512 or more \(a supertile\), got 256"),
        (lambda: Gemm("npu2", k=60), "expected m, n, k and k_mt in multiples"),
        (lambda: FlowKV("npu1", 32, 8, 128), "fit 4 columns, got 8 of 32 heads, which need 6"),
        (lambda: FlowKV("npu2", 8, 4, 60), "d and keys in multiples of 8, got 60"),
        (lambda: FlowKV("npu2", 8, 4, 256).program(5, 1000), "in multiples of 32, got 5 of 1000"),
        (lambda: FlowQKV("npu2", 6, 4, 64), "got 4 of 6, 64"),
        (lambda: FlowQKV("npu2", 8, 4, 256, rows=12), "expected rows in multiples of 8"),
        (lambda: FlowQKV("npu2", 8, 4, 256).program(5, 1020, 1024), "got 1025 of 1024"),
        (lambda: RMSNorm("npu1", 64, 5).program(1, 1e-6), "expected 1..4 cores on npu1, got 5"),
        (
            lambda: gated_activation("npu2", "relu", 256),
            "expected geglu or swiglu of a multiple of 256, got relu of 256",
        ),
        (lambda: RMSNorm("npu3", 64).program(1, 1e-6), "expected a target of npu1, npu2, got 'npu3'"),
    ],
)
def test_what_a_design_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- What is moved, against the matrices' own layout ----------------------------------------------------------------


def taps(plan, fifo):
    """The elements of the host buffer that a fifo's transfers touch, in order."""
    moved = [
        indices(s.tap.walk, s.tap.offset) for s in plan.sequence.steps if isinstance(s, Transfer) and s.fifo == fifo
    ]
    return np.concatenate(moved)


@pytest.mark.parametrize(("m", "k", "epilogue"), [(1568, 1152, "none"), (672, 300, "none"), (672, 300, "geglu")])
@pytest.mark.parametrize("tiles", [16, 32])
def test_fused_dqp_sends_every_block_where_its_outputs_come_from(m, k, epilogue, tiles):
    """Follow the bytes of W to the tiles and the outputs back: each row of blocks meets its own 32 outputs."""
    design = FusedDQP("npu2", 1280, tiles, epilogue)
    plan = plan_of(design.program(m, k))
    require_valid(plan)
    rows, blocks, share = m // 32, -(-k // 256), 4 // design.channels
    covered = set()
    for column in range(design.columns):
        if not design.row_groups(m, column):  # fewer row groups than columns
            continue
        outputs = taps(plan, f"y_{column}").reshape(-1, 4, 32)
        for channel in range(design.channels):
            halves = taps(plan, f"w_{column}_{channel}").reshape(-1, share, 2560)
            for place in range(share):
                received = halves[:, place].reshape(-1, 2 if epilogue == "geglu" else 1, blocks, 5120)
                for group, projections_of_group in enumerate(received):
                    target = outputs[group, channel * share + place]
                    row = target[0] // 32
                    np.testing.assert_array_equal(target, np.arange(32 * row, 32 * row + 32))
                    for projection, w in enumerate(projections_of_group):
                        start = (projection * rows + row) * blocks * 5120
                        np.testing.assert_array_equal(w.ravel(), np.arange(start, start + blocks * 5120))
                    covered.add(row)
    assert covered == set(range(rows))


def test_gemm_tiles_meet():
    """What compute tile (1, 2) of a small GEMM multiplies and stores, element by element."""
    m, k, n = 512, 512, 1024 + 32
    design = Gemm("npu2")
    plan = plan_of(design.program(m, k, n))
    require_valid(plan)
    fifos = {fifo.name: fifo for fifo in plan.array.fifos}
    row, column = 1, 2

    def stream(outer, inner, size):
        """A forward link: what the memory tile holds of the host's elements, as it sends them on."""
        arriving = taps(plan, outer).reshape(-1, fifos[outer].type.elements)
        into, out = fifos[outer].consumers[0].walk, fifos[inner].producer.walk
        held = np.empty_like(arriving)
        held[:, indices(into) if into else slice(None)] = arriving
        return held[:, indices(out)].reshape(-1, size)

    a = stream(f"a_{row}", f"a_tiles_{row}", 64 * 64)
    b = stream(f"b_{column}", f"b_tiles_{column}", 64 * 64)
    walk = indices(fifos[f"c_{column}"].producer.walk)
    c = taps(plan, f"c_{column}").reshape(-1, 4, 64 * 64)[:, row]
    steps = k // 64
    assert len(a) == len(b) == len(c) * steps
    for tile, stored in enumerate(c):
        place = np.empty(64 * 64, np.int64)
        place[walk] = stored  # the sub-tiles' elements: where the walk takes each to
        rows, columns = np.divmod(place.reshape(8, 8, 8, 8).transpose(0, 2, 1, 3).reshape(64, 64), n)
        assert np.ptp(rows, axis=1).max() == np.ptp(columns, axis=0).max() == 0
        for step in range(steps):
            left = a[tile * steps + step].reshape(8, 8, 8, 8).transpose(0, 2, 1, 3).reshape(64, 64)
            right = b[tile * steps + step].reshape(2, 8, 4, 8, 8).transpose(1, 3, 0, 2, 4).reshape(64, 64)
            np.testing.assert_array_equal(left, rows[:, :1] * k + step * 64 + np.arange(64))
            # panels(K, N): [N / 32][K / 8][4][8][8]
            inner, outer = np.meshgrid(step * 64 + np.arange(64), columns[0], indexing="ij")
            panel, within = outer // 32, outer % 32
            expected = ((panel * (k // 8) + inner // 8) * 4 + within // 8) * 64 + inner % 8 * 8 + within % 8
            np.testing.assert_array_equal(right, expected)
    assert set(np.unique(c)) <= set(range(m * n))


@pytest.mark.parametrize(
    ("tokens", "past", "window", "causal"), [(40, 100, None, True), (40, 100, 48, True), (40, 0, None, False)]
)
def test_flow_qkv_sees_every_key_it_must(tokens, past, window, causal):
    heads, kv_heads, size, capacity = 8, 4, 256, 256
    design = FlowQKV("npu2", heads, kv_heads, size)
    plan = plan_of(design.program(tokens, past, capacity, window=window, causal=causal))
    require_valid(plan)
    line = kv_heads * 2 * size
    seen: dict[tuple[int, int], set[int]] = {}
    for column in range(design.columns):
        moved = [
            s for s in plan.sequence.steps if isinstance(s, Transfer) and s.fifo in {f"q_{column}", f"kv_{column}"}
        ]
        tops = []
        for step in moved:
            touched = indices(step.tap.walk, step.tap.offset)
            if step.fifo.startswith("q_"):
                token, feature = np.divmod(touched, heads * size)
                tops = [(t, feature[0] // size // 2) for t in np.unique(token)]
                assert set(np.unique(feature // size)) == {2 * tops[0][1], 2 * tops[0][1] + 1}, "the group's two heads"
            else:
                chunks = touched.reshape(-1, 2, design.keys, size)
                position, place = np.divmod(chunks, line)
                assert (place[:, 0] // size == 2 * tops[0][1]).all(), "keys"
                assert (place[:, 1] // size == 2 * tops[0][1] + 1).all(), "values"
                np.testing.assert_array_equal(position[:, 0], position[:, 1])
                for token, head in tops:
                    seen.setdefault((token, head), set()).update(np.unique(position))
    for token in range(tokens):
        last = past + token if causal else past + tokens - 1
        first = max(0, past + token - window + 1) if window else 0
        for head in range(kv_heads):
            assert seen[token, head] >= set(range(first, last + 1))


def test_flow_kv_sends_each_head_its_chunks():
    design = FlowKV("npu2", 8, 4, 256)
    plan = plan_of(design.program(1000, 1024, window=100))
    require_valid(plan)
    for column in range(2):
        for value, name in enumerate("kv"):
            position, place = np.divmod(taps(plan, f"{name}_{column}").reshape(-1, 2, design.keys, 256), 4 * 2 * 256)
            np.testing.assert_array_equal(
                place[:, 0], np.broadcast_to((2 * column * 2 + value) * 256 + np.arange(256), place[:, 0].shape)
            )
            assert (place[:, 1] // 256 == 2 * (2 * column + 1) + value).all()
            # The window's first key is 900; a chunk has 32 positions.
            np.testing.assert_array_equal(np.unique(position), np.arange(896, 1024))


def test_sub_tiles_and_back():
    matrix = np.arange(16 * 24)
    sent = matrix[indices(tiled(16, 24).walk)]
    np.testing.assert_array_equal(sent.reshape(2, 3, 8, 8)[1, 2], matrix.reshape(16, 24)[8:, 16:])
    np.testing.assert_array_equal(sent[indices(untiled(16, 24).walk)], matrix)


def test_sweeps():
    assert sweep(100, 8, 108, 16, window=None, causal=True, scale=1).chunks == 7
    part = sweep(100, 8, 108, 16, window=20, causal=True, scale=1)
    assert (part.first_key, part.chunks) == (80, 2)  # the first query sees from 81
    everything = sweep(0, 8, 108, 16, window=None, causal=False, scale=0.5)
    assert (everything.first_key, everything.chunks) == (0, 7)
    assert everything.words(0, 8) == [7, 0, 0, 108, ALL_KEYS, 0, bits(0.5 * np.log2(np.e)), 8]
    assert np.int32(bits(-1.5)).view(np.float32) == np.float32(-1.5)


# --- Kernels --------------------------------------------------------------------------------------------------------

_TYPES = {
    "bfloat16*": "bf16", "float*": "f32", "std::int32_t*": "i32", "std::uint8_t*": "u8", "bfp16ebs8*": "u8",
    "std::int32_t": "i32",
}  # fmt: skip


def prototypes():
    """Entry: (element type, is a buffer) of each argument, from the kernels' header."""
    text = re.sub(r"//.*", "", KERNELS.read_text(encoding="utf-8"))
    found = {}
    for name, arguments in re.findall(r"void (\w+)\(([^)]*)\)", text):
        kinds = [re.sub(r"\bconst\b|\s", "", " ".join(a.split()[:-1])) for a in arguments.split(",")]
        found[name] = [(_TYPES[kind], kind.endswith("*")) for kind in kinds]
    return found


ALL = {
    "fused_dqp": lambda: FusedDQP("npu2", 1280).program(1024, 1152),
    "fused_dqp 16": lambda: FusedDQP("npu2", 1280, 16).program(1024, 1152),
    "fused_dqp geglu": lambda: FusedDQP("npu2", 1280, 32, "geglu").program(1024, 1152),
    "fused_dqp swiglu": lambda: FusedDQP("npu2", 1280, 32, "swiglu").program(1024, 1152),
    "gemm": lambda: Gemm("npu2").program(17, 1152, 1536),
    "gemm bfp16": lambda: Gemm("npu2", "bfp16").program(17, 1152, 1536),
    "gemm gelu": lambda: Gemm("npu2", epilogue="gelu").program(17, 1152, 4320),
    "gemm geglu": lambda: Gemm("npu2", epilogue="geglu").program(17, 1152, 1536),
    "flow_kv": lambda: FlowKV("npu2", 8, 4, 256).program(17, 1024),
    "flow_qkv": lambda: FlowQKV("npu2", 8, 4, 256).program(17, 0, 1024),
    "rms_norm": lambda: RMSNorm("npu2", 1152, 4).program(17, 1e-6),
    "rope": lambda: RotaryEmbedding("npu2", 12, 256, cores=4).program(17),
    "rope interleaved": lambda: RotaryEmbedding("npu2", 12, 256, True).program(17),
    "geglu": lambda: gated_activation("npu2", "geglu", 6912, cores=4),
    "swiglu": lambda: gated_activation("npu2", "swiglu", 6912, cores=4),
}


@pytest.mark.parametrize("design", ALL)
def test_kernels_are_those_of_the_header(design):
    known = prototypes()
    for kernel in plan_of(ALL[design]()).array.kernels:
        assert known[kernel.entry] == [(kind.dtype, kind.shape != ()) for kind in kernel.arguments]
        assert (KERNELS.parent.parent / kernel.source).is_file()


# --- Mistakes planted in a design are found -------------------------------------------------------------------------


def changed_body(body, kind, change):
    """The body with its first statement of a kind (in loops too) changed, and whether there was one."""
    statements, done = [], False
    for statement in body:
        replacement = [statement]
        if not done and isinstance(statement, kind):
            replacement, done = change(statement), True
        elif not done and hasattr(statement, "body"):
            inner, done = changed_body(statement.body, kind, change)
            replacement = [dataclasses.replace(statement, body=inner)]
        statements += replacement
    return tuple(statements), done


@pytest.mark.parametrize("design", ALL)
def test_a_missing_release_is_found(design):
    plan = plan_of(ALL[design]())
    core = plan.array.cores[0]
    body, done = changed_body(core.body, Release, lambda _: [])
    assert done
    broken = with_array(plan, cores=(dataclasses.replace(core, body=body), *plan.array.cores[1:]))
    assert check(plan) == []
    assert check(broken)


@pytest.mark.parametrize("design", ALL)
def test_an_argument_too_many_is_found(design):
    plan = plan_of(ALL[design]())
    core = plan.array.cores[0]
    body, _ = changed_body(core.body, Call, lambda call: [dataclasses.replace(call, arguments=(*call.arguments, 1))])
    assert check(with_array(plan, cores=(dataclasses.replace(core, body=body), *plan.array.cores[1:])))


@pytest.mark.parametrize("design", ALL)
def test_a_wrong_count_is_found(design):
    """One pass more than the sequence sends data for."""
    plan = plan_of(ALL[design]())
    place = next(i for i, s in enumerate(plan.sequence.steps) if isinstance(s, WriteParameter) and s.index == 0)
    steps = list(plan.sequence.steps)
    steps[place] = dataclasses.replace(steps[place], value=steps[place].value + 1)
    broken = dataclasses.replace(plan, sequence=dataclasses.replace(plan.sequence, steps=tuple(steps)))
    assert any("in a call" in str(violation) for violation in check(broken))


@pytest.mark.parametrize("design", ALL)
def test_a_shorter_transfer_is_found(design):
    plan = plan_of(ALL[design]())
    place = next(i for i, s in enumerate(plan.sequence.steps) if isinstance(s, Transfer) and s.tap.walk[-1].size > 4)
    steps = list(plan.sequence.steps)
    last = steps[place].tap.walk[-1]
    walk = (*steps[place].tap.walk[:-1], dataclasses.replace(last, size=last.size // 2))
    steps[place] = dataclasses.replace(steps[place], tap=dataclasses.replace(steps[place].tap, walk=walk))
    broken = dataclasses.replace(plan, sequence=dataclasses.replace(plan.sequence, steps=tuple(steps)))
    assert check(broken)


def test_recording_errors_are_value_errors():
    assert issubclass(RecordingError, ValueError)

# SPDX-License-Identifier: Apache-2.0
"""The data that designs move, followed element by element through walks, against the matrices' own layout."""

import numpy as np
import pytest

from flownpu.aie.check import require_valid
from flownpu.aie.designs.attention import ALL_KEYS, sweep
from flownpu.aie.designs.common import bits, equal_steps, pieces, tiled, untiled
from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.patch_pooling import PatchPooling
from flownpu.aie.iron.access_pattern import indices
from flownpu.aie.plan.data import Transfer
from tests.aie.designs.test_plans import plan_of


def taps(plan, fifo):
    """The elements of the host buffer that a fifo's transfers read or write, in order."""
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


@pytest.mark.parametrize(("epilogue", "e_y", "e_x"), [("none", 1, 1), ("none", 2, 1), ("none", 1, 2), ("geglu", 1, 1)])
def test_gemm_tiles_meet(epilogue, e_y, e_x):
    """Follows the elements that compute tile (1, 2) of a small GEMM multiplies and stores."""
    m, k, n, size, row, column = 512, 512, 1024 + 64, 64, 1, 2
    design = Gemm("npu2", epilogue=epilogue, e_y=e_y, e_x=e_x, k=32)
    plan = plan_of(design.program(m, k, n))
    require_valid(plan)
    fifos = {fifo.name: fifo for fifo in plan.array.fifos}

    def stream(outer, inner):
        """The host's elements that a memory tile gets from fifo `outer`, in the order in which `inner` sends them."""
        arriving = taps(plan, outer).reshape(-1, fifos[outer].type.elements)
        into, out = fifos[outer].consumers[0].walk, fifos[inner].producer.walk
        held = np.empty_like(arriving)
        held[:, indices(into) if into else slice(None)] = arriving
        return held[:, indices(out)]

    steps, gates, half = k // 32, design.gates, 8 * 4
    a = stream(f"a_{row}", f"a_tiles_{row}").reshape(-1, steps, e_y, 8, 4, 8, 8).swapaxes(-3, -2)
    b = stream(f"b_{column}", f"b_tiles_{column}").reshape(-1, steps, e_x, gates, 2, 4, 4, 8, 8)
    walk = indices(fifos[f"c_{column}"].producer.walk)
    c = taps(plan, f"c_{column}").reshape(-1, e_x, e_y, 4, size * size)[..., row, :]
    assert len(a) == len(b) == len(c) == m // design.height * -(-n // design.width)
    covered = set()
    for megatile, x, y in np.ndindex(c.shape[:3]):
        place = np.empty(size * size, np.int64)
        place[walk] = c[megatile, x, y]  # where the walk takes each element of the sub-tiles
        rows, columns = np.divmod(place.reshape(8, 8, 8, 8).swapaxes(1, 2).reshape(size, size), n)
        assert np.ptp(rows, axis=1).max() == np.ptp(columns, axis=0).max() == 0
        covered |= set(rows[:, 0])
        for step, gate in np.ndindex(steps, gates):
            left = a[megatile, step, y].reshape(size, 32)
            np.testing.assert_array_equal(left, rows[:, :1] * k + step * 32 + np.arange(32))
            # panels(K, N): [N / 32][K / 8][4][8][8]; with a gate, 64 columns of gate and up in turn
            right = b[megatile, step, x, gate].transpose(1, 3, 0, 2, 4).reshape(32, size)
            woven = columns[0] if gates == 1 else columns[0] // size * 2 * size + gate * size + columns[0] % size
            inner, outer = np.meshgrid(step * 32 + np.arange(32), woven, indexing="ij")
            panel, within = outer // half, outer % half
            expected = ((panel * (k // 8) + inner // 8) * 4 + within // 8) * 64 + inner % 8 * 8 + within % 8
            np.testing.assert_array_equal(right, expected)
    assert covered == {
        r for top in range(0, m, design.height) for r in range(top + row * e_y * size, top + (row + 1) * e_y * size)
    }


@pytest.mark.parametrize(("gated", "interleaved"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("m", "k"), [(192, 600), (1024, 1152)])
def test_dequant_engine_puts_every_block_where_gemm_reads_it(m, k, gated, interleaved):
    """Follow the bytes of W to the tiles and out again: a block's weights go to its place in `panels` order."""
    plan = plan_of(DequantEngine("npu2").program(m, k, gated=gated, interleaved=interleaved))
    require_valid(plan)
    rows, blocks = m // 32, -(-k // 256)
    covered = set()
    for column in range(8):
        if not any(isinstance(s, Transfer) and s.fifo == f"b_{column}" for s in plan.sequence.steps):
            continue  # fewer groups than columns
        received = [taps(plan, f"w_{column}_{stream}").reshape(-1, 2, 5120) for stream in range(2)]
        for w, b in zip(np.concatenate(received, 1), taps(plan, f"b_{column}").reshape(-1, 4, 8192), strict=True):
            for source, target in zip(w, b, strict=True):
                block = source[0] // 5120
                np.testing.assert_array_equal(source, block * 5120 + np.arange(5120))
                row, j = divmod(block, blocks)
                if gated:  # gate and up in turn, 64 columns (two rows of blocks) of each
                    projection, row = divmod(row, rows) if not interleaved else (row % 2, row // 2)
                    row = row // 2 * 4 + projection * 2 + row % 2
                np.testing.assert_array_equal(target, (row * blocks + j) * 8192 + np.arange(8192))
                covered.add(block)
    assert covered == set(range((2 if gated else 1) * rows * blocks))


@pytest.mark.parametrize("cores", [1, 3])
def test_patch_pooling_takes_squares(cores):
    grid, side, n = 14, 2, 48
    plan = plan_of(PatchPooling("npu2", n, side, cores).program(grid))
    require_valid(plan)
    covered = set()
    for core in range(cores):
        patches, pooled = taps(plan, f"x_{core}").reshape(-1, side * side, n), taps(plan, f"y_{core}").reshape(-1, n)
        for square, target in zip(patches, pooled, strict=True):
            line, place = divmod(target[0] // n, grid // side)
            y, x = np.mgrid[line * side : (line + 1) * side, place * side : (place + 1) * side]
            np.testing.assert_array_equal(square, (y * grid + x).reshape(-1, 1) * n + np.arange(n))
            covered.add(target[0] // n)
    assert covered == set(range((grid // side) ** 2))


@pytest.mark.parametrize(
    ("tokens", "past", "window", "causal"),
    [(40, 100, None, True), (40, 100, 48, True), (40, 0, None, False), (40, 100, 48, False)],
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


def test_sweep_words_equal_hand_count():
    assert sweep(100, 8, 108, 16, window=None, causal=True, scale=1).chunks == 7
    part = sweep(100, 8, 108, 16, window=20, causal=True, scale=1)
    assert (part.first_key, part.chunks) == (80, 2)  # the first query sees from 81
    everything = sweep(0, 8, 108, 16, window=None, causal=False, scale=0.5)
    assert (everything.first_key, everything.chunks) == (0, 7)
    assert everything.words(0, 8) == [7, 0, 0, 108, ALL_KEYS, 0, bits(0.5 * np.log2(np.e)), 8]
    assert np.int32(bits(-1.5)).view(np.float32) == np.float32(-1.5)


def test_runs_are_cut_and_joined():
    assert pieces(8192, 2) == (8, 1024)  # 512 words: the wrap holds 1023
    assert pieces(9216, 1) == (3, 3072)
    assert pieces(2046, 2) == (1, 2046)
    assert pieces(2048, 2, most=256) == (4, 512)
    with pytest.raises(ValueError, match="expected a run of whole words, got 3 elements of 2 bytes"):
        pieces(3, 2)
    assert equal_steps([0, 4, 8, 11], 4, 64) == [(0, 3), (11, 1)]
    assert equal_steps([0, 4, 8, 12], 4, 2) == [(0, 2), (8, 2)]

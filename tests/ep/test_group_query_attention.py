# SPDX-License-Identifier: Apache-2.0
"""GroupQueryAttention in a session: refusals, fallback, and the reading of positions."""

from typing import Any

import numpy as np
import onnx
import pytest

from tests.ep.conftest import HEADER, MakeSession, Placed, reference

CPU = {"on_unsupported": "cpu"}
H, G, D, P = 4, 2, 16, 12
TABLE = 2048


def model(*, tokens: str = "K", attributes: str = "", outputs: str = "", positions: bool = False) -> onnx.ModelProto:
    """One attention node for any batch, tokens and past, with RoPE if `positions` is set."""
    # Not parse(): its checker knows no schemas of ONNX Runtime's own operators.
    from onnx import parser

    ids, tables = ("int64[B,L] ids,", "cos, sin, ids") if positions else ("", "")
    rotary = ", do_rotary = 1" if positions else ""
    return parser.parse_model(
        f"""{HEADER}
        g (float[B,S,{H * D}] query, float[B,{tokens},{G * D}] key, float[B,{tokens},{G * D}] value, {ids}
           float[B,{G},P,{D}] past_key, float[B,{G},P,{D}] past_value, int32[N] lengths, int32 total,
           float[T,{D // 2}] cos, float[T,{D // 2}] sin)
        => (float y, float present_key, float present_value{", float " + outputs if outputs else ""}) {{
            [attend] y, present_key, present_value{", " + outputs if outputs else ""} =
                com.microsoft.GroupQueryAttention <num_heads = {H}, kv_num_heads = {G}{rotary}{attributes}>
                (query, key, value, past_key, past_value, lengths, total{", " + tables if tables else ""})
        }}"""
    )


def feeds(batch: int, tokens: int, past: int, **changed: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    angles = np.arange(TABLE)[:, None] * 1000.0 ** (-np.arange(D // 2) / (D // 2))
    widths = {"query": H * D, "key": G * D, "value": G * D}
    given: dict[str, Any] = {
        name: rng.uniform(-1, 1, (batch, tokens, width)).astype(np.float32) for name, width in widths.items()
    }
    shape = (batch, G, max(P, past + tokens), D)
    given |= {name: rng.uniform(-1, 1, shape).astype(np.float32) for name in ("past_key", "past_value")}
    given["lengths"] = np.full(batch, past + tokens - 1, np.int32)
    given["total"] = np.array(past + tokens, np.int32)
    return given | {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)} | changed


def check_same(ours: list[np.ndarray], theirs: list[np.ndarray], total: int) -> None:
    """Compares two float32 evaluations of inputs within -1..1: scores of 16 products, sums over `total` keys."""
    for found, expected in zip(ours, theirs, strict=True):
        assert found.shape == expected.shape
        rows = slice(total) if found.ndim == 4 and found.shape[-1] == D else slice(None)
        np.testing.assert_allclose(found[:, :, rows], expected[:, :, rows], rtol=0, atol=2.0**-24 * (64 + 2 * total))


@pytest.mark.parametrize("kind", [1, 2], ids=["before softmax", "after"])
def test_scores_are_left_to_onnx_runtime(make_session: MakeSession, placed: Placed, kind: int) -> None:
    graph = model(attributes=f", qk_output = {kind}", outputs="scores")
    with pytest.raises(Exception, match=r"GroupQueryAttention 'attend'.*output 3 \(output_qk\): expected none"):
        make_session(graph)
    session, placement = placed(graph, CPU)
    assert [node["op_type"] for node in placement["left"]] == ["GroupQueryAttention"]
    given = feeds(1, 3, 5)
    check_same(session.run(None, given), reference(graph, given), 8)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        (", qk_output = 1", "qk_output"),
        (", kv_cache_bit_width = 8", "kv_cache_bit_width"),
        (", local_window_size = 0", "expected local_window_size above 0, or -1 for none, got 0"),
        (", causal = 2", "causal"),
        (", do_rotary = 1", "expected cos_cache and sin_cache with do_rotary = 1"),
    ],
)
def test_unsupported_attributes_are_named(make_session: MakeSession, attributes: str, reason: str) -> None:
    with pytest.raises(Exception, match=rf"does not take 1 of the model's 1 nodes:\n.*{reason}"):
        make_session(model(attributes=attributes))


NOTHING = np.zeros((1, 0, G * D), np.float32)
OTHERS = {
    "keys of another layer": (False, feeds(1, 3, 5, key=NOTHING, value=NOTHING, lengths=np.array([7], np.int32))),
    "a row longer than the total": (False, feeds(1, 3, 5, lengths=np.array([9], np.int32))),
    "a first prompt of another length": (False, feeds(1, 3, 0, lengths=np.array([6], np.int32))),
    "more positions than tokens": (True, feeds(1, 3, 5, ids=np.array([[9, 7, 5, 3]]))),
    "positions with an axis more": (True, feeds(1, 3, 5, ids=np.array([[[9], [7], [5]]]))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_run_refused_by_device_falls_back_to_onnxruntime(make_session: MakeSession, name: str) -> None:
    positions, given = OTHERS[name]
    graph = model(positions=positions)
    if positions:  # of any shape
        next(x for x in graph.graph.input if x.name == "ids").type.tensor_type.ClearField("shape")
    with pytest.raises(Exception, match="set the provider option on_unsupported to cpu"):
        make_session(graph).run(None, given)
    session = make_session(graph, CPU)
    total = 3 if name.startswith("a first") else 8
    check_same(session.run(None, given), reference(graph, given), total)
    # The next run is ours again.
    usual = feeds(1, 1, 6) | ({"ids": np.array([[4]])} if positions else {})
    check_same(session.run(None, usual), reference(graph, usual), 7)


@pytest.mark.parametrize("changed", ["zeros", "anything"])
@pytest.mark.parametrize(
    ("batch", "tokens", "past"), [(1, 5, 0), (2, 5, 0), (1, 1, 0), (2, 1, 0), (1, 4, 6), (2, 1, 6)]
)
def test_positions_are_read_as_onnx_runtime_reads_them(
    make_session: MakeSession, batch: int, tokens: int, past: int, changed: str
) -> None:
    """A first prompt counts on from position_ids[0, 0] in all rows; other calls read every position."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, TABLE - tokens, (batch, tokens)) * (changed == "anything")
    given = feeds(batch, tokens, past, ids=ids)
    graph = model(positions=True)
    check_same(make_session(graph, strict=True).run(None, given), reference(graph, given), past + tokens)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("past", [0, 40])
def test_sliced_prompt_positions_equal_onnxruntime(placed: Placed, batch: int, past: int) -> None:
    """1700 tokens are computed several hundred at a time: all count on from the first slice's first position."""
    tokens = 1700
    ids = np.random.default_rng(2).integers(0, TABLE, (batch, tokens))
    if past == 0:
        ids[0, 0] = 300
        ids.flat[1:] = -1  # no valid position: these must not be read
    given = feeds(batch, tokens, past, ids=ids)
    graph = model(positions=True)
    session, placement = placed(graph, strict=True)
    assert placement["whole_prompts"] == []
    ours = session.run(None, given)
    if batch == 1 or past == 0:
        check_same(ours, reference(graph, given), past + tokens)
        return
    # ONNX Runtime continues one prompt at a time.
    for row in range(batch):
        alone = {
            name: array[row : row + 1] if array.ndim > 0 and len(array) == batch else array
            for name, array in given.items()
        }
        check_same([array[row : row + 1] for array in ours], reference(graph, alone), past + tokens)

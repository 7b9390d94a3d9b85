# SPDX-License-Identifier: Apache-2.0
"""A graph that is refused; tests/generate/test_drafter.py compares outputs by what a drafter makes of them."""

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.newest_keys import add_newest_keys


def test_graph_without_caches_is_refused_and_left() -> None:
    model = testing.parse("decoder (float[B, S, 8] x) => (float[B, S, 8] y) { y = Neg (x) }")
    (miss,) = add_newest_keys(model)
    assert "expected attention whose keys and values are outputs" in miss.reason
    assert [value.name for value in model.graph.outputs] == ["y"]

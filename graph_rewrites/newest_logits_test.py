# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.last_token_logits import set_logits
from flownpu.graph_rewrites.newest_logits import NAME, add_hidden_states, add_newest_logits

if TYPE_CHECKING:
    import onnx_ir as ir

# An LM head of 40 tokens, applied to given hidden states; `last` is the index of each row's last token.
MODEL = """
decoder (float[B, S, 8] hidden, int64[B, 1, 1] last) => (float[B, 1, 40] logits) {
    state = GatherND <batch_dims = 1> (hidden, last)
    product = MatMul (state, weight)
    scaled = Div (product, cap)
    bent = Tanh (scaled)
    logits = Mul (bent, cap)
}
"""
WEIGHT = np.random.default_rng(0).standard_normal((8, 40)).astype(np.float32)


def _model(text: str = MODEL) -> ir.Model:
    return testing.parse(text, weight=WEIGHT, cap=np.array(3.0, np.float32))


@pytest.mark.parametrize(("new", "rows"), [(1, 1), (3, 3), (4, 4), (5, 1), (9, 1)])
def test_newest_logits_equal_last_rows_of_all(new: int, rows: int) -> None:
    model = _model()
    assert add_newest_logits(model, 4) == (NAME, [])
    testing.check(model)
    hidden = np.random.default_rng(1).standard_normal((2, new, 8)).astype(np.float32)
    feeds = {"hidden": hidden, "last": np.full((2, 1, 1), new - 1)}
    logits, newest = testing.run(model, feeds)
    expected = 3 * np.tanh(hidden.astype(np.float64) @ WEIGHT / 3)
    assert newest.shape == (2, rows, 40)
    # A sum of 8 products, and the functions after it, in float32.
    tolerance = 16 * testing.FLOAT32_ROUNDING * 3
    np.testing.assert_allclose(newest, expected[:, new - rows :], rtol=0, atol=tolerance)
    np.testing.assert_array_equal(logits, newest[:, -1:])


@pytest.mark.parametrize("logits", ["float[B, 1, 40] logits", "float[B, S, 40] logits"])
def test_hidden_states_of_all_tokens_are_those_of_the_head(logits: str) -> None:
    text = MODEL.replace("] hidden,", "] x,").replace("{\n", "{\n    hidden = Neg (x)\n", 1)
    if "S" in logits:
        text = text.replace("float[B, 1, 40] logits", logits).replace(
            "    state = GatherND <batch_dims = 1> (hidden, last)\n", ""
        )
        text = text.replace("MatMul (state", "MatMul (hidden")
    model = _model(text)
    assert add_hidden_states(model, "states") == []
    add_newest_logits(model, 4)
    testing.check(model)
    x = np.random.default_rng(1).standard_normal((1, 6, 8)).astype(np.float32)
    outputs = dict(
        zip(
            (value.name for value in model.graph.outputs),
            testing.run(model, {"x": x, "last": np.full((1, 1, 1), 5)}),
            strict=True,
        )
    )
    np.testing.assert_array_equal(outputs["states"], -x)


def test_logits_of_all_tokens_stay() -> None:
    model = _model(MODEL.replace("float[B, 1, 40] logits", "float[B, S, 40] logits"))
    assert add_newest_logits(model, 4) == ("logits", [])
    assert [value.name for value in model.graph.outputs] == ["logits"]


def test_unfit_graph_is_refused_with_reason() -> None:
    other = _model(MODEL.replace("GatherND <batch_dims = 1>", "GatherElements <axis = 1>"))
    name, (miss,) = add_newest_logits(other, 4)
    assert name == ""
    assert "what a GatherND selects" in miss.reason
    (miss,) = add_hidden_states(_model(MODEL.replace("MatMul (state", "MatMul (last")), "states")
    assert "what layers have computed" in miss.reason
    assert "no such output" in add_newest_logits(_model(), 4, "scores")[1][0].reason
    assert set_logits(_model(), "last") == (0, [])

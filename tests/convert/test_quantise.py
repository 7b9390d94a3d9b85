# SPDX-License-Identifier: Apache-2.0
"""A projection that is quantised in parts has the blocks that the whole weight has."""

from pathlib import Path

import numpy as np
import pytest

from flownpu.convert import quantise
from flownpu.convert.checkpoint import Checkpoint
from flownpu.convert.families import read_decoder
from flownpu.convert.quantise import QuantizedWeights
from flownpu.convert.sources.checkpoint_weights import CheckpointWeights
from flownpu.convert.weights import ProjectionWeight, weight_plan
from flownpu.ops import q4nx


@pytest.mark.parametrize("at_once", [1, 64 * 96, 1 << 20])
def test_quantised_parts_cover_all_rows(at_once: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 32 or 64 rows end within and between the 96 + 32 + 32 rows of a packed QKV, and within other weights."""
    monkeypatch.setattr(quantise, "_WEIGHTS_AT_ONCE", at_once)
    source = Checkpoint(checkpoint)
    decoder = read_decoder(source.config)
    weights = QuantizedWeights(CheckpointWeights(source))
    for projection in (weight for weight in weight_plan(decoder) if isinstance(weight, ProjectionWeight)):
        tensors = [source.rows(f"model.{part.tensor}", 0, part.rows).astype(np.float32) for part in projection.sources]
        quantized = [q4nx.quantize(tensor) for tensor in tensors]
        layout = weights.layout(projection)
        assert layout == q4nx.NARROW
        whole = q4nx.stack(*quantized)
        expected = q4nx.pack_gated(*quantized, layout) if projection.gated else q4nx.pack(*whole, layout)
        parts = list(weights.blocks(projection))
        np.testing.assert_array_equal(np.concatenate([part.blocks for part in parts]), expected)
        assert sum(part.size for part in parts) == projection.size
        exact, approximation = np.concatenate(tensors), np.concatenate([q4nx.dequantize_codes(q) for q in quantized])
        error = np.sqrt(sum(part.squared_error for part in parts) / sum(part.squares for part in parts))
        assert error == pytest.approx(q4nx.relative_error(exact, approximation), rel=1e-6)


def test_rows_of_whole_groups_equal_rows_with_rest() -> None:
    """q4nx.quantize takes rows of whole groups as one long row, and others row by row."""
    weight = np.random.default_rng(1).standard_normal((600, 4 * q4nx.GROUP + 1), dtype=np.float32)
    by_rows, at_once = q4nx.quantize(weight), q4nx.quantize(weight[:, :-1])
    np.testing.assert_array_equal(by_rows.codes[:, :-1], at_once.codes)
    np.testing.assert_array_equal(by_rows.scale[:, :-1], at_once.scale)
    np.testing.assert_array_equal(by_rows.minimum[:, :-1], at_once.minimum)

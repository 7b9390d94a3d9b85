# SPDX-License-Identifier: Apache-2.0
"""What the split decode layer adds to a layer's shape (designs/split_layer.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flownpu.aie.designs.common import TILES
from flownpu.aie.designs.decode_layer_shape import BLOCK_BYTES, BLOCK_ROWS, LayerShape, Region

__all__ = ["COLUMNS", "PART", "PARTIAL_LINE", "STREAMS", "SplitShape"]

COLUMNS = 6  # that project and attend
STREAMS = 2 * COLUMNS  # of weights, keys and values
PART = BLOCK_ROWS  # elements in which a tile gives its results
_HALF = BLOCK_BYTES // 4  # elements of half an object: its keys, or its values
PARTIAL_LINE = COLUMNS * TILES * PART  # elements of a part from all tiles
_MOST_KEYS, _MOST_ROWS = 32, 8


@dataclass(frozen=True)
class SplitShape(LayerShape):
    """A decoder layer whose keys are split among all tiles that project; see `LayerShape`.

    d divides 1280, so that objects are whole keys and values, and 768, so that the shares of all tiles are whole lines
    of it; a KV head has eight query heads or fewer.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if _HALF % self.d or self.keys_of_object > _MOST_KEYS or PARTIAL_LINE % self.d or self.group > _MOST_ROWS:
            raise ValueError(
                f"[split_layer] expected a head size that divides {_HALF} and {PARTIAL_LINE}, {_HALF // _MOST_KEYS} or "
                f"more, and {_MOST_ROWS} query heads or fewer a KV head, got {self.d} and {self.group}"
            )

    @property
    def columns(self) -> int:
        """Columns that project, and attend."""
        return COLUMNS

    @property
    def attention_columns(self) -> int:
        """Columns that only attend."""
        return 0

    @property
    def turns(self) -> int:
        """KV heads, which all tiles take one after the other."""
        return self.kv_heads

    @property
    def keys_of_object(self) -> int:
        """Keys of an object, before as many values."""
        return _HALF // self.d

    @property
    def keys(self) -> int:
        """Positions of a stream's two objects, one for each of its tiles; a capacity is a multiple of it."""
        return 2 * self.keys_of_object

    @property
    def round(self) -> int:
        """Positions of one object for each tile."""
        return STREAMS * self.keys

    @property
    def parts(self) -> int:
        """Parts that a tile gives: outputs of all heads, then its shares' maxima and sums, a part a KV head."""
        return self.heads * self.d // PART + self.kv_heads

    @cached_property
    def regions(self) -> dict[str, Region]:
        """Those of a layer; queries [H d], normalised and turned; and partial [part][tile][32], from all tiles."""
        regions = dict(super().regions)
        offset = sum(region.size for region in regions.values())
        for name, elements in (("queries", self.heads * self.d), ("partial", self.parts * PARTIAL_LINE)):
            regions[name] = Region(offset, self.lines(elements) * self.line)
            offset += regions[name].size
        return regions

# SPDX-License-Identifier: Apache-2.0
"""The decode layer's bytes, followed byte by byte in plans of models: from blocks to outputs, from keys to tiles."""

import numpy as np
import pytest

from flownpu.aie.designs.decode_layer.design import WAYS, CalledLayer, DecodeLayer
from flownpu.aie.plan.data import Transfer, WriteParameter
from tests.aie.designs.decode_layer.shapes import SHAPES
from tests.aie.small_programs import indices


def blocks_of(plan, column, first, size):
    """For each tile of a column, the beginnings of its blocks in weights[first : first + size], in order."""
    tiles = []
    for stream in range(2):
        starts = [np.zeros(0, int)]
        for step in plan.sequence.steps:
            if not isinstance(step, Transfer) or (step.fifo, step.buffer) != (f"w_{column}_{stream}", "weights"):
                continue
            if not first <= step.tap.offset < first + size:
                continue
            *outer, inner = step.tap.walk
            assert inner.stride == 1
            pieces = indices(outer, step.tap.offset) if outer else np.array([step.tap.offset])
            bytes_of_pieces = pieces.reshape(-1, 1) + np.arange(0, inner.size, 2560)
            halves = bytes_of_pieces.reshape(-1, 2)
            np.testing.assert_array_equal(halves[:, 1], halves[:, 0] + 2560)
            starts.append(halves[:, 0])
        tiles += list(map(list, np.concatenate(starts).reshape(-1, 2).T))
    return tiles


def shared_rows(blocks, rows, weights, queues, start):
    """The parts of shared rows that each tile takes: with n tiles, a tile takes every n-th block in order.

    Yields, for each weight of each row, its number, and for each tile the numbers of the blocks that it takes and where
    they begin. At the end, unused blocks of the second of two neighbours are dropped.
    """
    tiles, used = len(queues), [0] * len(queues)
    for number in range(rows * weights):
        found = []
        for tile, queue in enumerate(queues):
            mine = [j for j in range(blocks) if (start + number * blocks + j) % tiles == tile]
            found.append((mine, queue[: len(mine)]))
            del queue[: len(mine)]
            used[tile] += len(mine)
        yield number, found
    for tile in range(1, tiles, 2):
        del queues[tile][: used[tile - 1] - used[tile]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "eight_bits"),
    [("llama3.1-8b", 0), ("llama3.2-1b", 0b0110), ("qwen3-4b", 0), ("gemma3-1b", 0b1001), ("gemma3-topics", 0)],
)
def test_weight_blocks_reach_their_outputs(name, eight_bits, way):
    """Follow the weights' bytes to the tiles and the products back, at sizes of which the emulator runs only some."""
    shape, design = SHAPES[name], DecodeLayer(SHAPES[name], way)
    plan = design.program(0, 1024, layers=[CalledLayer(eight_bits=eight_bits)]).resolve_program("layer")
    words = {(s.buffer, s.index): s.value for s in plan.sequence.steps if isinstance(s, WriteParameter)}
    places = [design.regions[region].offset for region in ("qkv", "attended", "activated", "update")]
    first, span = 0, design.attention.span
    for phase, (projection, place) in enumerate(zip(shape.of_bits(eight_bits), places, strict=True)):
        made = {}  # by element of the state, the row of blocks that was written there last; None: no row
        weights = 2 if projection.gated else 1

        def row_of(number, found, first=first, projection=projection, weights=weights):
            """Checks that tiles took all blocks of one row of a weight, each once; returns the row."""
            numbers = [number for mine, _ in found for number in mine]
            starts = np.array([start for _, taken in found for start in taken])
            assert sorted(numbers) == list(range(projection.blocks))
            rows, rest = np.divmod(starts - first, projection.row_bytes)
            np.testing.assert_array_equal(rest // 5120, number % weights * projection.blocks + np.array(numbers))
            (row,) = set(rows)
            return row

        for begin in range(0, design.attention.columns, span):
            columns = range(begin, begin + span)
            queues = [tile for column in columns for tile in blocks_of(plan, column, first, projection.bytes)]
            outputs = []
            for column in columns:
                taps = [
                    step.tap
                    for step in plan.sequence.steps
                    if isinstance(step, Transfer)
                    and (step.fifo, step.buffer) == (f"y_{column}", "state")
                    and place <= step.tap.offset < place + projection.rows
                ]
                walked = [indices(tap.walk, tap.offset).reshape(-1, 2, 32) for tap in taps]
                outputs.append(iter(np.concatenate([np.zeros((0, 2, 32), int), *walked])))
            of_tiles = {
                tuple(words.get((f"tile_{column}_{tile}_parameters", 1 + 3 * phase + word), 0) for word in range(3))
                for column in columns
                for tile in range(4)
            }
            if len(of_tiles) > 1:  # few rows: columns have different numbers of rows, and share none
                assert all(word == 0 for _, _, word in of_tiles)
            of_row, _, word = next(iter(of_tiles))
            blocks = of_row % 1024 * (1 + of_row // 1024)
            gated = 1024 if projection.gated else 1
            shared, start = word % 65536 // gated, word // 65536
            for number, found in shared_rows(blocks, shared, weights, queues, start):
                row = row_of(number, found)
                if number % weights == weights - 1:
                    for tile, part in enumerate(next(outputs[0])):
                        made |= dict.fromkeys(part, None if tile else row)
            for place_in_span, column in enumerate(columns):
                rows = words.get((f"tile_{column}_0_parameters", 2 + 3 * phase), 0) // gated
                given = [next(outputs[place_in_span]) for _ in range(rows)]
                for stream in range(2):
                    pair = queues[place_in_span * 4 + 2 * stream :][:2]
                    for number, found in shared_rows(blocks, rows, weights, pair, 0):
                        made |= dict.fromkeys(given[number // weights][stream], row_of(number, found))
                assert next(outputs[place_in_span], None) is None
            assert not any(queues)
        assert made == {place + element: element // 32 for element in range(projection.rows)}
        first += projection.bytes


@pytest.mark.parametrize("name", ["gemma3-1b", "gemma3-4b", "llama3.2-1b", "qwen3-8b"])
@pytest.mark.parametrize(("position", "window"), [(0, None), (95, None), (700, 512), (1279, None)])
def test_key_lies_in_one_object_of_one_tile(name, position, window):
    """Follow the cache's bytes: each key that a KV head sees is in exactly one object, of one tile, once."""
    shape, way = SHAPES[name], DecodeLayer(SHAPES[name], "split").attention
    plan = DecodeLayer(shape, "split").program(position, 1280, layers=[CalledLayer(window)]).resolve_program("layer")
    words = {(s.buffer, s.index): s.value for s in plan.sequence.steps if isinstance(s, WriteParameter)}
    first_seen = max(0, position - window + 1) if window else 0
    line, of_head = 2 * shape.position_size, 4 * shape.d
    seen = {(head, key): 0 for head in range(shape.kv_heads) for key in range(first_seen, position + 1)}
    for column in range(way.columns):
        for stream in range(2):
            taps = [
                step.tap
                for step in plan.sequence.steps
                if isinstance(step, Transfer) and (step.fifo, step.buffer) == (f"w_{column}_{stream}", "cache_bytes")
            ]
            moved = np.concatenate([indices(tap.walk, tap.offset) for tap in taps]) if taps else np.zeros(0, int)
            # Objects of the stream: [tile][positions of an object][bytes of a bundle's position].
            objects = moved.reshape(-1, 2, way.positions, way.bundle * of_head)
            for place in range(2):
                share = f"share_tile_{column}_{2 * stream + place}_parameters"
                count, first, step, turns, head = (words.get((share, index), 0) for index in (0, 2, 8, 10, 11))
                assert len(objects) == count * turns
                for number, positions in enumerate(objects[:, place]):
                    turn, in_turn = divmod(number, count)
                    heads = range(head + turn * way.bundle, head + (turn + 1) * way.bundle)
                    for offset, of_position in enumerate(positions):
                        key = first + in_turn * step + offset
                        begin = key * line + heads[0] * of_head
                        np.testing.assert_array_equal(of_position, begin + np.arange(way.bundle * of_head))
                        for each in heads:
                            if (each, key) in seen:
                                seen[each, key] += 1
    assert set(seen.values()) == {1}

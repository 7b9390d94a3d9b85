# SPDX-License-Identifier: Apache-2.0
"""The tile of a decode layer that holds the residual stream (design.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.aie.designs.bias import bias_column
from flownpu.aie.designs.common import BF16, BLOCK_COLUMNS, I32, RunTimeParameters, kernel, limits_of, tensor, worker
from flownpu.aie.designs.decode_layer.call import AFTER_STATE, BEFORE_STATE
from flownpu.aie.designs.decode_layer.shape import RESIDUAL_COLUMN
from flownpu.aie.iron.compat import Buffer, ObjectFifo, Tile, range_

if TYPE_CHECKING:
    from flownpu.aie.designs.decode_layer.attention import Attention
    from flownpu.aie.designs.decode_layer.call import CalledLayer
    from flownpu.aie.designs.decode_layer.shape import LayerShape
    from flownpu.aie.iron.compat import Kernel, ObjectFifoHandle, Worker


def _deal_heads(shape: LayerShape, heads: ObjectFifoHandle, x: ObjectFifoHandle, copy: Kernel) -> None:
    """Deal batches of heads out in parts of x: several parts a batch, or several batches a part."""
    batch, batches = shape.batch * shape.d, shape.dealt_heads // shape.batch
    size = min(batch, BLOCK_COLUMNS)
    if batch == size:
        of_part = BLOCK_COLUMNS // size
        for parts, in_part in ((batches // of_part, of_part), (1, batches % of_part)):
            for _ in range_(parts) if parts and in_part else ():
                part = x.acquire(1)
                for place in range_(in_part):
                    copy(heads.acquire(1), part, 0, place, size)
                    heads.release(1)
                x.release(1)
        return
    for _ in range_(batches):
        whole = heads.acquire(1)
        for place in range_(batch // size):
            copy(whole, x.acquire(1), place, 0, size)
            x.release(1)
        heads.release(1)


def _deal_gated(shape: LayerShape, vectors: ObjectFifoHandle, x: ObjectFifoHandle, gated_part: Kernel) -> None:
    """Deal a line of attention's output, behind a line of its gate, out in parts that the gate has opened."""
    held = vectors.acquire(2)
    for part in range_(shape.line // BLOCK_COLUMNS):
        gated_part(held[1], held[0], x.acquire(1), part, BLOCK_COLUMNS)
        x.release(1)
    vectors.release(2)


def _enter(
    shape: LayerShape, kernels: list[Kernel], weights: list[Any], vectors: tuple[Any, ...], sizes: tuple[Any, ...],
    second: Any,
) -> None:  # fmt: skip
    """Compute after = before + update (normalised first, where there are post-norms), normal = norm(after).

    `vectors`: update, before, after, normal. Without norms before a layer's parts, these read the sum itself: normal =
    after, but for the LM head's entry, which has a norm (`second` is 0).
    """
    update, before, after, normal = vectors
    if not shape.post_norms:
        kernels[0](update, before, weights[0], after, normal, *sizes)
        return
    kernels[0](update, weights[0], before, after, *sizes)
    if shape.norms_before:
        kernels[1](after, weights[1], normal, *sizes)
        return
    for _ in range_(second):
        kernels[0](update, weights[0], before, normal, *sizes)
    for _ in range_(1 - second):
        kernels[1](after, weights[1], normal, *sizes)


def has_parts(shape: LayerShape) -> bool:
    """Whether the tile's program has words 5 and 6, for layers of which only parts are on the array."""
    return bool(shape.state_rows or shape.output_gate)


def residual_words(shape: LayerShape, layer: CalledLayer | None, epsilon: int) -> list[int]:
    """The words of a layer, or of a part of one; None: of an LM head. Without how many layers there are, word 4."""
    if layer is None or layer.part == BEFORE_STATE:
        return [epsilon, 0, 0, 0, *[0, 0] * has_parts(shape)]
    dense, columns = int(not shape.experts), shape.projections[1].columns
    if layer.part == AFTER_STATE:
        columns = shape.state_columns
    gated = shape.output_gate and not layer.part
    lines = shape.lines(columns)
    more = [int(not layer.part), gated * lines] if has_parts(shape) else []
    return [epsilon, 0 if gated else lines, dense, dense * shape.lines(shape.feed_forward), *more]


def residual_tile(
    way: Attention, x: ObjectFifo, heads: ObjectFifo, parameters: RunTimeParameters
) -> tuple[ObjectFifo, ObjectFifo, Worker]:
    """The tile that adds to the residual stream, normalises it, and deals every projection's x out in parts.

    Returns its fifos `vectors` (in) and `hidden` (out), and the tile. `heads`: the RoPE tile's fifo, from which heads
    are dealt, too, if the way asks for that. Words: 0, epsilon's bits; 1, lines of attention's output, 0 where there is
    no attention; 2, 1 if an entry and a dense feed-forward follow it; 3, lines of the activations; 4, layers (with
    experts, each expert's pass is one). Where layers keep states or attention's output has a gate, word 1 has no gated
    lines, and: 5, 1 if there are heads to deal; 6, lines of attention's output, each behind one of its gate.
    """
    shape = way.shape
    lines_of_context, mixed = shape.lines(shape.projections[1].columns), has_parts(shape)
    line, norms, post_norms, hidden_size = tensor(shape.line), shape.entry_norms, shape.post_norms, shape.hidden
    vectors, hidden = ObjectFifo(line, name="vectors"), ObjectFifo(line, name="hidden", depth=1)
    copy = kernel("copy_part", "copy_part", line, tensor(BLOCK_COLUMNS), I32, I32)
    if post_norms:
        kernels = [
            kernel("rms_norm", "rms_norm_add", *[line] * 4, *[I32] * 3),
            kernel("rms_norm", "rms_norm", *[line] * 3, *[I32] * 3),
        ]
    else:
        kernels = [kernel("rms_norm", "add_rms_norm", *[line] * 5, *[I32] * 3)]

    def core(
        vectors: ObjectFifoHandle, x: ObjectFifoHandle, hidden: ObjectFifoHandle, residual: Buffer, normal: Buffer,
        rtp: Buffer, barrier: Any, copy: Kernel, kernels: list[Kernel], heads: list[tuple[ObjectFifoHandle, Kernel]],
        opening: list[Kernel],
    ) -> None:  # fmt: skip
        barrier.wait_for_value(1)
        barrier.release_with_value(1)
        sizes = 1, hidden_size, rtp[0]
        context_lines, second, activated_lines = rtp[1], rtp[2], rtp[3]

        def enter(weights: list[Any], update: Any, before: Any, after: Any) -> None:
            _enter(shape, kernels, weights, (update, before, after, normal), sizes, second)

        def deal(whole: Any) -> None:
            for part in range_(shape.line // BLOCK_COLUMNS):
                copy(whole, x.acquire(1), part, BLOCK_COLUMNS)
                x.release(1)

        def pass_on(lines: Any) -> None:
            for _ in range_(lines):
                deal(vectors.acquire(1))
                vectors.release(1)

        for _ in range_(rtp[4]):
            held: Any = vectors.acquire(norms + 2)
            enter([held[1 + place] for place in range(norms)], held[1 + norms], held[0], residual)
            vectors.release(norms + 2)
            deal(normal)
            for dealt, copy_heads in heads:
                for _ in range_(rtp[5] if mixed else context_lines // lines_of_context):
                    _deal_heads(shape, dealt, x, copy_heads)
            for gated_part in opening:
                for _ in range_(rtp[6]):
                    _deal_gated(shape, vectors, x, gated_part)
            pass_on(context_lines)
            for _ in range_(second):
                held, after = vectors.acquire(norms + 1), hidden.acquire(1)
                enter([held[place] for place in range(norms)], held[norms], residual, after)
                vectors.release(norms + 1)
                hidden.release(1)
                deal(normal)
            pass_on(activated_lines)

    # The kernels write D elements. Elements beyond are multiplied by the padding's minima, which are 0, so they must be
    # finite and are 0. With a bias of QKV, the element is 1 in the column whose minima are the bias.
    beyond = np.zeros(shape.line, BF16)
    if shape.qkv_bias:
        beyond[bias_column(hidden_size)] = 1
    normal = Buffer(line, initial_value=beyond, name="normal")
    fifos = vectors.cons(depth=norms + 2), x.prod(), hidden.prod()
    arguments = [*fifos, Buffer(line, name="residual"), normal, parameters.buffers[-1], parameters.barrier]
    dealt = []
    if way.deals_heads:
        copy_heads = kernel("copy_part", "copy_into", heads.obj_type, tensor(BLOCK_COLUMNS), *[I32] * 3)
        dealt = [(heads.cons(), copy_heads)]
    opening = [kernel("gates", "gated_part", line, line, tensor(BLOCK_COLUMNS), I32, I32)] * shape.output_gate
    tile = Tile(RESIDUAL_COLUMN, limits_of("npu2").first_compute_row)
    return (
        vectors,
        hidden,
        worker(core, [*arguments, copy, kernels, dealt, opening], tile=tile),
    )

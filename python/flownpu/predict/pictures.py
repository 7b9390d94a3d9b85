# SPDX-License-Identifier: Apache-2.0
"""The predicted time of a picture by Stable Diffusion 1.4, whose networks a GPU or the array takes node by node.

Everything here is **predicted**. On a GPU it is the bound of its memory and its float32 arithmetic, for convolutions,
products and attention alone. On the array, a convolution or product is the array's or the host's, whichever the prices
call faster; products have another array than convolutions, so that one on the array changes it twice. Attention is the
host's, as sessions have it, at the rate of its products: a lower bound. What is between (norms, activations, turning
pictures channels-last and back) is counted by the bytes of float32 that pass.

The networks' sizes are those of diffusers' UNet2DConditionModel and AutoencoderKL, and of CLIP's ViT-L/14.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flownpu.aie.cost.parameters import VALUES, Values
from flownpu.aie.cost.phases import Cost
from flownpu.aie.programs.cost import Prices
from flownpu.aie.programs.operators import buckets, operator_program
from flownpu.predict.gpu import Gpu, Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flownpu.aie.cost.chips import Chip

NAME = "stable-diffusion-1.4"
STEPS, GUIDED = 20, 2  # guidance computes each step with the prompt and without
# Seconds of a picture of 512 x 512 and 20 steps in fp16, by the paper of ML Drift (*Scaling On-Device GPU Inference for
# Large Generative Models*).
PUBLISHED = {
    "Adreno 750 (S24)": 8.97,
    "Intel Ultra 7 165U, OpenCL": 13.5,
    "Intel Ultra 7 258V": 3.40,
    "M4 Pro": 5.34,
}
_TARGET, _LATENT = "npu2", 64
_CHANNELS, _TEXT, _TOKENS, _HEADS, _TIME = (320, 640, 1280, 1280), 768, 77, 8, 1280
_DECODER = (512, 512, 256, 128)
# Operations of Winograd's kernel (ops/gpu/kernels/images/winograd.cc) for those of the windows' products: of a channel,
# 32 rows and 16 tiles have 16 products each, a tile's transform takes 32 additions and a row's 28 operations, for 4
# pixels of 9 products each.
_WINOGRAD = (32 * 16 * 16 * 2 + 16 * 32 + 32 * 28) / (32 * 16 * 4 * 9 * 2)
_CONVOLUTIONS, _POINTS, _PRODUCTS, _ATTENTION, _BETWEEN = (
    "3 x 3 convolutions", "1 x 1 convolutions", "products", "attention", "between",
)  # fmt: skip


@dataclass(frozen=True)
class Node:
    """A node: its kind, multiply-adds, and rows (of a convolution, pictures) and sizes of its program.

    Attributes:
        moved: bytes of float32 that the host passes around it, by `_BETWEEN`.
    """

    kind: str
    multiply_adds: float
    rows: int = 0
    sizes: tuple[tuple[str, int], ...] = ()
    moved: float = 0.0


@dataclass
class Row:
    """The cost of a network's nodes of one kind.

    Attributes:
        nodes: how many.
        on_array: how many of them the array computes.
        multiply_adds: of all.
        seconds: of all, changes of array included.
        alone: seconds of the programs of all that have one, without changes of array and what the host writes and
            reads: what is left if pictures stay in the array's buffers.
        changes: of array.
    """

    nodes: int = 0
    on_array: int = 0
    multiply_adds: float = 0.0
    seconds: float = 0.0
    alone: float = 0.0
    changes: int = 0


@dataclass(frozen=True)
class PicturePrediction:
    """Rows by kind of each network: a step of the U-Net with guidance, the decoder, the text's encoder."""

    networks: dict[str, dict[str, Row]] = field(default_factory=dict)

    def seconds(self, network: str) -> float:
        """The seconds of one run of a network."""
        return sum(row.seconds for row in self.networks[network].values())

    @property
    def picture(self) -> float:
        """Seconds of a picture: all steps, the decoder, and the text."""
        return sum(self.seconds(name) * (STEPS if name == "step" else 1) for name in self.networks)


def predict_picture(chip: Chip, values: Values = VALUES) -> PicturePrediction:
    """The prediction for 512 x 512 pixels."""
    prices, found = Prices(chip, values), PicturePrediction()
    for name, nodes in networks().items():
        rows: dict[str, Row] = defaultdict(Row)
        for node, count in Counter(nodes).items():
            row, host = rows[node.kind], node.multiply_adds / values["host_products"]
            programs = _cost(node, prices)
            changes = 2 * (node.kind == _PRODUCTS)
            array = programs.total + changes * values["array_change"]
            chosen = programs.dispatches > 0 and array < host
            row.nodes += count
            row.on_array += count * chosen
            row.multiply_adds += count * node.multiply_adds
            row.seconds += count * (array if chosen else host)
            row.alone += count * (programs.total - programs.seconds.get("host", 0.0))
            row.changes += count * chosen * changes
            rows[_BETWEEN].seconds += count * node.moved / values["host_memory"]
        found.networks[name] = dict(rows)
    return found


def networks() -> dict[str, Iterator[Node]]:
    """The nodes of a step of the U-Net, of the decoder and of the text's encoder."""
    return {"step": unet(), "decoder": decoder(), "text": text_encoder()}


def predict_picture_on_gpu(gpu: Gpu, *, winograd: bool = True) -> dict[str, float]:
    """Seconds of a run of each network at least, and of the "picture".

    Args:
        gpu: the GPU.
        winograd: 3 x 3 convolutions take the faster of two kernels, else windows' products.
    """
    found = {
        name: sum(min(kernel.seconds(gpu) for kernel in _kernels(node, winograd=winograd)) for node in nodes)
        for name, nodes in networks().items()
    }
    return found | {"picture": sum(seconds * (STEPS if name == "step" else 1) for name, seconds in found.items())}


def _kernels(node: Node, *, winograd: bool) -> Iterator[Kernel]:
    """The kernels for a node, of which one is launched; attention stores no scores, and its arithmetic takes longer."""
    sizes, floats, moved = dict(node.sizes), 2 * node.multiply_adds, 0.0
    if node.kind == _PRODUCTS:
        moved = 4 * (node.rows * (sizes["inner"] + sizes["columns"]) + sizes["inner"] * sizes["columns"])
    elif sizes:
        pixels = node.rows * sizes["height"] * sizes["width"]
        weight = sizes["channels"] * sizes["filters"] * sizes["kernel_height"] * sizes["kernel_width"]
        moved = 4 * (pixels * (sizes["channels"] + sizes["filters"] / sizes["stride"] ** 2) + weight)
    yield Kernel(node.kind, moved, floats)
    if winograd and node.kind == _CONVOLUTIONS and sizes["stride"] == 1:
        yield Kernel("winograd", moved, floats * _WINOGRAD)


def _cost(node: Node, prices: Prices) -> Cost:
    """A node's programs; those of attention cost nothing, for there are none."""
    kind = "dense_matmul" if node.kind == _PRODUCTS else "convolution"
    cost, left = Cost(), node.rows
    while left > 0:
        rows = next((rows for rows in buckets(kind) if rows >= left), buckets(kind)[-1])
        cost = cost + prices.of(operator_program(kind, dict(node.sizes), _TARGET, rows), 0)
        left -= rows
    return cost


def _convolution(channels: int, filters: int, side: int, batch: int, taps: int = 3, stride: int = 1) -> Node:
    pad, out = taps // 2, side // stride
    sizes = {
        "channels": channels, "filters": filters, "height": side, "width": side, "kernel_height": taps,
        "kernel_width": taps, "stride": stride, "pad_top": pad, "pad_left": pad, "pad_bottom": pad, "pad_right": pad,
    }  # fmt: skip
    # Read and laid out, after a norm with SiLU that reads twice and writes; read back as planes.
    moved = batch * (side**2 * channels * (8 + 12) + out**2 * filters * 8)
    kind = _CONVOLUTIONS if taps == 3 else _POINTS
    return Node(kind, batch * out**2 * taps**2 * channels * filters, batch, tuple(sizes.items()), moved)


def _product(rows: int, inner: int, columns: int) -> Node:
    # A norm or an activation before it, and a sum after it.
    moved = rows * 8 * (inner + columns)
    return Node(_PRODUCTS, rows * inner * columns, rows, (("inner", inner), ("columns", columns)), moved)


def _attention(batch: int, queries: int, keys: int, width: int) -> Node:
    return Node(_ATTENTION, 2.0 * batch * queries * keys * width)


def unet() -> Iterator[Node]:
    """The nodes of a step of the U-Net, with guidance."""
    side, channels, skips = _LATENT, _CHANNELS[0], [_CHANNELS[0]]
    yield _convolution(4, channels, side, GUIDED)
    for level, out in enumerate(_CHANNELS):
        for _ in range(2):
            yield from _resnet(channels, out, side)
            channels = out
            if level < 3:
                yield from _transformer(out, side)
            skips.append(out)
        if level < 3:
            yield _convolution(out, out, side, GUIDED, stride=2)
            side //= 2
            skips.append(out)
    yield from (*_resnet(channels, channels, side), *_transformer(channels, side), *_resnet(channels, channels, side))
    for level in reversed(range(4)):
        out = _CHANNELS[level]
        for _ in range(3):
            yield from _resnet(channels + skips.pop(), out, side)
            channels = out
            if level < 3:
                yield from _transformer(out, side)
        if level > 0:
            side *= 2
            yield _convolution(out, out, side, GUIDED)
    yield _convolution(channels, 4, side, GUIDED)


def _resnet(channels: int, out: int, side: int, batch: int = GUIDED, *, timed: bool = True) -> Iterator[Node]:
    yield _convolution(channels, out, side, batch)
    if timed:
        yield _product(batch, _TIME, out)
    yield _convolution(out, out, side, batch)
    if channels != out:
        yield _convolution(channels, out, side, batch, taps=1)


def _transformer(width: int, side: int) -> Iterator[Node]:
    queries = side**2
    rows = GUIDED * queries
    yield from [_convolution(width, width, side, GUIDED, taps=1)] * 2
    yield from [_product(rows, width, width)] * 6  # of attention to the picture and to the text
    yield from [_product(GUIDED * _TOKENS, _TEXT, width)] * 2
    yield _attention(GUIDED, queries, queries, width)
    yield _attention(GUIDED, queries, _TOKENS, width)
    yield from (_product(rows, width, 8 * width), _product(rows, 4 * width, width))


def decoder() -> Iterator[Node]:
    """The nodes of the decoder, of one latent."""
    side, channels = _LATENT, _DECODER[0]
    yield from (_convolution(4, 4, side, 1, taps=1), _convolution(4, channels, side, 1))
    yield from [*_resnet(channels, channels, side, 1, timed=False)] * 2
    yield from [_product(side**2, channels, channels)] * 4
    yield _attention(1, side**2, side**2, channels)
    for level, out in enumerate(_DECODER):
        for _ in range(3):
            yield from _resnet(channels, out, side, 1, timed=False)
            channels = out
        if level < 3:
            side *= 2
            yield _convolution(out, out, side, 1)
    yield _convolution(channels, 4, side, 1)  # 3, padded in any case


def text_encoder() -> Iterator[Node]:
    """The nodes of CLIP's encoder for two texts."""
    rows = GUIDED * _TOKENS
    for _ in range(12):
        yield from [_product(rows, _TEXT, _TEXT)] * 4
        yield _attention(GUIDED, _TOKENS, _TOKENS, _TEXT)
        yield from (_product(rows, _TEXT, 4 * _TEXT), _product(rows, 4 * _TEXT, _TEXT))

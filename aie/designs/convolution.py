# SPDX-License-Identifier: Apache-2.0
"""Convolution of channels-last pictures as one product of `gemm.py`, whose rows of A are windows of the picture.

A window of kh x kw taps is kh runs of kw C neighbouring elements. Element (i, j, c) of the window of output pixel
(y, x) lies at ((s y + i) L + s x + j) C + c, for stride s, C channels and L pixels from line to line, which is

    r (s C)  +  i (L C)  +  (j C + c)        with r = y L + x

So windows are rows of A, s C elements apart, in kh runs that are L C apart (`gemm.Walk`): shifted reads of the picture
as it lies in main memory, no im2col, and all taps are one sum of K = kh kw C products in L1.

**Buffers**, bf16

    a  pixels of C channels: `head` of zeros, then for each picture `padded_lines` lines of `line` pixels, of which the
       first `height` x `width` are the picture's and the others 0; zeros to the end. A line's padding on the right is
       the next line's on the left, so that it is there once; the same holds between pictures.
    b  `panels` of [kh][run][N]: row (i, j C + c) is the weight of tap (i, j) and channel c. A run is kw C rows,
       padded with rows of 0 to a multiple of k_mt: a channel tail multiplies the pixels that follow by 0.
    c  [M][N], row r of which is the output pixel (y, x) of picture p: r = p lines line / s + y line + x. Rows between
       lines of the output, whose windows wrap around the end of a line, are no pixels.

**Work**: of the rows of C, 1 / s are pixels, less padding: with one pixel of padding 64 x 64 computes 1.03 times its
rows and 8 x 8 1.27 times, before M is padded to whole megatiles. A stride of 2 computes twice its rows, for 0.7 % of
the multiply-adds of Stable Diffusion's U-Net; one walk with no rest would need five dimensions.

**Bytes**: main memory is read kh kw times N / (8 e_x n) for A, since windows are not shared in L2: a memory tile's four
dimensions are all needed to send sub-tiles of 8 x 8, and taps would be a fifth. The arrays of four streams of A are
therefore bound by these streams (21 GB/s together) unless e_x is 2, where N is wide enough. This is the cost that GPUs
avoid by caches, and Winograd's products by fewer reads (neither is in the papers of the array's GEMM).

**Descriptors**: a transfer of A has the four dimensions that there are, [kh][run / k_mt][rows][k_mt]: kh is the
iteration, at most 64; strides are s C, k_mt and L C elements, of which 2^21 are reachable (20 bits of words), so lines
of 512 pixels have up to 4096 channels. C is even, for strides are whole words. B of more than 64 k_mt rows is read by
two tasks or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flownpu.aie.designs.gemm import Walk

if TYPE_CHECKING:
    from flownpu._native import ConvolutionSizes
    from flownpu.aie.designs.gemm import Gemm
    from flownpu.aie.iron.compat import Program


@dataclass(frozen=True)
class Convolution:
    """A convolution on the array of a GEMM.

    Attributes:
        gemm: the array; an epilogue of one tile is applied to what is stored.
        sizes: of pictures and filters, and how both lie in memory, which the host's step reads, too.
        batch: pictures.
    """

    gemm: Gemm
    sizes: ConvolutionSizes
    batch: int = 1

    def __post_init__(self) -> None:
        sizes = self.sizes
        if sizes.channels % 2 or min(sizes.lines, sizes.pixels, self.batch) < 1:
            raise ValueError(
                f"[convolution] expected even channels, and windows that fit the padded picture, got {self}"
            )

    @property
    def run(self) -> int:
        """Rows of B for a line of taps."""
        return self.sizes.run(self.gemm.k_mt)

    @property
    def inner(self) -> int:
        """K: rows of B."""
        return self.sizes.kernel_height * self.run

    @property
    def rows(self) -> int:
        """M: rows of C up to the last pixel; the buffers have as many as the array pads them to."""
        return self.sizes.rows(self.batch)

    def program(self) -> Program:
        """Host buffers a, b and c as above; a and c go on to M as padded.

        Raises:
            ValueError: the array does not take the sizes (`Gemm.program`).
        """
        sizes = self.sizes
        walk = Walk(sizes.stride * sizes.channels, sizes.kernel_height, sizes.line * sizes.channels)
        return self.gemm.program(self.rows, self.inner, sizes.padded_filters, walk=walk)

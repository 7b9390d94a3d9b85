# SPDX-License-Identifier: Apache-2.0
"""The program of a chunk of a prompt: its tokens through all layers, operator by operator.

    rms_norm, then in each layer  dequant_engine, gemm (QKV) -> norm_rope -> flow_qkv -> dequant_engine, gemm (output)
                                  -> residual -> dequant_engine, gemm (gate, up) -> dequant_engine, gemm (down)
                                  -> residual
    residual                      with post-norms rms_norm_add, then rms_norm; without, add_rms_norm

**Buffers of a chunk**, bf16, for all layers the same:

    hidden     [tokens][D]            the residual stream at a layer's beginning; for the first layer: the embeddings
    x          [tokens][D]            that, normalised: A of QKV, and of gate and up
    qkv        [tokens][(H + 2 G) d]  products
    q          [tokens][H][d]         queries, normalised and turned; keys and values go to the cache
    context    [tokens][H][d]         attention's output: A of the output projection
    attended   [tokens][D]            its product
    residual   [tokens][D]            the residual stream between attention and feed-forward
    activated  [tokens][I]            act(gate) * up: A of down
    update     [tokens][D]            its product, which the next layer's beginning adds
    panels     dequantised weights (B) of the projection that is at work: as large as the largest

A GEMM reads K padded to 256 elements of each row of A, whatever A's rows have (`Gemm.program`'s `line`): behind their
last row x, context and activated have the elements that it lacks, which only have to be finite. Rows of a chunk that no
token is in are zeros in `hidden`; they make finite numbers, and their keys and values are written over by the tokens
that come.

**Of the last layer** only keys and values are wanted: a prompt's last token is the decode program's, which has the LM
head, and it needs nothing of the tokens before it but the cache. So the last layer ends with `norm_rope`.

**The tokens of a block** see one another in both directions, as an image's do. A program of the kind `block` is for
exactly as many tokens: its attention lets each of them see all keys up to the last one, as far back as a layer's window
goes. All else is as in the kind `prefill`, and so are its arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from flownpu.aie.call_family import CallSweep
from flownpu.aie.designs.common import TILES
from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.norm_rope import NormRope
from flownpu.aie.designs.vector_operators import ResidualRMSNorm, RMSNorm
from flownpu.aie.programs.call import fixed_call, moving_call
from flownpu.aie.programs.decoder import DecoderBuffers
from flownpu.aie.programs.program import Program, ProgramWriter

if TYPE_CHECKING:
    from flownpu.aie.iron_compat import Program as DesignProgram
    from flownpu.aie.programs.call import ArtifactCall
    from flownpu.aie.programs.decoder import Decoder
    from flownpu.aie.programs.program import View

__all__ = ["prefill_program"]

_CORES = 4  # of the operators on rows
# A rest of fewer tokens than this goes token by token: a chunk reads each weight's 5 bits, writes 16 and reads them
# again, whatever its tokens: 37 bits, where a token of the decode program reads 5.
_FEWEST = 37 // 5 + 1


def prefill_program(
    decoder: Decoder, target: str, context: int, tokens: int, weights: str = "bf16", *, block: bool = False
) -> Program:
    """The program of a chunk of so many tokens, with caches of `context` positions.

    Args:
        decoder: whose layers.
        target: npu1 or npu2.
        context: positions of a layer's cache.
        tokens: rows of the chunk, a multiple of 64.
        weights: what GEMM multiplies by, bf16 or bfp16.
        block: whether the tokens are a block, which see one another.

    Raises:
        ValueError: a design has no place for the sizes.
    """
    return _Chunk(decoder, target, context, tokens, weights, block).program()


@dataclass
class _Chunk:
    decoder: Decoder
    target: str
    context: int
    tokens: int
    weights: str
    block: bool
    layer: int = 0
    calls: dict[tuple[str, str], ArtifactCall] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shape = self.decoder.shape
        self.buffers = DecoderBuffers(self.decoder, self.context)
        self.writer = ProgramWriter(self.buffers.constants())

    def program(self) -> Program:
        given = self.writer.rows("hidden", self.tokens, self.shape.hidden)
        layers = len(self.decoder.windows)
        for self.layer in range(layers):
            self._begin()
            self._project(0, "x", "qkv")
            self._norm_rope()
            if self.layer + 1 == layers:
                break
            self._flow_qkv()
            self._project(1, "context", "attended")
            self._add(1, "attended", "hidden", "residual")
            self._project(2, "x", "activated")
            self._project(3, "activated", "update")
        return Program(
            "block" if self.block else "prefill", self.decoder.attributes, self.tokens,
            self.tokens if self.block else _FEWEST, self.context, self.buffers.layout, self.writer.buffers, given, None,
            tuple(self.writer.steps),
        )  # fmt: skip

    def _step(self, call: ArtifactCall, *views: View | str) -> None:
        # A call of many layers is one call.
        call = self.calls.setdefault((call.array, call.name), call)
        self.writer.step(call, f"layer {self.layer}", *views)

    # --- The residual stream ------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Adds the update of the layer before to the residual stream, and normalises the sum."""
        if self.layer == 0:
            self._norm("hidden", self.shape.entry_norms - 1)
        else:
            self._add(0, "update", "residual", "hidden")

    def _add(self, entry: int, update: str, before: str, after: str) -> None:
        """After = before + update, normalised first where there are post-norms; x = norm(after)."""
        post_norms, first = self.shape.post_norms, entry * self.shape.entry_norms
        operator = "rms_norm_add" if post_norms else "add_rms_norm"
        design = ResidualRMSNorm(self.target, self.shape.hidden, post_norms, _CORES)
        weight, made = self.buffers.norm(self.layer, first), [] if post_norms else ["x"]
        self._step(self._of_rows(operator, design), update, before, weight, after, *made)
        if post_norms:
            self._norm(after, first + 1)

    def _norm(self, source: str, number: int) -> None:
        call = self._of_rows("rms_norm", RMSNorm(self.target, self.shape.hidden, _CORES))
        self._step(call, source, self.buffers.norm(self.layer, number), "x")

    def _of_rows(self, operator: str, design: Any) -> ArtifactCall:
        make = partial(design.program, self.tokens, self.decoder.epsilon)
        return self._fixed(operator, f"{operator}-n{self.shape.hidden}", f"rows{self.tokens}", make)

    # --- Projections --------------------------------------------------------------------------------------------------

    def _project(self, number: int, source: str, product: str) -> None:
        """Dequantises a weight and multiplies by it."""
        projection = self.shape.projections[number]
        n, k, gated = projection.rows, projection.columns, projection.gated
        make: Any = partial(DequantEngine(self.target, self.weights).program, n, k, gated=gated, interleaved=gated)
        engine = self._fixed("dequant_engine", f"dequant_engine-{self.weights}", f"m{n}-k{k}{'-gated' * gated}", make)
        self._step(engine, self.buffers.weights(self.layer, number), "panels")

        epilogue, rows = self.shape.activation if gated else "none", self.tokens // TILES
        gemm = Gemm(self.target, self.weights, epilogue, m=rows)
        if n < gemm.width and not gated:
            gemm = Gemm(self.target, self.weights, epilogue, m=rows, n=gemm.n // 2)
        array, name = f"gemm-{self.weights}-{epilogue}-{gemm.m}x{gemm.n}", f"m{self.tokens}-k{k}-n{n}"
        make = partial(gemm.program, self.tokens, k, n, line=k)
        self._step(self._fixed("gemm", array, name, make), source, "panels", product)

    # --- Attention ----------------------------------------------------------------------------------------------------

    def _norm_rope(self) -> None:
        """Queries, turned, into a buffer of their own; keys, turned, and values into the cache."""
        decoder, shape, table = self.decoder, self.shape, self.decoder.tables[self.layer]
        design = NormRope(self.target, shape.heads, shape.kv_heads, shape.d, shape.qk_norm, _CORES)
        turn = partial(
            design.program, self.tokens, capacity=self.context, tables=decoder.table_count, table=table,
            epsilon=decoder.epsilon,
        )  # fmt: skip
        call = self._moving("norm_rope", "-qk" * shape.qk_norm, f"table{table}", turn)
        norms = [self.buffers.qk_norm(self.layer)] * shape.qk_norm
        self._step(call, "qkv", "rotary", *norms, "q", self.buffers.cache(self.layer))

    def _flow_qkv(self) -> None:
        shape, window = self.shape, self.decoder.windows[self.layer]
        flow = FlowQKV(self.target, shape.heads, shape.kv_heads, shape.d)
        item = TILES * flow.queries
        attend = partial(
            flow.program, self.tokens, capacity=self.context, window=window or None, causal=not self.block,
            scale=self.decoder.scale,
        )  # fmt: skip
        # In a block all queries see keys up to the last token's.
        sweeps = [
            CallSweep(top, self.tokens - top if self.block else item, self.tokens, window)
            for top in range(0, self.tokens, item)
        ]
        call = self._moving("flow_qkv", "", f"window{window}{'-block' * self.block}", attend, flow.keys, sweeps)
        self._step(call, "q", self.buffers.cache(self.layer), "context")

    # --- Calls --------------------------------------------------------------------------------------------------------

    def _fixed(self, operator: str, array: str, name: str, make: partial[DesignProgram]) -> ArtifactCall:
        return fixed_call(operator, array, name, make, self.context)

    def _moving(
        self, operator: str, norms: str, name: str, make: partial[DesignProgram], keys: int = 1,
        sweeps: list[CallSweep] | None = None,
    ) -> ArtifactCall:  # fmt: skip
        array, positions = f"{operator}-{self.decoder.name}{norms}", self.context - self.tokens + 1
        return moving_call(
            operator, array, f"tokens{self.tokens}-{name}", make, self.target, positions, keys, sweeps or ()
        )

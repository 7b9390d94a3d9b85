# SPDX-License-Identifier: Apache-2.0
"""The experts that a token chose, on the array of a decode layer (design.py): a call between two of attention.

A layer with experts is two calls. The first ends with attention's output projection. Then the host adds its result to
the residual stream, normalises the sum and ranks the experts (aie/programs/host.py); the second call multiplies by the
weights of the experts that came first, and the host adds up their answers:

    attended + hidden -> norm -> gate, up, GeGLU or SwiGLU -> down -> answers [number in the choice]

The cores run the program of a layer whose first phase has no blocks, without attention and without a second entry, once
for each chosen expert. Each such pass normalises the same sum again, while weights arrive; so no core needs a program
for experts. Weights of the next expert's phases are sent as soon as a stream has room.

The experts' numbers only change where taps of weights begin: words of a call that follow them as others follow the
position (aie/programs/call_family.py), so the host patches the instructions of one call for any choice.

Host buffers: experts u8 [experts][gate and up | down], all of the layer's; vectors bf16 [line], the norm; state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import bits
from flownpu.aie.designs.decode_layer.call import HostBuffers, Token
from flownpu.aie.designs.decode_layer.rows import deal_rows
from flownpu.aie.designs.decode_layer.sequence import LayerSequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.designs.decode_layer.array import DecodeArray
    from flownpu.aie.designs.decode_layer.attention import Attention


class ExpertSequence(LayerSequence):
    """Writes the steps of the experts that a token chose.

    Attributes:
        chosen: their numbers, in the order of their answers.
    """

    def __init__(
        self, way: Attention, array: DecodeArray, buffers: HostBuffers, chosen: Sequence[int], experts: int,
        epsilon: float, eight_bits: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(way, array, buffers, Token(0, 0, epsilon, 1.0, 0), (), None)
        self.chosen, self.vectors_size = chosen, self._shape.line
        self._of_expert = deal_rows(self._shape.expert_projections(eight_bits), way.columns, way.span)
        of_expert = self._shape.expert_bytes(eight_bits)
        total = experts * of_expert
        for number in chosen:
            offset = number * of_expert
            for phase in self._of_expert:
                self.weights.add(self.planned, phase, self.buffers.weights, offset, total)
                self.planned, offset = self.planned + 1, offset + phase.projection.bytes

    def write(self) -> None:
        """Write all steps."""
        self.weights.start(self._phase)
        gate_up, down = self._of_expert
        answers = list[Any]()
        self._tell(None)
        self._start_projecting(
            [None, gate_up, down],
            [bits(self.token.epsilon), 0, 0, self._shape.lines(self._shape.feed_forward)],
            len(self.chosen),
        )
        for place in range(len(self.chosen)):
            self._send_residual(0)
            self.send_region(self.ends.vectors, "attended")
            activated = self._drain_products(gate_up, "activated")
            self.start_phase()
            # An answer has left before the next expert's activations; a stream's drains are at most four.
            self.wait(answers)
            answers = self._drain_products(down, "answers", place * self._shape.line)
            self.wait(activated)
            self.send_region(self.ends.vectors, "activated")
            self.start_phase()
        self.wait(answers)
        self.finish()

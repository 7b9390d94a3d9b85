# SPDX-License-Identifier: Apache-2.0
"""Random decoders on the emulated NPU: random weights and scripts, in a few shapes that the designs support.

Artifacts depend on the shape only, and take one to three seconds; they are built once for each.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Self

from hypothesis import strategies

from flownpu.convert.decoder import Decoder, Layer, Rotary
from flownpu.npu.artifacts import build_artifacts
from tests.fuzz.choices import Choices
from tests.fuzz.decoders.models import CONTEXT, VOCABULARY, converted
from tests.fuzz.decoders.oracle import BYTES, DecoderCase, DecoderOracle, script
from tests.fuzz.oracle import Verdict
from tests.fuzz.worker import Worker

FULL, WINDOWED = Layer(Rotary(10000.0)), Layer(Rotary(100.0), 16)
# Hidden size, heads, KV heads, head size, feed-forward size. The first is large enough for prefill's designs; with the
# others, prompts are computed token by token.
SHAPES = ((288, 4, 2, 32, 608), (160, 4, 2, 32, 320), (256, 2, 1, 64, 256), (160, 4, 4, 32, 192))
# Bound on the ratio of FlowNPU's error to the measured one (oracle.py). The array rounds more than the CPU: results of
# norms and products, the residual stream, attention's weights (tests/npu/rounding.py). Together with the inputs of a
# layer's four products, these are about three times as many roundings. The largest ratio of 14 decoders was 3.0.
ROUNDINGS = 10.0


def random_decoder(choices: Choices) -> Decoder:
    """One of a few decoders, so that few artifacts are built."""
    hidden, heads, kv_heads, head_size, feed_forward = choices.pick(SHAPES)
    return Decoder(
        family="llama",
        hidden_size=hidden,
        feed_forward_size=feed_forward,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocabulary_size=VOCABULARY,
        context_length=CONTEXT,
        layers=choices.pick(((FULL, WINDOWED), (FULL,), (WINDOWED, FULL, WINDOWED))),
        gating=choices.pick(("swiglu", "geglu")),
        norm_epsilon=1e-6,
        attention_scale=head_size**-0.5,
        qk_norm=choices.chance(50),
        sandwich_norms=choices.chance(50),
    )


def build(data: bytes) -> DecoderCase:
    """The case that these bytes encode."""
    choices = Choices(data)
    decoder = random_decoder(choices)
    steps, lengths = script(choices, (1, 1, 1, 1, 1, 2))
    capacity = CONTEXT if choices.chance(70) else 0
    options = {"device": "emulate", "activations": "bf16", "on_unsupported": "error" if len(lengths) == 1 else "cpu"}
    return DecoderCase(converted(choices, decoder, all_logits=False), steps, lengths, capacity, options)


def cases() -> strategies.SearchStrategy[DecoderCase]:
    """Random cases."""
    return strategies.binary(min_size=BYTES, max_size=BYTES).map(build)


class EmulatedOracle(DecoderOracle):
    """A DecoderOracle that builds artifacts, in a folder of its own; a context manager."""

    roundings = ROUNDINGS

    def __init__(self, reference: Worker, ours: Worker) -> None:
        super().__init__(reference, ours)
        self._folder = tempfile.TemporaryDirectory()
        self._built: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def judge(self, case: DecoderCase) -> Verdict:
        """Runs a case on ONNX Runtime and on the emulated NPU, and compares."""
        shape = case.decoder.description
        if shape not in self._built:
            self._built[shape] = str(self._build(case.decoder.model))
        return super().judge(replace(case, options={**case.options, "artifacts": self._built[shape]}))

    def _build(self, model: bytes) -> Path:
        folder = Path(self._folder.name) / str(len(self._built))
        folder.mkdir()
        (folder / "model.onnx").write_bytes(model)
        decoder = {"filename": "model.onnx"}
        settings = {"type": "llama", "context_length": CONTEXT, "vocab_size": VOCABULARY, "decoder": decoder}
        (folder / "genai_config.json").write_text(json.dumps({"model": settings}))
        build_artifacts(folder, context=CONTEXT, output=folder / "artifacts")
        return folder / "artifacts"

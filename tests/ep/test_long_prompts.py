# SPDX-License-Identifier: Apache-2.0
"""A long prompt gives the same results slice by slice (ep/partition/schedule.h) as at once."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from flownpu.ops import definitions
from tests.ep.conftest import MakeSession, Placed, parse

HEADS, GROUPS, SIZE, LAYERS = 4, 2, 16, 2
WIDTH, KV_WIDTH = HEADS * SIZE, GROUPS * SIZE
# Three slices of 768 tokens and less; and two, enough for what does not depend on the slice before last.
TOKENS, TWO_SLICES = 2000, 1000
NAMES = [f"{layer}_{kind}" for layer in range(LAYERS) for kind in ("key", "value")]
# Scores have a standard deviation of 16, so that a query attends almost only to a few keys, which may be anywhere: one
# key more or less changes some row by the size of a value.
SCALE = ", scale = 4.0"
# The kernels' coarsest rounding is of attention weights to bf16, by up to 2^-8 of each. Weights are relative to the
# maximum of the keys' chunks so far, and slices cut chunks in other places: a layer's results may differ by 2^-7 of the
# largest value. The residual adds the differences of two layers, the norm divides by a root mean square above 1/2 (that
# of x0 alone is 1), and y doubles them.
TOLERANCE = 2**-7 * LAYERS * 2 * 2
# A step that changes no number and yet needs all tokens at once, since a Reshape may move a row anywhere.
AT_ONCE = "x = Reshape(x0, same)"
IN_SLICES = "x = Identity(x0)"


@dataclass
class Case:
    """A decoder and what is fed to it."""

    lengths: list[int]
    """Tokens of each row of the batch; shorter rows are padded on the right."""
    past: int = 0
    capacity: int = TOKENS + 16
    attributes: str = ""
    positions: bool = False
    bias: bool = False
    causal: bool = True
    blocks: tuple[tuple[int, int], ...] = ()
    """bidirectional_blocks of every row, as runs of (number, tokens)."""
    slices: tuple[int, ...] = ()
    """Tokens of each slice as expected; if empty, any slices, but more than one."""

    @property
    def total(self) -> int:
        return self.past + max(self.lengths)


WINDOW_SIZED = ", local_window_size = 100, sliding_window_cache = 1"
CASES = {
    "one row": Case([TOKENS]),
    "as long as a slice and a little": Case([800], slices=(800,)),
    "rest of one token": Case([2 * 768 + 1]),
    "ragged batch": Case([1500, TOKENS, 10, 768]),
    "past": Case([TWO_SLICES], past=5),
    "batch with a past": Case([TWO_SLICES, TWO_SLICES, TWO_SLICES], past=70),
    "growing cache": Case([TWO_SLICES], capacity=0),
    "window": Case([TWO_SLICES], attributes=", local_window_size = 100"),
    "window-sized cache": Case([TOKENS], capacity=128, attributes=WINDOW_SIZED),
    "window-sized cache with a past": Case([TWO_SLICES] * 2, past=300, capacity=128, attributes=WINDOW_SIZED),
    "window-sized cache of a ragged batch": Case([TWO_SLICES, 900], capacity=128, attributes=WINDOW_SIZED),
    "positions": Case([TWO_SLICES] * 2, positions=True, attributes=", do_rotary = 1"),
    "rotary": Case([TWO_SLICES], past=3, attributes=", do_rotary = 1"),
    "bias": Case([TWO_SLICES], bias=True),
    # A slice has 768 tokens, or more to end with a block; the last 148 tokens are too few for a slice of their own.
    "blocks": Case([2000], blocks=((0, 600), (1, 256), (0, 300), (2, 256), (3, 440), (0, 148)), slices=(856, 1144)),
    "blocks of a ragged batch": Case([900, TWO_SLICES, 10], blocks=((0, 250), (1, 256), (0, 494))),
    "blocks of a batch with a past": Case(
        [700, 700], past=30, blocks=((0, 350), (1, 100), (2, 250)), slices=(450, 250)
    ),
    "blocks in a window": Case(
        [1000], attributes=", local_window_size = 100", blocks=((1, 700), (2, 256), (0, 44)), slices=(1000,)
    ),
    "blocks in a window-sized cache": Case(
        [TOKENS], capacity=128, attributes=WINDOW_SIZED, blocks=((0, 700), (1, 256), (0, 1044)), slices=(956, 768, 276)
    ),
}


def decoder(case: Case, first: str = IN_SLICES, last: str = "y = Mul(h, two)") -> Any:
    """Layers of attention with a residual; the hidden states of all tokens and of the last one."""
    batch = len(case.lengths)
    attributes = f"num_heads = {HEADS}, kv_num_heads = {GROUPS}, head_size = {SIZE}{SCALE}{case.attributes}"
    optional = ", ".join(
        [
            *(["cos", "sin"] if "rotary" in case.attributes else ["", ""]),
            "positions" if case.positions else "",
            "bias" if case.bias else "",
            *(["", "", "blocks"] if case.blocks else []),
        ]
    ).rstrip(", ")
    layers = "  ".join(
        f"[attend_{i}] a{i}, present_{i}_key, present_{i}_value = ai.flownpu.FlowQKVAttention <{attributes}> "
        f"(x{i or ''}, key, value, past_{i}_key, past_{i}_value, seqlens, total{', ' if optional else ''}{optional})  "
        f"x{i + 1} = Add(a{i}, x{i or ''})"
        for i in range(LAYERS)
    )
    cache = {name: f"float[{batch},{GROUPS},%s,{SIZE}] {{}}_{name}" for name in NAMES}
    inputs = [
        f"float[{batch},S,{WIDTH}] x0",
        f"float[{batch},S,{KV_WIDTH}] key",
        f"float[{batch},S,{KV_WIDTH}] value",
        f"int32[{batch}] counts",
        "int32 longest",
        f"int64[{batch},1,1] newest",
        *(text.format("past") % "P" for text in cache.values()),
        *([f"float[4096,{SIZE // 2}] cos", f"float[4096,{SIZE // 2}] sin"] if "rotary" in case.attributes else []),
        *([f"int64[{batch},S] positions"] if case.positions else []),
        *(["float[1,1,S,T] bias"] if case.bias else []),
        *([f"int32[{batch},S] numbers"] if case.blocks else []),
    ]
    outputs = [
        f"float[{batch},S,{WIDTH}] y",
        f"float[{batch},1,{WIDTH}] z",
        *(text.format("present") % "C" for text in cache.values()),
    ]
    ones = ", ".join(["1"] * WIDTH)
    model = parse(
        f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "ai.flownpu": 1]>
        decoder ({", ".join(inputs)}) => ({", ".join(outputs)})
        <int64[3] same = {{0, 0, {WIDTH}}}, int32 one = {{1}}, float two = {{2}}, float[{WIDTH}] ones = {{{ones}}}> {{
            seqlens = Sub(counts, one)  total = Mul(longest, one)
            {"blocks = Mul(numbers, one)" if case.blocks else ""}
            {first}  {layers}  h = com.microsoft.SkipSimplifiedLayerNormalization(x{LAYERS}, a0, ones)  {last}
            n = GatherND <batch_dims = 1> (y, newest)  z = Add(n, n)
        }}"""
    )
    proto = ir.from_proto(model)
    definitions.add_functions(proto)
    return ir.to_proto(proto)


def feed(case: Case) -> dict[str, Any]:
    random = np.random.default_rng(0)
    batch, tokens = len(case.lengths), max(case.lengths)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    inputs: dict[str, Any] = {
        "x0": normal(batch, tokens, WIDTH),
        "key": normal(batch, tokens, KV_WIDTH),
        "value": normal(batch, tokens, KV_WIDTH),
        "counts": np.array(case.lengths, np.int32) + case.past,
        "longest": np.array(case.total, np.int32),
        "newest": np.array(case.lengths)[:, None, None] - 1,
    }
    inputs |= {f"past_{name}": normal(batch, GROUPS, case.capacity, SIZE) for name in NAMES}
    if "rotary" in case.attributes:
        angles = np.arange(4096)[:, None] * 0.1 ** np.arange(SIZE // 2)
        inputs |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    if case.positions:
        inputs["positions"] = np.stack([random.permutation(tokens) for _ in range(batch)])
    if case.bias:
        inputs["bias"] = normal(1, 1, tokens, case.total)
    if case.blocks:
        row = np.concatenate([np.full(count, number, np.int32) for number, count in case.blocks])
        inputs["numbers"] = np.tile(row, (batch, 1))
    return inputs


def profiled(
    make_session: MakeSession, folder: Path, model: Any, inputs: dict[str, Any]
) -> tuple[list[Any], tuple[int, ...]]:
    """The outputs, and the tokens of each slice that the first layer's attention was run for."""
    configure = {"enable_profiling": True, "profile_file_prefix": str(folder / "profile")}
    session = make_session(model, strict=True, configure=configure)
    outputs = session.run(None, inputs)
    events = json.loads(Path(session.end_profiling()).read_text())
    slices = [event["args"]["output_shapes"][0][1] for event in events if event["name"] == "attend_0"]
    return outputs, tuple(slices)


@pytest.mark.parametrize("name", CASES)
def test_sliced_prompt_equals_whole_one(make_session: MakeSession, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    inputs = feed(case)
    sliced, slices = profiled(make_session, tmp_path, decoder(case), inputs)
    whole, once = profiled(make_session, tmp_path, decoder(case, first=AT_ONCE), inputs)
    assert once == (max(case.lengths),)
    assert sum(slices) == max(case.lengths)
    assert slices == case.slices if case.slices else len(slices) > 1
    largest = np.abs(inputs["value"]).max()
    held = case.capacity - 100 if "sliding" in case.attributes else None
    for row, length in enumerate(case.lengths):
        np.testing.assert_allclose(sliced[0][row, :length], whole[0][row, :length], rtol=0, atol=TOLERANCE * largest)
        # Keys and values are inputs, and are stored unchanged.
        for ours, theirs in zip(sliced[2:], whole[2:], strict=True):
            assert ours.shape == theirs.shape
            rows = held or case.past + length
            np.testing.assert_array_equal(ours[row, :, :rows], theirs[row, :, :rows])
    np.testing.assert_allclose(sliced[1], whole[1], rtol=0, atol=2 * TOLERANCE * largest)


def test_bound_outputs_are_written_in_slices(make_session: MakeSession) -> None:
    # As GenAI binds a cache: past and present are the same memory.
    case = CASES["past"]
    inputs = feed(case)
    session = make_session(decoder(case), strict=True)
    expected = session.run(None, inputs)
    binding = session.io_binding()
    shared = {name: onnxruntime.OrtValue.ortvalue_from_numpy(inputs[f"past_{name}"].copy()) for name in NAMES}
    for name, array in inputs.items():
        if not name.startswith("past"):
            binding.bind_cpu_input(name, array)
    for name, value in shared.items():
        binding.bind_ortvalue_input(f"past_{name}", value)
        binding.bind_ortvalue_output(f"present_{name}", value)
    binding.bind_output("y")
    binding.bind_output("z")
    session.run_with_iobinding(binding)
    y, z = (value.numpy() for value in binding.get_outputs()[-2:])
    np.testing.assert_array_equal(y, expected[0])
    np.testing.assert_array_equal(z, expected[1])
    for name, present in zip(NAMES, expected[2:], strict=True):
        np.testing.assert_array_equal(shared[name].numpy()[:, :, : case.total], present[:, :, : case.total])


def test_short_prompt_after_long_one_gives_same_bits(make_session: MakeSession) -> None:
    session = make_session(decoder(CASES["one row"]), strict=True)
    long, short = feed(Case([TOKENS])), feed(Case([3]))
    first = session.run(None, short)
    session.run(None, long)
    for ours, theirs in zip(session.run(None, short)[:2], first[:2], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("attributes", "first", "last", "reason"),
    [
        pytest.param("", IN_SLICES, "y = Mul(h, two)", None, id="slices"),
        pytest.param("", AT_ONCE, "y = Mul(h, two)", "Reshape 'x' needs all tokens at once", id="before attention"),
        pytest.param(
            "", IN_SLICES, "y = Reshape(h, same)", "Reshape 'y' needs all tokens at once", id="after attention"
        ),
        pytest.param(
            ", causal = 0", IN_SLICES, "y = Mul(h, two)", "no step knows where tokens are", id="tokens that look ahead"
        ),
        pytest.param(
            "",
            IN_SLICES,
            "t = Shape(h)  y = Reshape(h, t)",
            "Shape 't' needs all tokens at once",
            id="number of tokens in a slice",
        ),
        pytest.param(
            "",
            IN_SLICES,
            "g = GatherND <batch_dims = 1> (h, newest)  y = Add(h, g)",
            "Add 'y' needs 'g' of all tokens",
            id="what all slices make, in each",
        ),
        pytest.param(
            "",
            "p = Add(newest, newest)  x = Mul(x0, two)",
            "k = Cast <to = 1> (p)  y = Add(h, k)",
            None,
            id="a value without tokens",
        ),
    ],
)
def test_report_says_why_prompt_is_not_cut(
    placed: Placed, attributes: str, first: str, last: str, reason: str | None
) -> None:
    _, placement = placed(decoder(Case([3], attributes=attributes), first, last), strict=True)
    assert placement["whole_prompts"] == ([] if reason is None else [reason])


def test_program_without_attention_is_not_cut(placed: Placed) -> None:
    _, placement = placed("g (float[1,S,4] x) => (float[1,S,4] y) { y = Add(x, x) }")
    assert placement["whole_prompts"] == ["no step knows where tokens are"]

# SPDX-License-Identifier: Apache-2.0
"""GroupQueryAttention as exports have it: lowered onto our provider, against ORT's own CPU kernel.

A seeded sample of `GRID` is run. Any two values of two dimensions that may occur together do so in the sample, which a
test below checks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from flownpu.graph_rewrites import testing
from flownpu.ops.definitions.flow_qkv_attention import resident_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

# Dimensions and their values. `cache`: how the past comes (it is absent, grows, is shared with the present, or is as
# long as a window), in float16 if `halves`. `rope`: where the rotation is; `positions`: whether position_ids is given.
# `sink`: what the softmax's denominator has besides the keys. `bias`: the axes over which it varies, besides the
# tokens. `lengths`: seqlens_k's shape.
GRID: dict[str, tuple[Any, ...]] = {
    "packed": (True, False),
    "heads": ((4, 4), (4, 2), (6, 1)),
    "head_size": (64, 72, 80, 96, 128, 256),
    "batch": (1, 2, 3),
    "tokens": (1, 7, 33, 130),
    "past": (0, 5, 200),
    "cache": ("absent", "grows", "shared", "window"),
    "rope": ("none", "inside", "interleaved", "partial", "outside", "outside, partial"),
    "window": (-1, 8, 64),
    "softcap": (0.0, 5.0),
    "scale": (0.0, 0.2),
    "sink": ("none", "head_sink", "smooth", "both"),
    "bias": ("none", "tokens", "heads", "rows", "rows, heads"),
    "ragged": (False, True),
    "positions": (False, True),
    "halves": (False, True),
    "lengths": ("[B]", "[B,1]"),
    "causal": (True, False),
}
Values = tuple[Any, ...]
# Enough for every pair that may occur; twice as many would take twice the time and have found nothing more.
CASES = 300
F32 = TensorProto.FLOAT
HALF_STEP = 2.0**-10  # of float16 between 1 and 2
OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]


@dataclass(frozen=True)
class Case:
    """One point of the grid: an attention and what is fed to it."""

    packed: bool
    heads: tuple[int, int]
    head_size: int
    batch: int
    tokens: int
    past: int
    cache: str
    rope: str
    window: int
    softcap: float
    scale: float
    sink: str
    bias: str
    ragged: bool
    positions: bool
    halves: bool
    lengths: str
    causal: bool

    def is_valid(self) -> bool:
        """Whether ORT's CPU kernel takes it."""
        return not (
            (self.cache == "absent" and self.past > 0)
            # It takes several tokens after a past in a batch of one only.
            or (self.batch > 1 and self.past > 0 and self.tokens > 1)
            or (self.ragged and self.batch == 1)
            or (self.rope in {"inside", "interleaved", "partial"} and self.head_size % 16)
            or (self.cache == "window" and (self.window < 0 or self.ragged))
            # Without causal masking it takes no window.
            or (not self.causal and self.window > 0)
            or (self.halves and self.cache == "absent")
            or (self.positions and not self.rotates)
        )

    @property
    def rotates(self) -> bool:
        """Whether the operator itself rotates, not a node before it."""
        return self.rope in {"inside", "interleaved", "partial"}

    @property
    def is_first_prompt(self) -> bool:
        return self.past == 0

    @property
    def total(self) -> int:
        return self.past + self.tokens

    @property
    def capacity(self) -> int:
        return {"absent": 0, "grows": self.past, "shared": self.total + 9, "window": self.window + 5}[self.cache]

    @property
    def rotated(self) -> int:
        """Elements of a head that are rotated."""
        return self.head_size // 32 * 16 if "partial" in self.rope else self.head_size

    @cached_property
    def totals(self) -> np.ndarray:
        """Tokens so far of each row; of a ragged batch's rows all but the first are shorter."""
        if not self.ragged:
            return np.full(self.batch, self.total)
        if self.past:  # shorter pasts
            return self.total - np.arange(self.batch)
        return np.maximum(1, self.tokens - 2 * np.arange(self.batch))

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        half = self.rotated // 2
        angles = np.arange(512)[:, None] * 10000.0 ** (-np.arange(half) / half)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def feeds(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(1)
        heads, groups = self.heads
        widths = [heads * self.head_size, groups * self.head_size, groups * self.head_size]
        vectors = [rng.uniform(-1, 1, (self.batch, self.tokens, width)).astype(np.float32) for width in widths]
        given = dict(zip(("query", "key", "value"), vectors, strict=True))
        if self.packed:
            given = {"query": np.concatenate(vectors, axis=-1)}
        if self.cache != "absent":
            shape = (self.batch, groups, self.capacity, self.head_size)
            dtype = np.float16 if self.halves else np.float32
            given |= {name: rng.uniform(-1, 1, shape).astype(dtype) for name in ("past_key", "past_value")}
        given["seqlens_k"] = (self.totals - 1).astype(np.int32)
        if self.lengths == "[B,1]":
            given["seqlens_k"] = given["seqlens_k"][:, None]
        if self.rope.startswith("outside"):
            before = 0 if self.past == 0 else (self.totals - self.tokens)[:, None]
            given["position_ids"] = np.broadcast_to(before + np.arange(self.tokens), (self.batch, self.tokens)).copy()
        if self.positions:
            given["position_ids"] = rng.integers(0, 512 - 130, (self.batch, self.tokens))
            if self.is_first_prompt:
                given["position_ids"].flat[1:] = -1  # no valid position: these must not be read
        if self.bias != "none":
            rows, each = self.batch if "rows" in self.bias else 1, heads if "heads" in self.bias else 1
            given["bias"] = rng.uniform(-1, 1, (rows, each, self.tokens, self.total)).astype(np.float32)
        return given

    def model(self) -> onnx.ModelProto:
        heads, groups = self.heads
        feeds = self.feeds()
        constants = {"total": np.array([self.total], np.int32)}
        nodes, query, key = [], "query", "" if self.packed else "key"
        if self.rope != "none":
            constants |= dict(zip(("cos", "sin"), self.tables, strict=True))
        inside = self.rotates
        if self.rope.startswith("outside"):
            values = {"query": (query, heads)}
            if self.packed:  # split, then rotated one by one
                sizes = [heads * self.head_size, groups * self.head_size, groups * self.head_size]
                constants["sizes"] = np.array(sizes, np.int64)
                nodes.append(helper.make_node("Split", ["query", "sizes"], ["q", "k", "value"], "cut", axis=-1))
                values = {"q": ("q", heads), "k": ("k", groups)}
            else:
                values |= {"key": (key, groups)}
            size = self.rotated if "partial" in self.rope else 0
            for name, (value, count) in values.items():
                nodes.append(
                    helper.make_node(
                        "RotaryEmbedding",
                        [value, "position_ids", "cos", "sin"],
                        [f"{name}_rotated"],
                        f"rotate_{name}",
                        domain="com.microsoft",
                        rotary_embedding_dim=size,
                        num_heads=count if size else 0,
                    )
                )
            query, key = (f"{name}_rotated" for name in values)
        if self.sink in {"head_sink", "both"}:
            constants["sink"] = np.linspace(-2, 4, heads).astype(np.float32)
        past = ["past_key", "past_value"] if self.cache != "absent" else ["", ""]
        inputs = [query, key, "value" if key else "", *past, "seqlens_k", "total"]
        inputs += ["cos", "sin"] if inside else ["", ""]
        inputs += ["position_ids" if self.positions else ""]
        inputs += ["bias" if "bias" in feeds else "", "sink" if "sink" in constants else ""]
        attributes: dict[str, Any] = {
            "num_heads": heads,
            "kv_num_heads": groups,
            "scale": self.scale,
            "softcap": self.softcap,
            "local_window_size": self.window,
            "do_rotary": int(inside),
            "rotary_interleaved": int(self.rope == "interleaved"),
            "smooth_softmax": int(self.sink in {"smooth", "both"}),
        }
        attributes |= {} if self.causal else {"causal": 0}
        attributes |= {"sliding_window_cache": 1} if self.cache == "window" else {}
        outputs = ["output", "present_key", "present_value"]
        nodes.append(
            helper.make_node("GroupQueryAttention", inputs, outputs, "attend", domain="com.microsoft", **attributes)
        )
        graph = helper.make_graph(
            nodes,
            "g",
            [
                helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
                for n, a in feeds.items()
            ],
            [
                helper.make_tensor_value_info(n, TensorProto.FLOAT16 if self.halves and n != "output" else F32, None)
                for n in outputs
            ],
            [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
        )
        return helper.make_model(graph, ir_version=10, opset_imports=OPSETS)

    def bound(self) -> float:
        """How far two float32 evaluations of numbers within -1..1 can be apart; a sink is one key more."""
        scale = self.scale or self.head_size**-0.5
        bound = testing.attention_bound(1.0, 1.0, head_size=self.head_size, scale=scale, total=self.total + 1)
        # Elements of keys and values, below sqrt(2), may be rounded either way. A score is then off by at most scale d
        # times the rounding, and an output by twice a score's error and by a value's.
        return bound + (2 * scale * self.head_size + 1) * HALF_STEP * self.halves


def _sample() -> list[Case]:
    """Values drawn anew for each case, and again until the kernel takes them."""
    rng = np.random.default_rng(0)
    cases: list[Case] = []
    while len(cases) < CASES:
        case = Case(**{name: values[rng.integers(len(values))] for name, values in GRID.items()})
        if case.is_valid():
            cases.append(case)
    return cases


SAMPLE = _sample()


def _run(session: onnxruntime.InferenceSession, case: Case) -> list[np.ndarray]:
    feeds = case.feeds()
    if case.cache not in {"shared", "window"}:
        return session.run(None, feeds)
    # As GenAI binds a cache that is appended to in place.
    binding = session.io_binding()
    for name in ("key", "value"):
        value = onnxruntime.OrtValue.ortvalue_from_numpy(feeds[f"past_{name}"])
        binding.bind_ortvalue_input(f"past_{name}", value)
        binding.bind_ortvalue_output(f"present_{name}", value)
    for name, array in feeds.items():
        if not name.startswith("past"):
            binding.bind_cpu_input(name, array)
    binding.bind_output("output")
    session.run_with_iobinding(binding)
    outputs = dict(zip(("present_key", "present_value", "output"), binding.get_outputs(), strict=True))
    return [outputs[name].numpy().copy() for name in ("output", "present_key", "present_value")]


@pytest.mark.parametrize("part", [0, 1, 2, *(pytest.param(part, marks=pytest.mark.slow) for part in range(3, 10))])
def test_group_query_attention_equals_onnxruntime(ep_devices: list[Any], part: int) -> None:
    for case in SAMPLE[part::10]:
        model = case.model().SerializeToString()
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        options.add_provider_for_devices(ep_devices, {})
        ours = _run(onnxruntime.InferenceSession(model, options), case)
        theirs = _run(onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]), case)
        for row, length in enumerate(case.totals):
            # Padding behind a shorter first prompt is unspecified.
            valid = length if case.past == 0 else case.tokens
            error = np.abs(ours[0][row, :valid] - theirs[0][row, :valid]).max()
            assert error <= case.bound(), (case, row, error)
            kept = length
            if case.cache == "window":
                kept = resident_tokens(int(length), case.capacity, case.window)
            for a, b in zip(ours[1:], theirs[1:], strict=True):
                assert a.shape == b.shape, case
                # A rotation sums two products within -1..1, in three roundings on either side.
                bound = 6 * testing.FLOAT32_ROUNDING * 2 + HALF_STEP * case.halves
                np.testing.assert_allclose(a[row, :, :kept], b[row, :, :kept], rtol=0, atol=bound, err_msg=str(case))


def test_rows_that_no_token_fills_are_zero(ep_devices: list[Any]) -> None:
    """A batch of prompts of several lengths, in memory that held something else before."""
    case = next(c for c in SAMPLE if c.ragged and c.past == 0 and c.cache == "absent" and c.tokens > 1 and c.causal)
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices(ep_devices, {})
    session = onnxruntime.InferenceSession(case.model().SerializeToString(), options)
    binding = session.io_binding()
    for name, array in case.feeds().items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("output")
    shape = [case.batch, case.heads[1], case.tokens, case.head_size]
    presents = [onnxruntime.OrtValue.ortvalue_from_numpy(np.full(shape, np.nan, np.float32)) for _ in range(2)]
    for name, present in zip(("present_key", "present_value"), presents, strict=True):
        binding.bind_ortvalue_output(name, present)
    session.run_with_iobinding(binding)
    assert min(case.totals) < case.tokens
    for present in presents:
        for row, length in enumerate(case.totals):
            assert np.isfinite(present.numpy()[row, :, :length]).all()
            assert (present.numpy()[row, :, length:] == 0).all()


def _pairs(cases: Iterable[Case], dimensions: Iterable[str] = GRID) -> set[tuple[str, Any, str, Any]]:
    names = list(itertools.combinations(dimensions, 2))
    return {(one, getattr(case, one), other, getattr(case, other)) for case in cases for one, other in names}


# Whether a case is valid depends on these groups of dimensions, and on no dimension outside of them.
CONSTRAINED = (
    ("head_size", "batch", "tokens", "past", "cache", "rope", "window", "ragged", "causal"),
    ("head_size", "cache", "rope", "positions", "halves"),
)
# Values beside which any value of another dimension is valid.
EASY = {name: values[0] for name, values in GRID.items()} | {"window": 8}


def test_sample_has_all_pairs_of_values() -> None:
    """For each group of CONSTRAINED the pairs of all its valid points; for other dimensions any two values."""
    found = _pairs(SAMPLE)
    for constrained in CONSTRAINED:
        points = itertools.product(*(GRID[name] for name in constrained))
        grid = (Case(**(EASY | dict(zip(constrained, point, strict=True)))) for point in points)
        missing = _pairs((case for case in grid if case.is_valid()), constrained) - found
        assert not missing
    for one, other in itertools.combinations(GRID, 2):
        if not any(one in names and other in names for names in CONSTRAINED):
            pairs = {(a, b) for first, a, second, b in found if (first, second) == (one, other)}
            assert pairs == set(itertools.product(GRID[one], GRID[other]))

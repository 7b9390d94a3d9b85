# SPDX-License-Identifier: Apache-2.0
"""GroupQueryAttention as exports have it: lowered onto our provider, against ORT's own CPU kernel.

Random graphs (tests/fuzz) have any combination of its inputs and attributes, of few tokens; here are caches that are
appended to in place, rotations outside of it or of a part of a head, and long pasts and prompts.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from flownpu.graph_rewrites import testing
from flownpu.ops.definitions.flow_qkv_attention import resident_tokens

F32 = TensorProto.FLOAT
HALF_STEP = 2.0**-10  # of float16 between 1 and 2
OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]


@dataclass(frozen=True)
class Case:
    """An attention and what is fed to it.

    `cache`: how the past comes (it is absent, grows, is shared with the present, or is as long as a window), in float16
    if `halves`. `rope`: where the rotation is; `positions`: whether position_ids is given. `sink`: what the softmax's
    denominator has besides the keys. `bias`: the axes over which it varies, besides the tokens. `ragged`: whether all
    rows but the first are shorter.
    """

    packed: bool = False
    heads: tuple[int, int] = (4, 2)
    head_size: int = 64
    batch: int = 1
    tokens: int = 1
    past: int = 0
    cache: str = "shared"
    rope: str = "inside"
    window: int = -1
    softcap: float = 0.0
    sink: str = "none"
    bias: str = "none"
    ragged: bool = False
    positions: bool = False
    halves: bool = False
    causal: bool = True

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
        if self.ragged:  # of either shape
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
        scale = self.head_size**-0.5
        bound = testing.attention_bound(1.0, 1.0, head_size=self.head_size, scale=scale, total=self.total + 1)
        # Elements of keys and values, below sqrt(2), may be rounded either way. A score is then off by at most scale d
        # times the rounding, and an output by twice a score's error and by a value's.
        return bound + (2 * scale * self.head_size + 1) * HALF_STEP * self.halves


CASES = {
    "first prompt into a shared cache": Case(packed=True, tokens=33, sink="smooth"),
    "ragged prompts, shared": Case(batch=3, tokens=7, ragged=True, bias="rows, heads"),
    "ragged tokens, shared": Case(batch=3, past=200, ragged=True, softcap=5.0, bias="rows"),
    "ragged tokens, shared halves": Case(batch=2, past=200, ragged=True, halves=True, head_size=256),
    "second prompt, shared": Case(past=200, tokens=33, window=64, head_size=80, bias="heads"),
    "second prompt, shared halves": Case(past=200, tokens=130, packed=True, halves=True, sink="both"),
    "prompt, window-sized cache": Case(tokens=130, cache="window", window=64, head_size=96),
    "token, window-sized cache": Case(past=200, cache="window", window=8, heads=(6, 1), sink="head_sink"),
    "tokens, window-sized cache of halves": Case(past=200, tokens=7, cache="window", window=8, halves=True),
    "halves that grow": Case(past=5, tokens=7, cache="grows", halves=True, heads=(4, 4), softcap=5.0),
    "rotated before": Case(past=5, tokens=33, cache="grows", rope="outside"),
    "packed, rotated before": Case(batch=2, past=5, packed=True, rope="outside", head_size=72, ragged=True),
    "rotated in part before": Case(tokens=7, cache="absent", rope="outside, partial", packed=True),
    "rotated in part": Case(past=200, rope="partial", head_size=128, positions=True),
    "rotated in part, prompt": Case(batch=2, tokens=33, rope="partial", positions=True, packed=True),
    "interleaved": Case(past=200, tokens=33, rope="interleaved", packed=True, window=8),
    "non-causal": Case(tokens=33, rope="none", causal=False, bias="tokens"),
    "non-causal after a past": Case(past=5, tokens=7, cache="grows", causal=False),
    "nothing cached": Case(batch=3, tokens=130, cache="absent", ragged=True, window=64, head_size=256),
}


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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_group_query_attention_equals_onnxruntime(ep_devices: list[Any], case: Case) -> None:
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
    case = CASES["nothing cached"]
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

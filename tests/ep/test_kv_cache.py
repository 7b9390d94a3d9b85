# SPDX-License-Identifier: Apache-2.0
"""A KV cache that is appended to in place, as GenAI binds it, and a copied one give the same results, bit by bit."""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from flownpu.ops import definitions
from tests.ep.conftest import MakeSession, parse

CAPACITY, HEADS, GROUPS, SIZE, LAYERS = 8, 4, 2, 16, 2
WIDTH, KV_WIDTH = HEADS * SIZE, GROUPS * SIZE


def decoder() -> Any:
    """Layers of attention alone, all of which read the graph's inputs `key` and `value`."""
    cache = [f"past_{i}_{kind}" for i in range(LAYERS) for kind in ("key", "value")]
    attributes = f"num_heads = {HEADS}, kv_num_heads = {GROUPS}, head_size = {SIZE}"
    layers = "  ".join(
        f"[layer_{i}] x{i + 1}, present_{i}_key, present_{i}_value = ai.flownpu.FlowQKVAttention <{attributes}> "
        f"(x{i}, key, value, past_{i}_key, past_{i}_value, lengths, total)"
        for i in range(LAYERS)
    )
    inputs = ", ".join(f"float[1,{GROUPS},P,{SIZE}] {name}" for name in cache)
    outputs = ", ".join(f"float[1,{GROUPS},C,{SIZE}] {name.replace('past', 'present')}" for name in cache)
    model = parse(
        f"""<ir_version: 10, opset_import: ["": 21, "ai.flownpu": 1]>
        decoder (float[1,S,{WIDTH}] x0, float[1,S,{KV_WIDTH}] key, float[1,S,{KV_WIDTH}] value, int32[1] lengths,
                 int32 total, {inputs}) => (float[1,S,{WIDTH}] y, {outputs}) {{ {layers}  y = Identity(x{LAYERS}) }}"""
    )
    decoder = ir.from_proto(model)
    definitions.add_functions(decoder)
    return ir.to_proto(decoder)


def steps() -> list[tuple[int, dict[str, Any]]]:
    """A prompt of three tokens, then three calls of one token: the total of tokens so far, and the inputs."""
    random = np.random.default_rng(0)
    result, total = [], 0
    for tokens in (3, 1, 1, 1):
        total += tokens
        feed = {
            name: random.standard_normal((1, tokens, width)).astype(np.float32)
            for name, width in (("x0", WIDTH), ("key", KV_WIDTH), ("value", KV_WIDTH))
        }
        feed |= {"lengths": np.array([total - 1], np.int32), "total": np.array(total, np.int32)}
        result.append((total, feed))
    return result


def test_shared_cache_equals_copied_one(make_session: MakeSession) -> None:
    session = make_session(decoder(), strict=True)
    names = [f"{i}_{kind}" for i in range(LAYERS) for kind in ("key", "value")]
    copied = {name: np.zeros((1, GROUPS, CAPACITY, SIZE), np.float32) for name in names}
    shared = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array.copy()) for name, array in copied.items()}
    for total, feed in steps():
        y, *present = session.run(None, feed | {f"past_{name}": array for name, array in copied.items()})
        copied = dict(zip(names, present, strict=True))

        binding = session.io_binding()
        for name, array in feed.items():
            binding.bind_cpu_input(name, array)
        for name, value in shared.items():
            binding.bind_ortvalue_input(f"past_{name}", value)
            binding.bind_ortvalue_output(f"present_{name}", value)
        binding.bind_output("y")
        session.run_with_iobinding(binding)

        np.testing.assert_array_equal(binding.get_outputs()[-1].numpy(), y)
        for name in names:
            np.testing.assert_array_equal(shared[name].numpy()[:, :, :total], copied[name][:, :, :total])
            assert np.count_nonzero(shared[name].numpy()[:, :, :total]) > 0


def test_growing_cache_equals_fixed_one(make_session: MakeSession) -> None:
    session = make_session(decoder(), strict=True)
    names = [f"{i}_{kind}" for i in range(LAYERS) for kind in ("key", "value")]
    fixed = {name: np.zeros((1, GROUPS, CAPACITY, SIZE), np.float32) for name in names}
    # The first past has no rows: a tensor of no elements, whose data may be null.
    growing = {name: np.zeros((1, GROUPS, 0, SIZE), np.float32) for name in names}
    for total, feed in steps():
        y, *present = session.run(None, feed | {f"past_{name}": array for name, array in fixed.items()})
        fixed = dict(zip(names, present, strict=True))
        y2, *present = session.run(None, feed | {f"past_{name}": array for name, array in growing.items()})
        growing = dict(zip(names, present, strict=True))
        np.testing.assert_array_equal(y2, y)
        for name in names:
            assert growing[name].shape[2] == total
            np.testing.assert_array_equal(growing[name], fixed[name][:, :, :total])


def test_cache_bound_with_little_room_is_refused(make_session: MakeSession) -> None:
    session = make_session(decoder(), strict=True)
    total, feed = steps()[0]
    binding = session.io_binding()
    for name, array in feed.items():
        binding.bind_cpu_input(name, array)
    for name in (f"{i}_{kind}" for i in range(LAYERS) for kind in ("key", "value")):
        value = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((1, GROUPS, total - 1, SIZE), np.float32))
        binding.bind_ortvalue_input(f"past_{name}", value)
        binding.bind_ortvalue_output(f"present_{name}", value)
    binding.bind_output("y")
    with pytest.raises(Exception, match=r"FlowQKVAttention 'layer_0'.*present_0_key.*\{1,2,2,16\}.*\{1,2,3,16\}"):
        session.run_with_iobinding(binding)

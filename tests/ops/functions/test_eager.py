# SPDX-License-Identifier: Apache-2.0
"""The operators as functions on arrays, against the float64 references of their definitions."""

import inspect
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from flownpu import ops
from flownpu.ops import eager, eager_call, q4nx
from flownpu.ops.contracts import defaults, input_names
from tests.ops.cpu.attention.conversation import SIZES, D, G, H
from tests.ops.cpu.test_q4nx_matmul import blocks_of
from tests.ops.device import ISAS, run

ROWS, COLUMNS = 40, 300
EXACT = {"activations": "bf16"}


def weight_and_rows(tokens: int, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(tokens)
    return blocks_of(ROWS, columns, rng), rng.standard_normal((tokens, columns), dtype=np.float32)


@pytest.mark.parametrize("tokens", [1, 3, 13])
@pytest.mark.parametrize("options", [{}, EXACT], ids=["int8, the provider's default", "bf16"])
def test_products_have_bits_of_operator(tokens: int, options: dict[str, str]) -> None:
    blocks, x = weight_and_rows(tokens)
    given = {"activations": "int8", **options}
    expected = run("Q4NXMatMul", [x, blocks], constants=(1,), options=given, M=ROWS, K=COLUMNS)[0]
    for function in (ops.q4nx_matmul, ops.fused_dqp)[: 1 + (tokens == 1)]:
        np.testing.assert_array_equal(function(x, blocks, rows=ROWS, options=options), expected, strict=True)
        padded = function(x, blocks, options=options)
        np.testing.assert_array_equal(padded[:, :ROWS], expected)
        np.testing.assert_array_equal(padded[:, ROWS:], np.zeros((tokens, 64 - ROWS)))


def test_bias_residual_and_gating_equal_operator() -> None:
    rng = np.random.default_rng(1)
    blocks, x = weight_and_rows(2)
    bias, residual = (rng.standard_normal(shape, dtype=np.float32) for shape in (ROWS, (2, ROWS)))
    plain = ops.q4nx_matmul(x, blocks, rows=ROWS)
    both = ops.q4nx_matmul(x, blocks, rows=ROWS, bias=bias, residual=residual)
    np.testing.assert_array_equal(both, (plain + bias) + residual)
    pair = np.concatenate([blocks, blocks_of(ROWS, COLUMNS, rng)])
    for gating in ("geglu", "swiglu"):
        attributes = {"M": ROWS, "K": COLUMNS, "gating": gating}
        (expected,) = run("Q4NXMatMul", [x, pair], constants=(1,), options={"activations": "int8"}, **attributes)
        np.testing.assert_array_equal(ops.q4nx_matmul(x, pair, rows=ROWS, gating=gating), expected)
        assert ops.q4nx_matmul(x, pair, gating=gating).shape == (2, 64)


def test_gather_equals_operator() -> None:
    blocks, _ = weight_and_rows(1)
    indices = np.array([[3, 39], [0, 3]], np.int32)
    expected = q4nx.gather(blocks, indices, ROWS, COLUMNS)
    np.testing.assert_array_equal(ops.q4nx_gather(blocks, indices, rows=ROWS, columns=COLUMNS), expected)
    whole = ops.q4nx_gather(blocks, torch.tensor([39]))
    assert whole.shape == (1, 512)
    np.testing.assert_array_equal(whole[0, :COLUMNS], expected[0, 1])


def attention_call(dtype: Any, tokens: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    past = rng.standard_normal((2, 1, G, 24, D), dtype=np.float32).astype(dtype)
    return {
        "query": rng.standard_normal((1, tokens, (H + 2 * G) * D), dtype=np.float32),
        "past_key": past[0],
        "past_value": past[1],
        "seqlens_k": np.array([19], np.int32),
        "total_sequence_length": np.array(20, np.int32),
        **SIZES,
    }


def as_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_torch_tensors_are_accepted(dtype: Any) -> None:
    call = attention_call(dtype)
    tensors = {name: as_torch(value) if isinstance(value, np.ndarray) else value for name, value in call.items()}
    for ours, theirs in zip(ops.flow_kv_attention(**call), ops.flow_kv_attention(**tensors), strict=True):
        assert isinstance(theirs, np.ndarray)
        np.testing.assert_array_equal(theirs, ours, strict=True)
    assert ops.flow_kv_attention(**call)[1].dtype == dtype
    blocks, x = weight_and_rows(3)
    y = ops.q4nx_matmul(torch.from_numpy(x), torch.from_numpy(blocks))
    np.testing.assert_array_equal(y, ops.q4nx_matmul(x, blocks))
    grown = torch.from_numpy(x).requires_grad_() * 1
    np.testing.assert_array_equal(ops.q4nx_matmul(grown, blocks), y)


def test_inputs_are_not_changed_and_results_are_new() -> None:
    call = attention_call(np.float32)
    before = {name: np.copy(value) for name, value in call.items()}
    _, key, value = ops.flow_kv_attention(**call)
    for name, array in before.items():
        np.testing.assert_array_equal(call[name], array)
    assert not np.shares_memory(key, call["past_key"])
    np.testing.assert_array_equal(key[:, :, :19], call["past_key"][:, :, :19])
    np.testing.assert_array_equal(value[:, :, 19, :].ravel(), call["query"][0, 0, (H + G) * D :])


def test_total_sequence_length_takes_int_and_arrays() -> None:
    call = attention_call(np.float32)
    expected = ops.flow_kv_attention(**call)
    for total in (20, np.int64(20), np.array([20], np.int32)):
        for ours, theirs in zip(
            ops.flow_kv_attention(**call | {"total_sequence_length": total}), expected, strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def at_an_odd_address(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    memory[1:] = array.reshape(-1).view(np.uint8)
    return memory[1:].view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_memory_of_any_order_gives_same_result(framework: str, isa: str) -> None:
    """Transposed, every other row, backwards, read-only and at odd addresses: the result is that of dense memory."""
    blocks, x = weight_and_rows(6)
    options = {"cpu_isa": isa}
    expected = ops.q4nx_matmul(x, blocks, options=options)
    variants: list[tuple[Any, Any]] = [
        (np.asfortranarray(x), np.asfortranarray(blocks)),
        (np.repeat(x, 2, axis=0)[::2], np.repeat(blocks, 2, axis=1)[:, ::2]),
        (x, at_an_odd_address(blocks)),
    ]
    if framework == "torch":
        variants = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in variants]
    else:
        variants += [(x[::-1].copy()[::-1], blocks), (read_only(x.copy()), read_only(blocks.copy()))]
        variants += [(at_an_odd_address(x), blocks)]
    for given, weight in variants:
        np.testing.assert_array_equal(ops.q4nx_matmul(given, weight, options=options), expected)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_caches_in_memory_of_any_order_give_same_result(dtype: Any) -> None:
    call = attention_call(dtype)
    expected = ops.flow_kv_attention(**call)
    caches = ("past_key", "past_value")
    twice = {name: np.repeat(call[name], 2, axis=-1) for name in caches}
    variants = [
        {name: array[..., ::2] for name, array in twice.items()},
        {name: as_torch(array)[..., ::2] for name, array in twice.items()},
        {name: read_only(call[name].copy()) for name in caches},
        {name: at_an_odd_address(call[name]) for name in (*caches, "seqlens_k", "query")},
    ]
    for changed in variants:
        for ours, theirs in zip(ops.flow_kv_attention(**call | changed), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_empty_input_gives_empty_output_and_nan_gives_nan() -> None:
    blocks, x = weight_and_rows(3)
    assert ops.q4nx_matmul(x[:0], blocks).shape == (0, 64)
    assert ops.q4nx_gather(blocks, np.zeros((0, 2), np.int64)).shape == (0, 2, 512)
    assert ops.flow_qkv_attention(np.zeros((1, 0, (H + 2 * G) * D), np.float32), **SIZES)[0].shape == (1, 0, H * D)
    x[1, 5] = np.nan
    y = ops.q4nx_matmul(x, blocks, rows=ROWS)
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


def test_keywords_are_those_of_definition() -> None:
    optional = {*input_names("FlowQKVAttention")[3:], *defaults("FlowQKVAttention")}
    assert set(eager.AttentionKeywords.__annotations__) == optional
    parameters = inspect.signature(ops.flow_qkv_attention).parameters
    assert parameters.keys() - {"device", "options", "query", "key", "value", *SIZES} == optional
    assert parameters["local_window_size"].default == -1


@pytest.mark.parametrize("name", ["q4nx_matmul", "fused_dqp", "q4nx_gather", "flow_qkv_attention", "flow_kv_attention"])
def test_function_help_describes_each_argument(name: str) -> None:
    function = getattr(ops, name)
    for parameter in inspect.signature(function).parameters:
        assert f"\n        {parameter}: " in function.__doc__


def test_simultaneous_calls_give_same_results() -> None:
    blocks, x = weight_and_rows(20)
    call = attention_call(ml_dtypes.bfloat16)
    product, attention = ops.q4nx_matmul(x, blocks), ops.flow_kv_attention(**call)

    def both(_: int) -> bool:
        same = np.array_equal(ops.q4nx_matmul(x, blocks), product)
        return same and all(map(np.array_equal, ops.flow_kv_attention(**call), attention))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(both, range(200)))


def test_device_opened_by_threads_is_made_once() -> None:
    barrier, found = threading.Barrier(8), []

    def open_one() -> None:
        barrier.wait()
        found.append(eager_call.open_device("test", "cpu", {"threads": 3}))

    threads = [threading.Thread(target=open_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(device is found[0] for device in found)
    assert eager_call.open_device("test", "cpu", {"threads": "2"}) is not found[0]


@pytest.mark.slow
def test_python_goes_on_while_operator_computes() -> None:
    """Another thread counts during one call; it could not if the call held the interpreter's lock."""
    rng = np.random.default_rng(3)
    blocks, x = blocks_of(512, 512, rng), rng.standard_normal((1500, 512), dtype=np.float32)
    counted, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            counted[0] += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    options = {"threads": 1, "cpu_isa": "generic"}
    ops.q4nx_matmul(x[:1], blocks, options=options)
    interval = sys.getswitchinterval()
    # So long that the other thread runs only if the call itself releases the lock.
    sys.setswitchinterval(100)
    try:
        counter.start()
        before = counted[0]
        ops.q4nx_matmul(x, blocks, options=options)
        # The thread may count once or twice between Python's own steps.
        assert counted[0] > before + 20
    finally:
        sys.setswitchinterval(interval)
        done.set()
        counter.join()


def test_eager_operators_import_no_onnx() -> None:
    """In a process in which the packages of ONNX cannot be imported."""
    code = """
import sys
for name in ("onnx", "onnx_ir", "onnxruntime", "onnxruntime_genai", "onnxscript", "torch", "transformers"):
    sys.modules[name] = None
import numpy as np
from flownpu import ops
blocks = ops.q4nx.pack(*ops.q4nx.quantize(np.ones((32, 256), np.float32)))
assert ops.fused_dqp(np.ones((1, 256), np.float32), blocks).shape == (1, 32)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

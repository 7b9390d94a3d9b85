# SPDX-License-Identifier: Apache-2.0
"""Single operators on the emulated array, each in a session of one node, compared with its float64 reference."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from flownpu.errors import FlowNPUError
from flownpu.npu.artifacts import build_artifacts
from flownpu.ops import q4nx
from flownpu.ops.definitions import dense_matmul, flow_kv_attention, flow_qkv_attention, q4nx_matmul
from flownpu.selftest.reference.attention import ALL, attention_expectation
from flownpu.selftest.reference.projections import STEEPEST, activation_tolerance, projection_tolerance
from tests.aie.designs.cases import product_error
from tests.aie.host_kernels import F32_ROUNDING, PRODUCT, bf16, wide
from tests.end_to_end.emulated_operators import (
    ENGINE_AND_GEMM,
    Alone,
    numbers,
    product,
    rounded,
    session_of,
    stems,
    weights,
    write_node,
)
from tests.ops.stock_onnxruntime import model_of, node, value, with_functions

BFLOAT16 = ml_dtypes.bfloat16


def added(expected: np.ndarray, error: np.ndarray, *addends: np.ndarray) -> np.ndarray:
    """A bound on the error after the host added some addends in float32: each rounds once more."""
    return np.asarray(error + len(addends) * F32_ROUNDING * (np.abs(expected) + sum(map(np.abs, addends)) + error))


# --- Products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "rows", "runs"),
    [*(("npu2", rows, 1) for rows in (1, 7, 65, 300, 1030)), ("npu2", 4100, 2), ("npu1", 1, 1), ("npu1", 7, 1)],
)
def test_product_rows_equal_reference(target: str, rows: int, runs: int, alone: Alone) -> None:
    """Programs have 1, 64, 256, 1024 or 4096 rows; more rows take several runs. The weight does not fill its blocks.

    XDNA has half of the tiles, and multiplies bf16 without blocks of one exponent.
    """
    m, k, alone.target = 70, 72, target
    weight, x = weights(1, m, k), numbers(2, rows, k)
    blocks = q4nx.pack(*weight, q4nx.NARROW)
    (found,), dispatches = alone("Q4NXMatMul", {"X": x}, {"W": blocks}, M=m, K=k)
    assert stems(dispatches) == (["fused_dqp"] if rows == 1 else runs * ENGINE_AND_GEMM)
    expected = q4nx_matmul.reference(x, q4nx.pack(*weight), rows=m, columns=k)
    if rows == 1:
        error = projection_tolerance(weight, x[0].astype(BFLOAT16))
    else:
        error = product_error(
            x.astype(np.float64), q4nx.dequantize_codes(weight).astype(np.float64), 256, in_blocks=target == "npu2"
        )
    assert np.all(np.abs(found - expected) <= rounded(expected, error))
    assert not np.array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize(("target", "rows"), [("npu2", 1), ("npu2", 65), ("npu1", 1), ("npu1", 7)])
def test_product_of_eight_bits_equals_reference(target: str, rows: int, alone: Alone) -> None:
    """The dequantisation engine adds the planes up, so that more rows are multiplied as with 4 bits."""
    m, k, alone.target = 70, 72, target
    rng, x = np.random.default_rng(1), numbers(2, rows, k)
    weight = q4nx.Quantized(*q4nx.quantize_bytes(rng.standard_normal((m, k), np.float32) / 8))
    blocks = q4nx.pack(*weight, q4nx.EIGHT_BITS_WITH_MINIMA)
    (found,), dispatches = alone("Q4NXMatMul", {"X": x}, {"W": blocks}, M=m, K=k)
    assert stems(dispatches) == (["fused_dqp"] if rows == 1 else ENGINE_AND_GEMM)
    expected = q4nx_matmul.reference(x, blocks, rows=m, columns=k)
    matrix = q4nx.dequantize_codes(weight).astype(np.float64)
    error = (
        projection_tolerance(weight, x[0].astype(BFLOAT16))
        if rows == 1
        else product_error(x.astype(np.float64), matrix, 256, in_blocks=target == "npu2")
    )
    assert np.all(np.abs(found - expected) <= rounded(expected, error))


@pytest.mark.parametrize("addends", [("bias",), ("residual",), ("bias", "residual")])
def test_product_takes_bias_and_residual(addends: tuple[str, ...], alone: Alone) -> None:
    """Products of a batch; the host adds bias and residual in float32."""
    m, k = 96, 256
    weight, x = weights(1, m, k), numbers(2, 2, 5, k)
    given = {"bias": np.random.default_rng(3).standard_normal(m, np.float32), "residual": 3 * numbers(4, 2, 5, m)}
    bias, residual = (given[name] if name in addends else None for name in given)
    inputs = {"X": x, "W": None, "bias": None, "residual": residual}
    (found,), dispatches = alone("Q4NXMatMul", inputs, {"W": q4nx.pack(*weight), "bias": bias}, M=m, K=k)
    assert stems(dispatches) == ENGINE_AND_GEMM
    rows = x.reshape(-1, k).astype(np.float64)
    matrix = q4nx.dequantize_codes(weight).astype(np.float64)
    error = rounded(rows @ matrix.T, product_error(rows, matrix, 256, in_blocks=True)).reshape(2, 5, m)
    expected = q4nx_matmul.reference(x, q4nx.pack(*weight), bias, residual, rows=m, columns=k)
    parts = [np.broadcast_to(given[name], expected.shape) for name in addends]
    assert np.all(np.abs(found - expected) <= added(expected, error, *parts))


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("gating", ["geglu", "swiglu"])
def test_gated_product_equals_reference(gating: str, rows: int, alone: Alone) -> None:
    """The gate's and the up projection's last blocks are not full."""
    m, k = 70, 96
    parts, x = [weights(seed, m, k) for seed in (1, 2)], numbers(3, rows, k)
    blocks = q4nx.pack_gated(parts[0], parts[1], q4nx.NARROW)
    (found,), dispatches = alone("Q4NXMatMul", {"X": x}, {"W": blocks}, M=m, K=k, gating=gating)
    assert stems(dispatches) == (["fused_dqp"] if rows == 1 else ENGINE_AND_GEMM)
    wide_x, sums, errors = x.astype(np.float64), [], []
    for part in parts:
        matrix = q4nx.dequantize_codes(part).astype(np.float64)
        sums.append(wide_x @ matrix.T)
        error = (
            projection_tolerance(part, x[0].astype(BFLOAT16))
            if rows == 1
            else product_error(wide_x, matrix, 256, in_blocks=True)
        )
        errors.append(rounded(sums[-1], error))
    act = {"geglu": q4nx_matmul.gelu, "swiglu": q4nx_matmul.silu}[gating](sums[0])
    # This is the error of the array's functions; the host's are more exact.
    act_error = STEEPEST * errors[0] + activation_tolerance(sums[0], act)
    tolerance = act_error * (np.abs(sums[1]) + errors[1]) + np.abs(act) * errors[1] + PRODUCT * np.abs(act * sums[1])
    assert np.all(np.abs(found - act * sums[1]) <= tolerance)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh"])
def test_dense_products_equal_reference(kind: str, activation: str, alone: Alone) -> None:
    """With a bias and a residual; the weight is transposed where there is no activation."""
    rows, m, k, rng = 9, 300, 80, np.random.default_rng(5)
    transposed = int(activation == "none")
    stored = rng.standard_normal((m, k) if transposed else (k, m), np.float32)
    scale = None
    if kind == "int8":
        stored, scale = np.rint(40 * stored).clip(-127, 127).astype(np.int8), np.full(m, 0.02, np.float32)
    elif kind != "float32":
        stored = stored.astype(np.dtype(kind) if kind == "float16" else BFLOAT16)
    bias, x, residual = rng.standard_normal(m, np.float32), numbers(6, rows, k), numbers(7, rows, m)
    inputs = {"X": x, "W": None, "scale": None, "bias": None, "residual": residual}
    constants = {"W": stored, "scale": scale, "bias": bias}
    (found,), dispatches = alone("DenseMatMul", inputs, constants, activation=activation, transposed=transposed)
    assert stems(dispatches) == ["gemm"]
    wide_x = x.astype(np.float64)
    matrix = dense_matmul.reference(np.eye(k), stored, scale, transposed=transposed).T
    error = rounded(wide_x @ matrix.T, product_error(wide_x, matrix, 256, in_blocks=True))
    before = wide_x @ matrix.T + bias
    error = added(before, error, np.broadcast_to(bias, before.shape))
    if activation != "none":
        error = STEEPEST * error + activation_tolerance(before, dense_matmul.gelu(before))
    expected = dense_matmul.reference(x, stored, scale, bias, residual, activation=activation, transposed=transposed)
    assert np.all(np.abs(found - expected) <= added(expected, error, residual))


def test_broadcast_residual_runs_on_host(alone: Alone) -> None:
    stored, x, residual = numbers(1, 64, 96), numbers(2, 2, 3, 64), numbers(3, 1, 3, 96)
    inputs = {"X": x, "W": None, "scale": None, "bias": None, "residual": residual}
    (found,), dispatches = alone("DenseMatMul", inputs, {"W": stored})
    assert dispatches == []
    np.testing.assert_allclose(found, x @ stored + residual, rtol=1e-2, atol=0.2)


# --- Attention --------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, D = 4, 2, 64  # scores are scaled by 2^-3, which rounds nothing
SIZES: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "head_size": D}
CHUNK = 32  # keys of a chunk of FlowQKV


def heads_of(seed: int, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries [tokens, H, d], keys and values [tokens, G, 2, d], bf16; and the three packed, float32 [tokens, ..]."""
    rng = np.random.default_rng(seed)
    query, kv = bf16(rng.normal(size=(tokens, HEADS, D))), bf16(rng.normal(size=(tokens, KV_HEADS, 2, D)))
    packed = np.concatenate([query, kv[:, :, 0], kv[:, :, 1]], axis=1)
    return query, kv, wide(packed).astype(np.float32).reshape(tokens, -1)


def expectation(
    query: np.ndarray, kv: np.ndarray, first: int = 0, *, causal: bool = False, window: int = ALL,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Attention of queries from position `first` on over all keys, [tokens, H d], and its tolerance."""
    if not causal and len(query) > len(kv):  # the reference takes no more queries than keys; queries are independent
        parts = [expectation(query[at : at + len(kv)], kv) for at in range(0, len(query), len(kv))]
        expected, tolerance = zip(*parts, strict=True)
        return np.concatenate(expected), np.concatenate(tolerance)
    one = len(query) == 1
    held = np.zeros((-(-len(kv) // 64) * 64, *kv.shape[1:]), BFLOAT16)  # whole chunks
    held[: len(kv)] = kv
    module = flow_kv_attention if one else flow_qkv_attention
    of_sweep = {
        "key_end": len(kv), "first_query": len(kv) - 1 if one else first, "window": window,
        "causal": int(causal or one), "chunk": 64 if one else CHUNK,
    }  # fmt: skip
    expected, tolerance = attention_expectation(query, held, module, in_blocks=not one, sinks=sinks, **of_sweep)
    return expected.reshape(len(query), -1), tolerance.reshape(len(query), -1)


def assert_attended(found: np.ndarray, expectation: tuple[np.ndarray, np.ndarray]) -> None:
    expected, tolerance = expectation
    assert found.shape == expected.shape
    assert np.all(np.abs(found - expected) <= tolerance)


@pytest.mark.parametrize("tokens", [1, 26, 70, 300])
def test_encoder_attention_equals_reference(tokens: int, alone: Alone) -> None:
    """An encoder's attention: packed, without a cache; each sequence of a batch is computed by itself."""
    given = [heads_of(seed, tokens) for seed in (1, 2)]
    alone.context = 320
    query = np.stack([packed for *_, packed in given])
    (found, *_), dispatches = alone("FlowQKVAttention", {"query": query}, outputs=3, causal=0, **SIZES)
    assert stems(dispatches) == 2 * (["flow_kv"] if tokens == 1 else (1 + (tokens > 256)) * ["flow_qkv"])
    for row, (queries, kv, _) in zip(found, given, strict=True):
        assert_attended(row, expectation(queries, kv))


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("window", [-1, 20])
def test_cached_attention_equals_reference(window: int, tokens: int, alone: Alone) -> None:
    """The host appends to the cache, in bf16; the array reads it."""
    past, alone.context = 37, 320
    query, kv, packed = heads_of(3, past + tokens)
    cache = kv[:past].transpose(2, 1, 0, 3)[:, None]
    inputs = {
        "query": packed[None, past:], "key": None, "value": None, "past_key": cache[0], "past_value": cache[1],
        "seqlens_k": np.array([past + tokens - 1], np.int32),
        "total_sequence_length": np.array([past + tokens], np.int32),
    }  # fmt: skip
    op_type = "FlowKVAttention" if tokens == 1 else "FlowQKVAttention"
    (found, key, value), dispatches = alone(op_type, inputs, outputs=3, local_window_size=window, **SIZES)
    assert stems(dispatches) == ["flow_kv" if tokens == 1 else "flow_qkv"]
    kept = window if window > 0 else ALL
    assert_attended(found[0], expectation(query[past:], kv, past, causal=True, window=kept))
    np.testing.assert_array_equal(key[0].swapaxes(0, 1), kv[:, :, 0])
    np.testing.assert_array_equal(value[0].swapaxes(0, 1), kv[:, :, 1])


@pytest.mark.parametrize("tokens", [1, 5])
def test_cached_attention_with_sinks_equals_reference(tokens: int, alone: Alone) -> None:
    """Sinks far above and far below the scores, one as large as they are, and one that is no key at all."""
    past, sinks = 37, np.array([40, -200, 0.5, -np.inf], np.float32)
    query, kv, packed = heads_of(3, past + tokens)
    cache = kv[:past].transpose(2, 1, 0, 3)[:, None]
    inputs = {
        "query": packed[None, past:], **dict.fromkeys(BIASED), "past_key": cache[0], "past_value": cache[1],
        "seqlens_k": np.array([past + tokens - 1], np.int32),
        "total_sequence_length": np.array([past + tokens], np.int32),
        **dict.fromkeys(("attention_bias", "q_norm_weight", "k_norm_weight", "bidirectional_blocks")),
    }  # fmt: skip
    op_type = "FlowKVAttention" if tokens == 1 else "FlowQKVAttention"
    (found, *_), dispatches = alone(op_type, inputs, {"head_sink": sinks}, outputs=3, **SIZES)
    assert stems(dispatches) == ["flow_kv" if tokens == 1 else "flow_qkv"]
    assert_attended(found[0], expectation(query[past:], kv, past, causal=True, sinks=sinks))


def test_norm_and_rotation_before_attention_run_on_host(alone: Alone) -> None:
    """QK-norm and rotation, in float32; then one more rounding to bf16 of queries and keys."""
    tokens, rng = 20, np.random.default_rng(4)
    packed = heads_of(5, tokens)[2][None]
    angles = rng.uniform(0, 6, (64, D // 2))
    constants = {
        "cos_cache": np.cos(angles).astype(np.float32), "sin_cache": np.sin(angles).astype(np.float32),
        "position_ids": None, "attention_bias": None,
        "q_norm_weight": rng.uniform(0.5, 1.5, D).astype(np.float32),
        "k_norm_weight": rng.uniform(0.5, 1.5, D).astype(np.float32),
    }  # fmt: skip
    names = ("key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length")
    inputs = {"query": packed, **dict.fromkeys(names)}
    (found, *_), dispatches = alone("FlowQKVAttention", inputs, constants, outputs=3, causal=0, do_rotary=1, **SIZES)
    assert stems(dispatches) == ["flow_qkv"]
    given: dict[str, Any] = {name: array for name, array in constants.items() if array is not None}
    expected = flow_qkv_attention.reference(packed, **given, causal=0, do_rotary=1, **SIZES)[0]
    plain = flow_qkv_attention.reference(packed, causal=0, **SIZES)[0]
    # Queries and keys have a norm of about 8 (the square root of d): scores reach 8 and are off by 8 (2 2^-8 + 2 2^-6)
    # in blocks, outputs by that share; without rotation or norm, outputs are entirely different.
    bound = 8 * (2 * 2.0**-8 + 2 * 2.0**-6) / 2
    assert np.linalg.norm(found - expected) < bound * np.linalg.norm(expected)
    assert np.linalg.norm(plain - expected) > 2 * bound * np.linalg.norm(expected)


def mask_of(hidden: np.ndarray, low: float = float(np.finfo(np.float32).min)) -> np.ndarray:
    """An attention bias [B, 1, S, T] that hides keys where `hidden` [B, S, T] is true."""
    return np.where(hidden, np.float32(low), np.float32(0))[:, None]


BIASED = dict.fromkeys(
    ("key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache",
     "position_ids"),
)  # fmt: skip


@pytest.mark.parametrize("low", [float(np.finfo(np.float32).min), float("-inf"), -10000.0])
def test_key_mask_equals_reference(low: float, alone: Alone) -> None:
    """Padding at either end or in the middle: keys that no query of a sequence sees are not given to the array."""
    tokens = 26
    given = [heads_of(seed, tokens) for seed in (1, 2, 3)]
    hidden = np.zeros((3, tokens, tokens), bool)
    hidden[0, :, 19:] = hidden[1, :, :4] = hidden[2, :, [3, 11, 12]] = True
    query = np.stack([packed for *_, packed in given])
    inputs = {"query": query, **BIASED, "attention_bias": mask_of(hidden, low)}
    (found, *_), dispatches = alone("FlowQKVAttention", inputs, outputs=3, causal=0, **SIZES)
    assert stems(dispatches) == 3 * ["flow_qkv"]
    for row, (queries, kv, _), away in zip(found, given, hidden, strict=True):
        assert_attended(row, expectation(queries, kv[~away[0]]))


def test_causal_mask_equals_reference(alone: Alone) -> None:
    """CLIP's texts: a triangle, and padding on the right."""
    tokens, valid = 26, 19
    given = [heads_of(seed, tokens) for seed in (1, 2)]
    hidden = np.repeat(np.triu(np.ones((tokens, tokens), bool), 1)[None], 2, axis=0)
    hidden[1, :, valid:] = True
    query = np.stack([packed for *_, packed in given])
    inputs = {"query": query, **BIASED, "attention_bias": mask_of(hidden)}
    (found, *_), dispatches = alone("FlowQKVAttention", inputs, outputs=3, causal=0, **SIZES)
    assert stems(dispatches) == 3 * ["flow_qkv"]  # the second's padding sees all valid keys: one more
    assert_attended(found[0], expectation(*given[0][:2], causal=True))
    query, kv, _ = given[1]
    assert_attended(found[1, :valid], expectation(query[:valid], kv[:valid], causal=True))
    assert_attended(found[1, valid:], expectation(query[valid:], kv[:valid]))


def test_leftovers_of_other_sequence_change_no_bit(alone: Alone) -> None:
    """Values after the last key are masked, but could still matter: XDNA2 multiplies eight of them by one exponent."""
    tokens, valid = 26, 19
    hidden = np.zeros((2, tokens, tokens), bool)
    hidden[1, :, valid:] = True
    packed = heads_of(1, tokens)[2]
    after = []
    for before in (packed, 1000 * packed):
        inputs = {"query": np.stack([before, packed]), **BIASED, "attention_bias": mask_of(hidden)}
        (found, *_), dispatches = alone("FlowQKVAttention", inputs, outputs=3, causal=0, **SIZES)
        assert stems(dispatches) == 2 * ["flow_qkv"]
        after.append(found[1, :valid])
    assert after[0].tobytes() == after[1].tobytes()


@pytest.mark.parametrize("kind", ["numbers", "heads", "holes", "nothing seen"])
def test_unsupported_masks_run_on_host(kind: str, alone: Alone) -> None:
    tokens, rng = 6, np.random.default_rng(1)
    bias = mask_of(np.zeros((1, tokens, tokens), bool))
    if kind == "numbers":
        bias = rng.standard_normal(bias.shape, np.float32)
    elif kind == "heads":
        bias = np.repeat(bias, HEADS, axis=1)
    elif kind == "holes":
        bias = mask_of(np.eye(tokens, dtype=bool)[None])
    else:
        bias = mask_of(np.ones((1, tokens, tokens), bool))
    packed = heads_of(1, tokens)[2][None]
    inputs = {"query": packed, **BIASED, "attention_bias": bias}
    (found, *_), dispatches = alone("FlowQKVAttention", inputs, outputs=3, causal=0, **SIZES)
    assert dispatches == []
    expected = flow_qkv_attention.reference(packed, attention_bias=bias, causal=0, **SIZES)[0]
    np.testing.assert_allclose(found, expected, atol=0.05)  # averages, in bf16, of numbers of about 1


def test_keys_beyond_programs_run_on_host(alone: Alone) -> None:
    alone.context = 64
    packed = heads_of(1, 65)[2][None]
    assert alone("FlowQKVAttention", {"query": packed}, outputs=3, causal=0, **SIZES)[1] == []


# --- Which nodes the array gets ---------------------------------------------------------------------------------------


def test_nodes_of_same_size_keep_own_weights(tmp_path: Path, ep_devices: list[Any]) -> None:
    """The nodes share programs and buffers, but not weights, and get separate numbers."""
    sizes, x = 128, numbers(1, 5, 128)
    matrices = [weights(seed, sizes, sizes) for seed in (2, 3)]
    constants = {f"W{i}": q4nx.pack(*matrix) for i, matrix in enumerate(matrices)}
    known = {name: value(name, array) for name, array in {"X": x, **constants}.items()}
    first = node("Q4NXMatMul", [known["X"], known["W0"]], M=sizes, K=sizes)
    second = node("Q4NXMatMul", [first.outputs[0], known["W1"]], M=sizes, K=sizes)
    kept = {known[name]: array for name, array in constants.items()}
    file = tmp_path / "model.onnx"
    ir.save(with_functions(model_of([first, second], [known["X"]], kept)), file)
    build_artifacts(file)
    emulated = session_of(file, ep_devices[:1])
    (between, found), dispatches = emulated.run({"X": x})
    assert stems(dispatches) == 2 * ENGINE_AND_GEMM
    assert emulated.placement["lowered"] == [
        "by themselves on the array: Q4NXMatMul (2) (runs below 0 multiply-adds a dispatch: the host is faster)"
    ]
    for given, matrix, made in ((x, matrices[0], between), (between, matrices[1], found)):
        rows, dense = given.astype(np.float64), q4nx.dequantize_codes(matrix).astype(np.float64)
        expected = rows @ dense.T
        assert np.all(np.abs(made - expected) <= rounded(expected, product_error(rows, dense, 256, in_blocks=True)))


def test_runs_below_threshold_stay_on_host(tmp_path: Path, ep_devices: list[Any]) -> None:
    """64 rows are 64 x 2^16 multiply-adds in two dispatches; 1024 rows are 16 times as many, also in two."""
    file, feeds = product(tmp_path)
    build_artifacts(file)
    each = 64 * 2**16 // 2

    def dispatches(threshold: int, rows: int) -> list[str]:
        given = session_of(file, ep_devices[:1], npu_threshold=str(threshold))
        return stems(given.run({"X": np.resize(feeds["X"], (rows, 256))})[1])

    assert dispatches(each, 64) == ENGINE_AND_GEMM
    assert dispatches(each + 1, 64) == []
    assert dispatches(16 * each, 1024) == ENGINE_AND_GEMM
    # No run of 4096 rows is worth it: the node is the host's.
    placement = session_of(file, ep_devices[:1], npu_threshold=str(64 * each + 1)).placement
    assert placement["lowered"] == [f"Q4NXMatMul below {64 * each + 1} multiply-adds a dispatch: the host is faster"]
    assert placement["on_host"] == []


@pytest.mark.parametrize(("activations", "of_a_core"), [("int8", 225e9), ("bf16", 116e9)])
def test_default_threshold_is_host_work_during_dispatch(
    activations: str, of_a_core: float, tmp_path: Path, ep_devices: list[Any]
) -> None:
    file, _ = product(tmp_path)
    build_artifacts(file)
    options = {"npu_threshold": "", "activations": activations, "threads": "2"}
    (told,) = session_of(file, ep_devices[:1], **options).placement["lowered"]
    rows, one = round(2 * of_a_core * 2.75e-3), 4135999
    assert told == f"Q4NXMatMul below {rows} (of one row {one}) multiply-adds a dispatch: the host is faster"


@pytest.mark.parametrize(("columns", "dispatches"), [(2048, ["fused_dqp"]), (1984, [])])
def test_single_row_is_dispatched_from_bytes_that_pay(
    columns: int, dispatches: list[str], tmp_path: Path, ep_devices: list[Any]
) -> None:
    """The host takes 47 us longer to read 4.136 million weights of 5 bits: 30 GB/s beside the array's 66."""
    file = write_node(
        tmp_path / "model.onnx", "Q4NXMatMul", {"X": numbers(1, 1, 2080)},
        {"W": q4nx.pack(*weights(2, columns, 2080))}, M=columns, K=2080,
    )  # fmt: skip
    build_artifacts(file)
    session = session_of(file, ep_devices[:1], npu_threshold="")
    assert stems(session.run({"X": numbers(1, 1, 2080)})[1]) == dispatches


@pytest.mark.parametrize("given", ["-1", "many", "1.5", "99999999999999999999"])
def test_threshold_that_is_no_number_is_refused(given: str, tmp_path: Path, ep_devices: list[Any]) -> None:
    file, _ = product(tmp_path)
    with pytest.raises(Exception, match=r"option npu_threshold = '.*' is not valid; expected a number"):
        session_of(file, ep_devices[:1], npu_threshold=given)


@pytest.mark.parametrize(
    ("attributes", "inputs", "reason"),
    [
        ({"softcap": 2.0}, {}, "expected no softcap, which the array's attention has not"),
        ({}, {"head_sink": np.zeros(HEADS, np.float32)}, "expected head_sink to be an initializer"),
        (
            {"causal": 1},
            {"attention_bias": np.zeros((1, 1, 3, 3), np.float32)},
            "expected no attention_bias beside a causal",
        ),
    ],
)
def test_unsupported_attention_is_named_by_build_and_session(
    attributes: dict[str, Any], inputs: dict[str, np.ndarray], reason: str, alone: Alone
) -> None:
    """Both the build and the session name the feature that the array's attention lacks."""
    names = (*BIASED, "attention_bias", "q_norm_weight", "k_norm_weight", "bidirectional_blocks", "head_sink")
    given = {"query": heads_of(1, 3)[2][None], **dict.fromkeys(names), **inputs}
    file = write_node(
        alone.folder / "model.onnx", "FlowQKVAttention", given, outputs=3, **{"causal": 0, **SIZES, **attributes}
    )
    with pytest.raises(FlowNPUError, match=reason):
        build_artifacts(file)
    # The folder gets the programs of another model.
    other = write_node(
        alone.folder / "other.onnx", "FlowQKVAttention", {"query": given["query"]}, outputs=3, causal=0, **SIZES
    )
    build_artifacts(other, context=64)
    placement = session_of(file, alone.devices, on_unsupported="cpu").placement
    assert [reason in left["reason"] for left in placement["on_host"]] == [True]

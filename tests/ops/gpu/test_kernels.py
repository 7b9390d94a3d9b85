# SPDX-License-Identifier: Apache-2.0
"""Kernels with weights in images on PoCL, as `flownpu selftest --device gpu` tries them; NaN, refusals and transfers.

test_dialects.py compares all other variants with float64.
"""

import dataclasses

import numpy as np
import pytest

from flownpu.selftest.gpu.case import Expected, PreparedCase
from flownpu.selftest.gpu.trials import Devices, Outcome, Variant, run_variant, variants
from tests.ops.device import one

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

VARIANTS = {variant.name: variant for variant in variants(large=False)}
OF_IMAGES = [name for name in VARIANTS if name not in {each.name for each in variants(large=False, images=False)}]


@pytest.fixture(scope="module")
def devices(pocl):
    del pocl
    return Devices()


@pytest.fixture(scope="module")
def device(devices):
    return devices.first


@pytest.mark.parametrize("name", [*OF_IMAGES, "rms_norm"])
def test_kernel_variant_passes(name, devices):
    result = run_variant(VARIANTS[name], devices)
    assert result.outcome is Outcome.PASSED, result.text
    assert result.kernels
    assert all(seconds > 0 for seconds in result.kernels.values())


@pytest.mark.parametrize("name", ["fused_dqp, narrow", "rms_norm", "argmax", "flow_kv_attention, float cache"])
def test_wrong_number_is_found(name, devices):
    """An error above its tolerance."""
    case = VARIANTS[name].case()
    values = case.expected[0].values.copy()
    tolerance = np.broadcast_to(case.expected[0].tolerance, values.shape)
    values.flat[-1] += max(2.5 * tolerance.flat[-1], 1e-9)
    wrong = dataclasses.replace(case, expected={0: Expected(values, tolerance)})
    result = run_variant(Variant(name, lambda _rng: wrong), devices)
    assert result.outcome is Outcome.WRONG
    assert "1 of" in result.text


def test_kernel_with_other_lengths_is_not_recompiled(device):
    """Rows, tokens and lengths are parameters of a launch: nothing is compiled anew."""
    rng = np.random.default_rng(3)
    table = VARIANTS["q4nx_matmul int8, narrow"].case()
    heads = {"num_heads": 2, "kv_num_heads": 1, "head_size": 26}

    def run(tokens, past):
        x = rng.standard_normal((tokens, table.attributes["K"]), dtype=np.float32)
        PreparedCase(dataclasses.replace(table, inputs=[x, *table.inputs[1:]]), device).run()
        given = [rng.standard_normal((1, tokens, size), dtype=np.float32) for size in (52, 26, 26)]
        cache = [np.zeros((1, 1, past, 26), np.float32)] * 2
        lengths = [np.array([past + tokens - 1], np.int32), np.array(past + tokens, np.int32)]
        case = dataclasses.replace(
            table, op_type="FlowQKVAttention", inputs=[*given, *cache, *lengths], attributes=heads,
            outputs=["float"] * 3, constants=[],
        )  # fmt: skip
        PreparedCase(case, device).run()

    run(2, 3)
    before = device.counts()
    run(5, 40)
    after = device.counts()
    assert after["dispatches"] == before["dispatches"] + 3  # rounding, product, attention
    assert (after["compiled"], after["from_cache"]) == (before["compiled"], before["from_cache"])


def test_weights_go_to_device_once(device):
    """A run moves activations in and results out, and no weight."""
    case = VARIANTS["fused_dqp, narrow"].case()
    prepared = PreparedCase(case, device)
    before = device.counts()
    prepared.run()
    after = device.counts()
    assert after["bytes_to_device"] - before["bytes_to_device"] == case.inputs[0].nbytes
    assert after["bytes_to_host"] - before["bytes_to_host"] == 4 * case.attributes["M"]


@pytest.mark.parametrize("place", [0, 40, 344])
def test_nan_is_seen(device, place):
    """As on the CPU: a row with a NaN becomes all NaN, and no other row does."""
    for name in ("fused_dqp, narrow", "q4nx_matmul int8, narrow"):
        case = VARIANTS[name].case()
        x = case.inputs[0].copy()
        x[0, place] = np.nan
        (y,) = PreparedCase(dataclasses.replace(case, inputs=[x, *case.inputs[1:]]), device).run()
        assert np.isnan(y[0]).all(), name
        assert not np.isnan(y[1:]).any(), name


def test_argmax_of_nan_equals_cpu_device(device):
    case = VARIANTS["argmax"].case()
    x = np.full((5, 300), -np.inf, np.float32)
    x[0, 7] = x[1, 0] = np.nan
    x[1, 5] = x[2, 299] = x[3, 256] = 1
    x[4] = np.nan
    attributes = case.attributes
    (found,) = PreparedCase(dataclasses.replace(case, inputs=[x]), device).run()
    expected = one("ArgMax", [x], outputs=("int64",), domain="", **attributes)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("index", [-1, 77])
def test_rows_beyond_table_are_refused(device, index):
    case = VARIANTS["q4nx_gather, narrow"].case()
    prepared = PreparedCase(dataclasses.replace(case, inputs=[case.inputs[0], np.array([3, index])]), device)
    with pytest.raises(ValueError, match=rf"expected indices in \[0, 77\), got {index} at position 1"):
        prepared.run()


@pytest.mark.parametrize(
    ("name", "attributes", "reason"),
    [
        ("gated_delta, prompt", {"update_rule": "gated"}, "the gated delta rule, decay and beta of heads"),
        ("gated_delta, prompt", {"q_num_heads": 1}, None),
        ("short_convolution, one token", {"dilation": 2}, "channels_last, dilation = 1, no bias"),
        ("gated_rms_norm", {"activation": "sigmoid"}, "the activation silu"),
    ],
)
def test_form_of_state_layer_without_kernel_is_refused(device, name, attributes, reason):
    case = VARIANTS[name].case()
    if reason is None:  # queries of another size than keys
        inputs, reason = [case.inputs[0][..., :32], *case.inputs[1:]], "as many queries as keys"
        case = dataclasses.replace(case, inputs=inputs)
    with pytest.raises(ValueError, match=f"expected .*{reason}.*use device = cpu"):
        PreparedCase(dataclasses.replace(case, attributes=case.attributes | attributes), device)


def test_inputs_without_kernel_are_refused(device):
    case = VARIANTS["flow_qkv_attention, first prompt"].case()
    blocks = [*case.inputs[:13], np.ones((2, 13), np.int32)]
    with pytest.raises(ValueError, match=r"expected no bidirectional_blocks on device 'gpu'.*use device = cpu"):
        PreparedCase(dataclasses.replace(case, inputs=blocks), device)
    x = np.zeros((13, 13), np.float32)
    other = dataclasses.replace(
        case, op_type="CumSum", domain="", inputs=[x, np.array(0)], outputs=["float"], attributes={}
    )
    with pytest.raises(
        ValueError, match=r"expected one of the operators of device 'gpu': Q4NXMatMul, .*; use device = cpu"
    ):
        PreparedCase(other, device)

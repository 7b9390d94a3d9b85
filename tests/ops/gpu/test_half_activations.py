# SPDX-License-Identifier: Apache-2.0
"""Activations between a decoder's kernels stored as float16 (the option gpu_dtype), which needs no extension."""

import math
from dataclasses import replace

import numpy as np
import pytest

from flownpu.ops import q4nx
from tests.decoding import float32_tolerance
from tests.npu.decoders import Session, read_nodes
from tests.ops.device import testing
from tests.ops.gpu.test_session import hidden_of, logits_of

gpu = testing.gpu
HALF, MIDDLE = "args.halves.Read(i)", "args.middles.Read(i)"


def with_large_gates(nodes):
    """The nodes with up projections 2^20 times as large, and down projections that much smaller."""
    wide = {node.attributes["M"] for node in nodes if node.attributes.get("gating", "none") != "none"}
    return [_scaled(node, wide) if node.op_type == "Q4NXMatMul" else node for node in nodes]


def _scaled(node, wide):
    if node.attributes.get("gating", "none") != "none":
        by = (1, 2.0**20)
    elif node.attributes["K"] in wide:
        by = (2.0**-20,)
    else:
        return node
    name, kind, shape, blocks = node.inputs[1]
    layout = q4nx.layout_of(blocks)
    parts = []
    for part, factor in zip(np.split(blocks, len(by)), by, strict=True):
        weight = q4nx.unpack(part, node.attributes["M"], node.attributes["K"])
        scale, minimum = ((each.astype(np.float32) * factor).astype(q4nx.BFLOAT16) for each in weight[1:])
        parts.append(q4nx.pack(weight.codes, scale, minimum, layout))
    inputs = list(node.inputs)
    inputs[1] = [name, kind, shape, np.concatenate(parts)]
    return replace(node, inputs=inputs)


@pytest.mark.opencl
@pytest.mark.usefixtures("pocl")
def test_logits_of_float16_activations_differ_only_by_rounding(models):
    """A prompt and a token.

    A layer rounds five values that it multiplies next: both norms, the packed heads, queries, and attention's output;
    the last norm is one more. An element is off by 2^-11 of it at most, evenly, which is 2^-11 / sqrt(3) in the rms,
    and so is a sum of products of such elements; these errors add up in quadrature. The factor of 4 is
    float32_tolerance's.
    """
    session = Session(gpu.SessionDevice(half=True), *read_nodes(models.converted("llama", kv_dtype="fp32")))
    assert session.lowered.summary.endswith("activations stored as fp16 (gpu_dtype = fp16)")
    layers, ids = session.attributes["layers"], np.random.default_rng(5).integers(3, 250, 31)
    hidden, expected = (of(models, "llama", ids) for of in (hidden_of, logits_of))
    past = session.past(40, np.float32)
    found = [session.run(hidden[begin:end], end, past)[0] for begin, end in ((0, 30), (30, 31))]
    error = np.abs(np.array(found)[:, : expected.shape[1]] - expected[29:]).max()
    assert error <= 4 * math.sqrt(5 * layers + 1) * 2.0**-11 / math.sqrt(3) * np.abs(expected[29:]).max()
    # The values are rounded to float16: in float32 the error would be below this tolerance.
    assert error > float32_tolerance(expected[29:], layers, session.attributes["feed_forward.size"])


@pytest.mark.opencl
@pytest.mark.usefixtures("pocl")
def test_activations_beyond_float16_are_stored_as_float32(models):
    """Gated products beyond 65504, which Gemma3's are known to reach."""
    nodes, outputs = read_nodes(models.converted("llama", kv_dtype="fp32"))
    hidden = hidden_of(models, "llama", np.arange(3, 9))
    found = []
    for half in (True, False):
        session = Session(gpu.SessionDevice(half=half), with_large_gates(nodes), outputs)
        found.append(session.run(hidden, len(hidden), session.past(16, np.float32))[0])
    assert np.isfinite(found[0]).all()
    assert np.corrcoef(found)[0, 1] > 0.999


@pytest.mark.parametrize(
    ("has_half", "half", "wrong", "text"),
    [
        (False, None, 0, "fp32 (the device does not compute in half precision)"),
        (True, None, 0, "fp16 (the device computes in half precision, and converts rightly)"),
        (True, None, 7, "fp32 (the driver converts 7 of 131072 numbers wrongly)"),
        (False, True, 0, "fp16 (gpu_dtype = fp16)"),
        (True, False, 0, "fp32 (gpu_dtype = fp32)"),
        (True, False, 7, "fp32 (gpu_dtype = fp32)"),
    ],
)
def test_stored_type_is_chosen_with_reason(has_half, half, wrong, text):
    assert gpu.stored_type_of(has_half, half, wrong) == text


def test_driver_with_wrong_conversion_is_refused():
    with pytest.raises(
        RuntimeError, match=r"which gpu_dtype = fp16 asks for, got 7 of 131072 numbers wrong on .*fp32$"
    ):
        gpu.stored_type_of(True, True, 7)


@pytest.mark.opencl
@pytest.mark.usefixtures("pocl")
@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (("", ""), 0),
        # Subnormal numbers, 1023 of either sign, are taken for 0.
        ((HALF, f"fabs({HALF}) < 0x1p-14f ? 0.0f * {HALF} : {HALF}"), 2046),
        # Half of the ties go the wrong way: those of even codes, 15872 of either sign.
        ((MIDDLE, f"nextafter({MIDDLE}, copysign(INFINITY, {MIDDLE}))"), 31744),
    ],
)  # fmt: skip
def test_conversions_are_tried_once(change, wrong, tmp_path):
    kernel = gpu.convert_halves(*change)
    first = gpu.open(cache=str(tmp_path))
    assert gpu.wrong_halves(first, kernel) == wrong
    assert first.dispatches == 1
    again = gpu.open(cache=str(tmp_path))
    assert gpu.wrong_halves(again, kernel) == wrong
    assert again.dispatches == 0

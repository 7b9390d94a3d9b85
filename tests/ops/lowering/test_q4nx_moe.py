# SPDX-License-Identifier: Apache-2.0
"""QMoE, as ORT GenAI's builder writes it, against ONNX Runtime's own kernel of it; fp4, which its CPU provider does not
have, against float64."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from flownpu.graph_rewrites import testing
from flownpu.ops import q4nx

EXPERTS, TAKEN, HIDDEN, INNER = 5, 2, 64, 96
MODEL = """
moe (float[B, S, {hidden}] x, float[B, S, {experts}] logits) => (float[B, S, {hidden}] y) {{
    rows = Constant <value_ints = [-1, {experts}]> ()
    router_probs = Reshape (logits, rows)
    y = com.microsoft.QMoE <{attributes}>
        (x, router_probs, gate_up, gate_up_scales, {gate_up_bias}, down, down_scales, {down_bias}, , , ,
         {gate_up_zero_points}, {down_zero_points}, , , {gate_up_factors}, {down_factors})
}}
"""
ATTRIBUTES: dict[str, Any] = {
    "k": TAKEN,
    "activation_type": '"swiglu"',
    "activation_alpha": 1.0,
    "activation_beta": 0.0,
    "swiglu_fusion": 1,
    "normalize_routing_weights": 1,
    "use_sparse_mixer": 0,
    "expert_weight_bits": 4,
}
ACTIVATION = ("activation_alpha", "activation_beta", "swiglu_limit")
# As exporters write models without biases.
ZEROS = {
    "gate_up_bias": np.zeros((EXPERTS, 2 * INNER), np.float32),
    "down_bias": np.zeros((EXPERTS, HIDDEN), np.float32),
}
# Those of gpt-oss, with a limit that about a third of the gates reach.
GPT_OSS: dict[str, Any] = dict(zip(ACTIVATION, (1.702, 1.0, 1.5), strict=True))
BIASES = {name: np.random.default_rng(6).standard_normal(zeros.shape, np.float32) for name, zeros in ZEROS.items()}


class Case:
    """A random QMoE: its model, and the float32 weights that the operator's description defines."""

    def __init__(
        self,
        block_size: int | None = 32,
        *,
        zero_points: bool = False,
        bits: int = 4,
        constants: dict[str, testing.Array] | None = None,
        **attributes: Any,
    ) -> None:
        generator = np.random.default_rng(3)
        given: dict[str, testing.Array] = {}
        self.weights = {}
        for name, rows, columns in (("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER)):
            blocks = columns // (block_size or columns)
            codes = generator.integers(0, 2**bits, (EXPERTS * rows, columns), np.uint8)
            pack, middle = (testing.pack_nibbles, 8) if bits == 4 else (np.asarray, 128)
            scales = testing.bfloat16_values(generator, EXPERTS * rows, blocks) / 4
            if zero_points:  # with scales of powers of two, minima are exact in bfloat16, too
                scales = np.exp2(np.round(np.log2(scales)))
            points = generator.integers(middle - 4, middle + 4, scales.shape, np.uint8) if zero_points else None
            given[name] = pack(codes).reshape(EXPERTS, rows, -1)
            shape = (EXPERTS, rows, blocks) if block_size else (EXPERTS, rows)
            given[f"{name}_scales"] = scales.reshape(shape)
            if points is not None:
                given[f"{name}_zero_points"] = pack(points).reshape(EXPERTS, rows, -1)
            scale, zero = (
                np.repeat(values.astype(np.float32), columns // blocks, axis=1)
                for values in (scales, np.full_like(codes[:, :blocks], middle) if points is None else points)
            )
            self.weights[name] = (scale * (codes - zero)).reshape(EXPERTS, rows, columns)
        given |= constants or {}
        sizes = {"block_size": block_size} if block_size else {}
        self._make(given, {"expert_weight_bits": bits} | sizes | attributes)

    def _make(self, given: dict[str, testing.Array], attributes: dict[str, Any]) -> None:
        self.given = given = ZEROS | given
        attributes = ATTRIBUTES | attributes
        self.activation = [float(attributes.get(name, np.inf)) for name in ACTIVATION]
        text = ", ".join(f"{name} = {value}" for name, value in attributes.items())
        names = [f"{weight}_{what}" for weight in ("gate_up", "down") for what in ("bias", "zero_points", "factors")]
        named = {name: name if name in given else "" for name in names}
        self.model = testing.parse(MODEL.format(hidden=HIDDEN, experts=EXPERTS, attributes=text, **named), **given)

    def feeds(self) -> dict[str, testing.Array]:
        generator = np.random.default_rng(5)
        return {
            "x": generator.standard_normal((2, 3, HIDDEN), np.float32),
            "logits": generator.standard_normal((2, 3, EXPERTS), np.float32),
        }

    def exact(self) -> testing.Array:
        """The operator's equation in float64, with rows of gate and up that alternate."""
        feeds = {name: array.astype(np.float64) for name, array in self.feeds().items()}
        alpha, beta, limit = self.activation
        result = np.zeros(feeds["x"].shape)
        for row in np.ndindex(result.shape[:-1]):
            taken = np.argsort(-feeds["logits"][row])[:TAKEN]
            share = np.exp(feeds["logits"][row][taken])
            for expert, weight in zip(taken, share / share.sum(), strict=True):
                both = self.weights["gate_up"][expert] @ feeds["x"][row] + self.given["gate_up_bias"][expert]
                gate, up = np.minimum(both[::2], limit), np.clip(both[1::2], -limit, limit)
                inner = gate / (1 + np.exp(-alpha * gate)) * (up + beta)
                result[row] += weight * (self.weights["down"][expert] @ inner + self.given["down_bias"][expert])
        return result


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class Fp4Case(Case):
    """A random QMoE in MXFP4: codes [experts, columns, rows / 2], the even row's in the low half of a byte."""

    def __init__(
        self, *, factor: float = 1.0, constants: dict[str, testing.Array] | None = None, **attributes: Any
    ) -> None:
        """`factor`: of the experts' global scales."""
        generator = np.random.default_rng(4)
        given: dict[str, testing.Array] = {}
        self.weights = {}
        for name, rows, columns in (("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER)):
            codes = generator.integers(0, 16, (EXPERTS, columns, rows), np.uint8)
            given[name] = codes[..., ::2] | codes[..., 1::2] << np.uint8(4)
            powers = np.exp2(generator.integers(-6, -2, (EXPERTS, rows, columns // 32)))
            given[f"{name}_scales"] = powers.astype(ml_dtypes.float8_e8m0fnu)
            given[f"{name}_factors"] = np.float32(factor) * np.exp2(np.arange(EXPERTS) % 3).astype(np.float32)
            values = (np.where(codes < 8, 1, -1) * E2M1[codes % 8]).transpose(0, 2, 1)
            scales = given[f"{name}_factors"].astype(np.float64)[:, None, None] * powers
            self.weights[name] = values * np.repeat(scales, 32, axis=2)
        self._make(given | (constants or {}), {"quant_type": '"fp4"', "block_size": 32} | attributes)


# A sum of HIDDEN terms, then one of INNER, in any order and on both sides; a factor of 4 for terms that cancel.
TOLERANCE = 2 * 4 * (HIDDEN + INNER) * testing.FLOAT32_ROUNDING


@pytest.mark.parametrize("normalize", [0, 1])
@pytest.mark.parametrize("block_size", [32, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_experts_equal_onnxruntime(bits: int, block_size: int | None, normalize: int) -> None:
    case = Case(block_size, bits=bits, normalize_routing_weights=normalize)
    model, misses = testing.rewritten(case.model, "q4nx_moe")
    assert testing.operator_names(model) == ["Q4NXMoE"]
    assert misses == []
    (expected,), (found,) = (testing.run(m, case.feeds()) for m in (case.model, model))
    # With 8 bits in blocks, ONNX Runtime's kernel rounds what it multiplies to int8, by up to 1 / 254 of the largest of
    # 32 columns, before both products; the test of codes is exact.
    tolerance = 3 * 2 / 254 if bits == 8 and block_size else TOLERANCE
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
    testing.check(model)


@pytest.mark.parametrize("bits", [4, 8])
def test_biases_and_limited_gates_equal_onnxruntime(bits: int) -> None:
    """As gpt-oss has them; ONNX Runtime's kernel does not round what it multiplies with one scale a row."""
    case = Case(None, bits=bits, constants=BIASES, **GPT_OSS)
    model, misses = testing.rewritten(case.model, "q4nx_moe")
    assert misses == []
    (expected,), (found,) = (testing.run(m, case.feeds()) for m in (case.model, model))
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
    assert np.abs(expected - case.exact()).max() <= TOLERANCE * np.abs(expected).max()
    testing.check(model)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_stay_and_rows_are_sorted(bits: int) -> None:
    """In the model rows of gate and up alternate; in an expert's blocks all of gate's come before up's."""
    case = Case(bits=bits)
    model, _ = testing.rewritten(case.model, "q4nx_moe")
    (node,) = (node for node in model.graph if node.op_type == "Q4NXMoE")
    gate_up, down = (np.split(node.inputs[place].const_value.numpy(), EXPERTS) for place in (2, 3))
    for expert in range(EXPERTS):
        for part, blocks in enumerate(np.split(gate_up[expert], 2)):
            expected = case.weights["gate_up"][expert, part::2]
            np.testing.assert_array_equal(q4nx.dequantize(blocks, INNER, HIDDEN), expected)
        np.testing.assert_array_equal(q4nx.dequantize(down[expert], HIDDEN, INNER), case.weights["down"][expert])


def test_gate_above_up_equals_onnxruntime() -> None:
    """swiglu_fusion=2, which ONNX Runtime's CPU kernel does not have: the same experts as with alternating rows."""
    turns = Case(constants=BIASES)
    given = {name: turns.given[name] for name in ("gate_up", "gate_up_scales", "gate_up_bias")}
    apart = {name: np.concatenate([array[:, 0::2], array[:, 1::2]], axis=1) for name, array in given.items()}
    above = Case(swiglu_fusion=2, constants=BIASES | apart)
    results = [testing.run(testing.rewritten(case.model, "q4nx_moe")[0], turns.feeds())[0] for case in (turns, above)]
    np.testing.assert_array_equal(*results)


def test_logits_that_no_reshape_makes_are_taken_as_they_are() -> None:
    """A row for each row of the input, as LFM2's router has them, which is written in operators."""
    case = Case()
    (flatten,) = (node for node in case.model.graph if node.op_type == "Reshape")
    flatten.op_type = "Flatten"
    flatten.resize_inputs(1)
    flatten.attributes["axis"] = ir.AttrInt64("axis", 2)
    model, misses = testing.rewritten(case.model, "q4nx_moe")
    assert testing.operator_names(model) == ["Flatten", "Q4NXMoE"]
    assert misses == []
    (expected,), (found,) = (testing.run(m, case.feeds()) for m in (case.model, model))
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_zero_points_are_folded() -> None:
    case = Case(zero_points=True)
    model, misses = testing.rewritten(case.model, "q4nx_moe")
    assert misses == []
    (expected,), (found,) = (testing.run(m, case.feeds()) for m in (case.model, model))
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_fp4_keeps_each_weight() -> None:
    """Scales that are powers of two stay exact, also those of experts."""
    case = Fp4Case()
    model, misses = testing.rewritten(case.model, "q4nx_moe")
    assert misses == []
    (node,) = (node for node in model.graph if node.op_type == "Q4NXMoE")
    gate_up, down = (np.split(node.inputs[place].const_value.numpy(), EXPERTS) for place in (2, 3))
    for expert in range(EXPERTS):
        for part, blocks in enumerate(np.split(gate_up[expert], 2)):
            expected = case.weights["gate_up"][expert, part::2]
            np.testing.assert_array_equal(q4nx.dequantize(blocks, INNER, HIDDEN), expected)
        np.testing.assert_array_equal(q4nx.dequantize(down[expert], HIDDEN, INNER), case.weights["down"][expert])
    (found,) = testing.run(model, case.feeds())
    expected = case.exact()
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_fp4_rounds_scales_of_experts_that_bf16_lacks() -> None:
    case = Fp4Case(factor=1.003)
    model, _ = testing.rewritten(case.model, "q4nx_moe")
    (node,) = (node for node in model.graph if node.op_type == "Q4NXMoE")
    down = q4nx.dequantize(node.inputs[3].const_value.numpy()[: HIDDEN // 32], HIDDEN, INNER)
    off = np.abs(down - case.weights["down"][0])
    assert off.max() > 0
    assert np.all(off <= testing.BFLOAT16_ROUNDING * np.abs(case.weights["down"][0]))


@pytest.mark.parametrize("activations", ["bf16", "int8"])
def test_session_runs_fp4_experts(ep_devices: list[Any], tmp_path: Path, activations: str) -> None:
    """gpt-oss's, with biases and limits; ONNX Runtime's CPU provider has no kernel for it."""
    case, path = Fp4Case(constants=BIASES, **GPT_OSS), tmp_path / "model.onnx"
    ir.save(case.model, path)
    options = ort.SessionOptions()
    options.add_provider_for_devices(ep_devices[:1], {"device": "cpu", "activations": activations})
    (found,) = ort.InferenceSession(path, options).run(None, case.feeds())
    expected = case.exact()
    # X and what is between the two products are rounded: to bfloat16, or in groups of 32 to int8, by up to 1 / 254 of
    # the largest.
    rounding = 4 * testing.BFLOAT16_ROUNDING if activations == "bf16" else 3 * 2 / 254
    assert np.abs(found - expected).max() <= rounding * np.abs(expected).max()


def test_session_runs_lowered_mixture(ep_devices: list[Any], tmp_path: Path) -> None:
    case, path = Case(), tmp_path / "model.onnx"
    ir.save(case.model, path)
    options = ort.SessionOptions()
    options.add_provider_for_devices(ep_devices[:1], {"device": "cpu", "activations": "bf16"})
    (found,) = ort.InferenceSession(path, options).run(None, case.feeds())
    (expected,) = testing.run(case.model, case.feeds())
    # X and what is between the two products are rounded to bfloat16.
    assert np.abs(found - expected).max() <= 4 * testing.BFLOAT16_ROUNDING * np.abs(expected).max()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(expert_weight_bits=2), "expert_weight_bits=2: Q4NX stores codes of 4 or 8 bits; export experts with"),
        (Case(use_sparse_mixer=1), "use_sparse_mixer=1: experts are chosen by their logits, all at once"),
        (Case(swiglu_limit=0.0), "swiglu_limit=0: gates have a positive limit, or none"),
        (Case(activation_type='"silu"'), "activation_type"),
        (Case(swiglu_fusion=0), "swiglu_fusion=0: gate and up must be one input; export with swiglu_fusion=1"),
        (Case(weights_prepacked=1), "weights_prepacked=1: the codes are in an order made for a GPU; export without it"),
        (Case(constants={"down_bias": BIASES["down_bias"][:, 1:]}), f"down_bias is not of {EXPERTS} x {HIDDEN}"),
        (Case(quant_type='"fp4"'), "gate_up: quant_type fp4 has 4 bits, a global scale and no zero points"),
        (
            Fp4Case(constants={"down_scales": np.ones((EXPERTS, HIDDEN, INNER // 32), np.float32)}),
            "down_scales is of float, expected float8e8m0 for fp4",
        ),
        (
            Fp4Case(constants={"down_factors": np.ones(EXPERTS + 1, np.float32)}),
            "input 16 (fc2_global_scale",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_mixtures_are_left_with_reason(case: Case, reason: str) -> None:
    model, misses = testing.rewritten(case.model, "q4nx_moe")
    assert "QMoE" in testing.operator_names(model)
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [("q4nx_moe", reason)]

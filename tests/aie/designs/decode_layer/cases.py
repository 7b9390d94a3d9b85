# SPDX-License-Identifier: Apache-2.0
"""Cases of decoder layers (flownpu.selftest.reference.layer) for the emulator, and layers made from checkpoints."""

from dataclasses import dataclass

import numpy as np

from flownpu.aie.designs.decode_layer.shape import LayerShape
from flownpu.aie.emulator import Emulator
from flownpu.aie.plan.data import Plan
from flownpu.ops import q4nx
from flownpu.selftest.reference.layer import LayerInputs, LayerWeights, expectation
from tests.aie.emulation import call as run_plan
from tests.aie.emulation import emulator, plan_of
from tests.aie.host_kernels import assert_within, bf16


def quantized(*parts: np.ndarray) -> q4nx.Quantized:
    """Weights, quantised and stacked one below the other."""
    return q4nx.stack(*(q4nx.quantize(part) for part in parts))


def checkpoint_layer(shape: LayerShape, tensors: dict[str, np.ndarray], index: int) -> LayerWeights:
    """Layer `index` of a Gemma3 (with post-norms), Llama or Qwen3 checkpoint; Gemma3's norms multiply by 1 + weight."""
    layer = {name.removeprefix(f"model.layers.{index}."): values for name, values in tensors.items()}
    q, k, v, output = (layer[f"self_attn.{name}_proj.weight"] for name in "qkvo")
    gate, up, down = (quantized(layer[f"mlp.{name}_proj.weight"]) for name in ("gate", "up", "down"))
    names = ["input", "post_attention"]
    if shape.post_norms:
        names += ["pre_feedforward"]
    rows = [layer[f"{name}_layernorm.weight"] for name in names]
    if shape.post_norms:
        before = tensors.get(f"model.layers.{index - 1}.post_feedforward_layernorm.weight")
        rows.insert(0, np.zeros_like(rows[0]) if before is None else before)
    qk_norm = np.stack([layer[f"self_attn.{name}_norm.weight"] for name in "qk"]) if shape.qk_norm else None
    return LayerWeights(
        q4nx.pack(*quantized(q, k, v)), q4nx.pack(*quantized(output)), q4nx.pack_gated(gate, up), q4nx.pack(*down),
        norm_weights(shape, np.stack(rows)), None if qk_norm is None else norm_weights(shape, qk_norm),
    )  # fmt: skip


def norm_weights(shape: LayerShape, weights: np.ndarray) -> np.ndarray:
    """The factors of a norm, in bf16 (Gemma3, which has post-norms: 1 + weight)."""
    return bf16(weights.astype(np.float32) + (1 if shape.post_norms else 0))


def run(
    array: Emulator, plan: Plan, *, seed: int = 0, settle: bool = True, last: str = "", **buffers: np.ndarray
) -> dict:
    """As `emulation.call`. With split keys the cache, or its rows in int8, are two arguments.

    The memory behind them (bf16 1000, codes 68 with scales of 785) must not matter.
    """
    kinds = {record.name: record.type for record in plan.sequence.buffers}
    if "cache_bytes" not in kinds:
        return run_plan(array, plan, seed=seed, settle=settle, last=last, **buffers)
    name = "int8_rows" if "int8_rows" in kinds else "cache"
    kept = buffers[name].reshape(-1)
    memory = np.full(kinds["cache_bytes"].bytes // kept.itemsize, 68 if kept.itemsize == 1 else 1000).astype(kept.dtype)
    memory[: kept.size] = kept
    return run_plan(
        array, plan, seed=seed, settle=settle, last=last,
        shared={name: memory[: kept.size], "cache_bytes": memory.view(np.uint8)},
        **{n: b for n, b in buffers.items() if n != name},
    )  # fmt: skip


@dataclass
class LayerCase:
    """A call and its expected results."""

    plan: Plan
    call: LayerInputs
    expected: dict[str, tuple[np.ndarray, np.ndarray]]

    def check(self, array: Emulator | None = None, *, seed: int = 0, settle: bool = True) -> dict[str, np.ndarray]:
        """Run, compare, and return the host buffers; `array`: an emulator that ran other calls before."""
        own = array is None
        array = emulator(self.plan.array) if array is None else array
        found = run(array, self.plan, seed=seed, settle=settle, **self.call.buffers())
        outcome = self.call.outcome(found)
        for name, (expected, tolerance) in self.expected.items():
            assert_within(outcome[name], expected, tolerance)
        if own:
            left = array.leftovers()
            assert left == [], left
        return found


def case_of(call: LayerInputs, rng) -> LayerCase:
    """The case of a call, its plan checked."""
    return LayerCase(plan_of(call.program()), call, expectation(call, rng))

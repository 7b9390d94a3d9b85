# SPDX-License-Identifier: Apache-2.0
"""Mistakes planted in every design are caught: by the checker, by the emulator, or by the resulting numbers."""

import pytest

from tests.aie.designs.mutations import MUTATIONS, caught
from tests.aie.designs.small_cases import SMALL_CASES, cases_of

# By design, the beginnings of the names of mutants that change no result, with the reason.
_NOT_ASKED_FOR = "another call of the array stores so, this one does not"
EQUIVALENT = {
    "gemm swiglu": {
        "missing_calls core (0, 2): store_bf16": _NOT_ASKED_FOR,
        "wrong_sizes core (0, 2): store_bf16": _NOT_ASKED_FOR,
    },
    "gemm without swiglu": {
        "missing_calls core (0, 2): store_silu_mul": _NOT_ASKED_FOR,
        "wrong_sizes core (0, 2): store_silu_mul": _NOT_ASKED_FOR,
    },
    "flow_kv": {
        "wrong_parameters k_0_parameters[3]": "the key after the last is hidden as one of the future, too",
        "wrong_parameters k_0_parameters[5]": "a token at the end sees every key, causal or not",
    },
    "flow_qkv": {"wrong_parameters tile_0_0_parameters[3]": "as in flow_kv"},
    "flow_qkv in parts": {"wrong_parameters tile_0_0_parameters[3]": "as in flow_kv"},
    "flow_qkv non-causal": {
        "wrong_parameters tile_0_0_parameters[1]": "where the queries are counts for causality and windows only",
        "wrong_parameters tile_0_0_parameters[7]": "and so does which rows are the same token",
    },
    "norm_rope": {
        "strides_of_transfers qkv_0_task6: stride 0": "a weight is sent once for each KV head, and read once",
    },
}


@pytest.mark.parametrize("design", SMALL_CASES)
def test_planted_mistakes_are_caught(rng, design):
    cases = cases_of(design, rng)
    for case in cases:
        case.check()
    survivors, planted = [], 0
    for mutation in MUTATIONS:
        for text, mutant in mutation(cases[0].plan):
            planted += 1
            name = f"{mutation.__name__} {text}"
            equivalent = any(name.startswith(known) for known in EQUIVALENT.get(design, {}))
            if not caught(cases, mutant) and not equivalent:
                survivors.append(name)
    assert survivors == []
    assert planted >= 25  # even the smallest design has room for as many


def test_mutations_apply_to_some_design(rng):
    plans = [cases_of(design, rng)[0].plan for design in SMALL_CASES]
    assert [m.__name__ for m in MUTATIONS if all(not list(m(plan)) for plan in plans)] == []

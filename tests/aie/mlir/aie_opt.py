# SPDX-License-Identifier: Apache-2.0
"""A real aie-opt, where there is one: mlir-aie's, or a build of its passes. Tests that need it are skipped elsewhere.

It is looked for at FLOWNPU_AIE_OPT and on the path. The passes are those of mlir-aie's tools/aiecc/aiecc.cpp, in its
order, without those that compile cores. Both they and the lowered operations that `instructions` reads are those of
March 2026, whose MLIR is no longer printed: with an aie-opt of 1.4.5 they are to be read again in that file.
"""

import os
import re
import shutil
import subprocess

import numpy as np
import pytest

AIE_OPT = os.environ.get("FLOWNPU_AIE_OPT") or shutil.which("aie-opt")
needs_aie_opt = pytest.mark.skipif(
    AIE_OPT is None, reason="there is no aie-opt on the path, nor at FLOWNPU_AIE_OPT (mlir-aie's wheel has one)"
)

_OF_ARRAY = (
    "lower-affine,aie-canonicalize-device,aie.device(aie-assign-lock-ids,aie-register-objectFifos,"
    "aie-objectFifo-stateful-transform{dynamic-objFifos=false packet-sw-objFifos=false},aie-assign-bd-ids,"
    "aie-lower-cascade-flows,aie-lower-broadcast-packet,aie-lower-multicast,aie-assign-tile-controller-ids,"
    "aie-generate-column-control-overlay{route-shim-to-tile-ctrl=false},aie-assign-buffer-addresses{alloc-scheme=},"
    "aie-assign-core-link-files,aie-vector-transfer-lowering),convert-scf-to-cf,"
    "aie.device(aie-create-pathfinder-flows)"
)
_OF_SEQUENCE = (
    "aie-materialize-runtime-sequences,aie.device(aie-materialize-bd-chains,aie-substitute-shim-dma-allocations,"
    "aie-assign-runtime-sequence-bd-ids,aie-dma-tasks-to-npu,aie-dma-to-npu,aie-lower-set-lock)"
)


def lowered(text):
    """The result of aiecc's passes on MLIR text, and their warnings; an error fails the test."""
    command = [AIE_OPT, f"--pass-pipeline=builtin.module({_OF_ARRAY},{_OF_SEQUENCE})"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"\berror:", done.stderr), done.stderr  # it may still exit with 0
    return done.stdout, done.stderr


def instructions(text):
    """The instruction words of lowered MLIR, as mlir-aie's lib/Targets/AIETargetNPU.cpp writes them."""
    data = {
        name: [int(word) & 0xFFFFFFFF for word in words.split(", ")]
        for name, words in re.findall(r"@(blockwrite_data_\d+) : memref<\d+xi32> = dense<\[(.*?)\]>", text)
    }
    globals_of = dict(re.findall(r"(%\w+) = memref.get_global @(\w+)", text))
    words, count = [0, 0, 0, 0], 0
    for name, operands, attributes in re.findall(r"aiex\.npu\.(\w+)(?:\((%\w+)\))? ?\{(.*?)\}", text):
        at = {key: int(value) for key, value in re.findall(r"(\w+) = (-?\d+)", attributes)}
        address = at.get("address", 0) | at.get("column", 0) << 25 | at.get("row", 0) << 20
        value = at.get("value", 0) & 0xFFFFFFFF
        if name == "write32":
            words += [0, 0, address, 0, value, 24]
        elif name == "maskwrite32":
            words += [3, 0, address, 0, value, at["mask"], 28]
        elif name == "blockwrite":
            found = data[globals_of[operands]]
            words += [1, 0, address, (4 + len(found)) * 4, *found]
        elif name == "address_patch":
            words += [129, 48, 0, 0, 0, 0, at["addr"], 0, at["arg_idx"], 0, at["arg_plus"] & 0xFFFFFFFF, 0]
        elif name == "sync":
            place = at["direction"] | at["row"] << 8 | at["column"] << 16
            words += [128, 16, place, at["row_num"] << 8 | at["column_num"] << 16 | at["channel"] << 24]
        else:
            raise AssertionError(f"aiex.npu.{name}")
        count += 1
    words[2:4] = count, 4 * len(words)
    return np.array(words, np.int64)

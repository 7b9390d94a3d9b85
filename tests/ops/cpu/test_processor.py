# SPDX-License-Identifier: Apache-2.0
"""The instruction sets that the C++ code finds, against Linux's description of the processor."""

import platform
import re
from pathlib import Path

from tests.ops.device import ISAS

CPUINFO = Path("/proc/cpuinfo")
# Processor features that the kernels of each instruction set need, by Linux's names.
NEEDS = {
    "x86_64": {
        "avx512": "avx512f avx512bw avx512vl avx512dq avx512vbmi avx512_vnni avx512_bf16",
        "avx2": "avx2 fma f16c",
        "generic": "",
    },
    "aarch64": {"i8mm": "asimddp i8mm", "dotprod": "asimddp", "generic": ""},
}


def test_instruction_sets_equal_processor_features():
    needs_of = NEEDS[platform.machine()]
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
    assert flags is not None
    has = set(flags[1].split())
    assert [isa for isa, needs in needs_of.items() if set(needs.split()) <= has] == ISAS

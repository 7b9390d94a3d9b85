# SPDX-License-Identifier: Apache-2.0
"""Which kernels the C++ takes this processor to run, against what Linux says of it."""

import re
from pathlib import Path

import pytest

from tests.ops.device import ISAS

CPUINFO = Path("/proc/cpuinfo")
# By Linux's names.
NEEDS = {
    "avx512": "avx512f avx512bw avx512vl avx512dq avx512vbmi avx512_vnni avx512_bf16",
    "avx2": "avx2 fma f16c",
    "generic": "",
}


def test_instruction_sets_are_the_processors():
    flags = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
    if flags is None:
        pytest.skip("Linux names this processor's features otherwise than x86's")
    has = set(flags[1].split())
    assert [isa for isa, needs in NEEDS.items() if set(needs.split()) <= has] == ISAS

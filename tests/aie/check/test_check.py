# SPDX-License-Identifier: Apache-2.0
"""The whole checker: it passes valid plans, and names all faults of an invalid one."""

import pytest

from flownpu.aie.check import PlanError, require_valid
from flownpu.aie.plan.data import Dimension, Type
from tests.aie.check.faults import CHAIN, messages
from tests.aie.small_programs import with_end, with_fifo


def test_valid_plan_passes():
    assert messages(CHAIN) == []
    assert require_valid(CHAIN) is CHAIN


def test_error_lists_violations_of_all_kinds():
    plan = with_end(with_fifo(CHAIN, "a", type=Type((1 << 18,), "i32")), "c", "produce", walk=(Dimension(600, 1),))
    with pytest.raises(PlanError, match=r"\[plan chain\] breaks the hardware's limits:\n") as raised:
        require_valid(plan)
    assert len(raised.value.violations) > 1

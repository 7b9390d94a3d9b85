# SPDX-License-Identifier: Apache-2.0
"""Checks a plan against the hardware's limits, and against the mistakes that the real compiler lets pass.

    for violation in check(plan):
        print(violation)

Each case was run through aie-opt. Nothing here is rounded in favour of a plan: where sources differ, the smaller limit
counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.aie.check.cores import check_cores
from flownpu.aie.check.flow import check_flow
from flownpu.aie.check.resources import check_resources
from flownpu.aie.check.sequence import check_sequence
from flownpu.aie.check.structure import check_structure
from flownpu.aie.check.violation import PlanError, Violation
from flownpu.aie.plan.limits import LIMITS

if TYPE_CHECKING:
    from flownpu.aie.plan.data import Plan
    from flownpu.aie.plan.limits import Limits

__all__ = ["PlanError", "Violation", "check", "require_valid"]


def check(plan: Plan, limits: Limits | None = None) -> list[Violation]:
    """All faults of a plan; empty if there are none.

    Later checks rely on earlier ones (a link that names no fifo has no size): the first of structure, resources, cores,
    sequence and flow that finds mistakes is the last that runs.

    Args:
        plan: the plan to check.
        limits: the hardware's limits; None: those of the plan's target.
    """
    limits = limits or LIMITS[plan.array.target]
    for one in (check_structure, check_resources, check_cores, check_sequence, check_flow):
        if found := one(plan, limits):
            return found
    return []


def require_valid(plan: Plan) -> Plan:
    """Return the plan, unchanged, if nothing is wrong with it.

    Raises:
        PlanError: it has violations; the message lists them.
    """
    if found := check(plan):
        raise PlanError(plan.name, found)
    return plan

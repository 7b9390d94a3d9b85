# SPDX-License-Identifier: Apache-2.0
"""The waiting of the plugin for XRT (ops/npu/xrt/waiting.h), with a clock that only its sleeps advance."""

import pytest

from tests.npu.arrays import npu

US, MS = 1_000, 1_000_000
# As in waiting.cc: the shortest and the longest sleep between looks; a sleep may take one PART-th of the time so far.
SHORTEST, LONGEST, PART = 10 * US, 250 * US, 16


@pytest.mark.parametrize("taken", [20 * US, 500 * US, 3 * MS, 20 * MS, 300 * MS])
def test_first_call_is_polled_by_16ths_of_time(taken):
    """Each sleep is a 16th of the time so far, so the end is noticed at most that much late."""
    expectation = npu.Expectation()
    sleeps = expectation.wait(taken)
    assert sleeps[0] == SHORTEST
    assert max(sleeps) <= min(LONGEST, max(SHORTEST, taken // PART))
    assert sleeps == sorted(sleeps) or taken > 100 * MS  # there the last sleep before the device is checked is shorter
    assert taken <= sum(sleeps) < taken + sleeps[-1] + 1
    assert expectation.nanoseconds == sum(sleeps)


@pytest.mark.parametrize("taken", [500 * US, 3 * MS, 20 * MS])
def test_wait_for_repeated_call_sleeps(taken):
    """Sleeps all but a 16th at once; each later sleep is a 256th of that plus a 16th of the time since."""
    expectation = npu.Expectation()
    expectation.learn(taken)
    sleeps = expectation.wait(taken)
    quiet = taken - taken // PART
    assert sleeps[0] == quiet
    assert sleeps[1] == max(SHORTEST, quiet // PART**2)
    # The last sleep: a 16th of the 16th that is left, and a 256th of the long sleep.
    assert sum(sleeps) - taken < max(SHORTEST, taken // PART**2 + quiet // PART**2)
    assert len(sleeps) < 2 * PART


def test_shorter_dispatches_are_learnt():
    """A call that ends during the long sleep shows only that the expectation is too long: a quarter less each time."""
    expectation = npu.Expectation()
    expectation.learn(20 * MS)
    found = []
    while expectation.wait(10 * MS)[0] > 10 * MS:
        found.append(expectation.nanoseconds)
    assert found == [20 * MS * 3**n // 4**n for n in (1, 2, 3)]
    assert expectation.nanoseconds == pytest.approx(10 * MS, rel=1 / PART)


def test_long_call_raises_expectation_by_quarter():
    """A longer dispatch raises the expectation by a quarter at most, so it takes several to reach all of it."""
    expectation = npu.Expectation()
    expectation.learn(10 * MS)
    expectation.wait(1000 * MS)
    assert expectation.nanoseconds == 10 * MS * 5 // 4
    waits = 1
    while expectation.nanoseconds < 40 * MS:
        expectation.wait(40 * MS)
        waits += 1
    assert waits == 7  # 1.25^7 > 4


def test_long_sleep_checks_device():
    expectation = npu.Expectation()
    expectation.learn(80 * MS)
    sleeps = expectation.wait(80 * MS, check=30 * MS)
    assert sleeps[:3] == [30 * MS, 30 * MS, 15 * MS]
    assert expectation.nanoseconds == sum(sleeps)  # the last sleep was a short one: it was not overslept


@pytest.mark.parametrize(
    ("content", "patience"),
    [
        (None, 15_000),  # an older driver, whose watchdog takes 6 to 60 s: what it never ends is kept
        ("2000\n", 2 * 2000 + 1000),  # two intervals of its checks, and the restart of the context
        ("100\n", 2 * 100 + 1000),
        ("0\n", 0),  # it is off: nothing is waited for
        ("", 2 * 2000 + 1000),  # Linux 7's own time, where it cannot be read
        ("never\n", 2 * 2000 + 1000),
    ],
)
def test_watchdog_time_is_read(tmp_path, content, patience):
    parameter = tmp_path / "tdr_timeout_ms"
    if content is not None:
        parameter.write_text(content)
    assert npu.watchdog_patience(parameter) == patience


def test_unreadable_watchdog_time_is_default(tmp_path):
    """A folder stands for the file: it exists, and not even root can read it."""
    assert npu.watchdog_patience(tmp_path) == 2 * 2000 + 1000

# SPDX-License-Identifier: Apache-2.0
"""Cores, their speeds and nodes of memory, from made-up trees of /sys: the computing processors, with reasons."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from flownpu import _native
from flownpu.machine import describe_threads
from tests.large_pages import asks_for_large_pages, has_large_pages
from tests.ops.device import testing

CPUS, NODES = "sys/devices/system/cpu", "sys/devices/system/node"
V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"


def write(file: Path, text: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def machine(root, siblings, speeds=(), file="cpu_capacity", nodes=None, with_memory="0"):
    """A /sys with a processor for each item of `siblings`, the processors of its core; `speeds` are in `file`."""
    for number, shared in enumerate(siblings):
        write(root / f"{CPUS}/cpu{number}/topology/thread_siblings_list", shared)
        write(root / f"{CPUS}/cpu{number}/node{nodes[number] if nodes else 0}/cpulist", "")
        if speeds:
            write(root / f"{CPUS}/cpu{number}/{file}", speeds[number])
    write(root / f"{NODES}/has_memory", with_memory)
    write(root / f"{NODES}/has_cpu", "0" if nodes is None else f"0-{max(nodes)}")
    return list(range(len(siblings)))


def chosen(root, numbers):
    """The processors that get a thread each, and how many threads there are."""
    used = [one.number for one in _native.computing_processors(_native.processors(root, numbers))]
    return used, _native.usable_processors(root, numbers)


# A desktop with SMT: Linux numbers the second threads after all first ones, hypervisors often each after its first.
@pytest.mark.parametrize(
    ("siblings", "used"),
    [(["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"], [0, 1, 2, 3]), (["0-1", "0-1", "2-3", "2-3"], [0, 2])],
)
def test_threads_are_described_as_one_per_core(tmp_path, siblings, used):
    numbers = machine(tmp_path, siblings)
    assert chosen(tmp_path, numbers) == (used, len(used))
    assert describe_threads(tmp_path, numbers) == (
        f"{len(used)}, each on a core of its own; not on the second threads of {len(used)} cores, which compute no more"
    )


def test_second_thread_of_core_is_kept_where_first_is_excluded(tmp_path):
    machine(tmp_path, ["0,2", "1,3", "0,2", "1,3"])
    assert chosen(tmp_path, [2, 3]) == ([2, 3], 2)
    assert chosen(tmp_path, [0, 2, 3]) == ([0, 3], 2)


# 2 P cores with SMT and 4 E cores; cores of Arm of two kinds; 2 Zen 5 and 2 Zen 5c cores, which clocks tell apart.
@pytest.mark.parametrize(
    ("siblings", "speeds", "file", "used", "words"),
    [
        (
            ["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"],
            [1024, 1024, 1024, 1024, 614, 614, 614, 614],
            "cpu_capacity",
            [0, 2, 4, 5, 6, 7],
            "cores differ in speed (4 have 0.60 of the fastest's): by what each did before",
        ),
        (["0", "1", "2", "3"], [720, 720, 1024, 1024], "cpu_capacity", [2, 3, 0, 1], "2 have 0.70"),
        (
            ["0", "1", "2", "3"],
            [5100000, 5100000, 3300000, 3300000],
            "cpufreq/cpuinfo_max_freq",
            [0, 1, 2, 3],
            "2 have 0.65",
        ),
    ],
)
def test_cores_of_two_kinds_are_told_apart(tmp_path, siblings, speeds, file, used, words):
    numbers = machine(tmp_path, siblings, speeds, file)
    assert chosen(tmp_path, numbers) == (used, len(used))
    assert words in describe_threads(tmp_path, numbers)


def test_cores_that_maker_lets_clock_little_higher_are_of_one_kind(tmp_path):
    numbers = machine(tmp_path, ["0", "1", "2"], [5700000, 5500000, 5700000], "cpufreq/cpuinfo_max_freq")
    assert {one.capacity for one in _native.processors(tmp_path, numbers)} == {1024}


def test_equal_capacities_do_not_hide_clocks(tmp_path):
    machine(tmp_path, ["0", "1"], [1024, 1024])
    numbers = machine(tmp_path, ["0", "1"], [4000000, 3000000], "cpufreq/cpuinfo_max_freq")
    assert [one.capacity for one in _native.processors(tmp_path, numbers)] == [1024, 768]


def test_cores_of_less_than_half_speed_are_left_alone(tmp_path):
    numbers = machine(tmp_path, ["0", "1", "2", "3"], [1024, 512, 511, 300])
    assert chosen(tmp_path, numbers) == ([0, 1], 2)
    assert "not on 2 cores that are less than half as fast as the fastest" in describe_threads(tmp_path, numbers)


def test_sockets_are_memory_nodes(tmp_path):
    numbers = machine(tmp_path, ["0", "1", "2", "3"], nodes=[0, 0, 1, 1], with_memory="0-1")
    assert [one.node for one in _native.processors(tmp_path, numbers)] == [0, 0, 1, 1]
    assert _native.memory_nodes(tmp_path) == [0, 1]
    assert describe_threads(tmp_path, numbers).endswith("weights lie on 2 nodes of memory in turn")


def test_memory_without_processors_is_not_ours(tmp_path):
    machine(tmp_path, ["0", "1"], nodes=[0, 1], with_memory="0-1,4-5")
    assert _native.memory_nodes(tmp_path) == [0, 1]


def test_quota_counts_cores(tmp_path):
    numbers = machine(tmp_path, ["0,2", "1,3", "0,2", "1,3"])
    for name, text in {
        "proc/self/mountinfo": V2,
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/cpu.max": "150000 100000",
    }.items():
        write(tmp_path / name, text)
    assert _native.usable_processors(tmp_path, numbers) == 1
    assert "not on 1 cores more, for the quota of CPU time" in describe_threads(tmp_path, numbers)


def test_system_without_topology_has_no_nodes(tmp_path):
    assert [(one.number, one.core, one.node, one.capacity) for one in _native.processors(tmp_path, [3, 5])] == [
        (3, 3, 0, 1024),
        (5, 5, 0, 1024),
    ]
    assert _native.memory_nodes(tmp_path) == []
    assert _native.computing_processors([]) == []


def policy(pages: np.ndarray) -> str:
    """The memory policy of the mapping that the array begins in, numa(7)."""
    lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    return max((int(begin, 16), words[0]) for begin, *words in lines if int(begin, 16) <= pages.ctypes.data)[1]


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel knows no nodes of memory (NUMA)")
def test_pages_are_asked_to_lie_on_nodes_in_turn(tmp_path):
    """On node 0 alone, which every machine has: the system takes the request."""
    own = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    assert policy(own) == "default"
    testing.interleave(own, [0])
    assert re.match("interleave.*:0$", policy(own))
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    with (tmp_path / "file").open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ), np.uint8)
    testing.interleave_file(mapped, [0])
    assert re.match("interleave.*:0$", policy(mapped))
    assert not mapped.any()
    # The thread's own policy is what it was before.
    after = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    assert policy(after) == "default"


def test_missing_memory_nodes_raise_no_error():
    pages = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    testing.interleave(pages, [60])
    testing.interleave(pages, [])
    assert not pages.any()


@pytest.mark.skipif(not has_large_pages(), reason="this system has no large pages (transparent_hugepage) to ask for")
@pytest.mark.parametrize(("mebibytes", "asked"), [(31, False), (36, True)])
def test_memory_that_is_new_each_time_is_asked_to_be_in_large_pages(mebibytes, asked):
    memory = np.frombuffer(mmap.mmap(-1, mebibytes << 20), np.uint8)
    testing.ask_for_large_pages(memory[5:])  # the C library's allocations do not begin on a page
    assert asks_for_large_pages(memory.ctypes.data + memory.nbytes // 2) is asked

# SPDX-License-Identifier: Apache-2.0
"""The process's share of a machine, by made-up control groups of both versions."""

import os
import subprocess
import sys

import pytest

from flownpu import _native

V2 = "30 23 0:26 {shown} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 30 0:29 {shown} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "34 30 0:30 {shown} /sys/fs/cgroup/memory rw shared:9 master:2 - cgroup cgroup rw,memory"
OTHER = "25 1 254:1 / / rw,relatime - ext4 /dev/vda1 rw"
ROOMY = 1000.0
"""More processors than any machine that runs the tests."""


def machine(root, mounts, groups, files):
    """A root with these lines of mountinfo and of cgroup, and files below /sys/fs/cgroup."""
    for name, text in {
        "proc/self/mountinfo": "\n".join([OTHER, *mounts]),
        "proc/self/cgroup": "\n".join(groups),
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "quota", "place"),
    [
        ({"a/b/cpu.max": "150000 100000"}, 1.5, "a/b/cpu.max"),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "25000 50000"}, 0.5, "a/cpu.max"),
        ({"a/b/cpu.max": "200000 100000", "a/cpu.max": "300000 100000"}, 2.0, "a/b/cpu.max"),
        ({"a/b/cpu.max": "max 100000"}, None, None),
        ({"a/c/cpu.max": "100000 100000"}, None, None),  # another group's
        ({}, None, None),
        ({"a/b/cpu.max": "much"}, None, None),
    ],
)
def test_quota_of_control_groups_2_is_read(tmp_path, files, quota, place):
    root = machine(tmp_path, [V2.format(shown="/")], ["0::/a/b"], files)
    expected = None if quota is None else (quota, str(root / "sys/fs/cgroup" / place))
    assert _native.processor_quota(root) == expected


@pytest.mark.parametrize(
    ("shown", "group"),
    [
        ("/", "/docker/1f"),
        ("/docker/1f", "/docker/1f"),  # the container's group is mounted as the whole tree
        ("/", "/"),  # the group is the whole tree
        ("/docker/1f", "/../../elsewhere"),  # moved out of the mounted tree
    ],
)
def test_quota_of_control_groups_1_is_read(tmp_path, shown, group):
    folder = "cpu,cpuacct/docker/1f" if (shown, group) == ("/", "/docker/1f") else "cpu,cpuacct"
    files = {f"{folder}/cpu.cfs_quota_us": "250000", f"{folder}/cpu.cfs_period_us": "100000"}
    groups = [f"5:cpuset:{group}", f"4:cpu,cpuacct:{group}", "0::/init.scope"]
    root = machine(tmp_path, [V1.format(shown=shown)], groups, files)
    assert _native.processor_quota(root) == (2.5, str(root / "sys/fs/cgroup" / folder / "cpu.cfs_quota_us"))


def test_control_groups_1_without_quota_have_no_limit(tmp_path):
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    assert _native.processor_quota(machine(tmp_path, [V1.format(shown="/")], ["4:cpu,cpuacct:/"], files)) is None


@pytest.mark.parametrize(("quota", "threads"), [("50000", 1), ("100000", 1), ("199999", 1)])
def test_threads_are_whole_processors_of_quota(tmp_path, quota, threads):
    root = machine(tmp_path, [V2.format(shown="/")], ["0::/"], {"cpu.max": f"{quota} 100000"})
    assert _native.usable_processors(root) == threads


def test_threads_are_no_more_than_affinity_allows(tmp_path):
    files = {"cpu.max": f"{int(ROOMY * 100000)} 100000"}
    root = machine(tmp_path, [V2.format(shown="/")], ["0::/"], files)
    cores = os.sched_getaffinity(0)
    assert _native.usable_processors(root) == len(cores)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert _native.usable_processors(root) == 1
    finally:
        os.sched_setaffinity(0, cores)


def test_system_without_control_groups_has_all_processors(tmp_path):
    assert _native.processor_quota(tmp_path) is None
    assert _native.memory_limit(tmp_path) is None
    assert _native.usable_processors(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("mounts", "groups", "files", "limit"),
    [
        ([V2.format(shown="/")], ["0::/a"], {"a/memory.max": "max", "memory.max": "1073741824"}, 2**30),
        ([V2.format(shown="/")], ["0::/a"], {"a/memory.max": "max"}, None),
        ([V1_MEMORY.format(shown="/")], ["9:memory:/a"], {"memory/a/memory.limit_in_bytes": "536870912"}, 2**29),
        ([V1_MEMORY.format(shown="/")], ["9:memory:/a"], {"memory/a/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ],
)
def test_memory_limit_is_read(tmp_path, mounts, groups, files, limit):
    found = _native.memory_limit(machine(tmp_path, mounts, groups, files))
    assert (found and found[0]) == limit


# A device's pool has a thread for each processor but the caller's.
STARTED = """
import os
import subprocess
import sys
from flownpu._native import make_device
before = len(os.listdir("/proc/self/task"))
device = make_device("cpu", {})
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_thread_pool_keeps_to_quota(tmp_path):
    """In a separate mount namespace the process finds a made-up quota in the usual place."""
    file = tmp_path / "group/cpu.max"
    mount = f"30 23 0:26 / {file.parent} rw - cgroup2 cgroup2 rw"
    for name, text in {"mountinfo": mount, "cgroup": "0::/", "group/cpu.max": "100000 100000"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    # Exit code 77 distinguishes a failed mount from a failed program.
    shown = " && ".join(f'mount --bind "{tmp_path}/{name}" /proc/$$/{name}' for name in ("mountinfo", "cgroup"))
    script = f'({shown}) || exit 77; exec "$0" -c "$1"'
    command = ["unshare", "--mount", "sh", "-c", script, sys.executable, STARTED]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare here, to show a process a quota that it has not")
    if done.returncode in (1, 77) and "Traceback" not in done.stderr:
        pytest.skip(f"this user may not mount, to show a process a quota that it has not: {done.stderr.strip()}")
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    free = subprocess.run([sys.executable, "-c", STARTED], check=True, capture_output=True, text=True)
    assert int(free.stdout) == _native.usable_processors() - 1

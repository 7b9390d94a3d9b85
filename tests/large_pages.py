# SPDX-License-Identifier: Apache-2.0
"""Large pages of this process, as Linux reports them in /proc/self/smaps (see proc(5))."""

from pathlib import Path


def has_large_pages() -> bool:
    """Whether processes of this system can get large pages."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return enabled.exists() and "[never]" not in enabled.read_text()


def asks_for_large_pages(address: int) -> bool:
    """Whether large pages were asked for (MADV_HUGEPAGE) in the mapping at this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if name == "VmFlags:" and inside:
            return "hg" in words
        if not name.endswith(":"):
            begin, end = (int(number, 16) for number in name.split("-"))
            inside = begin <= address < end
    raise AssertionError(f"expected a mapping that has {address:#x}")

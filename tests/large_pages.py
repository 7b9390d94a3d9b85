# SPDX-License-Identifier: Apache-2.0
"""What Linux says of the large pages of a process: /proc/self/smaps, proc(5)."""

from pathlib import Path

__all__ = ["asks_for_large_pages", "has_large_pages"]


def has_large_pages() -> bool:
    """Whether a process may ask for them."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return enabled.exists() and "[never]" not in enabled.read_text()


def asks_for_large_pages(address: int) -> bool:
    """Whether the mapping that has this address was advised to be in large pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if name == "VmFlags:" and inside:
            return "hg" in words
        if not name.endswith(":"):
            begin, end = (int(number, 16) for number in name.split("-"))
            inside = begin <= address < end
    raise AssertionError(f"expected a mapping that has {address:#x}")

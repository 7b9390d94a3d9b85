# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation, and the blocks in them that are marked `<!-- tested -->`."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "aie" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"<!-- tested -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code that readers are told to run."""

    page: str
    language: str
    text: str


def blocks() -> list[Block]:
    return [
        Block(str(page.relative_to(ROOT)), language, text)
        for page in PAGES
        for language, text in BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the rows of the first table whose first heading is `heading`."""
    lines = iter((ROOT / page).read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            break
    else:
        raise AssertionError(f"{page} has no table of {heading}")
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows

# SPDX-License-Identifier: Apache-2.0
"""Says which units of C++ can be read as one: the header files that they share are then read once.

Most of the time to compile a unit of a hundred lines goes into what it includes. Units that define the same name cannot
be one. Each line of the output is a group.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path

# What a unit defines at the margin: units that share such a name are not read as one.
DEFINED = re.compile(
    r"^(?!using namespace|namespace|return|template)[a-zA-Z](?:[\w<>,*& ]|::)*?(?<![:\w])(\w+)"
    r"(?=;| = |\[|\(| ?\{| final| :)",
    re.MULTILINE,
)
NAMESPACE = re.compile(r"^namespace ([\w:]+) \{", re.MULTILINE)
ENUMERATORS = re.compile(r"^enum (?!class).*", re.MULTILINE)
# Units that are read alone: macros would go on into others.
ALONE = re.compile(r"^#define ", re.MULTILINE)
# What a unit takes over into its namespace. Units that have the word are not read with it: they could mean something
# else by it, or use it, which would hide that it is needless. (Within a function or a class a `using` is indented.)
TAKEN_OVER = re.compile(r"^using (?:\w+::)+(\w+);", re.MULTILINE)
# Units that have all names of a namespace: two of them share no name that they define, and none takes over more.
DIRECTIVE = re.compile(r"^using namespace ", re.MULTILINE)
WORD = re.compile(r"[A-Za-z_]\w*")


def main() -> None:
    """Prints the groups, a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=16, help="units in a group [16]")
    parser.add_argument("units", nargs="*", type=Path)
    arguments = parser.parse_args()
    for group in groups(arguments.units, arguments.most):
        print(*group)


@dataclass
class Group:
    """Units that are read as one; the names that they define and take over, and all of their words."""

    units: list[Path] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    taken_over: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    closed: bool = False

    def bears(self, other: Group) -> bool:
        """Whether the units of both can be one."""
        return not (
            self.closed
            or other.closed
            or self.defined & other.defined
            or self.taken_over & other.words
            or self.words & other.taken_over
        )

    def add(self, other: Group) -> None:
        """Takes the units of another group, too."""
        self.units += other.units
        self.defined |= other.defined
        self.taken_over |= other.taken_over
        self.words |= other.words


def groups(units: list[Path], most: int) -> list[list[Path]]:
    """Units that have no name in common, at most so many together."""
    found: list[Group] = []
    for unit in units:
        one = alone(unit)
        group = next((group for group in found if len(group.units) < most and group.bears(one)), None)
        if group is None:
            found.append(one)
        else:
            group.add(one)
    return [group.units for group in found]


def alone(unit: Path) -> Group:
    """A group of one unit."""
    text = unit.read_text(encoding="utf-8")
    spaces = NAMESPACE.findall(text)
    if not spaces or DIRECTIVE.search(text):
        spaces.append("")
    names = {*DEFINED.findall(text), *re.findall(r"\bk[A-Z]\w*", " ".join(ENUMERATORS.findall(text)))}
    defined = {f"{space}::{name}" for space in spaces for name in names}
    words = set(WORD.findall(text))
    taken_over = set(TAKEN_OVER.findall(text))
    closed = bool(ALONE.search(text) or (taken_over and DIRECTIVE.search(text)))
    return Group([unit], defined, taken_over, words, closed)


if __name__ == "__main__":
    main()

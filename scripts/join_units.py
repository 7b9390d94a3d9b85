# SPDX-License-Identifier: Apache-2.0
"""Groups translation units of C++ that can be compiled as one, so that the headers that they share are read once.

Most of the time to compile a unit of a hundred lines goes into what it includes. Units that define the same name cannot
be joined. Each line of the output is a group.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path

# A name that a unit defines at the beginning of a line: units that share such a name are not joined.
DEFINED = re.compile(
    r"^(?!using namespace|namespace|return|template)[a-zA-Z](?:[\w<>,*& ]|::)*?(?<![:\w])(\w+)"
    r"(?=;| = |\[|\(| ?\{| final| :)",
    re.MULTILINE,
)
NAMESPACE = re.compile(r"^namespace ([\w:]+) \{", re.MULTILINE)
ENUMERATORS = re.compile(r"^enum (?!class).*", re.MULTILINE)
# A macro definition: units that have any are compiled alone, for macros would affect the units after them.
ALONE = re.compile(r"^#define ", re.MULTILINE)
# A name that a unit brings into its namespace with a using-declaration. Units that have the word are not joined with
# it: they could mean something else by it, or use it, which would hide that the declaration is not needed. (Within a
# function or a class a `using` is indented.)
TAKEN_OVER = re.compile(r"^using (?:\w+::)+(\w+);", re.MULTILINE)
# A using-directive, with which a unit has all names of a namespace. What such a unit defines is compared as if it were
# in the global namespace, too; one that also has using-declarations is compiled alone.
DIRECTIVE = re.compile(r"^using namespace ", re.MULTILINE)
WORD = re.compile(r"[A-Za-z_]\w*")


def main() -> None:
    """Prints the groups, one per line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=16, help="units in a group [16]")
    parser.add_argument("units", nargs="*", type=Path)
    arguments = parser.parse_args()
    for group in groups(arguments.units, arguments.most):
        print(*group)


@dataclass
class Group:
    """Units that are joined; the names that they define and bring in by `using`, and all words in them."""

    units: list[Path] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    taken_over: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    closed: bool = False

    def bears(self, other: Group) -> bool:
        """Whether the units of both groups can be joined."""
        return not (
            self.closed
            or other.closed
            or self.defined & other.defined
            or self.taken_over & other.words
            or self.words & other.taken_over
        )

    def add(self, other: Group) -> None:
        """Adds the units of another group."""
        self.units += other.units
        self.defined |= other.defined
        self.taken_over |= other.taken_over
        self.words |= other.words


def groups(units: list[Path], most: int) -> list[list[Path]]:
    """Groups of at most `most` units that can be joined."""
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

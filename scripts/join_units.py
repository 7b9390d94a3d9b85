# SPDX-License-Identifier: Apache-2.0
"""Says which units of C++ can be read as one: the header files that they share are then read once.

Most of the time to compile a unit of a hundred lines goes into what it includes. Units that define the same name cannot
be one. Each line of the output is a group.
"""

import argparse
import re
from pathlib import Path

# What a unit defines at the margin: units that share such a name are not read as one.
DEFINED = re.compile(
    r"^(?!using namespace|namespace|return|template)[a-zA-Z](?:[\w<>,*& ]|::)*?(?<![:\w])(\w+)"
    r"(?=;| = |\[|\(| ?\{| final| :)",
    re.MULTILINE,
)
ENUMERATORS = re.compile(r"^enum (?!class).*", re.MULTILINE)
# Units that are read alone: macros would go on into others, and what others name would hide that a `using` is needless.
ALONE = re.compile(r"^#define |^ *using [\w:]+;", re.MULTILINE)


def main() -> None:
    """Prints the groups, a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=16, help="units in a group [16]")
    parser.add_argument("units", nargs="*", type=Path)
    arguments = parser.parse_args()
    for group in groups(arguments.units, arguments.most):
        print(*group)


def groups(units: list[Path], most: int) -> list[list[Path]]:
    """Units that have no name in common, at most so many together."""
    found: list[tuple[list[Path], set[str]]] = []
    for unit in units:
        text = unit.read_text(encoding="utf-8")
        if ALONE.search(text):
            found.append(([unit], set()))
            continue
        names = {*DEFINED.findall(text), *re.findall(r"\bk[A-Z]\w*", " ".join(ENUMERATORS.findall(text)))}
        group = next((one for one in found if one[1] and len(one[0]) < most and not one[1] & names), None)
        if group is None:
            found.append(group := ([], set()))
        group[0].append(unit)
        group[1].update(names)
    return [group[0] for group in found]


if __name__ == "__main__":
    main()

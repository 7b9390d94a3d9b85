# SPDX-License-Identifier: Apache-2.0
"""Units of C++ that are joined and compiled as one."""

from pathlib import Path

import pytest

from scripts import join_units


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    texts = {
        "sum.cc": "namespace {\nconstexpr int kLanes = 8;\nint sum_of(int a) { return a; }\n}\n",
        "product.cc": "namespace {\nint product_of(int a) { return a; }\n}\n",
        "lanes.cc": "namespace {\nconstexpr int kLanes = 4;\n}\n",
        "macro.cc": "#define SIZE 8\nint size() { return SIZE; }\n",
        "naming.cc": "using std::size_t;\nint bytes() { return 1; }\n",
        "named.cc": "std::size_t count() { return 1; }\n",
        "elsewhere.cc": "namespace other {\nnamespace {\nconstexpr int kLanes = 4;\n}\n}\n",
        "heir.cc": "struct Heir : Base {\n  using Base::Base;\n};\nBase base();\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return [tmp_path / name for name in texts]


def test_units_of_one_name_and_units_of_macros_are_apart(units: list[Path]) -> None:
    names = [[unit.name for unit in group] for group in join_units.groups(units, most=16)]
    assert names == [
        ["sum.cc", "product.cc", "naming.cc", "elsewhere.cc", "heir.cc"],
        ["lanes.cc", "named.cc"],  # lanes.cc defines a name of sum.cc, named.cc has the word in naming.cc's using
        ["macro.cc"],
    ]


def test_group_has_at_most_given_units(units: list[Path]) -> None:
    assert all(len(group) == 1 for group in join_units.groups(units, most=1))

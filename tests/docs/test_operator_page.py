# SPDX-License-Identifier: Apache-2.0
"""The table of docs/operators.md is what the device takes."""

from flownpu import _native
from scripts import write_operator_page


def test_operator_table_is_up_to_date():
    text = write_operator_page.PAGE.read_text(encoding="utf-8")
    assert text == write_operator_page.page(text), "run: python -m scripts.write_operator_page"


def test_operators_are_all_on_page():
    text = write_operator_page.PAGE.read_text(encoding="utf-8")
    assert text.count("\n| ") > len(_native.contracts())

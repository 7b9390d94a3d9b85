# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/operators.md list the operators that the device takes."""

import re

from flownpu import _native
from scripts import write_operator_page


def test_operator_table_is_up_to_date():
    text = write_operator_page.PAGE.read_text(encoding="utf-8")
    assert text == write_operator_page.page(text), "run: python -m scripts.write_operator_page"


def test_operators_are_all_on_page():
    text = write_operator_page.PAGE.read_text(encoding="utf-8")
    for contract in _native.contracts():
        name = contract.op_type
        listed = rf"^\|[^|]*[ *]{name} [\d-]+[,\s*]"
        assert f"`{name}`" in text if contract.domain == "ai.flownpu" else re.search(listed, text, re.M)

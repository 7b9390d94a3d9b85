# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/model.md are what the cost model says."""

from scripts import write_model_page


def test_the_tables_are_up_to_date():
    text = write_model_page.PAGE.read_text(encoding="utf-8")
    assert text == write_model_page.page(text), "run: python scripts/write_model_page.py"


def test_every_table_of_the_script_is_on_the_page():
    text = write_model_page.PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- begin {name} -->" in text for name in write_model_page.SECTIONS)

# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/model.md are what the cost model says."""

import re

import pytest

from scripts import write_model_page

TEXT = write_model_page.PAGE.read_text(encoding="utf-8")


def section(name: str) -> str:
    found = re.search(rf"<!-- begin {name} -->\n(.*?)\n<!-- end {name} -->", TEXT, re.DOTALL)
    assert found, name
    return found[1]


@pytest.mark.parametrize("name", ["parameters", "validation"])
def test_model_page_tables_are_up_to_date(name):
    assert section(name) == write_model_page.SECTIONS[name](), "run: python scripts/write_model_page.py"


@pytest.mark.parametrize("model", ["gemma3-1b"])
def test_model_page_predictions_are_up_to_date(model):
    """Compares the rows of one model: those of the others take a minute, and change with them."""
    for name, rows in (("decoding", write_model_page.decoding_rows), ("prompts", write_model_page.prompt_rows)):
        assert "\n".join(rows(model)) in section(name), "run: python scripts/write_model_page.py"


def test_script_tables_are_all_on_page():
    assert all(f"<!-- begin {name} -->" in TEXT for name in write_model_page.SECTIONS)

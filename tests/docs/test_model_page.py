# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/model.md have the numbers that the cost models give."""

import re

import pytest

from scripts import write_model_page

TEXT = write_model_page.PAGE.read_text(encoding="utf-8")
RUN = "run: python -m scripts.write_model_page"
# The rows of one model are compared below; the other models' rows take minutes, and change together with them.
SLOW = {"decoding", "pairs", "prompts", "sensitivity", "states"}


def section(name: str) -> str:
    found = re.search(rf"<!-- begin {name} -->\n(.*?)\n<!-- end {name} -->", TEXT, re.DOTALL)
    assert found, name
    return found[1]


@pytest.mark.parametrize("name", write_model_page.SECTIONS.keys() - SLOW)
def test_model_page_tables_are_up_to_date(name):
    assert section(name) == write_model_page.SECTIONS[name](), RUN


@pytest.mark.parametrize(
    ("name", "model", "rows"),
    [
        ("decoding", "gemma3-1b", write_model_page.decoding_rows),
        ("prompts", "gemma3-1b", write_model_page.prompt_rows),
        ("pairs", "gemma3-1b", write_model_page.pair_rows),
        ("states", "lfm2-1.2b", write_model_page.state_rows),
    ],
)
def test_model_page_predictions_are_up_to_date(name, model, rows):
    for row in rows(model):
        assert f"| {' | '.join(row)} |" in section(name), RUN


def test_script_tables_are_all_on_page():
    assert all(section(name) for name in SLOW)

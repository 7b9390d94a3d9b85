# SPDX-License-Identifier: Apache-2.0
"""The matrix of docs/families.md is what is tested, and what the provider says of the array."""

from flownpu.convert.families import FAMILIES
from scripts import write_families_page


def test_the_matrix_is_up_to_date():
    text = write_families_page.PAGE.read_text(encoding="utf-8")
    assert text == write_families_page.page(text), "run: python -m scripts.write_families_page"


def test_every_family_is_there():
    text = write_families_page.PAGE.read_text(encoding="utf-8")
    assert [name for name in FAMILIES if f"`{name}`" not in text] == []

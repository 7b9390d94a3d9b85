# SPDX-License-Identifier: Apache-2.0
"""docs/gpu-model.md has the numbers that the model gives."""

import pytest

from scripts import write_gpu_model_page
from scripts.write_model_page import fill

TEXT = write_gpu_model_page.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", write_gpu_model_page.SECTIONS)
def test_gpu_model_table_is_up_to_date(name):
    assert f"<!-- begin {name} -->" in TEXT
    sections = dict.fromkeys(write_gpu_model_page.SECTIONS, lambda: "") | {name: write_gpu_model_page.SECTIONS[name]}
    filled = fill(TEXT, sections)
    section = TEXT.split(f"<!-- begin {name} -->")[1].split(f"<!-- end {name} -->")[0]
    assert section in filled, "run: python -m scripts.write_gpu_model_page"

# SPDX-License-Identifier: Apache-2.0
"""The recorded matrix of families is complete, within bounds and on the page, and cells that run again agree with it.

All cells take some 20 minutes, and the exporters; `python -m scripts.write_families_page run` runs and records them.
"""

from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType

from flownpu.convert import convert
from flownpu.convert.families import FAMILIES, read_decoder
from flownpu.convert.make_model import RandomWeights
from flownpu.convert.model_writer import ModelOptions, write_model
from flownpu.errors import FlowNPUError
from flownpu.npu.layers import read_decoder as read_shape
from scripts import write_families_page
from tests.convert.conftest import ALL_CONFIGS
from tests.convert.sources.gguf_files import write_gguf
from tests.families.cells import CALLS, DEVICES, Cell, array_refusal, recorded_cells, run_form, run_on
from tests.families.checkpoints import configuration, make_checkpoint
from tests.families.sources import RECIPE_FORMS, RECIPE_SOURCES, SOURCES
from tests.rewrites import optimum_export

CELLS, OF_RECIPES = recorded_cells(), recorded_cells("recipes")
# Cells that run again. These forms have most of the traits in which families differ, so that few are enough; the array
# takes all of them, qwen2 once it is converted. tests/convert/test_other_families.py runs all checkpoints on the CPU.
AGAIN = {
    "granite": ("checkpoint", "GGUF"),
    "llama with biases": ("checkpoint",),
    "llama with yarn": ("checkpoint",),
    "olmo2": ("checkpoint",),
    "phi3": ("checkpoint",),
    "phi3 as phi4-mini": ("checkpoint",),
    "qwen2": ("GenAI, as it is", "GenAI, converted"),
}


def test_forms_have_all_cells() -> None:
    assert sorted(CELLS) == sorted(ALL_CONFIGS), "run: python -m scripts.write_families_page run FORM"
    for form, rows in CELLS.items():
        assert list(rows) == list(SOURCES), form
        assert all(list(row) == list(DEVICES) for row in rows.values()), form
    # Gemma 3, Gemma 4 and Qwen 3.5 with pictures have the decoders of those without.
    with_pictures = {"gemma3", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe"}
    drafters = {name for name, family in FAMILIES.items() if family.drafts_for}  # tests/generate/test_drafter.py
    assert set(FAMILIES) - with_pictures - drafters == {ALL_CONFIGS[form]().model_type for form in CELLS}


def test_recipes_have_all_cells() -> None:
    assert sorted(OF_RECIPES) == sorted(RECIPE_FORMS), "run: python -m scripts.write_families_page run FORM"
    for form, rows in OF_RECIPES.items():
        assert list(rows) == list(RECIPE_SOURCES), form


@pytest.mark.parametrize("form", CELLS)
def test_recorded_errors_are_within_telling_bounds(form: str) -> None:
    for source, row in (CELLS[form] | OF_RECIPES.get(form, {})).items():
        for device, cell in row.items():
            if not cell.refused:
                assert 0 < cell.error < cell.bound < cell.spread / 4, (source, device)


def test_families_page_is_up_to_date() -> None:
    text = write_families_page.PAGE.read_text(encoding="utf-8")
    assert text == write_families_page.page(text), "run: python -m scripts.write_families_page"


@pytest.mark.parametrize("form", sorted(ALL_CONFIGS))
def test_array_refusals_are_as_recorded(form: str, tmp_path: Path) -> None:
    """The reason why the array does not take a form, for all forms, because nothing has to run."""
    decoder = read_decoder(configuration(form).to_dict())
    write_model(tmp_path, decoder, RandomWeights(0), ModelOptions())
    refused = ""
    try:
        read_shape(tmp_path)
    except FlowNPUError as error:
        refused = array_refusal(error)
    assert refused == CELLS[form]["checkpoint"]["emulate"].refused


@pytest.mark.parametrize("form", AGAIN)
def test_matrix_cells_equal_fresh_runs(form: str, tmp_path: Path, ep_devices: list[Any]) -> None:
    names = DEVICES[1:] if AGAIN[form] == ("checkpoint",) else DEVICES
    for source, row in run_form(form, tmp_path, ep_devices, AGAIN[form], names).items():
        for device, cell in row.items():
            check(cell, CELLS[form][source][device])


def test_file_in_mxfp4_equals_transformers_on_array(tmp_path: Path, ep_devices: list[Any]) -> None:
    """All products have tables, which the array reads as planes of 8 bits, without rounding a weight."""
    tiny = make_checkpoint("llama", tmp_path / "checkpoint")
    write_gguf(tmp_path / "model.gguf", tiny.reference, lambda _name: GGMLQuantizationType.MXFP4)
    convert(tmp_path / "model.gguf", tmp_path / "model")
    cell = run_on(tiny, tmp_path / "model", "emulate", ep_devices, tmp_path, CALLS)
    assert not cell.refused
    assert cell.error <= cell.bound < cell.spread / 4


def test_optimum_phi3_equals_transformers(tmp_path: Path, ep_devices: list[Any]) -> None:
    """Fused projections, RoPE of a part of each head, and a mask with a window."""
    try:
        optimum_export.environment()
    except FlowNPUError as error:
        pytest.skip(f"optimum's environment cannot be made: {error}")
    (row,) = run_form("phi3", tmp_path, ep_devices, ["optimum"]).values()
    for device, cell in row.items():
        check(cell, CELLS["phi3"]["optimum"][device])
        assert not cell.refused


def check(cell: Cell, recorded: Cell) -> None:
    assert cell.refused == recorded.refused
    # Another machine's kernels round in other ways: errors may differ, within the same bound.
    assert cell.error <= cell.bound
    assert cell.bound == pytest.approx(recorded.bound, rel=0.1)

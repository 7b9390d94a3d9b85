# SPDX-License-Identifier: Apache-2.0
"""Writes the matrix and the recipes in docs/use/families.md; a test checks that the page is up to date.

    python -m scripts.write_families_page              # from the recorded results
    python -m scripts.write_families_page run          # runs all cells anew, some 25 minutes, and records them
    python -m scripts.write_families_page run qwen3 "llama with yarn"

The cells are those of tests/families/; each compares with transformers on the same weights, or a recipe with ONNX
Runtime on the same export.
"""

import re
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import onnxruntime

import flownpu
from flownpu.convert.families import FAMILIES
from tests.convert.conftest import ALL_CONFIGS
from tests.families.cells import DEVICES, Cell, read_record, recorded_cells, run_form, write_record
from tests.families.sources import RECIPE_FORMS, RECIPE_SOURCES, RECIPES, SOURCES
from tests.rewrites.optimum_export import REQUIREMENTS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "use" / "families.md"
_NAMED = re.compile(r"an? \w+ (model,)|(model type) `\w+`")  # a family's name in an error of optimum
_SECTION = re.compile(r"(<!-- begin (matrix|recipes) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def page(text: str) -> str:
    """The page's text with the recorded matrix and recipes."""
    tables = {"matrix": _matrix, "recipes": _recipes}
    return _SECTION.sub(lambda found: f"{found[1]}{tables[found[2]]()}\n{found[3]}", text)


def _matrix() -> str:
    cells = recorded_cells()
    notes: dict[str, str] = {}
    rows = [(*_names(form), *(_text(cells[form][source], notes) for source in SOURCES)) for form in sorted(cells)]
    table = _table(("family", "`model_type`", *SOURCES), rows)
    versions = ", ".join(f"{name} {number}" for name, number in read_record()["versions"].items())
    return "\n\n".join([table, f"The reasons ({versions}):", *_listed(notes)])


def _recipes() -> str:
    """A row a recipe: as it is; converted."""
    cells = recorded_cells("recipes")
    notes: dict[str, str] = {}
    rows = [
        (
            recipe,
            *(
                "; ".join(_text(cells[form][f"{recipe}, {how}"], notes) for how in ("as it is", "converted"))
                for form in RECIPE_FORMS
            ),
        )
        for recipe in RECIPES
    ]
    heads = [_names(form)[0] for form in RECIPE_FORMS]
    return "\n\n".join([_table(("recipe", *heads), rows), *_listed(notes)])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def _listed(notes: dict[str, str]) -> list[str]:
    text = "\n".join(f"- **{letters}**: {sentence}" for sentence, letters in notes.items())
    return [text] if text else []


def _names(form: str) -> tuple[str, str]:
    model_type = ALL_CONFIGS[form]().model_type
    detail = form.removeprefix(model_type).strip()
    return f"{FAMILIES[model_type].title} {detail}".strip(), f"`{model_type}`"


def _text(cells: dict[str, Cell], notes: dict[str, str]) -> str:
    """The outcome on each device, once if they are equal."""
    return ", ".join(dict.fromkeys(_outcome(cell, notes) for cell in cells.values()))


def _outcome(cell: Cell, notes: dict[str, str]) -> str:
    """The error in percent of the logits' spread, or the letters of the reason why there is none."""
    if cell.refused:
        first, *more = cell.refused.split(". ")
        reason = f"{first})" if more else first  # of a long error, which is in parentheses, the first sentence
        reason = _NAMED.sub(r"this \1\2", reason)  # so that families with the same reason share its letter
        return f"no ({notes.setdefault(reason, _letters(len(notes)))})"
    return f"{100 * cell.error / cell.spread:.2g}{f' within {cell.within}' if cell.within else ''}"


def _letters(number: int) -> str:
    """A .. z, aa, ab .."""
    tens, ones = divmod(number, 26)
    return (chr(ord("a") + tens - 1) if tens else "") + chr(ord("a") + ones)


def run(forms: list[str]) -> None:
    """Runs the cells of these forms and records them; prints every outcome, and marks errors beyond their bounds."""
    flownpu.register()
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == "FlowNPUExecutionProvider"]
    packages = dict(line.split("==") for line in REQUIREMENTS)
    versions = {"transformers": version("transformers"), "GenAI": version("onnxruntime-genai"), "gguf": version("gguf")}
    versions["optimum-onnx"] = f"{packages['optimum-onnx']} with transformers {packages['transformers']}"
    tables = {table: recorded_cells(table) for table in ("cells", "recipes")}
    for form in forms:
        parts: dict[str, tuple[Sequence[str], Sequence[str]]] = {"cells": (tuple(SOURCES), DEVICES)}
        if form in RECIPE_FORMS:
            parts["recipes"] = (tuple(RECIPE_SOURCES), DEVICES[:1])
        for table, (sources, names) in parts.items():
            with tempfile.TemporaryDirectory() as folder:
                tables[table][form] = run_form(form, Path(folder), devices, sources, names)
            write_record(versions, tables)
            for source, row in tables[table][form].items():
                for device, cell in row.items():
                    outcome = cell.refused or f"{cell.error:.3g}, at most {cell.bound:.3g} of {cell.spread:.3g}"
                    print(f"{'WRONG ' * (cell.error > cell.bound)}{form}, {source}, {device}: {outcome}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2:] or sorted(ALL_CONFIGS))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

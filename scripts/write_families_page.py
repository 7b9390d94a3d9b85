# SPDX-License-Identifier: Apache-2.0
"""Writes the matrix in docs/use/families.md; a test checks that the page is up to date.

    python -m scripts.write_families_page              # from the recorded results
    python -m scripts.write_families_page run          # runs all cells anew, some 20 minutes, and records them
    python -m scripts.write_families_page run qwen3 "llama with yarn"

The cells are those of tests/families/; each compares with transformers on the same weights.
"""

import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import onnxruntime

import flownpu
from flownpu.convert.families import FAMILIES
from tests.convert.conftest import ALL_CONFIGS
from tests.families.cells import DEVICES, Cell, read_record, recorded_cells, run_form, write_record
from tests.families.sources import SOURCES
from tests.rewrites.optimum_export import REQUIREMENTS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "use" / "families.md"
_SECTION = re.compile(r"(<!-- begin matrix -->\n).*?(<!-- end matrix -->)", re.DOTALL)


def page(text: str) -> str:
    """The page's text with the recorded matrix."""
    return _SECTION.sub(lambda found: f"{found[1]}{_matrix()}\n{found[2]}", text)


def _matrix() -> str:
    cells = recorded_cells()
    notes: dict[str, str] = {}
    head = ("family", "`model_type`", *SOURCES)
    rows = [(*_names(form), *(_text(cells[form][source], notes) for source in SOURCES)) for form in sorted(cells)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))
    versions = ", ".join(f"{name} {number}" for name, number in read_record()["versions"].items())
    listed = "\n".join(f"- **{letters}**: {sentence}" for sentence, letters in notes.items())
    return "\n\n".join([table, f"The reasons ({versions}):", listed])


def _names(form: str) -> tuple[str, str]:
    model_type = ALL_CONFIGS[form]().model_type
    detail = form.removeprefix(model_type).strip()
    return f"{FAMILIES[model_type].title} {detail}".strip(), f"`{model_type}`"


def _text(cells: dict[str, Cell], notes: dict[str, str]) -> str:
    """The outcome on each of DEVICES, once if they are equal."""
    return ", ".join(dict.fromkeys(_outcome(cells[device], notes) for device in DEVICES))


def _outcome(cell: Cell, notes: dict[str, str]) -> str:
    """The error in percent of the logits' spread, or the letters of the reason why there is none."""
    if cell.refused:
        first, *more = cell.refused.split(". ")
        reason = f"{first})" if more else first  # of a long error, which is in parentheses, the first sentence
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
    cells = recorded_cells()
    for form in forms:
        with tempfile.TemporaryDirectory() as folder:
            cells[form] = run_form(form, Path(folder), devices)
        write_record(versions, cells)
        for source, row in cells[form].items():
            for device, cell in row.items():
                outcome = cell.refused or f"{cell.error:.3g}, at most {cell.bound:.3g} of {cell.spread:.3g}"
                print(f"{'WRONG ' * (cell.error > cell.bound)}{form}, {source}, {device}: {outcome}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2:] or sorted(ALL_CONFIGS))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

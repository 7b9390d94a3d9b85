# SPDX-License-Identifier: Apache-2.0
"""Writes the matrix in docs/families.md; a test sees to it that the page is up to date.

A cell says "yes" where a test compares that family out of that source: the lists that those tests go through are read
here. What the array takes is asked of the execution provider, of a small model in each form.
"""

import re
import tempfile
from pathlib import Path
from typing import Any

from flownpu.convert.families import FAMILIES, read_decoder
from flownpu.convert.make_model import RandomWeights
from flownpu.convert.model_writer import ModelOptions, write_model
from flownpu.errors import FlowNPUError
from flownpu.npu.decoder import read_decoder as read_shape
from tests.convert.conftest import ALL_CONFIGS
from tests.convert.sources.gguf_files import ARCHITECTURES
from tests.convert.sources.test_gguf import OTHER_FORMS
from tests.npu.models import SIZES
from tests.rewrites.genai_export import OTHER_CONFIGS
from tests.rewrites.sources import MODEL_TYPES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
_SECTION = re.compile(r"(<!-- begin matrix -->\n).*?(<!-- end matrix -->)", re.DOTALL)
# What was tried with exporters by hand (GenAI 0.18.0, optimum-onnx 0.1.0) and is no test; None: not tried.
_EXPORTERS: dict[str, tuple[str | None, str | None]] = {
    "mistral": ("up to the window as it is; converted, also beyond it", None),
    "olmo2": ("no: its builder does not know the family", None),
    "phi3 with longrope": (None, "no: `IsNaN`, which no device runs"),
    "smollm3": ("no: its builder fails (`KeyError: 'position_ids'`)", None),
}
# What the column of GGUF files says where there is no test of one.
_GGUF = {"mistral": "as Llama: such files do not have its window", "llama with yarn": "no: its scaling is refused"}


def page(text: str) -> str:
    """The page's text with its matrix as it is now."""
    return _SECTION.sub(lambda found: f"{found[1]}{_table()}\n{found[2]}", text)


def _table() -> str:
    head = ("family", "`model_type`", "checkpoint", "GGUF", "GenAI, as it is and converted", "optimum", "NPU's array")
    rows = [_row(form) for form in sorted(ALL_CONFIGS)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))


def _row(form: str) -> tuple[str, ...]:
    config = ALL_CONFIGS[form]()
    family = FAMILIES[config.model_type]
    detail = form.removeprefix(config.model_type).strip()
    genai, optimum = _EXPORTERS.get(form, (None, None))
    in_exports = config.model_type in MODEL_TYPES.values() and not detail
    from_gguf = form in ARCHITECTURES or form in OTHER_FORMS
    return (
        f"{family.title} {detail}".strip(),
        f"`{config.model_type}`",
        "yes",
        "yes" if from_gguf else _GGUF.get(form, "not tried"),
        genai or ("yes" if in_exports or form in OTHER_CONFIGS else "not tried"),
        optimum or ("yes" if in_exports else "not tried"),
        _array(config),
    )


def _array(config: Any) -> str:
    """Whether the array takes the decoder, or why not."""
    rope = dict(config.rope_parameters)
    config.update(SIZES)
    for key in ("short_factor", "long_factor"):  # as many as the larger head has
        if key in rope:
            rope[key] = (rope[key] * 2)[: int(SIZES["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2]
    config.update({"rope_parameters": rope})
    decoder = read_decoder(config.to_dict())
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), decoder, RandomWeights(0), ModelOptions())
        try:
            read_shape(Path(folder))
        except FlowNPUError as error:
            reason = str(error).partition("': ")[2].replace("the QKV projection ", "").replace("|", ", ")
            return f"no: {reason}"
    return "yes"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

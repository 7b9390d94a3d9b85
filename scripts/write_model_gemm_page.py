# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/model-gemm.md from the cost model itself; a test checks that the page is up to date."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from flownpu.aie.cost.gemm_fit import left_out, rows
from flownpu.aie.cost.gemm_kernel import PRECISIONS, macs_per_cycle, peak_macs, single_core_kernel
from flownpu.aie.cost.gemm_model import predict_gemm
from flownpu.aie.cost.gemm_parameters import GEMM
from flownpu.aie.cost.gemm_system import GemmSearch
from flownpu.aie.cost.gemm_tuner import rank_for_shapes
from flownpu.aie.cost.parameters import Parameter
from flownpu.aie.cost.published_gemm import CORES, GEMMS, OTHERS
from flownpu.aie.designs.gemm import Gemm
from flownpu.npu.models import MODELS, projections

PAGE = Path(__file__).resolve().parent.parent / "docs" / "model-gemm.md"
_SECTION = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
_TOKENS = 512  # tokens of a chunk
_GATED = {"geglu", "swiglu"}
_WEIGHTS = (("npu1", "bf16"), ("npu2", "bf16"), ("npu2", "bfp16"))
# The tiles with which the tuner's are compared: 64 x 64, as deep as L1 permits.
_BEFORE = {"none": {"m": 64, "k": 64, "e_y": 1, "e_x": 1}, "swiglu": {"m": 64, "k": 32, "e_y": 1, "e_x": 1}}


def page(text: str) -> str:
    """The page's text with its tables rewritten."""
    return _SECTION.sub(lambda found: f"{found[1]}{SECTIONS[found[2]]()}\n{found[3]}", text)


def _table(heading: str, lines: Iterable[Iterable[object]]) -> str:
    columns = heading.split(" | ")
    rule = "|".join(["---"] * len(columns))
    return "\n".join([f"| {heading} |", f"|{rule}|", *(f"| {' | '.join(map(str, line))} |" for line in lines)])


def parameters() -> str:
    """The table of all parameters, for both generations of NPUs."""
    lines = []
    for name in dict.fromkeys(name for known in reversed(GEMM.values()) for name in known.table):
        field, _, kind = name.partition(" ")
        held = {target: known.table[name] for target, known in GEMM.items() if name in known.table}
        lines.append(_parameter(f"`{field}` of {kind}" if kind else f"`{field}`", held))
    return _table("parameter | npu1 | npu2 | unit | source | fitted to", lines)


def _parameter(name: str, held: dict[str, Parameter]) -> list[object]:
    values = [f"{held[target].value:g}" if target in held else "–" for target in GEMM]
    sources = "; ".join(dict.fromkeys(one.source for one in held.values()))
    fitted = "; ".join(dict.fromkeys(one.fitted_from for one in held.values() if one.fitted_from))
    return [name, *values, held["npu2"].unit, f"{sources} (read {held['npu2'].date})", fitted or "–"]


def cores() -> str:
    """The optimal single-core kernels of the integer programme beside the paper's table 1."""
    lines = []
    for core in (core for core in CORES if core.source == "table 1"):
        known, kind, size = GEMM[core.target], PRECISIONS[core.precision], core.size
        measured = single_core_kernel(known, kind, measured=core.macs_per_cycle / peak_macs(known, kind))
        modelled = single_core_kernel(known, kind)
        rate = macs_per_cycle(known, kind, size)
        same = [str(found) if found != size else "the same" for found in (measured, modelled)]
        lines.append([core.target, core.precision, size, core.macs_per_cycle, f"{rate:.1f}", *same])
    return _table(
        "| precision | table 1 | MACs/cycle | predicted | by measured efficiency | by predicted".strip(), lines
    )


def tiles() -> str:
    """The programme's kernels for each k of tables 2 and 3, and the best kernel of the whole search."""
    lines = []
    for gemm in (gemm for gemm in GEMMS if gemm.l2):
        search, size = GemmSearch(gemm.target, gemm.precision), gemm.tiling.size
        # The paper's search uses the efficiency of its previous step's kernel, a little higher than that of this one.
        found = [*search.kernels(size.k), *search.kernels(size.k, throughput=1.02 * gemm.macs_per_cycle)]
        programme = "the same" if size in found else " or ".join(map(str, found[:1]))
        saturated = search.with_k_mt(size)
        best, of_best = search.candidates()[0]
        chosen = f"{best.size}: {of_best.tops:.2f}"
        lines.append([
            gemm.target, gemm.precision, size, programme, gemm.tiling.k_mt,
            saturated[0].k_mt if saturated else "–", gemm.tops,
            f"{search.predict(gemm.tiling).tops:.2f}", chosen,
        ])  # fmt: skip
    heading = (
        "| precision | tables 2, 3 | largest m n | k_mt | saturated at | TOPS | predicted | predicted best of all k"
    )
    return _table(heading.strip(), lines)


def validation() -> str:
    """The table of all published numbers and their predictions."""
    found = rows()
    others = left_out(found)
    lines, errors, apart = [], [], []
    for row in found:
        errors.append(abs(row.error(GEMM)))
        apart.append(abs(row.error(others[row.group])))
        source, target, precision = row.group
        measured = f"{row.error(GEMM, measured=True):+.1%}" if row.step > 1 else ""
        lines.append([
            source, target, precision, row.what, f"{row.published:.4g} {row.unit}", f"{row.predict(GEMM, False):.4g}",
            f"{row.error(GEMM):+.1%}", measured, f"{row.error(others[row.group]):+.1%}",
        ])  # fmt: skip
    heading = (
        "| | precision | tiles and size | published | predicted | error | with the core's measured rate | left out"
    )
    summary = (
        f"{len(found)} numbers. Mean absolute error {_mean(errors):.1%}, worst {max(errors):.1%}; "
        f"left out, {_mean(apart):.1%} and {max(apart):.1%}."
    )
    return summary + "\n\n" + _table(f"source {heading}", lines)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def elsewhere() -> str:
    """The table of published numbers to which nothing was fitted."""
    lines = []
    for gemm in OTHERS:
        of = predict_gemm(gemm.target, gemm.precision, *gemm.sizes, gemm.tiling)
        size = " x ".join(map(str, gemm.sizes))
        lines.append(
            [gemm.source, gemm.target, size, f"{gemm.tops:.2f}", f"{of.tops:.2f}", f"{of.tops / gemm.tops - 1:+.0%}"]
        )
    return _table("source | | M x K x N | TOPS | predicted | error", lines)


def defaults() -> str:
    """The table of this project's own GEMM: 64 x 64 tiles, and the default tiles, which the tuner found."""
    lines = []
    for target, weights in _WEIGHTS:
        for epilogue, what in (("none", "one projection"), ("swiglu", "gate and up")):
            groups = [
                [
                    (_TOKENS, k, -(-n // 32) * 32)
                    for n, k, kind in projections(model)
                    if (kind in _GATED) == (epilogue in _GATED)
                ]
                for model in MODELS.values()
            ]
            ranked = dict(rank_for_shapes(target, weights, epilogue, [group for group in groups if group]))
            design = Gemm(target, weights, epilogue)
            before = Gemm(target, weights, epilogue, **_BEFORE[epilogue])
            tile = f"{design.m} x {design.k} x {design.n}, {design.e_y} x {design.e_x}"
            megatile = f"{design.height} x {design.width}"
            gain = ranked[design] / ranked[before] - 1
            lines.append([
                target, weights, what, tile, megatile, f"{ranked[before]:.2f}", f"{ranked[design]:.2f}", f"{gain:+.0%}",
            ])  # fmt: skip
    heading = "| weights | | m x k x n, e_y x e_x | megatile | 64 x 64 tiles | default | gain"
    return _table(heading.strip(), lines)


SECTIONS = {
    "parameters": parameters,
    "cores": cores,
    "tiles": tiles,
    "validation": validation,
    "elsewhere": elsewhere,
    "defaults": defaults,
}


def main() -> int:
    """Writes the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

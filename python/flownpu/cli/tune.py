# SPDX-License-Identifier: Apache-2.0
"""`flownpu tune`: the tiles of an operator that are predicted to be the fastest for a shape."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from flownpu.cli import options
from flownpu.cli.build import Target
from flownpu.cli.output import console, print_json

if TYPE_CHECKING:
    from flownpu.aie.cost.gemm_model import GemmPrediction, Tiling


# The first two are those of our own design, the others those of the paper's kernels.
Precision = Literal["bf16", "bfp16", "int8-int8", "int8-int16", "int8-int32", "bf16-bf16", "bfp16-bf16"]
Epilogue = Literal["none", "gelu", "geglu", "swiglu"]


def tune(
    operator: Annotated[Literal["gemm"], typer.Argument(metavar="gemm", help="The operator.")],
    target: Annotated[Target, typer.Option("--target", help="XDNA is npu1, XDNA2 is npu2.")] = "npu2",
    precision: Annotated[
        Precision,
        typer.Option(
            "--precision",
            help="bf16 and bfp16 are the weights of FlowNPU's own GEMM; the others, input-output, the kernels of "
            "arXiv 2512.13282.",
        ),
    ] = "bf16",
    m: Annotated[int, typer.Option("-m", metavar="NUMBER", min=1, help="Rows of A: tokens.")] = 512,
    k: Annotated[int, typer.Option("-k", metavar="NUMBER", min=1, help="Columns of A: input features.")] = 2048,
    n: Annotated[int, typer.Option("-n", metavar="NUMBER", min=1, help="Columns of C: output features.")] = 2048,
    epilogue: Annotated[
        Epilogue, typer.Option("--epilogue", help="Epilogue of FlowNPU's own GEMM; a gated one has 2 N columns of B.")
    ] = "none",
    top: Annotated[int, typer.Option("--top", metavar="NUMBER", min=1, help="How many tiles to show.")] = 5,
    as_json: options.AsJson = False,
) -> None:
    """Find the tiles that are predicted to be the fastest.

    Nothing is measured: docs/model.md says how times are predicted, and how far they are from what was published.
    """
    del operator
    if precision in {"bf16", "bfp16"}:
        found = _designs(target, precision, epilogue, (m, k, n))
    else:
        found = _kernels(target, precision, (m, k, n))
    if not found:
        raise typer.BadParameter(f"expected M, K and N that tiles of {precision} on {target} take, got {m}, {k}, {n}")
    shown = found[:top]
    if as_json:
        head = {"target": target, "precision": precision, "m": m, "k": k, "n": n, "predicted": True}
        print_json({**head, "tried": len(found), "tiles": [_document(*pair) for pair in shown]})
        return
    console.print(_table(shown))
    console.print(f"M {m}, K {k}, N {n} in {precision} on {target}: predicted, not measured; {len(found)} tiles tried")


_Found = list[tuple["Tiling", "GemmPrediction"]]


def _designs(target: Target, precision: Precision, epilogue: Epilogue, size: tuple[int, int, int]) -> _Found:
    """Tiles of our own design, the fastest first."""
    from flownpu.aie.cost.gemm_model import tiling_of  # noqa: PLC0415 other commands need not read the model
    from flownpu.aie.cost.gemm_tuner import rank  # noqa: PLC0415

    try:
        ranked = rank(target, precision, epilogue, *size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return [(tiling_of(design), prediction) for design, prediction in ranked]


def _kernels(target: Target, precision: Precision, size: tuple[int, int, int]) -> _Found:
    """Tiles of the paper's scheme, the fastest first."""
    from flownpu.aie.cost.gemm_system import GemmSearch  # noqa: PLC0415

    try:
        return GemmSearch(target, precision, size).candidates()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _document(tiling: "Tiling", prediction: "GemmPrediction") -> dict[str, Any]:
    return {"tiling": asdict(tiling), "prediction": asdict(prediction)}


def _table(shown: _Found) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("m x k x n", "k_mt", "e_y x e_x", "padding", "TOPS", "ms", "compute", "read", "bound"):
        left = heading in {"m x k x n", "bound"}
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for tiling, of in shown:
        counted = of.tops * of.seconds * 1e12 / 2
        table.add_row(
            str(tiling.size),
            str(tiling.k_mt),
            f"{tiling.e_y} x {tiling.e_x}",
            f"{max(of.macs / counted - 1, 0.0):.0%}",
            f"{of.tops:.2f}",
            *(f"{1e3 * value:.3g}" for value in (of.seconds, of.compute_seconds, of.read_seconds)),
            of.bound,
        )
    return table

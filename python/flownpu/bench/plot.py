# SPDX-License-Identifier: Apache-2.0
"""Draws values over the context's length, as SVG."""

import io

from flownpu.errors import require

Points = list[tuple[float, float]]

# Colours by Okabe and Ito, which colour-blind people can tell apart.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
_ROOF_COLOUR = "#777777"
_INCHES = (7.5, 4.0)


def draw(title: str, curves: dict[str, Points], roof: Points) -> str:
    """An SVG of curves of (tokens in the context, value) and of the memory roof; empty ones are left out.

    Raises:
        MissingDependencyError: Matplotlib is not installed.
    """
    require("matplotlib", extra="plot", purpose="--plot")
    from matplotlib import rc_context  # noqa: PLC0415 other commands need none of it
    from matplotlib.figure import Figure  # noqa: PLC0415

    # Text is written as text, not as paths; the same drawing always has the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flownpu"}):
        figure = Figure(_INCHES, layout="constrained")
        axes = figure.subplots()
        axes.set_prop_cycle(color=_COLOURS)
        for name, points in curves.items():
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, gid=name)
        if roof:
            axes.plot(*zip(*roof, strict=True), color=_ROOF_COLOUR, linestyle="--", label="memory roof")
        contexts = sorted({context for points in (*curves.values(), roof) for context, _ in points})
        axes.set_xscale("log")
        labels = [f"{context:.0f}" for context in contexts]
        axes.set_xticks(contexts, labels, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens in the context")
        axes.set_title(title, loc="left")
        axes.grid(axis="y", alpha=0.4)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False)
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    return drawing.getvalue()

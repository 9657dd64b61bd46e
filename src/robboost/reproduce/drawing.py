"""The paper's figures as PNG and SVG, from their numbers alone."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from robboost.errors import InputError
from robboost.models.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["can_draw", "draw"]

# Okabe and Ito's palette, which the colour-blind can tell apart; lines and hatches differ as well.
_OURS, _OTHER = "#0072b2", "#e69f00"
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "robboost", "font.size": 10.0, "text.parse_math": False,
          "axes.spines.top": False, "axes.spines.right": False}  # fmt: skip


def can_draw() -> bool:
    """Whether matplotlib is installed here."""
    try:
        import matplotlib
    except ImportError:
        return False
    return bool(matplotlib)


def draw(values: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes figureN.png and figureN.svg into the folder, from what `reproduce` gave or saved as JSON."""
    number = values.get("figure")
    if number not in _DRAWERS:
        raise InputError(f"figure {number!r}: expected the saved numbers of figure 1, 2 or 3")
    if not can_draw():
        raise InputError("matplotlib is missing: expected it for drawing (pip install matplotlib)")
    from matplotlib import rc_context

    written = []
    with rc_context(_STYLE):
        figure = _DRAWERS[number](values)
        for kind, options in (("png", {"dpi": 160}), ("svg", {})):
            stream = io.BytesIO()
            metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
            figure.savefig(stream, format=kind, facecolor="white", metadata=metadata, **options)
            file = folder / f"figure{number}.{kind}"
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, stream.getvalue())
            written.append(file)
    return written


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _slopes(values: Mapping[str, Any]) -> Figure:
    networks = values["networks"]
    figure = _figure(2.6 * (1 + len(networks)), 3.0)
    cells = figure.subplots(1, 1 + len(networks))
    cells[0].imshow(np.array(values["image"]["pixels"]), cmap="gray", vmin=0, vmax=1)
    cells[0].set_title(f"digit {values['digit']}, target {values['target']}\neps {values['eps']:g}")
    for cell, (name, network) in zip(cells[1:], networks.items(), strict=True):
        slope = np.array(network["slope"])
        reach = float(np.abs(slope).max()) or 1.0
        cell.imshow(slope, cmap="PuOr", vmin=-reach, vmax=reach)
        cell.set_title(f"{name}\nL1 {network['l1']:.2f}, {100 * network['on_digit']:.0f}% on the digit")
    for cell in cells:
        cell.set_xticks([])
        cell.set_yticks([])
        cell.spines[:].set(visible=True, linewidth=0.5)
    return figure


def _boosting(values: Mapping[str, Any]) -> Figure:
    runs = values["runs"]
    figure = _figure(4.6 * len(runs), 3.4)
    for axes, (name, run) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs.items(), strict=True):
        counts = np.arange(1, len(run["members"]) + 1)
        for key, colour, marker, line in (("verified", _OURS, "o", "-"), ("clean", _OTHER, "^", "--")):
            shares = run[key]
            middle = [100 * share["value"] for share in shares]
            reach = [[m - 100 * s["lower"] for m, s in zip(middle, shares, strict=True)],
                     [100 * s["upper"] - m for m, s in zip(middle, shares, strict=True)]]  # fmt: skip
            axes.errorbar(counts, middle, yerr=reach, color=colour, marker=marker, ls=line, capsize=3, label=key)
        if run["paper"] is not None:
            for key, text in (("first", "paper, 1 member"), ("ensemble", "paper, boosted")):
                axes.axhline(run["paper"][key], color="#666666", lw=1, ls=":")
                axes.annotate(text, (counts[-1], run["paper"][key]), ha="right", va="bottom", fontsize=8)
        axes.set_xticks(counts)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("boosted members")
        axes.set_ylabel("test error, %")
        axes.set_title(f"{name}: {run['threat']}", fontsize=9)
        axes.legend(frameon=False)
    return figure


def _margins(values: Mapping[str, Any]) -> Figure:
    pools = values["pools"]
    columns = min(3, len(pools))
    rows = -(-len(pools) // columns)
    figure = _figure(3.8 * columns, 3.0 * rows)
    cells = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in cells[len(pools) :]:
        axes.axis("off")
    for axes, (name, pool) in zip(cells, pools.items(), strict=False):
        edges = np.array(pool["edges"])
        uniform, ours = (np.array(pool["counts"][key]) for key in ("uniform", "RobBoost"))
        axes.stairs(uniform, edges, fill=True, alpha=0.3, color=_OTHER)
        axes.stairs(uniform, edges, color=_OTHER, ls="--", lw=1.5, label="uniform")
        axes.stairs(ours, edges, color=_OURS, lw=1.8, label="RobBoost")
        axes.axvline(0, color="#666666", lw=1, ls=":")
        axes.set_title(f"{pool['label']}: {name}", fontsize=9)
        axes.set_xlabel("lower bound of a margin")
        axes.set_ylabel("pairs")
        axes.legend(frameon=False, fontsize=8)
    return figure


_DRAWERS: dict[Any, Callable[[Mapping[str, Any]], Figure]] = {1: _slopes, 2: _boosting, 3: _margins}

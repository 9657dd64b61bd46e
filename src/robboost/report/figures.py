"""The figures, drawn once for screen and file: colours that the colour-blind can tell apart, shapes that differ too."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from robboost.comparison import Comparison
from robboost.report.study import Slopes, Study

__all__ = ["STYLE", "captions", "figures", "to_png", "to_svg"]

# Okabe and Ito's palette, in tones that stand out on white and on black.
_OURS, _UNIFORM, _BEST = "#0a84d0", "#e08a00", "#00a06d"
# Drawn in this colour, and turned into the page's own text colour in the SVG.
_INK = "#7f7f7e"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "robboost",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.parse_math": False,  # a "$" in a name is a "$"
}


def figures(comparison: Comparison, found: Study, x: Tensor, y: Tensor) -> dict[str, Figure]:
    """All figures by file name.

    Args:
        comparison: the table they belong to.
        found: what was computed for them.
        x: test images.
        y: their labels.
    """
    draw: dict[str, Callable[[], Figure]] = {
        "margins": partial(_margins, comparison),
        "radii": partial(_radii, found, comparison.fitted.threat.eps),
        "weights": partial(_weights, comparison),
        "overlap": partial(_overlap, comparison),
        "slopes": partial(_slopes, found.slopes, comparison),
        "images": partial(_images, found, comparison.margins["RobBoost"], x, y),
    }
    with rc_context(STYLE):
        return {name: function() for name, function in draw.items()}


def to_svg(figure: Figure) -> str:
    """The figure as an SVG element that takes its text colour from the page around it."""
    stream = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Ids that nothing points to would occur several times on one page.
    used = set(re.findall(r"#([\w.-]+)", text))
    return re.sub(r' id="([\w.-]+)"', lambda match: match[0] if match[1] in used else "", text)


def to_png(figure: Figure) -> bytes:
    """The figure on white, at twice the resolution of a screen."""
    stream = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(stream, format="png", dpi=192, facecolor="white", metadata={"Software": None})
    return stream.getvalue()


def _margins(comparison: Comparison) -> Figure:
    figure = Figure(figsize=(5.4, 3.3), layout="constrained")
    axes = figure.subplots()
    ours, uniform = (comparison.margins[name].cpu().numpy() for name in ("RobBoost", "uniform"))
    both = np.concatenate([ours, uniform])
    low, high = np.quantile(both[np.isfinite(both)], [0.002, 0.998]) if np.isfinite(both).any() else (-1.0, 1.0)
    bins = np.linspace(low, max(high, low + 1e-9), 41)
    axes.hist(np.clip(uniform, low, high), bins, histtype="stepfilled", alpha=0.35, color=_UNIFORM)
    axes.hist(np.clip(uniform, low, high), bins, histtype="step", lw=1.5, ls="--", color=_UNIFORM, label="uniform")
    axes.hist(np.clip(ours, low, high), bins, histtype="step", lw=2, color=_OURS, label="RobBoost")
    axes.axvline(0, color=_INK, lw=1, ls=":")
    axes.set_xlabel("lowest margin proved (above 0: certified)")
    axes.set_ylabel("test images")
    axes.legend(frameon=False)
    return figure


def _radii(found: Study, eps: float) -> Figure:
    figure = Figure(figsize=(5.4, 3.3), layout="constrained")
    axes = figure.subplots()
    looks = ((_BEST, "s", ":"), (_UNIFORM, "^", "--"), (_OURS, "o", "-"))
    for (name, shares), (colour, marker, line) in zip(found.certified.items(), looks, strict=True):
        values = [100 * share for share in shares]
        axes.plot(found.radii, values, color=colour, marker=marker, ls=line, lw=1.8, ms=5, label=name)
    axes.axvline(eps, color=_INK, lw=1, ls=":")
    axes.set_xlabel("radius eps of the threat (0: clean accuracy)")
    axes.set_ylabel("certified, % of images")
    axes.legend(frameon=False)
    return figure


def _weights(comparison: Comparison) -> Figure:
    names, fitted = comparison.names, comparison.fitted
    figure = Figure(figsize=(5.4, 0.8 + 0.34 * len(names)), layout="constrained")
    axes = figure.subplots()
    rows = np.arange(len(names))
    weights = fitted.weights.numpy()
    axes.barh(rows, weights, color=_OURS, height=0.62)
    axes.axvline(1 / len(names), color=_UNIFORM, lw=1.5, ls="--", label="uniform")
    for row, weight in zip(rows, weights, strict=True):
        axes.annotate(f"{weight:.3f}", (weight, row), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_yticks(rows, [_short(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(float(weights.max()), 1 / len(names)))
    axes.set_xlabel("weight")
    axes.legend(frameon=False, loc="lower right")
    return figure


def _overlap(comparison: Comparison) -> Figure:
    names = comparison.names
    size = 2.2 + 0.55 * len(names)
    figure = Figure(figsize=(size, 0.85 * size), layout="constrained")
    axes = figure.subplots()
    values = 100 * comparison.overlap.cpu().numpy()
    low, high = float(values.min()), float(values.max())
    axes.imshow(values, cmap="Blues", vmin=low - 0.3 * (high - low) - 1, vmax=high)
    axes.set_xticks(range(len(names)), [_short(name) for name in names], rotation=40, ha="right")
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    if len(names) <= 16:
        for i, j in np.ndindex(values.shape):
            colour = "white" if values[i, j] > (low + high) / 2 else "#202020"
            axes.text(j, i, f"{values[i, j]:.0f}", ha="center", va="center", color=colour, fontsize=9)
    axes.spines[:].set_visible(False)
    return figure


def _slopes(slopes: Slopes, comparison: Comparison) -> Figure:
    weights = comparison.fitted.weights.tolist()
    panels = [
        (f"{_short(name)}\nweight {weights[t]:.2f}", slope) for t, (name, slope) in enumerate(slopes.members.items())
    ]
    panels += [(name, slope) for name, slope in slopes.mixes.items()]
    figure, cells = _grid(len(panels) + 1)
    _picture(cells[0], slopes.image, f"image: {slopes.label}\nagainst {slopes.target}")
    flat = [_flat(slope) for _, slope in panels]
    # Each panel has its own scale: what differs is the pattern, not the size.
    for cell, (title, _), values in zip(cells[1:], panels, flat, strict=False):
        reach = float(np.abs(values).max()) or 1.0
        cell.imshow(values, cmap="PuOr", vmin=-reach, vmax=reach)
        _frame(cell)
        cell.set_title(f"{title}\nL1 {np.abs(values).sum():.2f}", fontsize=8)
    return figure


def _images(found: Study, margins: Tensor, x: Tensor, y: Tensor) -> Figure:
    kinds = (("not certified", found.failed), ("fragile", found.fragile), ("secure", found.secure))
    groups = [(name, which) for name, which in kinds if which]
    columns = max(len(which) for _, which in groups)
    figure = Figure(figsize=(1.0 * columns + 0.6, 1.45 * len(groups)), layout="constrained")
    cells = figure.subplots(len(groups), columns, squeeze=False)
    for row, (name, which) in zip(cells, groups, strict=True):
        for cell in row:
            cell.axis("off")
        for cell, n in zip(row, which, strict=False):
            _picture(cell, x[n], f"#{n}: {int(y[n])}\n{float(margins[n]):+.3f}")
        row[0].text(-0.18, 0.5, name, rotation=90, ha="center", va="center", transform=row[0].transAxes, fontsize=9)
    return figure


def _grid(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(6, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(1.25 * columns, 1.75 * rows), layout="constrained")
    cells = list(figure.subplots(rows, columns, squeeze=False).flat)
    for cell in cells:
        cell.axis("off")
    return figure, cells


def _frame(cell: Axes) -> None:
    """An edge where picture and page would run into each other."""
    cell.axis("on")
    cell.set_xticks([])
    cell.set_yticks([])
    cell.spines[:].set(visible=True, linewidth=0.5)


def _picture(cell: Axes, image: Tensor, title: str) -> None:
    values = image.detach().cpu().to(torch.float32)
    if values.ndim == 3 and values.shape[0] == 3:
        cell.imshow(values.permute(1, 2, 0).clamp(0, 1).numpy())
    else:
        cell.imshow(_flat(values), cmap="gray", vmin=0, vmax=1)
    cell.set_title(title, fontsize=8)


def _flat(values: Tensor) -> np.ndarray:
    """Two axes for imshow: channels added up, a vector as a row."""
    array = values.detach().cpu().to(torch.float64)
    if array.ndim >= 3:
        array = array.flatten(0, -3).sum(0)
    return np.atleast_2d(array.numpy())


def _short(name: str, length: int = 18) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def captions(found: Study) -> Mapping[str, tuple[str, str]]:
    """Title and explanation of each figure."""
    slopes = found.slopes
    return {
        "margins": (
            "How far the proof reaches",
            "Distribution of the lowest margin proved for each test image. What lies right of zero is certified.",
        ),
        "radii": (
            "Other radii",
            f"Certified share of the first {found.count} test images for other radii of the same threat; the weights"
            " stay those fitted at the dotted line.",
        ),
        "weights": (
            "Who is in the mix",
            "Weights of the members after each was divided by its scale. A member without weight costs nothing at"
            " inference.",
        ),
        "overlap": (
            "Who certifies what",
            "Share of test images, in percent, that both members certify; the diagonal is each member alone. Low"
            " values off the diagonal mean members that complement each other.",
        ),
        "slopes": (
            "What the proof looks at",
            f"Slopes of the linear bound of the margin of class {slopes.label} against class {slopes.target}, for the"
            " certified image with the smallest margin (figure 1 of the paper). Where members disagree, slopes cancel"
            " in the mix, and their L1 norm, which is what an attacker can use, shrinks.",
        ),
        "images": (
            "The most fragile and the most secure images",
            "Test images by the lowest margin proved for RobBoost, with label and margin.",
        ),
    }

"""The logs of a trained pool as a figure: loss, share robust under the training bound, and radius, epoch by epoch."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from robboost.errors import InputError
from robboost.report.figures import STYLE

__all__ = ["read_logs", "training_curves"]

_ENDING = ".log.jsonl"


def read_logs(folder: str | Path) -> dict[str, list[dict[str, float]]]:
    """The log of every member in `folder` by its name: one entry per epoch."""
    logs = {}
    for file in sorted(Path(folder).glob(f"*{_ENDING}")):
        try:
            entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            complete = all({"epoch", "loss", "robust", "eps"} <= set(entry) for entry in entries)
        except (OSError, ValueError, TypeError):
            complete = False
        if not complete:
            raise InputError(f"{file}: expected one JSON object an epoch, with epoch, loss, robust and eps")
        if entries:
            logs[file.name.removesuffix(_ENDING)] = entries
    if not logs:
        raise InputError(f"{folder}: no log of an epoch there, expected a folder with NAME{_ENDING} files")
    return logs


def training_curves(folder: str | Path) -> Figure:
    """Three panels over the epochs, a line for each member; dashed where what is called robust is an estimate.

    "robust" is measured on augmented training images at the radius of that epoch, so it falls while the radius grows.
    """
    logs = read_logs(folder)
    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.2), layout="constrained")
        panels: list[Axes] = list(figure.subplots(1, 3))
        for name, entries in logs.items():
            epochs = [entry["epoch"] for entry in entries]
            estimated = "estimated_from" in entries[-1]
            for axes, key in zip(panels, ("loss", "robust", "eps"), strict=True):
                style = "--" if estimated and key == "robust" else "-"
                axes.plot(epochs, [entry[key] for entry in entries], style, lw=1.5, label=name)
        titles = ("training loss", "robust in training", "radius")
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title)
            axes.set_xlabel("epoch")
        panels[0].set_yscale("log")
        panels[0].legend(frameon=False, fontsize=7)
    return figure

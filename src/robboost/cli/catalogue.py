"""models, data: what is there to use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from robboost.cli.console import show
from robboost.cli.options import ArchitectureOption, JsonOption, ShapeOption, open_pool
from robboost.data import DATASETS, data_directory, load_dataset
from robboost.errors import DataError
from robboost.models.architectures import ARCHITECTURES, build, float32_bytes

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(models)
    app.command()(data)


def models(
    pool: Annotated[list[Path] | None, typer.Argument(help="A folder of networks, or several files.")] = None,
    architecture: ArchitectureOption = None,
    input_shape: ShapeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the architectures that are known by name, or the members of a pool."""
    if pool:
        found = open_pool(pool, architecture, input_shape)
        rows = [
            {
                "name": member.name,
                "architecture": member.architecture,
                "MB": round(float32_bytes(member.model) / 1e6, 3),
                "input_shape": None if member.input_shape is None else list(member.input_shape),
                "classes": member.num_classes,
                "sha256": member.sha256,
            }
            for member in found.members
        ]
        text = "\n".join(f"{row['name']:<20} {row['MB']:>8} MB  {row['architecture']}" for row in rows)
        show({"members": rows, "notes": dict(found.notes)} if as_json else text, as_json)
        return
    sizes = {
        name: {
            "structure": structure,
            "MB 1x28x28": round(float32_bytes(build(name, (1, 28, 28))) / 1e6, 3),
            "MB 3x32x32": round(float32_bytes(build(name, (3, 32, 32))) / 1e6, 3),
        }
        for name, structure in ARCHITECTURES.items()
    }
    text = "\n".join(f"{name:<12} {row['MB 1x28x28']:>7} / {row['MB 3x32x32']:>7} MB  {row['structure']}"
                     for name, row in sizes.items())  # fmt: skip
    show(sizes if as_json else f"name         1x28x28 / 3x32x32      structure\n{text}", as_json)


def data(as_json: JsonOption = False) -> None:
    """List the data sets, and which of them are on this machine."""
    rows = {}
    for name, about in DATASETS.items():
        try:
            load_dataset(name, split="test", download=False)
            rows[name] = {"about": about, "here": True}
        except DataError:
            rows[name] = {"about": about, "here": False}
    where = f"official files are looked for in {data_directory(None)} (set ROBBOOST_DATA to change it)"
    text = "\n".join(
        f"{name:<14} {'here' if row['here'] else 'not here':<9} {row['about']}" for name, row in rows.items()
    )
    show({"datasets": rows, "folder": str(data_directory(None))} if as_json else f"{text}\n{where}", as_json)

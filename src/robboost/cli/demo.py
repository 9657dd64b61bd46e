"""demo: the whole path on data and networks that ship with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from robboost.attacks import AttackSettings
from robboost.cli.console import check_writable, progress, resumed, show, to_json, write_text
from robboost.cli.ensembles import pool_facts, to_device
from robboost.cli.options import DeviceOption, JsonOption
from robboost.comparison import Settings, compare
from robboost.data import load_dataset
from robboost.devices import usable_device
from robboost.models import demo_pool, save_model
from robboost.report import write_report
from robboost.threat import Threat

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(demo)


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the ensemble, the report and the figures.")] = Path(
        "robboost-demo"
    ),
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fit, certify, attack, compare and report, with five small networks on a part of MNIST (all embedded)."""
    check_writable(out / "report.html")
    pool = demo_pool()
    to_device(pool, usable_device(device))
    threat = Threat(0.1, clip=(0.0, 1.0))
    held = load_dataset("mnist-small", split="heldout")
    test = load_dataset("mnist-small", split="test")
    settings = Settings(bounds="ibp+crown-ibp", attack=AttackSettings(steps=20, restarts=1))
    with progress() as tell, resumed("demo", pool.models, [held, test], settings=vars(settings)):
        result = compare(
            pool,
            fit=(held.images, held.labels),
            test=(test.images, test.labels),
            threat=threat,
            settings=settings,
            progress=tell,
        )
        page = write_report(
            result, pool, (test.images, test.labels), out, about=pool_facts(pool, held, test), progress=tell
        )
    write_text(out / "comparison.json", to_json(result.to_dict()))
    save_model(result.fitted.ensemble.cpu(), out / "ensemble.safetensors", {"fit": result.fitted.to_dict()},
               input_shape=test.input_shape)  # fmt: skip
    show(result, as_json)
    if not as_json:
        typer.echo(f"\nensemble  {out / 'ensemble.safetensors'}\nreport    {page.absolute()}")

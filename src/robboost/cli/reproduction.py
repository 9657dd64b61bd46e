"""reproduce: the paper's tables and figures, and the pools that ship, one command each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from robboost.cli.console import progress, show
from robboost.cli.options import JsonOption, ThreadsOption, set_threads
from robboost.reproduce import COMMANDS, Request
from robboost.reproduce import reproduce as run

__all__ = ["register"]

_DEFAULT = Request()


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(reproduce)


def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(COMMANDS)}.")],
    paths: Annotated[
        list[Path] | None, typer.Argument(help="zoo: trained pools, or ensembles; figure2: runs of `robboost boost`.")
    ] = None,
    pools: Annotated[Path, typer.Option("--pools", help="Folder with one folder per trained pool.")] = _DEFAULT.pools,
    train: Annotated[bool, typer.Option("--train", help="Train the pools (or networks) that are missing.")] = False,
    settings: Annotated[str, typer.Option("--settings", help="Such as mnist-0.3,cifar10-2-255.  [default: all]")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Folder for results.")] = None,
    work: Annotated[Path, typer.Option("--work", help="Where finished parts of long work are kept.")] = _DEFAULT.work,
    data: Annotated[str | None, typer.Option("--data", help="Data set, not the pools' own.")] = None,
    eps: Annotated[str | None, typer.Option("--eps", help="Radius, not the pools' own.")] = None,
    bounds: Annotated[str, typer.Option("--bounds", help="Method of all bounds.  [default: suits the pool]")] = "",
    limit: Annotated[int | None, typer.Option("--limit", help="Use so many images of each split.")] = None,
    train_images: Annotated[
        int, typer.Option("--train-images", help="Training images behind the train columns (0: none).")
    ] = _DEFAULT.train_images,
    fit_split: Annotated[str, typer.Option("--fit-split", help="heldout, or train (the paper).")] = "heldout",
    steps: Annotated[int, typer.Option("--steps", help="Gradient steps of the attack (0: none).")] = _DEFAULT.steps,
    restarts: Annotated[int, typer.Option("--restarts", help="Starts of the attack.")] = _DEFAULT.restarts,
    members: Annotated[str, typer.Option("--members", help="zoo: all, or used (those with weight).")] = "all",
    minutes: Annotated[float | None, typer.Option("--minutes", help="Time limit of training.")] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Epochs of training, not the recipe's.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, ...  [default: a GPU if there is one]")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure, even where results lie beside a pool.")] = False,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """The paper's tables and figures, side by side with the paper's figures.

    Weights are fitted on held-out images; the test set is measured last. Interrupted, the same command continues.
    """
    set_threads(threads)
    request = Request(
        pools=pools, train=train, settings=tuple(name for name in settings.split(",") if name), out=out, work=work,
        data=data, eps=eps, bounds=bounds, limit=limit, train_images=train_images, fit_split=fit_split, steps=steps,
        restarts=restarts, members=members, minutes=minutes, epochs=epochs, device=device, fresh=fresh,
    )  # fmt: skip
    with progress() as tell:
        outcome = run(what, paths or [], request, tell)
    show(outcome.values if as_json else outcome.text, as_json)

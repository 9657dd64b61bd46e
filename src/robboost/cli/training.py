"""train: a pool of certifiable members from a recipe."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from robboost.cli.console import check_writable, progress, show
from robboost.cli.options import DeviceOption, JsonOption, LimitOption, ThreadsOption, set_threads
from robboost.data import Dataset, load_dataset
from robboost.devices import usable_device
from robboost.errors import DivergedError
from robboost.models import PoolMember, write_pool
from robboost.models.architectures import float32_bytes
from robboost.training import PoolConfig, Progress, RunOptions, Trained, load_pool, train_pool
from robboost.training.files import estimates

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(train)


def train(
    pool: Annotated[str, typer.Argument(help="A pool's .toml or .json file, or the name of a shipped recipe.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the pool; a run found there is resumed.")],
    epochs: Annotated[int | None, typer.Option("--epochs", help="Epochs of every member, not the file's.")] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Cut the epochs to what fits.")] = None,
    limit: LimitOption = None,
    data: Annotated[str | None, typer.Option("--data", help="Data set, not the file's.")] = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a pool on the "train" split and write it with its manifest; "heldout" only measures.

    The folder also gets a log and a state of every member, and the curves of all as training.svg.
    Interrupted, the same command continues from the last state that was saved.
    """
    set_threads(threads)
    usable_device(device)
    check_writable(out / "manifest.json")
    config = load_pool(pool)
    if epochs is not None:
        config = replace(config, members=tuple(member.with_epochs(epochs) for member in config.members))
    # Members lie in the folder itself: it is the pool.
    config = replace(config, members=tuple(replace(member, pool="") for member in config.members))
    name = data or config.dataset
    images, heldout = (load_dataset(name, split=split).at_most(limit) for split in ("train", "heldout"))
    with progress() as tell:

        def say(state: Progress) -> None:
            tell(f"{state.member} (loss {state.loss:.3f})", state.epoch, state.epochs)

        trained = train_pool(
            list(config.members),
            images,
            heldout=heldout,
            options=RunOptions(out=out, device=device, minutes=minutes, report_seconds=5.0),
            progress=say,
        )
    kept = [member for member in trained if not member.diverged]
    if not kept:
        raise DivergedError(f"{pool}: no member stayed finite; expected finite losses: lower lr, or lengthen the ramp")
    members = [_member(member, images) for member in kept]
    write_pool(out, members, _notes(config, name, kept))
    _draw(out)
    for member in trained:
        if member.diverged:
            sys.stderr.write(f"robboost: {member.config.label} diverged and is left out\n")
    summary = {member.name: dict(member.metrics) for member in members}
    keys = list(dict.fromkeys(key for values in summary.values() for key in values))
    lines = [f"{'held-out error, %':<34} " + "  ".join(f"{key:>8}" for key in keys)]
    lines += [
        f"{label:<34} " + "  ".join(_percent(values.get(key)).rjust(max(8, len(key))) for key in keys)
        for label, values in summary.items()
    ]
    show({"members": summary, "pool": str(out)} if as_json else "\n".join([*lines, f"pool: {out}"]), as_json)


def _draw(out: Path) -> None:
    """OUT/training.svg: the curves of all members."""
    from robboost.report.figures import to_svg
    from robboost.report.training_curves import training_curves

    (out / "training.svg").write_text(to_svg(training_curves(out)), encoding="utf-8")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def _member(trained: Trained, data: Dataset) -> PoolMember:
    config = trained.config
    return PoolMember(
        name=config.label,
        model=trained.model.cpu().eval(),
        input_shape=data.input_shape,
        architecture=config.architecture,
        config={key: value for key, value in config.as_dict().items() if key != "seed"},
        seed=config.seed,
        metrics={} if trained.figures is None else trained.figures.errors(),
    )


def _notes(config: PoolConfig, dataset: str, kept: list[Trained]) -> dict[str, Any]:
    radii = {member.config.eps for member in kept}
    notes: dict[str, Any] = {"recipe": config.name, "dataset": dataset, **estimates(m.config for m in kept)}
    if len(radii) == 1:
        notes["threat"] = {"eps": radii.pop(), "norm": "linf", "clip": [0.0, 1.0]}
    notes["megabytes"] = round(sum(float32_bytes(member.model) for member in kept) / 1e6, 3)
    return notes

"""boost: members trained one after another, each for what the ensemble before it cannot certify."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from robboost.cli.console import check_writable, progress, show
from robboost.cli.options import DeviceOption, JsonOption, LimitOption, ThreadsOption, set_threads
from robboost.data import load_dataset
from robboost.models import save_model
from robboost.training import Progress, RunOptions
from robboost.training.boosting import Boosted, Stage, boost
from robboost.training.boosting_config import BoostConfig, load_boost

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(name="boost")(boost_command)


def boost_command(
    recipe: Annotated[str, typer.Argument(help="A .toml or .json file, or the name of a shipped recipe (mnist-0.3).")],
    out: Annotated[Path, typer.Option("--out", help="Folder for OUT/NAME; a run found there goes on.")],
    minutes: Annotated[float | None, typer.Option("--minutes", help="Time limit of all stages together.")] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Epochs of every stage, not the recipe's.")] = None,
    limit: LimitOption = None,
    data: Annotated[str | None, typer.Option("--data", help="Data set, not the recipe's.")] = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Boost an ensemble (paper, section 3.5) on the "train" split; "heldout" measures every stage and chooses.

    Writes OUT/NAME/stage-M.safetensors after each stage, boosting.json for `robboost reproduce figure2`, and at the end
    ensemble.safetensors, the best stage. Interrupted, the same command continues.
    """
    set_threads(threads)
    config = load_boost(recipe)
    if epochs is not None:
        config = config.with_epochs(epochs)
    if data is not None:
        config = replace(config, dataset=data)
    folder = out / config.name
    check_writable(folder / "ensemble.safetensors")
    images, heldout = (load_dataset(config.dataset, split=split).at_most(limit) for split in ("train", "heldout"))
    count = len(config.stages)
    with progress() as tell:

        def say(state: Progress) -> None:
            tell(f"{state.member} (loss {state.loss:.3f})", state.epoch, state.epochs)

        def stage_done(stage: Stage) -> None:
            tell(f"stages (verified error {100 * stage.verified_error:.2f} %)", len(stage.coefficients), count)

        boosted = boost(
            config,
            images,
            heldout=heldout,
            options=RunOptions(out=out, device=device, minutes=minutes, report_seconds=5.0),
            progress=say,
            on_stage=stage_done,
        )
    file = folder / "ensemble.safetensors"
    save_model(boosted.ensemble, file, _notes(config, boosted), input_shape=images.input_shape)
    show({**boosted.to_dict(), "ensemble": str(file)} if as_json else f"{_text(boosted)}\nensemble: {file}", as_json)


def _notes(config: BoostConfig, boosted: Boosted) -> dict[str, object]:
    """What `certify` needs to know, and how the ensemble came about."""
    threat = config.threat
    return {
        "dataset": config.dataset,
        "threat": {"eps": threat.eps, "norm": threat.norm, "clip": list(threat.clip or ())},
        "bounds": config.certificate,
        "boosting": boosted.to_dict(),
    }


def _text(boosted: Boosted) -> str:
    lines = [f"{'held-out error, %':<24} {'verified':>8} {'clean':>8} {'alone':>8} {'MB':>6} {'epochs':>6}"]
    lines += [
        f"{stage.member:<24} {100 * stage.verified_error:8.2f} {100 * stage.clean_error:8.2f}"
        f" {100 * stage.alone_verified_error:8.2f} {stage.size_mb:6.2f} {stage.epochs:6d}"
        for stage in boosted.stages
    ]
    return "\n".join([*lines, f"chosen: the first {len(boosted.ensemble.members)} of {len(boosted.stages)} stages"])

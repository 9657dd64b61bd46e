"""Three ways to the same number of members: boosted, each for itself with fitted weights, tuned together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from robboost.data import Dataset
from robboost.errors import DivergedError, InputError
from robboost.models import Ensemble, load_model, read_pool, save_model
from robboost.training.boosting import Boosted, Stage, boost
from robboost.training.boosting_config import BoostConfig
from robboost.training.boosting_results import measure
from robboost.training.boosting_rivals import Rivals, all_alive, rivals
from robboost.training.config import TrainConfig
from robboost.training.pool import Progress, RunOptions, train_pool
from robboost.training.tuning import TuneConfig, fine_tune

__all__ = ["Experiment", "Outcome", "boosted", "by_themselves", "tuned"]

# Exact fits of the weights during a fine-tuning, and the share of the first learning rate that it starts with.
_FITS = 4
_TUNING_RATE = 0.2
_WARM_UP = 100


def _silent(_: object) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class Experiment:
    """What the three have in common.

    Attributes:
        config: members, objective, bounds.
        data, heldout: for training; for weights and choices.
        options: of the trainer; `out` is needed.
        progress: told about members in training; on_stage: about finished stages.
    """

    config: BoostConfig
    data: Dataset
    heldout: Dataset
    options: RunOptions
    progress: Callable[[Progress], None] = _silent
    on_stage: Callable[[Stage], None] = _silent

    @property
    def folder(self) -> Path:
        """OUT/NAME."""
        if self.options.out is None:
            raise InputError("out=None: expected a folder for what the run leaves")
        return self.options.out / self.config.name

    def rivals(self, names: list[str], members: list[Any]) -> Rivals:
        """Mixes of finished members."""
        pool = dict(zip(names, members, strict=True))
        return rivals(pool, self.heldout, self.config.threat, self.config.certificate, self.options.chosen_device)

    def save(self, ensemble: Ensemble, name: str) -> None:
        """OUT/NAME/`name`.safetensors."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_model(ensemble, self.folder / f"{name}.safetensors", input_shape=tuple(self.data.images.shape[1:]))


@dataclass(frozen=True)
class Outcome:
    """Ensembles to be measured, the one that the others are compared with, and what else is worth keeping."""

    kind: str
    ensembles: dict[str, Ensemble]
    chosen: str
    entries: dict[str, Any] = field(default_factory=dict)


def boosted(experiment: Experiment) -> Outcome:
    """Every stage, and the members of all stages with fitted weights; chosen is the stage best on held-out images.

    Where a stage diverges, those before it are the result.
    """
    result, diverged = _boosted(experiment)
    names = [_short(stage.member) for stage in result.stages]
    ensembles = {_stage_name(n, names): result.after(n) for n in range(1, len(names) + 1)}
    chosen = _stage_name(len(result.ensemble.members), names)
    entries: dict[str, Any] = {"boosting": result.to_dict(), "diverged": diverged}
    if len(names) > 1:
        found = experiment.rivals(names, list(result.members))
        ensembles["all stages, weights fitted"] = found.fitted.ensemble
        entries["heldout"] = {"all stages, weights fitted": _errors(found)["weights fitted"]}
        experiment.save(found.fitted.ensemble, "boosted-fitted")
    experiment.save(result.ensemble, "boosted")
    return Outcome("boosted", ensembles, chosen, entries)


def by_themselves(experiment: Experiment) -> Outcome:
    """The same members side by side, each for itself; chosen are the weights fitted on held-out images."""
    options = replace(experiment.options, out=experiment.folder / "alone")
    trained = train_pool(experiment.config.stages, experiment.data, heldout=experiment.heldout, options=options,
                         progress=experiment.progress)  # fmt: skip
    finished = [run for run in trained if not run.diverged]
    if not finished:
        raise DivergedError("every member diverged; expected finite losses: lower lr, or lengthen warmup and ramp")
    names = [_short(run.config.label) for run in finished]
    found = experiment.rivals(names, [run.model for run in finished])
    experiment.save(found.fitted.ensemble, "alone")
    experiment.save(found.average.ensemble, "alone-average")
    entries = {"heldout": _errors(found), "epochs": {_short(run.config.label): run.config.epochs for run in trained}}
    return Outcome("alone", _ensembles(found, ""), "weights fitted", entries)


def tuned(experiment: Experiment, path: Path, lr: float | None = None) -> Outcome:
    """The ensemble of the file (or pool folder) `path` tuned, beside the best its members did without.

    Radius, method, batch and epochs are those of the first stage, its schedule at its end from the first step on; the
    weights are fitted anew a few times on the way. `lr` None: a share of the first stage's.
    """
    start = _ensemble_of(path)
    if experiment.options.minutes is not None:
        # A few images first: what has to be compiled for these networks is no part of the time of a fit.
        replace(experiment, heldout=experiment.heldout.at_most(_WARM_UP)).rivals(list(start.names), list(start.members))
    began = time.monotonic()
    found = experiment.rivals(list(start.names), list(start.members))
    fit_minutes = (time.monotonic() - began) / 60
    stage = experiment.config.stages[0]
    name = path.name if path.is_dir() else path.stem
    train = _finished_schedule(stage, lr or stage.lr * _TUNING_RATE, f"tuned-{name}")
    config = TuneConfig(train, experiment.config.objective, reweight_every=math.ceil(train.epochs / (_FITS + 1)),
                        bounds=experiment.config.bounds)  # fmt: skip
    options = replace(experiment.options, out=experiment.folder.parent)
    if options.minutes is not None:
        options = replace(options, minutes=max(0.1, options.minutes - (_FITS + 2) * fit_minutes))
    begin = _better_start(experiment, path, start, found)
    result = fine_tune(begin, config, experiment.data, heldout=experiment.heldout, options=options,
                       progress=experiment.progress)  # fmt: skip
    chosen = f"tuned ({result.chosen})"
    ensembles = {chosen: result.ensemble, **_ensembles(found, "before: ")}
    if not path.is_dir():
        ensembles["before: as it was"] = start
    entries = {"start": str(path), "lr": train.lr, "heldout": _errors(found), "tuning": result.to_dict()}
    return Outcome(train.short_name, ensembles, chosen, entries)


def _boosted(experiment: Experiment) -> tuple[Boosted, str]:
    """The stages, and why they are fewer than wanted (empty: they are not)."""
    config, heldout = experiment.config, experiment.heldout
    try:
        found = boost(config, experiment.data, heldout=heldout, options=experiment.options,
                      progress=experiment.progress, on_stage=experiment.on_stage)  # fmt: skip
    except DivergedError as error:
        files = [experiment.folder / f"stage-{n}.safetensors" for n in range(1, len(config.stages) + 1)]
        done = sum(file.exists() for file in files)
        if done == 0:
            raise
        shorter = replace(config, stages=config.stages[:done])
        return boost(shorter, experiment.data, heldout=heldout, options=experiment.options), str(error)
    return found, ""


def _finished_schedule(stage: TrainConfig, lr: float, name: str) -> TrainConfig:
    """The stage's settings with full radius and final mixture from the first step on; members are networks already."""
    return replace(stage, architecture="joint", name=name, lr=lr, warmup=0.0, ramp=0.0, mixture_start=None,
                   batch_norm=False, pixel_share=1.0)  # fmt: skip


def _better_start(experiment: Experiment, path: Path, start: Ensemble, found: Rivals) -> Ensemble:
    """A file's own weights where they are no worse on held-out images than fitted ones, and every member has some."""
    if not path.is_dir() and bool((start.weights > 0).all()):
        config = experiment.config
        device = experiment.options.chosen_device
        (own,) = measure({"own": start}, experiment.heldout, config.threat, config.certificate, device)
        if own.verified.value <= found.fitted.verified_error:
            return start
    return all_alive(found)


def _ensemble_of(path: Path) -> Ensemble:
    """What a file holds (a single network is an ensemble of one), or the average of a folder's pool."""
    if path.is_dir():
        pool = read_pool(path)
        return Ensemble(pool.models, [1 / len(pool.models)] * len(pool.models), names=pool.names)
    found = load_model(path)
    return found if isinstance(found, Ensemble) else Ensemble([found], [1.0], names=[path.stem])


def _ensembles(found: Rivals, before: str) -> dict[str, Ensemble]:
    return {
        f"{before}weights fitted": found.fitted.ensemble,
        f"{before}average": found.average.ensemble,
        f"{before}best member ({found.best.ensemble.names[0]})": found.best.ensemble,
    }


def _errors(found: Rivals) -> dict[str, dict[str, float]]:
    names = ("weights fitted", "average", "best member")
    return {
        name: {"verified_error": rival.verified_error, "clean_error": rival.clean_error}
        for name, rival in zip(names, found, strict=True)
    }


def _stage_name(count: int, names: list[str]) -> str:
    return f"{count} stages (+ {names[count - 1]})"


def _short(label: str) -> str:
    return label.rpartition("/")[2]

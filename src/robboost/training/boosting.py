"""Boosting: members trained one after another, each to fix what the ensemble before it cannot certify.

F_{m+1} = F_m + f_{m+1}, where F_m is frozen and f_{m+1} is trained on the margins' lower bounds of the sum (paper,
section 3.5). No network of the result is a heuristic's: every figure is a certificate by the engine.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from robboost.data import Dataset
from robboost.errors import CheckpointError, DivergedError
from robboost.models import Ensemble, load_model, read_metadata, save_model
from robboost.models.architectures import float32_bytes
from robboost.threat import Threat
from robboost.training.boosting_bounds import FrozenSum, frozen_sum, stored_bytes
from robboost.training.boosting_certificate import HeldOut, ensemble_of
from robboost.training.boosting_config import BoostConfig
from robboost.training.boosting_member import BoostedMember, Frozen, FrozenNetworks
from robboost.training.config import TrainConfig
from robboost.training.member import DeviceData
from robboost.training.pool import Progress, RunOptions, train_members

__all__ = ["Boosted", "Stage", "boost"]


@dataclass(frozen=True)
class Stage:
    """One member more, and what the ensemble certifies with it.

    Attributes:
        member: its name.
        coefficients: a_t of all members so far, as they are added up.
        verified_error, clean_error: of the ensemble on held-out images (0 to 1).
        alone_verified_error: of the new member by itself.
        loss: mean surrogate of the ensemble's training certificate in the last epoch.
        size_mb: of all members so far in float32, in 1e6 bytes.
        epochs, seconds: what the stage took.
    """

    member: str
    coefficients: tuple[float, ...]
    verified_error: float
    clean_error: float
    alone_verified_error: float
    loss: float
    size_mb: float
    epochs: int
    seconds: float


@dataclass(frozen=True)
class Boosted:
    """The ensemble of the stage with the lowest held-out verified error (of ties the smaller), and all stages.

    `config` is the one of the run, with frozen="auto" decided.
    """

    ensemble: Ensemble
    stages: tuple[Stage, ...]
    members: tuple[nn.Module, ...]
    config: BoostConfig

    def after(self, count: int) -> Ensemble:
        """The ensemble as it was after `count` stages."""
        names = [stage.member for stage in self.stages[:count]]
        return ensemble_of(self.members[:count], self.stages[count - 1].coefficients, names)

    def to_dict(self) -> dict[str, Any]:
        """Configuration and stages as plain numbers and text: what figure 2 is drawn from."""
        return {
            "config": self.config.as_dict(),
            "threat": str(self.config.threat),
            "bounds": self.config.certificate,
            "chosen": len(self.ensemble.members),
            "stages": [asdict(stage) for stage in self.stages],
        }


def boost(
    config: BoostConfig,
    data: Dataset,
    *,
    heldout: Dataset,
    options: RunOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
    on_stage: Callable[[Stage], None] | None = None,
) -> Boosted:
    """Trains the members of `config` one after another on `data`; finished members are never touched again.

    Args:
        config: stages and how they are added up.
        data: training images; the frozen bounds are of these.
        heldout: images that measure every stage, choose where to stop, and fit the weights with reweight="exact".
        options: of the trainer. With `out`, OUT/NAME/stage-M.safetensors is the ensemble after M stages, and
            OUT/NAME/boosting.json tells the stages; a run found there goes on after its last stage, and within a stage
            from the trainer's last report. `minutes` is for all stages together.
        progress: told about the member in training.
        on_stage: told about every finished stage.
    """
    run = _Boosting(config, data, heldout, options or RunOptions())
    run.resume()
    while run.wants_more():
        run.train_next(progress)
        if on_stage is not None:
            on_stage(run.stages[-1])
    return run.result()


class _Sums(NamedTuple):
    """Stored rows, and what they are rows of: the leading members with these coefficients, on this set."""

    threat: Threat
    coefficients: tuple[float, ...]
    rows: FrozenSum


class _Boosting:
    """A run between two stages."""

    def __init__(self, config: BoostConfig, data: Dataset, heldout: Dataset, options: RunOptions) -> None:
        self.config = _decided(config, data)
        self.options = options
        self.device = options.chosen_device
        self.data = data
        pad = max(stage.shift for stage in config.stages)
        self.shared = DeviceData.of(data.images, data.labels, pad=pad, classes=len(data.classes), device=self.device)
        self.heldout = HeldOut(heldout, config.threat, config.certificate, self.device)
        self.members: list[nn.Module] = []
        self.stages: list[Stage] = []
        self._sums: _Sums | None = None
        self.start = time.monotonic()
        self.folder = None if options.out is None else options.out / config.name

    def resume(self) -> None:
        """Takes up the stages that are finished in the output folder."""
        while self.folder is not None and (file := self._file(len(self.stages) + 1)).exists():
            notes = read_metadata(file).notes
            found = load_model(file)
            if not isinstance(found, Ensemble) or not _fits(notes, self.config, len(self.stages) + 1):
                raise CheckpointError(
                    f"{file}: belongs to another configuration; expected the one that it was started with, or another"
                    " folder"
                )
            stage = notes["stages"][-1]
            self._take(found.members[-1])
            self.stages.append(Stage(**stage | {"coefficients": tuple(stage["coefficients"])}))

    def wants_more(self) -> bool:
        """Whether a stage is left, time is left, and the last `patience` stages were not all in vain."""
        done, patience = len(self.stages), self.config.patience
        if done == len(self.config.stages):
            return False
        if done and self.options.minutes is not None and self._minutes_left() <= 0:
            return False
        return not patience or done - self._best() < patience

    def train_next(self, progress: Callable[[Progress], None] | None) -> None:
        began = time.monotonic()
        config = self.config.stages[len(self.stages)]
        member = BoostedMember(config, self.shared, frozen=self._frozen(config), objective=self.config.objective)
        minutes = None
        if self.options.minutes is not None:
            minutes = max(self._minutes_left(), 0.1) / (len(self.config.stages) - len(self.stages))
        out = None if self.folder is None else self.folder / "stages"
        options = replace(self.options, out=out, minutes=minutes)
        (trained,) = train_members([member], options=options, progress=progress)
        if trained.diverged:
            raise DivergedError(
                f"{config.label}: the loss was not finite in epoch {len(trained.history) + 1}; expected finite numbers:"
                " lower lr, or lengthen warmup and ramp"
            )
        coefficients = (*self._coefficients(), 1.0)
        self._take(trained.model)
        if self.config.reweight == "exact":
            coefficients = self.heldout.fitted_coefficients()
        names = [stage.member for stage in self.stages] + [config.label]
        ensemble = ensemble_of(self.members, coefficients, names)
        alone = [0.0] * (len(self.members) - 1) + [1.0]
        judged, by_itself = self.heldout.judge([ensemble.coefficients().tolist(), alone])
        self.stages.append(
            Stage(
                member=config.label,
                coefficients=coefficients,
                verified_error=judged.verified_error,
                clean_error=judged.clean_error,
                alone_verified_error=by_itself.verified_error,
                loss=trained.history[-1]["loss"],
                size_mb=sum(float32_bytes(part) for part in self.members) / 1e6,
                epochs=trained.config.epochs,
                seconds=time.monotonic() - began,
            )
        )
        self._write(ensemble)

    def result(self) -> Boosted:
        members = tuple(self.members)
        all_stages = Boosted(ensemble_of(members, self._coefficients(), [s.member for s in self.stages]),
                             tuple(self.stages), members, self.config)  # fmt: skip
        return replace(all_stages, ensemble=all_stages.after(self._best()))

    def _best(self) -> int:
        """Number of stages with the lowest held-out verified error."""
        errors = [stage.verified_error for stage in self.stages]
        return errors.index(min(errors)) + 1 if errors else 0

    def _coefficients(self) -> tuple[float, ...]:
        return self.stages[-1].coefficients if self.stages else ()

    def _take(self, model: nn.Module) -> None:
        """Freezes a finished member: a copy on the CPU for the result, one on the device for its bounds."""
        frozen = copy.deepcopy(model).cpu().eval().requires_grad_(False)
        self.members.append(frozen)
        self.heldout.add(copy.deepcopy(frozen).to(self.device))

    def _frozen(self, config: TrainConfig) -> Frozen | None:
        """The sum of the members so far, at the radius that the next one is trained with."""
        coefficients = self._coefficients()
        used = [(m, c) for m, c in zip(self.heldout.members, coefficients, strict=True) if c > 0]
        if not used:
            return None
        if self.config.frozen == "recomputed":
            method = "ibp" if self.config.frozen_method == "ibp" else "crown-ibp"
            return FrozenNetworks.of(*_unzipped(used), self.shared.input_shape, method)
        threat = Threat(config.final_eps, clip=(0.0, 1.0))
        return self._stored_rows(threat, coefficients, used)

    def _stored_rows(
        self, threat: Threat, coefficients: tuple[float, ...], used: Sequence[tuple[nn.Module, float]]
    ) -> FrozenSum:
        """Rows of the sum; where the earlier members keep their coefficients, only the newest are bounded."""
        method = self.config.frozen_method
        sums = self._sums
        if sums is not None and sums.threat == threat and coefficients[: len(sums.coefficients)] == sums.coefficients:
            rows = sums.rows
            done = sum(c > 0 for c in sums.coefficients)
            for member, coefficient in used[done:]:
                rows.add(member, coefficient, self._examples(), threat, method)
        else:
            self._sums = sums = None  # lets go of the rows before new ones are made
            rows = frozen_sum(*_unzipped(used), self._examples(), threat, method,
                              storage=self.config.storage, budget=self.config.budget)  # fmt: skip
        self._sums = _Sums(threat, coefficients, rows)
        return rows

    def _examples(self) -> tuple[Tensor, Tensor]:
        return self.data.images.to(self.device), self.data.labels.to(self.device)

    def _minutes_left(self) -> float:
        assert self.options.minutes is not None
        return self.options.minutes - (time.monotonic() - self.start) / 60

    def _file(self, stage: int) -> Path:
        assert self.folder is not None
        return self.folder / f"stage-{stage}.safetensors"

    def _write(self, ensemble: Ensemble) -> None:
        """The figures first: a stage counts as finished once its network is there."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        result = self.result().to_dict()
        (self.folder / "boosting.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        notes = {"boosting": self.config.as_dict(), "stages": result["stages"]}
        save_model(ensemble, self._file(len(self.stages)), notes, input_shape=self.shared.input_shape)


def _decided(config: BoostConfig, data: Dataset) -> BoostConfig:
    """The configuration with "stored" or "recomputed" in place of "auto"."""
    if config.frozen != "auto":
        return config
    needed = stored_bytes(data.images, len(data.classes) - 1, config.frozen_method, config.storage)
    return replace(config, frozen="recomputed" if config.augments or needed > config.budget else "stored")


def _unzipped(used: Sequence[tuple[nn.Module, float]]) -> tuple[list[nn.Module], list[float]]:
    return [member for member, _ in used], [coefficient for _, coefficient in used]


def _fits(notes: Any, config: BoostConfig, stage: int) -> bool:
    """Whether the stages so far were trained as `config` says (a longer list of stages is fine)."""
    saved = dict(notes.get("boosting", {}))
    wanted = json.loads(json.dumps(config.as_dict()))
    finished = saved.pop("stages", []), wanted.pop("stages")
    for ignored in ("patience", "budget"):
        saved.pop(ignored, None)
        wanted.pop(ignored)
    return saved == wanted and finished[0][:stage] == finished[1][:stage] and len(notes.get("stages", ())) == stage


if __name__ == "__main__":
    from robboost.training.boosting_run import main

    raise SystemExit(main())

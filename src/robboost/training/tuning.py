"""Joint fine-tuning: all members of an ensemble move at once, on the certificate of their sum.

Beyond the paper: fitting weights leaves the members as they are, boosting moves one at a time. Here the loss of a step
is the surrogate of M = sum_t a_t c_t - <radius, |sum_t a_t L_t|> with gradients to every member, so that their slopes
learn to cancel; between epochs the weights a are solved exactly, as in `RobBoost.fit`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from robboost.data import Dataset
from robboost.errors import DivergedError, InputError
from robboost.models import Ensemble, save_model
from robboost.threat import Threat
from robboost.training.boosting_certificate import HeldOut, Judged
from robboost.training.boosting_member import BOUNDS, Objective
from robboost.training.config import TrainConfig
from robboost.training.losses import ESTIMATING
from robboost.training.member import DeviceData
from robboost.training.pool import Progress, RunOptions, train_members
from robboost.training.tuning_member import JointMember, Reweighting

__all__ = ["TuneConfig", "Tuned", "fine_tune"]

# Multiples of 1 / mean |M| that the margins may be scaled by before the surrogate sees them.
_SCALES = tuple(2.0 ** (step / 2) for step in range(-6, 11))


@dataclass(frozen=True)
class TuneConfig:
    """How an ensemble is tuned.

    Attributes:
        train: method (one of `BOUNDS`), radius, epochs, batch, learning rate and so on; its architecture is not read.
            Members are trained already: warmup=0, ramp=0 and a small lr are a good start.
        objective: surrogate of the ensemble's margins.
        reweight_every: epochs between exact fits of the weights on the held-out images; 0: the weights stay.
        damping: share of the old weights that such a fit keeps: a member whose weight were zero could not learn.
        bounds: method of the certificate on held-out images; "": what suits the training.
    """

    train: TrainConfig
    objective: Objective = field(default_factory=Objective)
    reweight_every: int = 5
    damping: float = 0.5
    bounds: str = ""

    def __post_init__(self) -> None:
        if self.train.method not in BOUNDS:
            raise InputError(f"method={self.train.method!r}: expected one of {', '.join(BOUNDS)} (tuning needs lines)")
        if self.train.method in ESTIMATING and self.train.crown_share != 1:
            raise InputError(f"crown_share={self.train.crown_share:g}: expected 1 for method {self.train.method!r}")
        if self.train.batch_norm or self.train.pixel_share != 1:
            raise InputError("batch_norm and pixel_share: expected neither, because the members are finished networks")
        if self.reweight_every < 0:
            raise InputError(f"reweight_every={self.reweight_every}: expected a number of epochs, or 0")
        if not 0 < self.damping <= 1:
            raise InputError(f"damping={self.damping}: expected a number above 0 and at most 1")

    @property
    def threat(self) -> Threat:
        return Threat(self.train.eps, clip=(0.0, 1.0))

    @property
    def certificate(self) -> str:
        return self.bounds or BOUNDS["crown-ibp"]


@dataclass(frozen=True)
class Tuned:
    """The best on held-out images of: tuned members with exact weights, with their last weights, the start itself.

    `chosen` is "exact weights", "last weights" or "start"; `errors` holds the held-out verified and clean error
    (0 to 1) of all three.
    """

    ensemble: Ensemble
    chosen: str
    errors: dict[str, dict[str, float]]
    history: list[dict[str, float]]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and text."""
        weights = (self.ensemble.weights / self.ensemble.scales).tolist()
        return {"chosen": self.chosen, "errors": self.errors, "coefficients": weights, "history": self.history}


def fine_tune(
    ensemble: Ensemble,
    config: TuneConfig,
    data: Dataset,
    *,
    heldout: Dataset,
    options: RunOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Tuned:
    """Trains all members of `ensemble` together on `data`; the ensemble handed in is not changed.

    Args:
        ensemble: the start: a fitted, boosted or plain mix. Members with weight zero are left out.
        config: see `TuneConfig`.
        data: training images; augmentation is allowed, because every bound is computed for each batch.
        heldout: images that fit the weights and choose the result.
        options: of the trainer. With `out`, the state of the run and OUT/NAME.safetensors (the tuned ensemble).
        progress: told about the run.
    """
    options = options or RunOptions()
    device = options.chosen_device
    used = ensemble.pruned()
    pad = config.train.shift
    shared = DeviceData.of(data.images, data.labels, pad=pad, classes=len(data.classes), device=device)
    _, before = _judged(used, config, heldout, device)
    scale = _scale(before, config.objective)
    coefficients = [scale * c for c in used.coefficients().tolist()]
    reweighting = None
    if config.reweight_every:
        reweighting = Reweighting(heldout, config.threat, config.certificate, config.reweight_every, config.damping)
    member = JointMember(config.train, shared, members=list(used.members), coefficients=coefficients,
                         objective=config.objective, reweighting=reweighting)  # fmt: skip
    stages = None if options.out is None else options.out / "stages"
    (trained,) = train_members([member], options=replace(options, out=stages), progress=progress)
    if trained.diverged:
        raise DivergedError(
            f"{config.train.label}: the loss was not finite in epoch {len(trained.history) + 1}; expected finite"
            " numbers: lower lr"
        )
    last = member.ensemble(used.names)
    held, after = _judged(last, config, heldout, device)
    exact = Ensemble(list(last.members), *held.fitted_weights(), names=used.names)
    (refitted,) = held.judge([exact.coefficients().tolist()])
    candidates = {"exact weights": (exact, refitted), "last weights": (last, after), "start": (used, before)}
    chosen = min(candidates, key=lambda name: candidates[name][1].verified_error)
    best = candidates[chosen][0].pruned()
    errors = {
        name: {"verified_error": judged.verified_error, "clean_error": judged.clean_error}
        for name, (_, judged) in candidates.items()
    }
    result = Tuned(best, chosen, errors, trained.history)
    if options.out is not None:
        file = options.out / f"{config.train.label}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        save_model(best, file, {"tuning": result.to_dict()}, input_shape=shared.input_shape)
    return result


def _judged(ensemble: Ensemble, config: TuneConfig, heldout: Dataset, device: torch.device) -> tuple[HeldOut, Judged]:
    held = HeldOut(heldout, config.threat, config.certificate, device)
    for member in ensemble.members:
        held.add(copy.deepcopy(member).to(device).eval())
    (judged,) = held.judge([ensemble.coefficients().tolist()])
    return held, judged


def _scale(start: Judged, objective: Objective) -> float:
    """The multiple of the margins at which the surrogate is lowest on held-out images.

    A certificate does not depend on the size of the logits, a surrogate does: the start should not be spent on finding
    a size.
    """
    unit = 1 / float(start.margins.abs().mean().clamp(min=1e-12))
    return unit * min(_SCALES, key=lambda scale: float(objective(start.margins * (unit * scale))))

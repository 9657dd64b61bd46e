"""What boosting and fine-tuning have to beat: the best member, the average and the best weighting of finished ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from robboost.data import Dataset
from robboost.models import Ensemble
from robboost.threat import Threat
from robboost.training.boosting_certificate import HeldOut, ensemble_of

__all__ = ["Rival", "Rivals", "all_alive", "rivals"]


class Rival(NamedTuple):
    """An ensemble with its held-out verified and clean error (0 to 1)."""

    ensemble: Ensemble
    verified_error: float
    clean_error: float


class Rivals(NamedTuple):
    """fitted: weights as `RobBoost.fit` chooses them on held-out images. best: the member best there, alone."""

    fitted: Rival
    average: Rival
    best: Rival


def rivals(
    pool: Mapping[str, nn.Module], heldout: Dataset, threat: Threat, method: str, device: torch.device
) -> Rivals:
    """Mixes of the members that need no further training; all are fitted and chosen on held-out images alone."""
    held = HeldOut(heldout, threat, method, device)
    for member in pool.values():
        held.add(copy.deepcopy(member).to(device).eval())
    weights, scales = (part.cpu() for part in held.fitted_weights())
    members, names = list(pool.values()), list(pool)
    units = torch.eye(len(members), dtype=torch.float64)
    mixes = torch.cat([torch.stack([weights / scales, 1 / scales]), units])
    fitted, average, *singles = held.judge(mixes.tolist())
    best = min(range(len(members)), key=lambda t: singles[t].verified_error)
    uniform = torch.full_like(weights, 1 / len(members))
    return Rivals(
        Rival(Ensemble(members, weights, scales, names=names).pruned(), *fitted[:2]),
        Rival(Ensemble(members, uniform, scales, names=names), *average[:2]),
        Rival(Ensemble([members[best]], [1.0], names=[names[best]]), *singles[best][:2]),
    )


def all_alive(found: Rivals) -> Ensemble:
    """The fitted mix where every member has weight, else half way from it to the average: without, none could learn."""
    fitted, average = found.fitted.ensemble, found.average.ensemble
    if len(fitted.members) == len(average.members):
        return fitted
    own = dict(zip(fitted.names, _shares(fitted), strict=True))
    plain = dict(zip(average.names, _shares(average), strict=True))
    mixed = [own.get(name, 0.0) + share for name, share in plain.items()]
    return ensemble_of(list(average.members), mixed, average.names)


def _shares(ensemble: Ensemble) -> list[float]:
    coefficients = ensemble.coefficients()
    return list((coefficients / coefficients.sum()).tolist())

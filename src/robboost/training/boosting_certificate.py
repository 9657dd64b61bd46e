"""What a growing ensemble certifies on held-out images, each member bounded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from robboost.data import Dataset
from robboost.fitting import RobBoost
from robboost.mixtures import PoolBounds, pool_bounds, settle
from robboost.models import Ensemble
from robboost.threat import Threat

__all__ = ["HeldOut", "Judged", "ensemble_of", "exact_weights", "fitted_coefficients", "fitted_weights"]


class Judged(NamedTuple):
    """Shares of the held-out images in error (0 to 1), and which are certified [N]."""

    verified_error: float
    clean_error: float
    certified: Tensor


class HeldOut:
    """Held-out images with the bounds of the members so far: adding a member costs its own bounds and no more."""

    def __init__(self, data: Dataset, threat: Threat, method: str, device: torch.device) -> None:
        self.images, self.labels = data.images.to(device), data.labels.to(device)
        self.threat = threat
        self.method = method
        self.members: list[nn.Module] = []
        self._bounds: PoolBounds | None = None

    @property
    def bounds(self) -> PoolBounds:
        """Of all members so far."""
        assert self._bounds is not None
        return self._bounds

    def add(self, member: nn.Module) -> None:
        """`member` lies on the device of the images."""
        found = pool_bounds([member], self.images, self.labels, self.threat, method=self.method)
        old = self._bounds
        if old is not None:
            found = replace(
                found,
                slopes=torch.cat([old.slopes, found.slopes]),
                intercepts=torch.cat([old.intercepts, found.intercepts]),
                logits=torch.cat([old.logits, found.logits]),
            )
        self.members.append(member)
        self._bounds = found

    def judge(self, ensemble: Ensemble) -> Judged:
        """The certificate of `certify(ensemble, ...)`, from bounds that are there already."""
        coefficients = ensemble.coefficients().to(self.images.device)
        (certified,), (correct,) = settle(self.members, self.images, self.bounds, [coefficients])[1:3]
        return Judged(1 - _share(certified), 1 - _share(correct), certified)

    def judge_alone(self, t: int) -> Judged:
        """The certificate of member t by itself."""
        coefficients = torch.zeros(len(self.members), dtype=torch.float64, device=self.images.device)
        coefficients[t] = 1
        (certified,), (correct,) = settle(self.members, self.images, self.bounds, [coefficients])[1:3]
        return Judged(1 - _share(certified), 1 - _share(correct), certified)


def fitted_weights(heldout: HeldOut) -> tuple[Tensor, Tensor]:
    """Exact weights and scales of all members [T], fitted on the held-out images as `RobBoost.fit` does."""
    fitted = RobBoost(heldout.threat, bounds=heldout.method).fit_bounds(heldout.members, heldout.bounds)
    return fitted.weights, fitted.scales


def exact_weights(heldout: HeldOut, kappa: float = 1.0) -> tuple[Tensor, Tensor]:
    """The optimum of the RobBoost loss (paper, equation 8) on the held-out images, and the scales, [T] each.

    One problem and its global optimum; `fitted_weights` also weighs it against other kappa, members and the average.
    """
    fitted = RobBoost(heldout.threat, kappa=kappa, bounds=heldout.method).fit_bounds(heldout.members, heldout.bounds)
    return torch.tensor(fitted.solution.weights, dtype=torch.float64), fitted.scales


def fitted_coefficients(heldout: HeldOut) -> tuple[float, ...]:
    """S a_t / Z_t with the exact weights a and S = sum_t Z_t.

    The plain sum of the members is a_t = Z_t / S, so this scale keeps the size of the margins that it had.
    """
    weights, scales = fitted_weights(heldout)
    return tuple((scales.sum() * weights / scales).tolist())


def _share(mask: Tensor) -> float:
    return float(mask.double().mean())


def ensemble_of(members: Sequence[nn.Module], coefficients: Sequence[float], names: Sequence[str]) -> Ensemble:
    """F = sum_t coefficient_t f_t, divided by the sum of the coefficients (which changes no certificate)."""
    total = sum(coefficients)
    return Ensemble(members, [c / total for c in coefficients], names=names)

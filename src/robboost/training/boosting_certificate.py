"""What a growing ensemble certifies on held-out images, and which weights suit it there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from robboost.data import Dataset
from robboost.fitting import RobBoost
from robboost.mixtures import pool_bounds
from robboost.models import Ensemble
from robboost.proofs import prove, stages
from robboost.threat import Threat

__all__ = ["HeldOut", "Judged", "ensemble_of"]


class Judged(NamedTuple):
    """Shares of the held-out images in error (0 to 1), and the proved margins [N, C-1]."""

    verified_error: float
    clean_error: float
    margins: Tensor


class HeldOut:
    """Held-out images, and the members so far, on one device."""

    def __init__(self, data: Dataset, threat: Threat, method: str, device: torch.device) -> None:
        self.images, self.labels = data.images.to(device), data.labels.to(device)
        self.threat = threat
        self.method = method
        self.members: list[nn.Module] = []

    def add(self, member: nn.Module) -> None:
        """`member` lies on the device of the images."""
        self.members.append(member)

    def judge(self, mixes: Sequence[Sequence[float]]) -> list[Judged]:
        """The certificates (those of `certify`) of mixes of the members, each given by its coefficients [T]."""
        device = self.images.device
        tensors = [torch.tensor(mix, dtype=torch.float64, device=device) for mix in mixes]
        proof = prove(self.members, self.images, self.labels, self.threat, tensors, method=self.method)
        parts = zip(proof.certified, proof.correct, proof.margins, strict=True)
        return [Judged(_missing(certified), _missing(correct), margins) for certified, correct, margins in parts]

    def fitted_weights(self) -> tuple[Tensor, Tensor]:
        """Weights and scales [T], as `RobBoost.fit` chooses them on the held-out images."""
        fitted = self._fit("auto")
        return fitted.weights, fitted.scales

    def exact_weights(self, kappa: float = 1.0) -> tuple[Tensor, Tensor]:
        """The optimum of the RobBoost loss (paper, equation 8) on the held-out images, and the scales, [T] each.

        One problem and its global optimum; `fitted_weights` also weighs it against other kappa, members, the average.
        """
        fitted = self._fit(kappa)
        return torch.tensor(fitted.solution.weights, dtype=torch.float64), fitted.scales

    def fitted_coefficients(self) -> tuple[float, ...]:
        """S a_t / Z_t with the fitted weights a and S = sum_t Z_t.

        The plain sum of the members is a_t = Z_t / S, so this scale keeps the size of the margins that it had.
        """
        weights, scales = self.fitted_weights()
        return tuple((scales.sum() * weights / scales).tolist())

    def _fit(self, kappa: float | str) -> RobBoost:
        first = stages(self.method)[0]
        bounds = pool_bounds(self.members, self.images, self.labels, self.threat, method=first)
        return RobBoost(self.threat, kappa=kappa, bounds=first).fit_bounds(self.members, bounds)


def ensemble_of(members: Sequence[nn.Module], coefficients: Sequence[float], names: Sequence[str]) -> Ensemble:
    """F = sum_t coefficient_t f_t, divided by the sum of the coefficients (which changes no certificate)."""
    total = sum(coefficients)
    return Ensemble(members, [c / total for c in coefficients], names=names)


def _missing(mask: Tensor) -> float:
    return 1 - float(mask.double().mean())

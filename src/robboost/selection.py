"""Which mix to keep: candidates are solved on two thirds of the fit images and judged on the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robboost.errors import InputError
from robboost.intervals import Share
from robboost.mixtures import PoolBounds
from robboost.weights import Solution, WeightProblem, solve, weight_problem

__all__ = ["Candidate", "Limits", "Selection"]

# Every third image judges.
_VALIDATION = 3
_NEGLIGIBLE = 1e-3


@dataclass(frozen=True)
class Candidate:
    """A mix that was considered: its weights [T] and its verified error on the validation part."""

    name: str
    weights: tuple[float, ...]
    verified: Share
    targeted: float

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller is better: examples without a certificate, then pairs."""
        return self.verified.count, self.targeted


@dataclass(frozen=True)
class Limits:
    """Which sets of members a user allows: at most so many, of at most so many megabytes together.

    Attributes:
        sizes: [T], megabytes of each member.
        members: largest number of members with weight; None: any.
        megabytes: largest sum of their sizes; None: any.
    """

    sizes: tuple[float, ...]
    members: int | None = None
    megabytes: float | None = None

    def allow(self, chosen: Sequence[int]) -> bool:
        """Whether these members may have weight together."""
        few = self.members is None or len(chosen) <= self.members
        return few and (self.megabytes is None or sum(self.sizes[t] for t in chosen) <= self.megabytes + 1e-9)


class Selection:
    """The problem on all fit images, its part for solving, and its part for judging.

    Args:
        bounds: of T members on the fit images.
        scales: [T], all positive.
        limits: which members may be used together.
    """

    def __init__(self, bounds: PoolBounds, scales: Tensor, limits: Limits) -> None:
        self.scales = scales.to(bounds.slopes.device)
        self.limits = limits
        position = torch.arange(len(bounds), device=bounds.slopes.device)
        held = position % _VALIDATION == _VALIDATION - 1
        # Too few images to part with: the same ones solve and judge.
        self._judging = bounds.take(position[held]) if bool(held.any()) else bounds
        self._whole = _problem(bounds, self.scales)
        pairs = torch.repeat_interleave(~held, bounds.slopes.shape[2])
        self._solving = self._whole.take_pairs(pairs)
        if not any(limits.allow([t]) for t in range(bounds.members)):
            smallest = min(limits.sizes)
            raise InputError(f"max_megabytes={limits.megabytes}: expected at least {smallest:g}, the smallest member")

    def solve(self, kappa: float, method: str, *, everything: bool) -> Solution:
        """Weights [T] at this kappa, on all fit images or on the solving part.

        Where limits forbid the members found, the one with the least weight leaves, and the rest is solved again, until
        they fit; that set is not proved the best of its size, and `lower_bound` concerns the members that are left.
        """
        problem = (self._whole if everything else self._solving).with_kappa(kappa)
        members = list(range(problem.n_members))
        while True:
            part = problem if len(members) == problem.n_members else problem.take_members(members)
            solution = solve(part, method=method)
            used = [t for t, weight in zip(members, solution.weights, strict=True) if weight > 0]
            if self.limits.allow(used):
                break
            weight_of = dict(zip(members, solution.weights, strict=True))
            # Members that could never be part of an allowed set leave first.
            least = min(used, key=lambda t: (self.limits.allow([t]), weight_of[t]))
            members = [t for t in used if t != least]
        weights = [0.0] * problem.n_members
        for t, weight in zip(members, solution.weights, strict=True):
            weights[t] = weight
        return replace(solution, weights=tuple(weights))

    def judge(self, name: str, weights: Sequence[float]) -> Candidate:
        """The mix's verified error on the validation part."""
        coefficients = torch.tensor(weights, dtype=torch.float64, device=self.scales.device) / self.scales
        margins = self._judging.mix(coefficients).lower
        safe = (margins > 0).all(1) & self._judging.correct(coefficients)
        return Candidate(
            name,
            tuple(float(weight) for weight in weights),
            Share(int((~safe).sum()), len(safe)),
            1 - float((margins > 0).to(torch.float64).mean()),
        )

    def without_small(self, candidate: Candidate) -> Candidate:
        """The same mix without members of negligible weight, where the validation part does not suffer."""
        kept = [weight if weight >= _NEGLIGIBLE else 0.0 for weight in candidate.weights]
        total = sum(kept)
        trimmed = self.judge(candidate.name, [weight / total for weight in kept]) if total > 0 else candidate
        return trimmed if trimmed.rank <= candidate.rank else candidate

    def single(self) -> list[Candidate]:
        """Each member alone that the limits allow."""
        count = len(self.limits.sizes)
        allowed = [t for t in range(count) if self.limits.allow([t])]
        return [self.judge(f"member {t} alone", [float(s == t) for s in range(count)]) for t in allowed]

    def uniform(self) -> list[Candidate]:
        """The plain average, where the limits allow all members."""
        count = len(self.limits.sizes)
        return [self.judge("uniform", [1 / count] * count)] if self.limits.allow(range(count)) else []


def _problem(bounds: PoolBounds, scales: Tensor) -> WeightProblem:
    """Bounds divided by the scales, one row per (example, target) pair."""
    members, count, targets, size = bounds.slopes.shape
    factor = (1 / scales).to(bounds.slopes.dtype)
    radius = bounds.radius if bounds.radius.ndim == 0 else bounds.radius.repeat_interleave(targets, dim=0)
    return weight_problem(
        (bounds.slopes * factor[:, None, None, None]).view(members, count * targets, size),
        (bounds.intercepts / scales[:, None, None]).view(members, count * targets),
        radius,
        norm=bounds.threat.norm,
    )

"""Which mix to keep: candidates are solved on two thirds of the fit images and judged on the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robboost.errors import InputError
from robboost.intervals import Share
from robboost.mixtures import PoolBounds
from robboost.stored import StoredBounds
from robboost.weights import Solution, solve

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

    def __init__(self, bounds: PoolBounds | StoredBounds, scales: Tensor, limits: Limits) -> None:
        self.scales = scales.to(bounds.labels.device)
        self.limits = limits
        position = torch.arange(len(bounds), device=bounds.labels.device)
        held = position % _VALIDATION == _VALIDATION - 1
        # Too few images to part with: the same ones solve and judge.
        self._judging = bounds.take(position[held]) if bool(held.any()) else bounds
        self._whole = bounds.problem(self.scales)
        self._solving = bounds.pairs_of(~held)
        # Margins are concave in the weights: where every member alone reaches kappa, so does every mix. (Bounds on disk
        # were screened when they were written.)
        self._least = torch.full_like(self._solving, -torch.inf, dtype=torch.float64)
        if isinstance(bounds, PoolBounds):
            units = torch.eye(bounds.members, dtype=torch.float64, device=self.scales.device)
            self._least = bounds.lower(units / self.scales).amin(0).flatten()
        if not any(limits.allow([t]) for t in range(bounds.members)):
            smallest = min(limits.sizes)
            raise InputError(f"max_megabytes={limits.megabytes}: expected at least {smallest:g}, the smallest member")

    def solve(self, kappa: float, method: str, *, everything: bool) -> Solution:
        """Weights [T] at this kappa, on all fit images or on the solving part.

        Pairs on which every member reaches kappa are left out: they add nothing to the loss of any mix.

        Where limits forbid the members found, the one with the least weight leaves, and the rest is solved again, until
        they fit; that set is not proved the best of its size, and `lower_bound` concerns the members that are left.
        """
        costly = ~(self._least >= kappa)
        if not everything:
            costly &= self._solving
        if not bool(costly.any()):
            costly[0] = True  # every mix is optimal; the solver wants one pair to say so
        problem = (self._whole if bool(costly.all()) else self._whole.only(costly)).with_kappa(kappa)
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
        return self._judge({name: weights})[0]

    def _judge(self, mixes: Mapping[str, Sequence[float]]) -> list[Candidate]:
        """Several mixes together: bounds on disk are read once."""
        weights = torch.tensor(list(mixes.values()), dtype=torch.float64, device=self.scales.device)
        margins = self._judging.lower(weights / self.scales)
        candidates = []
        for n, (name, chosen) in enumerate(mixes.items()):
            safe = (margins[n] > 0).all(1) & self._judging.correct(weights[n] / self.scales)
            targeted = 1 - float((margins[n] > 0).to(torch.float64).mean())
            share = Share(int((~safe).sum()), len(safe))
            candidates.append(Candidate(name, tuple(float(weight) for weight in chosen), share, targeted))
        return candidates

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
        return self._judge({f"member {t} alone": [float(s == t) for s in range(count)] for t in allowed})

    def uniform(self) -> list[Candidate]:
        """The plain average, where the limits allow all members."""
        count = len(self.limits.sizes)
        return [self.judge("uniform", [1 / count] * count)] if self.limits.allow(range(count)) else []

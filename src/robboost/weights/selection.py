"""Choices on a validation part: kappa, a 0-1 refinement, and dropping small weights.

The loss is not verified error: at kappa = 1 its exact optimum can be worse than the best member. So kappa is chosen by
verified error on pairs that the weights were not fitted on, and what is chosen is never worse there than the best
member or equal weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from robboost.errors import InputError
from robboost.weights.oracle import fast_pass
from robboost.weights.problem import Array, WeightProblem, check_weights
from robboost.weights.screening import member_margins, verified_error
from robboost.weights.solution import Solution, SolverSettings
from robboost.weights.solve import solve
from robboost.weights.verify import margins

__all__ = ["KAPPAS", "Candidate", "Choice", "Part", "prune_weights", "refine_weights", "select_weights"]

KAPPAS = (1.0, 0.3, 0.1, 0.03)
# Step lengths of the 0-1 refinement, and how often it may move.
_STEPS, _MOVES = (0.2, 0.1, 0.05, 0.02), 30


@dataclass(frozen=True, eq=False)
class Part:
    """Pairs with the example [n] that each belongs to: what verified error is counted on."""

    problem: WeightProblem
    example: Array

    def error(self, weights: Array) -> float:
        """Verified error of a mix, from float64 margins."""
        return verified_error(margins(self.problem, weights), self.example)


@dataclass(frozen=True)
class Candidate:
    """Weights [T], their verified error on the validation part, and where they come from."""

    name: str
    weights: tuple[float, ...]
    error: float
    kappa: float | None = None
    solution: Solution | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Choice:
    """The candidate with the least verified error on the validation part, and all that were compared."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]

    @property
    def weights(self) -> tuple[float, ...]:
        return self.chosen.weights

    def __str__(self) -> str:
        lines = [f"{'*' if c is self.chosen else ' '} {c.name:<16} {c.error:.4%}" for c in self.candidates]
        return "\n".join(["verified error on the validation part:", *lines])


def select_weights(
    fit: WeightProblem,
    validation: Part,
    *,
    kappas: Sequence[float] = KAPPAS,
    method: str = "auto",
    settings: SolverSettings | None = None,
) -> Choice:
    """Fits weights at each kappa on `fit` and keeps what certifies most of `validation`.

    Guaranteed: on the validation part, verified error is at most that of the best member and of equal weights (both
    compete). Not guaranteed: the same on other examples. Ties go to the larger kappa, then to equal weights.
    """
    members = fit.n_members
    if validation.problem.n_members != members:
        raise InputError(f"validation part has {validation.problem.n_members} members: expected {members} as in fit")
    if not kappas:
        raise InputError("kappas is empty: expected at least one number above 0")
    candidates = []
    for kappa in sorted(kappas, reverse=True):
        found = solve(fit.with_kappa(kappa), method=method, settings=settings)
        error = validation.error(found.weights)
        candidates.append(Candidate(f"kappa {kappa:g}", found.weights, error, kappa, found))
    equal = (1.0 / members,) * members
    candidates.append(Candidate("equal weights", equal, validation.error(equal)))
    corners = member_margins(validation.problem)
    errors = [verified_error(corners[t], validation.example) for t in range(members)]
    best = min(range(members), key=errors.__getitem__)
    alone = tuple(float(t == best) for t in range(members))
    candidates.append(Candidate(f"member {best} alone", alone, errors[best]))
    return Choice(chosen=min(candidates, key=lambda c: c.error), candidates=tuple(candidates))


def refine_weights(weights: Array, fit: Part, validation: Part) -> Candidate:
    """Lowers the verified error itself, by steps towards and away from single members.

    Verified error is a step function without slopes, so this is a local search on `fit`; its result is taken only if
    verified error on `validation` falls, otherwise the weights come back as they were.
    """
    device = fit.problem.device
    before = check_weights(weights, fit.problem.n_members, device)
    current, error = before, _fast_error(fit, before)
    moves = 0
    for step in _STEPS:
        improved = True
        while improved and moves < _MOVES:
            improved = False
            for other in _neighbours(current, step):
                found = _fast_error(fit, other)
                if found < error:
                    current, error, improved = other, found, True
                    moves += 1
    start = validation.error(before)
    end = validation.error(current)
    if end < start:
        return Candidate("refined", tuple(current.tolist()), end)
    return Candidate("not refined", tuple(before.tolist()), start)


def prune_weights(weights: Array, part: Part, *, threshold: float = 0.01) -> Candidate:
    """Sets weights below `threshold` to zero and scales the others up, if verified error on `part` does not rise.

    Tried from the smallest weight on; the largest number of members that can go, goes.
    """
    a = check_weights(weights, part.problem.n_members, part.problem.device)
    start = part.error(a)
    small = [int(t) for t in a.argsort() if 0 < a[t] < threshold]
    for count in range(len(small), 0, -1):
        kept = a.clone()
        kept[small[:count]] = 0.0
        if float(kept.sum()) <= 0:
            continue
        kept = kept / kept.sum()
        end = part.error(kept)
        if end <= start:
            return Candidate(f"pruned by {count}", tuple(kept.tolist()), end)
    return Candidate("not pruned", tuple(a.tolist()), start)


def _fast_error(part: Part, weights: torch.Tensor) -> float:
    """Verified error up to float32 rounding: good enough to search by."""
    norms = fast_pass(part.problem, weights).norms
    return verified_error(weights @ part.problem.intercepts - norms, part.example)


def _neighbours(weights: torch.Tensor, step: float) -> list[torch.Tensor]:
    """Steps towards each member, and away from each that has weight."""
    found = []
    for t in range(weights.numel()):
        corner = torch.zeros_like(weights)
        corner[t] = 1.0
        for length in (step, -step):
            moved = (weights + length * (corner - weights)).clamp(min=0)
            if float(moved.sum()) > 0 and not torch.equal(moved, weights):
                found.append(moved / moved.sum())
    return found

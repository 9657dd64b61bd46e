"""method="coordinate": the paper's coordinate descent (section 3.3) with the corrected formulas."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from robboost.errors import UnsupportedOperationError
from robboost.weights.bundle import Bundle
from robboost.weights.line import Rows, minimise_line
from robboost.weights.optimum import Clock, finish
from robboost.weights.oracle import checked_pass
from robboost.weights.problem import WeightProblem
from robboost.weights.solution import Solution, SolverSettings, Status

__all__ = ["solve_coordinate"]


def solve_coordinate(problem: WeightProblem, settings: SolverSettings) -> Solution:
    """Sweeps over the members, each weight set to its exact minimiser while the others keep their proportions.

    It starts from equal weights and can stick away from the optimum: the loss has kinks that no single coordinate
    descends from. The gap says by how much. One step reads the member's slopes and the running mix, 2 / T of a pass.
    """
    if problem.norm != "linf":
        raise UnsupportedOperationError(
            f"method 'coordinate' with norm {problem.norm!r}: the paper's step is for linf, so use method 'auto'"
        )
    clock = Clock(settings)
    members, device = problem.n_members, problem.device
    generator = torch.Generator().manual_seed(settings.seed)
    a = torch.full((members,), 1.0 / members, dtype=torch.float64, device=device)
    bundle = Bundle(problem)
    status: Status | None = None
    for epoch in range(settings.epochs + 1):
        bundle.add(a, 0.0, checked_pass(problem, a, threads=settings.threads))
        clock.passes += 1
        clock.note(bundle.best_value, 0.0)
        status = "stalled" if epoch == settings.epochs else clock.expired(reserve=2)
        if status is not None or members == 1:
            break
        order = torch.randperm(members, generator=generator) if settings.order == "random" else torch.arange(members)
        mixed = _mix(problem, a)
        clock.passes += 1
        for t in order.tolist():
            a, mixed, reads = _step(problem, a, mixed, t)
            clock.passes += reads
    bundle.improve_bound()
    clock.note(bundle.best_value, bundle.bound)
    return finish(problem, bundle, clock, method="coordinate", status=status or "stalled")


def _step(
    problem: WeightProblem, a: torch.Tensor, mixed: torch.Tensor, t: int
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """One exact coordinate step; returns the weights, their mix [n, d] and the share of a pass that was read."""
    others = a.clone()
    others[t] = 0.0
    rest = float(others.sum())
    share = 2.0 / problem.n_members
    if rest > 0:
        b = others / rest
        outside = (mixed - a[t] * _member(problem, t)) / rest
        reads = share
    else:
        # All weight on t: the paper's direction is undefined there, so go towards the average of the others.
        b = torch.full_like(a, 1.0 / (problem.n_members - 1))
        b[t] = 0.0
        outside = _mix(problem, b)
        reads = 1.0
    c = problem.intercepts
    gamma, mu = -(c[t] - b @ c), problem.kappa - b @ c

    def lines() -> Iterator[Rows]:
        step = max(1, 2**22 // problem.dim)
        for start in range(0, problem.n_pairs, step):
            part = slice(start, start + step)
            yield Rows(gamma[part], mu[part], _member(problem, t, part) - outside[part], outside[part])

    found = minimise_line(lines, n_rows=problem.n_pairs * problem.dim)
    moved = (1.0 - found.position) * b
    moved[t] = found.position
    moved = moved / moved.sum()
    return moved, (1.0 - found.position) * outside + found.position * _member(problem, t), reads + found.reads * share


def _member(problem: WeightProblem, t: int, part: slice | None = None) -> torch.Tensor:
    rows = slice(None) if part is None else part
    radius = problem.radius[rows] if problem.radius.ndim == 2 else problem.radius
    return problem.slopes[t, rows].to(torch.float64) * radius


def _mix(problem: WeightProblem, weights: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.einsum("t,tmd->md", weights, columns) for _, columns in problem.chunks()])

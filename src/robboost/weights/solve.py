"""The public way in: arrays to weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from robboost.errors import InputError
from robboost.weights.bundle import Bundle
from robboost.weights.coordinate import solve_coordinate
from robboost.weights.optimum import Clock, finish, solve_auto
from robboost.weights.oracle import checked_pass
from robboost.weights.problem import Array, WeightProblem, weight_problem
from robboost.weights.screening import member_margins
from robboost.weights.solution import Solution, SolverSettings, check_method

__all__ = ["solve", "solve_weights"]


def solve_weights(
    slopes: Array,
    intercepts: Array,
    radius: Array | float,
    *,
    kappa: float = 1.0,
    norm: str = "linf",
    method: str = "auto",
    settings: SolverSettings | None = None,
) -> Solution:
    """Weights of the mix with the smallest RobBoost loss, and a proof of how near the optimum they are.

        minimise g(a) = sum_n max(0, kappa - c_n . a + ||sum_t a_t radius * slope_tn||_q)   over the simplex

    (equations 7 and 8 of the paper; q dual to `norm`). The weights multiply the members as they are handed in: divide
    slopes and intercepts by a positive scale per member before, where members differ in scale (see `normalisers`).

    Args:
        slopes: [T, n, d] or [T, n, *input], NumPy (memory-mapped too) or torch, CPU or GPU.
        intercepts: [T, n]; with a box, already re-centred: `c + <slope, centre - x>`.
        radius: scalar, [d] or [n, d].
        kappa: margin from which on a pair costs nothing.
        norm: norm of the threat, "linf", "l2" or "l1".
        method: "auto" (global optimum with a certified gap), "coordinate" (the paper's descent, corrected; linf only)
            or "uniform" (equal weights, with the gap that they leave).
        settings: when to stop, and on what to run.

    The gap is guaranteed, whatever the status. It concerns the loss on these pairs, not verified error on others.
    """
    problem = weight_problem(slopes, intercepts, radius, kappa=kappa, norm=norm)
    return solve(problem, method=method, settings=settings)


def solve(problem: WeightProblem, *, method: str = "auto", settings: SolverSettings | None = None) -> Solution:
    """`solve_weights` for a problem that was checked before."""
    chosen = check_method(method)
    limits = settings or SolverSettings()
    if limits.eliminate != "none":
        if problem.slopes.is_meta:
            raise InputError(f"eliminate={limits.eliminate!r} needs the slopes in memory: expected 'none' for a stream")
        part = _remaining(problem, limits.eliminate)
        found = solve(part, method=method, settings=replace(limits, eliminate="none"))
        # Telling the pairs apart took a read of all of them.
        passes = 1 + found.passes * part.n_pairs / problem.n_pairs
        return replace(found, passes=passes, eliminated=problem.n_pairs - part.n_pairs)
    if chosen == "auto":
        return solve_auto(problem, limits)
    if chosen == "coordinate":
        if problem.slopes.is_meta:
            raise InputError("method='coordinate' needs the slopes in memory: expected 'auto' for a streamed problem")
        return solve_coordinate(problem, limits)
    clock, bundle = Clock(limits), Bundle(problem)
    equal = torch.full((problem.n_members,), 1.0 / problem.n_members, dtype=torch.float64, device=problem.device)
    bundle.add(equal, 0.0, checked_pass(problem, equal, threads=limits.threads))
    clock.passes += 1
    bundle.improve_bound()
    return finish(problem, bundle, clock, method="uniform", status="not-optimised")


def _remaining(problem: WeightProblem, rule: str) -> WeightProblem:
    """The problem without the pairs that `rule` eliminates; the first pair stays if all would go."""
    corners = member_margins(problem)
    gone = (corners >= problem.kappa).all(0)
    if rule == "paper":
        gone = gone | (corners > 0).all(0) | ~(corners > 0).any(0)
    if bool(gone.all()):
        gone[0] = False
    return problem.take_pairs(~gone)

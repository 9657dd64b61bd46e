"""method="auto": the global optimum with a certified gap."""

from __future__ import annotations

import time

import torch

from robboost.weights.bundle import Bundle, checked_pass, solution_from
from robboost.weights.problem import WeightProblem
from robboost.weights.solution import Progress, Solution, SolverSettings, Status

__all__ = ["solve_auto"]


def solve_auto(problem: WeightProblem, settings: SolverSettings) -> Solution:
    """Minimises the loss until the certified gap is reached, or a limit."""
    began = time.perf_counter()
    bundle = Bundle(problem)
    current = bundle.best
    history: list[Progress] = []
    status: Status = "pass-limit"
    passes = 0
    while passes + 1 < max(2, settings.max_passes):
        bundle.add(current, 0.0, checked_pass(problem, current))
        passes += 1
        model = bundle.improve_bound(tolerance=0.1 * settings.gap)
        history.append(Progress(passes, time.perf_counter() - began, bundle.best_value, bundle.bound))
        if bundle.gap <= 0.5 * settings.gap:
            status = "optimal"
            break
        if time.perf_counter() - began > settings.max_seconds:
            status = "time-limit"
            break
        current = torch.from_numpy(model.weights).to(current)
    return solution_from(
        problem, bundle, settings, method="auto", status=status, passes=passes, began=began, history=history
    )

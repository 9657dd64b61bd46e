"""The passes made so far: best weights, and the best lower bound that their minorants prove together."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from robboost.errors import InputError
from robboost.weights.master import ModelMinimum, minimise_model
from robboost.weights.oracle import Pass, reference_pass
from robboost.weights.problem import WeightProblem
from robboost.weights.solution import Method, Progress, Solution, SolverSettings, Status, relative_gap
from robboost.weights.verify import DualPoint, recompute

__all__ = ["Bundle", "checked_pass", "solution_from"]


class Bundle:
    """Cuts of every pair from every pass, kept apart so that each pair chooses its own mixture of them."""

    def __init__(self, problem: WeightProblem) -> None:
        self.problem = problem
        self.points: list[tuple[torch.Tensor, float]] = []
        self.cuts: list[np.ndarray[Any, Any]] = []
        self.best = torch.full(
            (problem.n_members,), 1.0 / problem.n_members, dtype=torch.float64, device=problem.device
        )
        self.best_value = float("inf")
        self.bound = 0.0
        self.proof: tuple[DualPoint, ...] = ()

    def add(self, weights: torch.Tensor, width: float, result: Pass) -> None:
        problem = self.problem
        value = float((problem.kappa - weights @ problem.intercepts + result.norms).clamp(min=0).sum())
        if value < self.best_value:
            self.best, self.best_value = weights, value
        self.points.append((weights, width))
        self.cuts.append((result.slopes - problem.intercepts.T).cpu().numpy())

    def improve_bound(self, tolerance: float = 1e-9) -> ModelMinimum:
        """Minimises the model made of all cuts; its multipliers are a proof."""
        slopes = np.stack(self.cuts, axis=1)
        constants = np.full(slopes.shape[:2], self.problem.kappa)
        model = minimise_model(constants, slopes, np.zeros(self.problem.n_members), tolerance=tolerance)
        mu = model.multipliers
        bound = float((mu * constants).sum() + np.einsum("gk,gkt->t", mu, slopes).min())
        if bound > self.bound:
            self.bound = bound
            self.proof = tuple(
                DualPoint(weights, width, torch.from_numpy(mu[:, k].copy()))
                for k, (weights, width) in enumerate(self.points)
            )
        return model

    @property
    def gap(self) -> float:
        return relative_gap(self.best_value, self.bound)


def checked_pass(problem: WeightProblem, weights: torch.Tensor, width: float = 0.0) -> Pass:
    """One pass that refuses slopes that are not numbers."""
    result = reference_pass(problem, weights, width)
    finite = torch.isfinite(result.norms)
    if not bool(finite.all()):
        pair = int((~finite).nonzero()[0, 0])
        raise InputError(f"slopes of pair {pair} hold NaN or infinity: expected finite numbers")
    return result


def solution_from(
    problem: WeightProblem,
    bundle: Bundle,
    settings: SolverSettings,
    *,
    method: Method,
    status: Status,
    passes: float,
    began: float,
    history: list[Progress],
) -> Solution:
    """Recomputes loss and bound from the arrays; a status of "optimal" is given by that gap alone."""
    loss, lower = recompute(problem, bundle.best, bundle.proof)
    lower = min(lower, loss)
    gap = relative_gap(loss, lower)
    if gap <= settings.gap:
        status = "optimal"
    elif status == "optimal":
        status = "stalled"
    return Solution(
        weights=tuple(bundle.best.tolist()),
        objective=loss,
        lower_bound=lower,
        gap=gap,
        status=status,
        passes=passes + 1,
        seconds=time.perf_counter() - began,
        method=method,
        kappa=problem.kappa,
        norm=problem.norm,
        n_pairs=problem.n_pairs,
        history=tuple(history),
    )

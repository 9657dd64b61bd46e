"""Loss and lower bound recomputed in float64 from the arrays, outside every solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from robboost.weights.oracle import evaluate_columns
from robboost.weights.problem import Array, WeightProblem, check_weights

__all__ = ["DualPoint", "margins", "objective", "recompute"]


@dataclass(frozen=True, eq=False)
class DualPoint:
    """A part of a proof: pair n's minorant at `weights` and `width` (see `Pass`), taken `multipliers[n]` times.

    For multipliers that are not negative and sum to at most 1 on every pair, over all points of a proof,

        g(b) >= sum_n lambda_n (kappa - c_n . b + <d_n, A_n b>)   for every b on the simplex,

    so the right side's minimum over the simplex, which lies at a vertex, bounds the loss of every mix from below.
    """

    weights: torch.Tensor
    width: float
    multipliers: torch.Tensor


def margins(problem: WeightProblem, weights: Array) -> torch.Tensor:
    """Certified margins [n] of a mix, `M_n(a) = c_n . a - ||A_n a||_q` (equation 7), float64.

    Positive means certified on that pair, zero or NaN does not.
    """
    a = check_weights(weights, problem.n_members, problem.device)
    parts = [evaluate_columns(columns, a, 0.0, problem.norm).norms for _, columns in problem.chunks()]
    return a @ problem.intercepts - torch.cat(parts)


def objective(problem: WeightProblem, weights: Array) -> float:
    """The loss `g(a) = sum_n max(0, kappa - M_n(a))` (equation 8), float64."""
    return float((problem.kappa - margins(problem, weights)).clamp(min=0).sum())


def recompute(problem: WeightProblem, weights: torch.Tensor, proof: Sequence[DualPoint]) -> tuple[float, float]:
    """Loss of `weights` and the lower bound that `proof` gives, both in float64 from the arrays, in one read.

    Multipliers that break their rule are scaled until they keep it, so a careless solver can weaken the bound but
    never falsify it. An a-priori bound of the rounding of these very sums is subtracted. An empty proof gives 0.
    """
    a = weights.to(device=problem.device, dtype=torch.float64)
    points = [
        (p.weights.to(a), p.width, p.multipliers.to(a).clamp(min=0).nan_to_num(nan=0.0, posinf=1.0)) for p in proof
    ]
    if points:
        excess = torch.stack([m for _, _, m in points]).sum(0).clamp(min=1.0)
        points = [(w, width, m / (excess * (1 + 1e-15))) for w, width, m in points]
    loss = torch.zeros((), dtype=torch.float64, device=a.device)
    constant, absolute = torch.zeros_like(loss), torch.zeros_like(loss)
    linear = torch.zeros_like(a)
    for part, columns in problem.chunks():
        c = problem.intercepts[:, part]
        norms = evaluate_columns(columns, a, 0.0, problem.norm).norms
        loss += (problem.kappa - a @ c + norms).clamp(min=0).sum()
        for w, width, multipliers in points:
            share = multipliers[part]
            slopes = evaluate_columns(columns, w, width, problem.norm).slopes
            constant += problem.kappa * share.sum()
            linear += share @ slopes - c @ share
            absolute += share @ (slopes.abs().amax(1) + c.abs().amax(0) + problem.kappa)
    bound = float(constant + linear.min())
    # Error of a float64 dot product of length d, then of a sum over pairs (torch sums in blocks, well below sqrt(n)).
    rounding = 2.0**-52 * (problem.dim + 64) * float(absolute)
    return float(loss), max(0.0, bound - rounding)

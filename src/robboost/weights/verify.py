"""Loss and lower bound recomputed in float64 from the arrays, outside every solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from robboost.observability import span
from robboost.weights.oracle import evaluate_columns, fast_pass
from robboost.weights.problem import Array, WeightProblem, check_weights

# A run of pairs that fits into a last-level cache.
_RUN_BYTES = 8 * 2**20

__all__ = ["DualPoint", "Recomputed", "margins", "objective", "recompute"]


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
    none = torch.zeros(0, dtype=torch.float64, device=problem.device)
    return a @ problem.intercepts - problem.whole(torch.cat([none, *parts]))


def objective(problem: WeightProblem, weights: Array) -> float:
    """The loss `g(a) = sum_n max(0, kappa - M_n(a))` (equation 8), float64."""
    return float((problem.kappa - margins(problem, weights)).clamp(min=0).sum())


@dataclass(frozen=True)
class Recomputed:
    """Loss, lower bound, and the passes that they took."""

    loss: float
    bound: float
    passes: int


@span("recomputing the proof")
def recompute(
    problem: WeightProblem, weights: torch.Tensor, proof: Sequence[DualPoint], *, threads: int = 1
) -> Recomputed:
    """Loss of `weights` and the lower bound that `proof` gives, both in float64 from the arrays.

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
    loss, constant, absolute, runs, longest = 0.0, 0.0, 0.0, 0.0, 0.0
    linear = torch.zeros_like(a)
    # Runs that stay in a cache are read from memory once, however many points there are.
    step = problem.n_pairs if a.is_cuda else max(1, _RUN_BYTES * problem.n_pairs // problem.nbytes)
    # The last pass is often both the answer and the proof: then one evaluation serves.
    shared = next((k for k, (w, _, _) in enumerate(points) if torch.equal(w, a)), None)
    for part, run in problem.runs(step):
        c = run.intercepts
        runs, longest = runs + 1, max(longest, float(run.n_pairs))
        read = [fast_pass(run, w, width, double=True, threads=threads) for w, width, _ in points]
        norms = read[shared].norms if shared is not None else fast_pass(run, a, double=True, threads=threads).norms
        loss += float((run.kappa - a @ c + norms).clamp(min=0).sum())
        for result, (_, _, multipliers) in zip(read, points, strict=True):
            share = multipliers[part]
            constant += run.kappa * float(share.sum())
            linear += share @ result.slopes - c @ share
            if result.sizes is None:
                raise RuntimeError("a pass with float64 sums left out their magnitudes")
            absolute += float(share @ (result.sizes + c.abs().amax(0) + run.kappa))
    # All of it together, so that every process comes to the same numbers.
    sums = problem.total(torch.cat([linear.new_tensor([loss, constant, absolute, runs, longest]), linear]))
    loss, constant, absolute, runs, longest = sums[:5].tolist()
    linear = sums[5:]
    bound = constant + float(linear.min())
    # Error of float64 dot products of length d, of their sums over a run of pairs, and of those over runs and points,
    # relative to the magnitudes of what is summed (Higham, Accuracy and Stability of Numerical Algorithms, 4.2).
    terms = problem.dim + longest + runs * len(points) + 64
    rounding = 2.0**-52 * terms * absolute
    reads = len(points) + (shared is None) if a.is_cuda else 1
    return Recomputed(loss, max(0.0, bound - rounding), reads)

"""One pass over the slopes: the norm of every pair's mixed column, and a dual-feasible minorant of it.

This is the plain PyTorch form, in float64; the compiled kernels compute the same in less time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from robboost.weights.problem import Norm, WeightProblem

__all__ = ["Pass", "evaluate_columns", "reference_pass"]


@dataclass(frozen=True, eq=False)
class Pass:
    """What one pass at weights a returns, pair by pair (float64, on the device of the slopes).

    For any d with dual norm at most 1, `<d, A_n b> <= ||A_n b||_q` for every b, with near equality at b = a for the d
    chosen here. So `slopes[n] . b` is a linear minorant of the norm, valid everywhere.

    Attributes:
        norms: [n], ||A_n a||_q.
        slopes: [n, T], A_n^T d.
    """

    norms: torch.Tensor
    slopes: torch.Tensor


def evaluate_columns(columns: torch.Tensor, weights: torch.Tensor, width: float, norm: Norm) -> Pass:
    """One pass over columns [T, m, d] in float64.

    `width` smooths the minorant: d = clip(A a / width, -1, 1) for l_inf threats, A a / max(||A a||, width) for l_2. At
    width 0 it is a subgradient. For l_1 the minorant is the single largest entry, whatever the width.
    """
    mixed = torch.einsum("t,tmd->md", weights, columns)
    if norm == "linf":
        norms = mixed.abs().sum(1)
        dual = (mixed / width).clamp(-1.0, 1.0) if width > 0 else mixed.sign()
    elif norm == "l2":
        norms = torch.linalg.vector_norm(mixed, dim=1)
        # The clamp keeps 0 / 0 out; 0 is a valid d there.
        dual = mixed / norms.clamp(min=max(width, torch.finfo(torch.float64).tiny))[:, None]
    else:
        norms, where = mixed.abs().max(dim=1)
        dual = torch.zeros_like(mixed)
        dual.scatter_(1, where[:, None], mixed.gather(1, where[:, None]).sign())
    return Pass(norms=norms, slopes=torch.einsum("md,tmd->mt", dual, columns))


def reference_pass(problem: WeightProblem, weights: torch.Tensor, width: float = 0.0) -> Pass:
    """One pass over a whole problem, in chunks, in float64: the twin that the kernels are checked against."""
    parts = [evaluate_columns(columns, weights, width, problem.norm) for _, columns in problem.chunks()]
    return Pass(norms=torch.cat([p.norms for p in parts]), slopes=torch.cat([p.slopes for p in parts]))

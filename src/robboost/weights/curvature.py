"""Curvature of the loss from a sample of pairs, and how wide the minorants may be smoothed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from robboost.observability import span
from robboost.weights.master import Vector
from robboost.weights.problem import WeightProblem

__all__ = ["Curvature", "estimate_curvature"]

# Pairs that are read: for so many rows, within limits, and never more than this share of the pairs that cost something.
_ROWS, _FEWEST, _MOST, _PART = 200_000, 64, 600, 8
# Small problems are read whole, if there are so many rows per weight that steps gain more than the read costs.
_WHOLE = 1500
# Rows near zero from which the curvature of an l_1 norm is read: this share, and at least so many per weight.
_SHARE, _ROWS_PER_MEMBER = 0.03, 30
# Of the rows read, the most that may be called near zero.
_NEAR = 0.1
# Of the sample, so much at a time in float64: on a GPU, where calls cost more than memory, all of it.
_CHUNK_BYTES = {"cpu": 2**21, "cuda": 2**28}


@dataclass(frozen=True, eq=False)
class Curvature:
    """An estimate for steps, never for proofs.

    Attributes:
        matrix: [T, T], second derivative of the norms' sum over the pairs that cost something, averaged over kinks.
        width: smoothing at which the minorants of all pairs together stay within the loss that was allowed.
        passes: the share of a pass that was read.
    """

    matrix: Vector
    width: float
    passes: float


@span("curvature from a sample")
def estimate_curvature(
    problem: WeightProblem, weights: torch.Tensor, costs: torch.Tensor, allowed: float
) -> Curvature | None:
    """Curvature at `weights` from pairs spread evenly over those with `costs` [n] above zero.

    A sum of very many |u_i| is nearly smooth: its second derivative is the density of rows at u = 0. None where there
    is nothing to go by: too few rows for a density, or a norm that is a maximum (l_1 threats), which has none.
    """
    active = (costs > 0).nonzero()[:, 0]
    if problem.norm == "l1" or active.numel() == 0:
        return None
    count = min(_MOST, max(_FEWEST, _ROWS // problem.dim), active.numel() // _PART)
    if count < _FEWEST and active.numel() * problem.dim >= _WHOLE * problem.n_members:
        count = min(_FEWEST, active.numel())
    wanted = max(int(_SHARE * count * problem.dim), _ROWS_PER_MEMBER * problem.n_members)
    if problem.norm == "l2":
        # Every pair is smooth by itself, so the sample need only stand for the others.
        count = min(_MOST, max(_FEWEST, _ROWS // problem.dim), active.numel())
    elif count == 0 or wanted > _NEAR * count * problem.dim:
        return None
    index = active[torch.linspace(0, active.numel() - 1, count, device=active.device).round().long()]
    sample = problem.take_pairs(index)
    # Few pairs in float64 at a time: the sample is as large as what a stream holds otherwise.
    step = max(1, _CHUNK_BYTES.get(problem.device.type, 2**28) // (8 * problem.n_members * problem.dim))
    parts = [slice(start, min(start + step, count)) for start in range(0, count, step)]
    factor = active.numel() / count
    passes = count / problem.n_pairs
    if problem.norm == "l2":
        matrix = torch.stack([_smooth(sample.columns(part), weights) for part in parts]).sum(0)
        return Curvature(matrix=(factor * matrix).cpu().numpy(), width=0.0, passes=passes)
    near, inside = _kinks(sample, parts, weights, wanted)
    if near.numel() == 0 or float(near[-1]) <= 0:
        return None
    matrix = factor / float(near[-1]) * (inside @ inside.T)
    # Smoothing at h loses sum over |u| < h of |u| (1 - |u| / h); take the widest h on the sample within its share.
    lost = factor * (near.cumsum(0) - (near**2).cumsum(0) / near.clamp(min=1e-300))
    fitting = int((lost <= allowed).sum())
    width = float(near[fitting - 1]) if fitting > 0 else 0.0
    return Curvature(matrix=matrix.cpu().numpy(), width=width, passes=passes)


def _smooth(columns: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Second derivative [T, T] of the sum of l_2 norms of mixed columns [T, m, d]."""
    mixed = torch.einsum("t,tmd->md", weights, columns)
    # A mix that cancels is a kink, whose curvature is without bound: capped by the size of what cancels.
    sizes = torch.linalg.vector_norm(columns, dim=2).amax(0)
    norms = torch.linalg.vector_norm(mixed, dim=1)
    norms = torch.where(sizes > 0, torch.maximum(norms, 1e-4 * sizes), 1.0)
    scaled = columns / norms.sqrt()[:, None]
    slopes = torch.einsum("tmd,md->mt", columns, mixed) / (norms**1.5)[:, None]
    return torch.einsum("tmd,smd->ts", scaled, scaled) - slopes.T @ slopes


def _kinks(
    sample: WeightProblem, parts: list[slice], weights: torch.Tensor, wanted: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `wanted` mixed rows nearest to zero: their sizes [k], ascending, and the rows themselves [T, k]."""
    sizes, rows = [], []
    for part in parts:
        columns = sample.columns(part).flatten(1)
        size = (weights @ columns).abs()
        # Rows without any slope (dead pixels) have no part in the kinks.
        size[(columns == 0).all(0)] = torch.inf
        near, index = size.topk(min(wanted, size.numel()), largest=False)
        sizes.append(near)
        rows.append(columns[:, index])
    every = torch.cat(sizes)
    near, order = every.topk(min(wanted, every.numel()), largest=False)
    alive = int(torch.isfinite(near).sum())
    return near[:alive], torch.cat(rows, dim=1)[:, order[:alive]]

"""The passes made so far: best weights, a model of the loss, and the best lower bound that they prove together.

Every pass leaves one cut for every pair, and the pairs keep their cuts apart, so the hinge stays exact. The model of n
pairs is minimised over a working set: pairs whose leading piece leads clearly are folded, and come back if that was
wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from robboost.observability import span
from robboost.weights.master import Vector, minimise_model
from robboost.weights.oracle import Pass
from robboost.weights.problem import WeightProblem
from robboost.weights.solution import relative_gap
from robboost.weights.verify import DualPoint

__all__ = ["Bundle", "Cut"]

# Pieces that the interior-point method is given, and blocks of folded pairs that may choose among passes together.
_PIECES, _BLOCKS = 3000, 32
# Numbers held in cuts before the oldest pass is let go.
_HELD = 60_000_000
_ROUNDS = 4


@dataclass(frozen=True, eq=False)
class Cut:
    """One pass seen as cuts: kappa + slopes[n] . b <= kappa - M_n(b) for every b, where made at `weights`, `width`."""

    weights: torch.Tensor
    width: float
    slopes: torch.Tensor
    costs: torch.Tensor


class Bundle:
    """Cuts of every pair from every pass."""

    def __init__(self, problem: WeightProblem) -> None:
        self.problem = problem
        self.cuts: list[Cut] = []
        self.best: Cut | None = None
        self.best_value = float("inf")
        self.bound = 0.0
        self.proof: tuple[DualPoint, ...] = ()

    def add(self, weights: torch.Tensor, width: float, result: Pass) -> float:
        """Takes in a pass; returns the loss at its weights."""
        problem = self.problem
        cut = Cut(
            weights=weights,
            width=width,
            slopes=result.slopes - problem.intercepts.T,
            costs=problem.kappa - weights @ problem.intercepts + result.norms,
        )
        value = float(cut.costs.clamp(min=0).sum())
        if value < self.best_value:
            self.best, self.best_value = cut, value
        self.cuts.append(cut)
        if len(self.cuts) > max(2, _HELD // cut.slopes.numel()):
            self.cuts.pop(0)
        return value

    @property
    def gap(self) -> float:
        return self._gap(self.bound)

    @property
    def proof_passes(self) -> int:
        """Passes that recomputing loss and bound takes: on a CPU one, since runs of pairs stay in a cache."""
        return 1 + len(self.proof) if self.problem.device.type == "cuda" else 1

    @span("search between passes")
    def improve_bound(self, tolerance: float = 1e-9) -> torch.Tensor:
        """Minimises the model made of all cuts: its multipliers are a proof, its minimiser [T] a candidate."""
        model = _minimise_cuts(self._needed(), self.cuts, self.problem.kappa, tolerance=tolerance)
        if model.bound > self.bound or not self.proof:
            self._prove(self.cuts, model)
        return model.weights

    def prove_alone(self, aim: float, tolerance: float = 1e-9) -> tuple[float, torch.Tensor]:
        """The gap that the newest pass alone proves, and its model's minimiser [T].

        That is less work than all passes together, and where its gap is at most `aim`, less to check as well.
        """
        model = _minimise_cuts(self.cuts[-1], self.cuts[-1:], self.problem.kappa, tolerance=tolerance)
        gap = self._gap(model.bound)
        if gap <= aim or model.bound > self.bound or not self.proof:
            self._prove(self.cuts[-1:], model)
        return gap, model.weights

    def _prove(self, cuts: list[Cut], model: _CutMinimum) -> None:
        self.bound = max(0.0, model.bound)
        self.proof = tuple(
            DualPoint(cut.weights, cut.width, share)
            for cut, share in zip(cuts, model.shares, strict=True)
            if bool((share > 0).any())
        )

    @span("search between passes")
    def curved_step(self, curvature: Vector, tolerance: float = 1e-7) -> torch.Tensor:
        """Minimises the best pass's cuts plus curvature around it: Newton's step with the hinge kept exact."""
        best = self._needed()
        return _minimise_cuts(best, [best], self.problem.kappa, curvature=curvature, tolerance=tolerance).weights

    def proximal_step(self, curvature: Vector, tolerance: float = 1e-7) -> torch.Tensor:
        """Minimises the model of all cuts plus curvature around the best pass."""
        return _minimise_cuts(
            self._needed(), self.cuts, self.problem.kappa, curvature=curvature, tolerance=tolerance
        ).weights

    def _gap(self, bound: float) -> float:
        return relative_gap(self.best_value, bound, self.problem.kappa * self.problem.n_pairs)

    def _needed(self) -> Cut:
        if self.best is None:
            raise RuntimeError("a bundle without a pass has no model")
        return self.best


@dataclass(frozen=True, eq=False)
class _CutMinimum:
    weights: torch.Tensor
    shares: list[torch.Tensor]
    bound: float


def _minimise_cuts(
    reference: Cut, cuts: list[Cut], kappa: float, *, curvature: Vector | None = None, tolerance: float
) -> _CutMinimum:
    """Minimises sum_n max(0, max_k kappa + slopes_k[n] . a), plus curvature around the reference, over the simplex."""
    a_ref = reference.weights
    n = reference.slopes.shape[0]
    pieces = torch.stack([kappa + cut.slopes @ a_ref for cut in cuts], dim=1)
    lead, top = pieces.max(dim=1)
    second = pieces.scatter(1, top[:, None], float("-inf")).amax(1).clamp(min=0)
    spread = reference.slopes.amax(1) - reference.slopes.amin(1)
    unclear = torch.where(lead > 0, lead - second, -lead) / spread.clamp(min=1e-12)
    limit = max(300, _PIECES // len(cuts))
    kept = unclear.topk(min(limit, n), largest=False).indices if n > limit else torch.arange(n, device=lead.device)
    bowl = None if curvature is None else (curvature, _numpy(a_ref))
    for last in range(_ROUNDS):
        fold = _Fold(cuts, kappa, kept, lead, top)
        model = minimise_model(fold.constants, fold.slopes, fold.linear, bowl=bowl, tolerance=tolerance)
        weights = torch.from_numpy(model.weights).to(a_ref)
        if last == _ROUNDS - 1 or kept.numel() == n:
            break
        values = torch.stack([kappa + cut.slopes @ weights for cut in cuts], dim=1)
        wrong = values.amax(1).clamp(min=0) - torch.where(lead > 0, values.gather(1, top[:, None])[:, 0], 0.0)
        wrong[kept] = 0.0
        if float(wrong.sum()) <= 10 * tolerance * float(values.amax(1).clamp(min=0).sum()):
            break
        found = wrong.topk(min(limit, n - kept.numel()))
        kept = torch.cat([kept, found.indices[found.values > 0]])
    shares, bound = fold.shares_and_bound(model.multipliers)
    return _CutMinimum(weights=weights, shares=shares, bound=bound)


class _Fold:
    """The model's groups: kept pairs with all their pieces; the others summed, in blocks that choose among passes."""

    def __init__(
        self, cuts: list[Cut], kappa: float, kept: torch.Tensor, lead: torch.Tensor, top: torch.Tensor
    ) -> None:
        self.cuts, self.kappa, self.kept, self.top = cuts, kappa, kept, top
        n, members = cuts[0].slopes.shape
        self.folded = lead > 0
        self.folded[kept] = False
        count = len(cuts)
        constants = [np.full((kept.numel(), count), kappa)]
        slopes = [_numpy(torch.stack([cut.slopes[kept] for cut in cuts], dim=1))]
        self.linear = np.zeros(members)
        self.constant = 0.0
        self.block = torch.arange(n, device=lead.device) % _BLOCKS
        if count == 1:
            inside = self.folded.to(cuts[0].slopes)
            self.linear = _numpy(inside @ cuts[0].slopes)
            self.constant = kappa * float(inside.sum())
        elif bool(self.folded.any()):
            where = self.folded.nonzero()[:, 0]
            block = self.block[where]
            sums = torch.zeros(_BLOCKS, count + 1, members, dtype=cuts[0].slopes.dtype, device=lead.device)
            for k, cut in enumerate(cuts):
                rows = cut.slopes[where]
                sums[:, k].index_add_(0, block, rows)
                sums[:, count].index_add_(0, block, rows * (top[where] == k)[:, None])
            sizes = _numpy(torch.bincount(block, minlength=_BLOCKS).to(rows))
            constants = [np.pad(constants[0], ((0, 0), (0, 1))), np.repeat(kappa * sizes[:, None], count + 1, axis=1)]
            slopes = [np.pad(slopes[0], ((0, 0), (0, 1), (0, 0))), _numpy(sums)]
        self.constants = np.concatenate(constants)
        self.slopes = np.concatenate(slopes)

    def shares_and_bound(self, multipliers: Vector) -> tuple[list[torch.Tensor], float]:
        """Multipliers spread to the pairs, one tensor [n] a pass, and the lower bound that they prove."""
        linear = self.linear + np.einsum("gk,gkt->t", multipliers, self.slopes)
        bound = self.constant + float((multipliers * self.constants).sum()) + float(linear.min())
        spread = torch.from_numpy(multipliers).to(self.cuts[0].slopes)
        shares = []
        for k in range(len(self.cuts)):
            share = torch.zeros_like(self.cuts[0].costs)
            if len(self.cuts) == 1:
                share[self.folded] = 1.0
            elif bool(self.folded.any()):
                blocks = spread[self.kept.numel() :]
                own = blocks[self.block, k] + blocks[self.block, -1] * (self.top == k)
                share = torch.where(self.folded, own, share)
            share[self.kept] = spread[: self.kept.numel(), k]
            shares.append(share)
        return shares, bound


def _numpy(values: torch.Tensor) -> Vector:
    return np.asarray(values.cpu().numpy(), dtype=np.float64)

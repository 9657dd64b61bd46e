"""The small convex problem of each step: piecewise-linear model of the loss, plus curvature, over the simplex.

    minimise  linear . a + (a - centre)^T curvature (a - centre) / 2
              + sum_g max(0, max_k constants[g, k] + slopes[g, k] . a)

A primal-dual interior-point method (Mehrotra) that starts feasible on both sides and eliminates everything but the T
weights, so one iteration costs G K T^2. Its multipliers are what lower bounds are made of.

Groups lie in blocks: a block's arrays stay in a cache, and its matrix products are too small for BLAS to start threads,
which cost more than such products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from robboost.observability import span

__all__ = ["ModelMinimum", "Vector", "minimise_model"]

Vector = np.ndarray[Any, np.dtype[np.float64]]

_ITERATIONS = 100
# Share of the way to the boundary that one step may go.
_INTERIOR = 0.995
# Numbers in a block, and its products' multiplications: below the limits from which OpenBLAS starts threads.
_BLOCK_NUMBERS, _BLOCK_PRODUCTS = 9000, 250_000
# Complementarity at which a model with a goal is done, relative to what is missing to the goal.
_OF_MISSING = 0.02


@dataclass(frozen=True, eq=False)
class ModelMinimum:
    """Minimiser [T] of the model, the multipliers [G, K] of its pieces, and the model's value there."""

    weights: Vector
    multipliers: Vector
    value: float


# What runs out of digits is no number, and no number ends the iterations (`_System.at`, and the length of the step).
@np.errstate(over="ignore", invalid="ignore", divide="ignore")
@span("weights: master")
def minimise_model(
    constants: Vector,
    slopes: Vector,
    linear: Vector,
    *,
    bowl: tuple[Vector, Vector] | None = None,
    tolerance: float = 1e-10,
    goal: float = -np.inf,
) -> ModelMinimum:
    """Minimises the model to a complementarity of `tolerance` times its value.

    Args:
        constants: [G, K], slopes: [G, K, T]: the pieces of each group; absent pieces hold constant 0 and slope 0.
        linear: [T], cost outside the groups.
        bowl: curvature [T, T] positive semidefinite, and centre [T]; None for the piecewise-linear model.
        goal: a value that the minimum is measured against; where it is much larger, fewer digits will do.
    """
    members = slopes.shape[2]
    quad, middle = (np.zeros((members, members)), np.zeros(members)) if bowl is None else bowl
    # In units of about its largest number, an exact power of two: squares and inverses stay within floating point.
    unit = _unit(constants, slopes, linear, quad)
    constants, slopes, linear, quad = constants / unit, slopes / unit, linear / unit, quad / unit
    goal = goal / unit
    model = _Model.blocked(constants, slopes, linear - quad @ middle, quad)
    # What the curvature adds at a = 0: the goal is compared with values that leave it out.
    offset = 0.5 * float(middle @ quad @ middle)
    point, scale = _start(model, constants, slopes)
    for _ in range(_ITERATIONS):
        comp = point.complementarity()
        value = float(model.base @ point.a + 0.5 * point.a @ quad @ point.a + point.top.sum()) + offset
        if comp <= max(tolerance * max(abs(value), scale), _OF_MISSING * (goal - value)):
            break
        system = _System.at(model, point)
        if system is None:  # Rounding has eaten the last digits: what stands is as good as it gets.
            break
        affine = system.direction(0.0, None)
        after = point.moved(affine, min(1.0, _longest(point, affine))).complementarity()
        sigma = min(1.0, max(after / comp, 1e-6)) ** 3
        change = system.direction(sigma * comp / point.primal.size, affine)
        step = min(1.0, _INTERIOR * _longest(point, change))
        if not step >= 1e-10:
            break
        point = point.moved(change, step)
    a = point.a / point.a.sum()
    values = np.maximum(model.values(a).max(axis=1, initial=0.0), 0.0)
    value = float(linear @ a + 0.5 * (a - middle) @ quad @ (a - middle) + values.sum())
    multipliers = point.mu.transpose(0, 2, 1).reshape(-1, constants.shape[1])[: len(constants)]
    return ModelMinimum(weights=a, multipliers=multipliers, value=value * unit)


def _unit(*parts: Vector) -> float:
    largest = max((float(np.abs(part).max()) for part in parts if part.size), default=0.0)
    return float(2.0 ** np.floor(np.log2(largest))) if 1e-300 < largest < np.inf else 1.0


@dataclass(frozen=True, eq=False)
class _Model:
    """The pieces in blocks of L groups: constants [B, K, L], slopes [B, T, K L]; empty groups fill the last block."""

    constants: Vector
    slopes: Vector
    base: Vector
    quad: Vector

    @classmethod
    def blocked(cls, constants: Vector, slopes: Vector, base: Vector, quad: Vector) -> _Model:
        groups, pieces, members = slopes.shape
        per_group = max(1, pieces * members)
        most = max(1, min(_BLOCK_NUMBERS // per_group, _BLOCK_PRODUCTS // (per_group * members)))
        blocks = -(-groups // most)
        length = -(-groups // max(1, blocks))
        lacking = blocks * length - groups
        # On the simplex a slope's mean is a constant; left in the slope it would cost the Newton equations digits.
        means = slopes.mean(axis=2)
        c = np.pad(constants + means, ((0, lacking), (0, 0))).reshape(blocks, length, pieces)
        s = np.pad(slopes - means[:, :, None], ((0, lacking), (0, 0), (0, 0))).reshape(blocks, length, pieces, members)
        turned = np.ascontiguousarray(s.transpose(0, 3, 2, 1)).reshape(blocks, members, pieces * length)
        return cls(np.ascontiguousarray(c.transpose(0, 2, 1)), turned, base, quad)

    def values(self, a: Vector) -> Vector:
        """The pieces [B, K, L] at a [T] on the simplex."""
        return np.asarray(self.constants + (a @ self.slopes).reshape(self.constants.shape))

    def summed(self, values: Vector) -> Vector:
        """Slopes times values [B, K, L], summed over all pieces: [T]."""
        blocks, _, width = self.slopes.shape
        return np.asarray((self.slopes @ values.reshape(blocks, width, 1)).sum(axis=0)[:, 0])


class _Point:
    """Two vectors whose entrywise products go to zero: weights a, tops of groups and slacks of pieces on the one side,
    the multipliers z, eta and mu of their signs on the other."""

    def __init__(self, primal: Vector, dual: Vector, shape: tuple[int, int, int]) -> None:
        blocks, pieces, length = shape
        self.primal, self.dual, self.shape = primal, dual, shape
        members = primal.size - blocks * (pieces + 1) * length
        split = members + blocks * length
        self.a, self.z = primal[:members], dual[:members]
        self.top, self.eta = primal[members:split].reshape(blocks, length), dual[members:split].reshape(blocks, length)
        self.slack, self.mu = primal[split:].reshape(shape), dual[split:].reshape(shape)

    def moved(self, change: _Point, step: float) -> _Point:
        return _Point(self.primal + step * change.primal, self.dual + step * change.dual, self.shape)

    def complementarity(self) -> float:
        # Not a BLAS product: that would start threads.
        return float(np.einsum("i,i->", self.primal, self.dual))


def _start(model: _Model, constants: Vector, slopes: Vector) -> tuple[_Point, float]:
    members = model.base.size
    a = np.full(members, 1.0 / members)
    values = model.values(a)
    scale = float(np.abs(model.base).max()) / max(len(constants), 1)
    if len(constants):
        scale = max(
            scale, float(np.abs(values).sum()) / constants.size, float(np.abs(model.slopes).sum()) / slopes.size
        )
    # Nothing at all: any scale serves.
    scale = scale if scale > 1e-150 else 1.0
    top = np.maximum(values.max(axis=1, initial=0.0), 0.0) + scale
    share = 1.0 / (values.shape[1] + 1)
    gradient = model.base + model.quad @ a + share * model.slopes.sum(axis=(0, 2))
    # Any z > 0 with z - gradient constant is dual feasible; the spread keeps the first step long.
    z = gradient - gradient.min() + max(float(np.ptp(gradient)), scale)
    primal = np.concatenate([a, top.reshape(-1), (top[:, None] - values).reshape(-1)])
    dual = np.concatenate([z, np.full(top.size + values.size, share)])
    return _Point(primal, dual, model.constants.shape), scale


@dataclass(frozen=True, eq=False)
class _System:
    """The Newton equations at a point, reduced to the weights; `inverse` is that of the scaled Cholesky factor."""

    model: _Model
    point: _Point
    ratio: _Point
    weight: Vector
    residual: Vector
    inverse: Vector
    even: Vector

    @classmethod
    def at(cls, model: _Model, point: _Point) -> _System | None:
        # Only the dual half of `ratio` means anything: dual / primal.
        ratio = _Point(point.primal, point.dual / point.primal, point.shape)
        weight = ratio.eta + ratio.mu.sum(axis=1)
        hessian = model.quad + _gram(model, ratio, weight)
        hessian[np.diag_indices_from(hessian)] += ratio.z
        diagonal = np.diagonal(hessian)
        if not (np.isfinite(hessian).all() and (diagonal > 0).all()):
            return None
        root = 1.0 / np.sqrt(diagonal)
        scaled = hessian * root[:, None] * root
        residual = model.base + model.quad @ point.a + model.summed(point.mu) - point.z
        one = np.eye(len(root))
        for shift in (0.0, 1e-12, 1e-8):
            try:
                inverse = np.asarray(np.linalg.inv(np.linalg.cholesky(scaled + shift * one)) * root)
            except np.linalg.LinAlgError:
                continue
            even = inverse.T @ inverse.sum(axis=1)
            return cls(model, point, ratio, weight, residual - residual.mean(), inverse, even)
        return None

    def direction(self, target: float, affine: _Point | None) -> _Point:
        """The step to complementarity `target`; with the affine step, Mehrotra's second-order correction."""
        point, ratio = self.point, self.ratio
        wanted = target - point.primal * point.dual
        if affine is not None:
            wanted -= affine.primal * affine.dual
        wanted /= point.primal
        change = _Point(np.empty_like(wanted), wanted, point.shape)
        tops = change.eta + change.mu.sum(axis=1)
        right = change.z - self.residual - self.model.summed(change.mu - ratio.mu * (tops / self.weight)[:, None])
        da = self.inverse.T @ (self.inverse @ right)
        # The weights' sum stays at 1.
        da -= self.even * (da.sum() / self.even.sum())
        moved = (da @ self.model.slopes).reshape(point.shape)
        change.a[:] = da
        change.top[:] = (tops + (ratio.mu * moved).sum(axis=1)) / self.weight
        np.subtract(change.top[:, None], moved, out=change.slack)
        change.dual[:] -= ratio.dual * change.primal
        return change


def _gram(model: _Model, ratio: _Point, weight: Vector) -> Vector:
    """Second derivative [T, T] that the pieces leave behind once tops and slacks are eliminated."""
    slopes = model.slopes
    blocks, pieces, length = ratio.shape
    turned = slopes.transpose(0, 2, 1)
    if pieces == 1:
        left = ratio.mu[:, 0] * (ratio.eta / weight)
        return np.asarray(((slopes * left[:, None]) @ turned).sum(axis=0))
    weighted = slopes * ratio.mu.reshape(blocks, 1, pieces * length)
    crossed = weighted.reshape(blocks, slopes.shape[1], pieces, length).sum(axis=2)
    common = (crossed / weight[:, None]) @ crossed.transpose(0, 2, 1)
    return np.asarray((weighted @ turned - common).sum(axis=0))


def _longest(point: _Point, change: _Point) -> float:
    """How far the step may go before a sign constraint is hit, at most 1 / _INTERIOR."""
    shrink = -min(float((change.primal / point.primal).min()), float((change.dual / point.dual).min()))
    return 1.0 / max(shrink, _INTERIOR)

"""The small convex problem of each step: piecewise-linear model of the loss, plus curvature, over the simplex.

    minimise  linear . a + (a - centre)^T curvature (a - centre) / 2
              + sum_g max(0, max_k constants[g, k] + slopes[g, k] . a)

A primal-dual interior-point method (Mehrotra) that starts feasible on both sides and eliminates everything but the T
weights, so one iteration costs G K T^2. Its multipliers are what lower bounds are made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["ModelMinimum", "Vector", "minimise_model"]

Vector = np.ndarray[Any, np.dtype[np.float64]]

_ITERATIONS = 100
# Share of the way to the boundary that one step may go.
_INTERIOR = 0.995


@dataclass(frozen=True, eq=False)
class ModelMinimum:
    """Minimiser [T] of the model, the multipliers [G, K] of its pieces, and the model's value there."""

    weights: Vector
    multipliers: Vector
    value: float


def minimise_model(
    constants: Vector,
    slopes: Vector,
    linear: Vector,
    *,
    curvature: Vector | None = None,
    centre: Vector | None = None,
    tolerance: float = 1e-10,
) -> ModelMinimum:
    """Minimises the model to a complementarity of `tolerance` times its value.

    Args:
        constants: [G, K], slopes: [G, K, T]: the pieces of each group; absent pieces hold constant 0 and slope 0.
        linear: [T], cost outside the groups.
        curvature: [T, T] positive semidefinite, centre: [T]; None for the piecewise-linear model.
    """
    members = slopes.shape[2]
    quad = np.zeros((members, members)) if curvature is None else curvature
    middle = np.zeros(members) if centre is None else centre
    model = _Model(constants, slopes, slopes.reshape(-1, members), linear - quad @ middle, quad)
    point, scale = _start(model)
    count = model.slopes.shape[0] * (model.slopes.shape[1] + 1) + members
    for _ in range(_ITERATIONS):
        comp = point.complementarity()
        value = model.base @ point.a + 0.5 * point.a @ quad @ point.a + point.top.sum()
        if comp <= tolerance * max(abs(float(value)), scale):
            break
        system = _System.at(model, point)
        if system is None:  # Rounding has eaten the last digits: what stands is as good as it gets.
            break
        affine = system.direction(0.0, None)
        after = point.moved(affine, min(1.0, _longest(point, affine))).complementarity()
        sigma = min(1.0, max(after / comp, 1e-6)) ** 3
        change = system.direction(sigma * comp / count, affine)
        step = min(1.0, _INTERIOR * _longest(point, change))
        if not step >= 1e-10:
            break
        point = point.moved(change, step)
    a = point.a / point.a.sum()
    values = np.maximum((constants + (model.flat @ a).reshape(constants.shape)).max(axis=1, initial=0.0), 0.0)
    value = float(linear @ a + 0.5 * (a - middle) @ quad @ (a - middle) + values.sum())
    return ModelMinimum(weights=a, multipliers=point.mu, value=value)


@dataclass(frozen=True, eq=False)
class _Model:
    constants: Vector
    slopes: Vector
    flat: Vector
    base: Vector
    quad: Vector


@dataclass(frozen=True, eq=False)
class _Point:
    """Weights a and group tops, slack of the pieces, and the multipliers mu, eta, z of the three sign conditions."""

    a: Vector
    top: Vector
    slack: Vector
    mu: Vector
    eta: Vector
    z: Vector

    def moved(self, change: _Point, step: float) -> _Point:
        return _Point(
            a=self.a + step * change.a,
            top=self.top + step * change.top,
            slack=self.slack + step * change.slack,
            mu=self.mu + step * change.mu,
            eta=self.eta + step * change.eta,
            z=self.z + step * change.z,
        )

    def complementarity(self) -> float:
        return float(np.vdot(self.mu, self.slack) + self.eta @ self.top + self.z @ self.a)


def _start(model: _Model) -> tuple[_Point, float]:
    groups, pieces, members = model.slopes.shape
    a = np.full(members, 1.0 / members)
    values = model.constants + (model.flat @ a).reshape(groups, pieces)
    scale = float(np.abs(model.base).max()) / max(groups, 1)
    if groups:
        scale = max(scale, float(np.abs(values).mean()), float(np.abs(model.flat).mean()))
    scale = max(scale, 1e-300)
    top = np.maximum(values.max(axis=1, initial=0.0), 0.0) + scale
    mu = np.full((groups, pieces), 1.0 / (pieces + 1))
    gradient = model.base + model.quad @ a + mu.reshape(-1) @ model.flat
    # Any z > 0 with z - gradient constant is dual feasible; the spread keeps the first step long.
    z = gradient - gradient.min() + max(float(np.ptp(gradient)), scale)
    return _Point(a, top, top[:, None] - values, mu, np.full(groups, 1.0 / (pieces + 1)), z), scale


@dataclass(frozen=True, eq=False)
class _System:
    """The Newton equations at a point, reduced to the weights."""

    model: _Model
    point: _Point
    crossed: Vector
    weight: Vector
    residual: Vector
    factor: Vector
    root: Vector

    @classmethod
    def at(cls, model: _Model, point: _Point) -> _System | None:
        pieces = point.mu / point.slack
        weighted = model.flat * pieces.reshape(-1, 1)
        crossed = weighted.reshape(model.slopes.shape).sum(axis=1) if pieces.shape[1] > 1 else weighted
        weight = pieces.sum(axis=1) + point.eta / point.top
        hessian = model.quad + model.flat.T @ weighted - (crossed / weight[:, None]).T @ crossed
        hessian[np.diag_indices_from(hessian)] += point.z / point.a
        diagonal = np.diagonal(hessian)
        if not (np.isfinite(hessian).all() and (diagonal > 0).all()):
            return None
        root = 1.0 / np.sqrt(diagonal)
        scaled = hessian * root[:, None] * root
        gradient = model.base + model.quad @ point.a + point.mu.reshape(-1) @ model.flat
        residual = gradient - point.z
        for shift in (0.0, 1e-12, 1e-8):
            try:
                factor: Vector = np.asarray(np.linalg.cholesky(scaled + shift * np.eye(len(root))), dtype=np.float64)
            except np.linalg.LinAlgError:
                continue
            return cls(model, point, crossed, weight, residual - residual.mean(), factor, root)
        return None

    def direction(self, target: float, affine: _Point | None) -> _Point:
        """The step to complementarity `target`; with the affine step, Mehrotra's second-order correction."""
        p, flat = self.point, self.model.flat
        for_mu, for_eta, for_z = target - p.mu * p.slack, target - p.eta * p.top, target - p.z * p.a
        if affine is not None:
            for_mu = for_mu - affine.mu * affine.slack
            for_eta = for_eta - affine.eta * affine.top
            for_z = for_z - affine.z * affine.a
        pull = for_mu / p.slack
        tops = pull.sum(axis=1) + for_eta / p.top
        right = -self.residual - pull.reshape(-1) @ flat + (tops / self.weight) @ self.crossed + for_z / p.a
        solved = self._solve(np.stack([right, np.ones_like(right)], axis=1))
        # The second column keeps the weights' sum at 1.
        da = solved[:, 0] - solved[:, 1] * (solved[:, 0].sum() / solved[:, 1].sum())
        dtop = (tops + self.crossed @ da) / self.weight
        dslack = dtop[:, None] - (flat @ da).reshape(p.slack.shape)
        return _Point(
            a=da,
            top=dtop,
            slack=dslack,
            mu=(for_mu - p.mu * dslack) / p.slack,
            eta=(for_eta - p.eta * dtop) / p.top,
            z=(for_z - p.z * da) / p.a,
        )

    def _solve(self, right: Vector) -> Vector:
        inner = np.linalg.solve(self.factor, right * self.root[:, None])
        return np.asarray(np.linalg.solve(self.factor.T, inner) * self.root[:, None])


def _longest(point: _Point, change: _Point) -> float:
    """How far the step may go before a sign constraint is hit, at most 1 / _INTERIOR."""
    shrink = _INTERIOR
    for name in ("a", "top", "slack", "mu", "eta", "z"):
        value = getattr(point, name)
        if value.size:
            shrink = max(shrink, float((-getattr(change, name) / value).max()))
    return 1.0 / shrink

"""Weights against hand computation, brute force on a grid, and an independent solver."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from weight_solvers import highs_optimum

import robboost as rb
from robboost.weights import Solution, SolverSettings, margins, objective, weight_problem


def test_hand_computed_pair():
    # The table's false elimination: both members have margin -1, their average +1, so at kappa 1 the loss vanishes.
    slopes = np.array([[[2.0]], [[-2.0]]])
    solution = rb.solve_weights(slopes, np.ones((2, 1)), 1.0)
    assert solution.weights == pytest.approx((0.5, 0.5))
    assert solution.objective == pytest.approx(0.0, abs=1e-9)
    assert solution.status == "optimal"
    problem = weight_problem(slopes, np.ones((2, 1)), 1.0)
    assert margins(problem, [1.0, 0.0]).tolist() == [-1.0]
    assert margins(problem, [0.5, 0.5]).tolist() == [1.0]
    assert objective(problem, [1.0, 0.0]) == 2.0


@pytest.mark.parametrize("seed", range(12))
def test_auto_meets_highs(seed):
    rng = np.random.default_rng(seed)
    members, n, d = int(rng.integers(1, 7)), int(rng.integers(1, 12)), int(rng.integers(1, 6))
    slopes = rng.normal(size=(members, n, d))
    intercepts = rng.normal(size=(members, n)) + 1
    radius = rng.random(d)
    exact = highs_optimum(slopes, intercepts, radius)
    solution = rb.solve_weights(slopes, intercepts, radius)
    assert solution.lower_bound <= exact + 1e-9 * (1 + exact)
    assert exact - 1e-9 * (1 + exact) <= solution.objective <= exact + 2e-6 * (1 + exact)
    assert solution.status == "optimal"


def test_solution_survives_json():
    solution = rb.solve_weights(torch.randn(3, 5, 4), torch.randn(3, 5), 0.1, method="uniform")
    assert Solution.from_json(solution.to_json()) == solution
    assert json.loads(solution.to_json())["method"] == "uniform"
    assert "uniform" in str(solution)


def test_uniform_and_coordinate_report_their_gap():
    rng = np.random.default_rng(3)
    slopes, intercepts = rng.normal(size=(4, 20, 3)) * 0.3, rng.normal(size=(4, 20)) + 1
    best = rb.solve_weights(slopes, intercepts, 1.0)
    for method in ("uniform", "coordinate"):
        found = rb.solve_weights(slopes, intercepts, 1.0, method=method, settings=SolverSettings(epochs=2))
        assert found.lower_bound <= best.objective
        assert found.objective >= best.lower_bound
        assert found.gap == pytest.approx((found.objective - found.lower_bound) / found.objective)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_a_number_is_refused(bad):
    slopes, intercepts = np.ones((2, 3, 4)), np.ones((2, 3))
    slopes[1, 2, 3] = bad
    with pytest.raises(rb.InputError, match="pair 2"):
        rb.solve_weights(slopes, intercepts, 1.0)
    with pytest.raises(rb.InputError, match="intercept of member"):
        rb.solve_weights(np.ones((2, 3, 4)), intercepts * bad, 1.0)
    with pytest.raises(rb.InputError, match="complex"):
        rb.solve_weights(np.ones((2, 3, 4)), np.ones((2, 3)) + 1j, 1.0)
    with pytest.raises(rb.InputError, match="radius"):
        rb.solve_weights(np.ones((2, 3, 4)), intercepts, bad)

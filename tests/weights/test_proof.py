"""The lower bound against exact optima: rounding, careless multipliers, scales; and the parts that make it hold."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from weight_families import families
from weight_solvers import highs_optimum

import robboost as rb
from robboost.weights import SolverSettings, objective, solve, weight_problem
from robboost.weights.bundle import Bundle
from robboost.weights.curvature import estimate_curvature
from robboost.weights.oracle import checked_pass
from robboost.weights.verify import DualPoint, recompute


def exact_on_the_line(slopes, intercepts, kappa=1.0):
    """The optimum for two members, up to float64 rounding: at an end, a kink of a row, or a zero of a pair's cost."""
    with np.errstate(all="ignore"):
        kinks = (-slopes[1] / (slopes[0] - slopes[1])).ravel()
    grid = np.unique(np.concatenate([[0.0, 1.0], kinks[(kinks > 0) & (kinks < 1)]]))

    def costs(s):
        s = s[:, None, None]
        mixed = np.abs(s * slopes[0] + (1 - s) * slopes[1]).sum(2)
        return kappa - (s[:, 0] * intercepts[0] + (1 - s[:, 0]) * intercepts[1]) + mixed

    at = costs(grid)
    low, high = at[:-1], at[1:]
    where, pair = np.nonzero((low > 0) != (high > 0))
    low, high = low[where, pair], high[where, pair]
    zeros = grid[where] + (grid[where + 1] - grid[where]) * low / (low - high)
    return np.maximum(costs(np.concatenate([grid, zeros])), 0).sum(1).min()


def two_members(rng):
    """Two members on a few pairs, of any scale; now and then they cancel but for a little."""
    n, d = int(rng.integers(1, 8)), int(rng.integers(1, 7))
    slopes = rng.normal(size=(2, n, d)) * 10.0 ** rng.uniform(-3, 3)
    if rng.random() < 0.3:
        slopes[1] = -slopes[0] + 10.0 ** rng.uniform(-9, -1) * rng.normal(size=(n, d))
    if rng.random() < 0.3:
        slopes[rng.random(slopes.shape) < 0.5] = 0.0
    return slopes, rng.normal(size=(2, n)) * 10.0 ** rng.uniform(-1, 1) + 1


def test_exact_optimum_on_the_line_is_that_of_highs():
    rng = np.random.default_rng(0)
    for _ in range(20):
        slopes, intercepts = rng.normal(size=(2, 5, 3)), rng.normal(size=(2, 5)) + 1
        assert exact_on_the_line(slopes, intercepts) == pytest.approx(highs_optimum(slopes, intercepts, 1.0), abs=1e-9)


def test_bound_and_loss_enclose_the_exact_optimum_at_any_scale_and_limit():
    rng = np.random.default_rng(1)
    for _ in range(400):
        slopes, intercepts = two_members(rng)
        exact = exact_on_the_line(slopes, intercepts)
        limits = SolverSettings(max_passes=int(rng.choice([2, 3, 100])))
        found = rb.solve_weights(slopes, intercepts, 1.0, settings=limits)
        room = 1e-13 * (exact + np.abs(slopes).sum() + np.abs(intercepts).sum())
        assert found.lower_bound <= exact + room
        assert found.objective >= exact - room
        if found.status == "optimal":
            assert found.objective - exact <= 1e-6 * max(found.objective, 1e-3 * slopes.shape[1]) + room


def test_no_multipliers_can_raise_the_bound_above_the_optimum():
    rng = np.random.default_rng(2)
    tight = 0
    for _ in range(1500):
        slopes, intercepts = two_members(rng)
        problem = weight_problem(slopes, intercepts, 1.0)
        exact = exact_on_the_line(slopes, intercepts)
        proof = []
        for _ in range(int(rng.integers(1, 4))):
            s = rng.random()
            multipliers = rng.choice([0.0, 1.0, 0.5, 7.0, -3.0, np.nan, np.inf], size=slopes.shape[1])
            proof.append(
                DualPoint(torch.tensor([s, 1 - s]), float(rng.choice([0.0, 0.1, 1e3])), torch.from_numpy(multipliers))
            )
        found = recompute(problem, torch.tensor([0.5, 0.5]), proof)
        assert np.isfinite(found.bound)
        assert found.bound <= exact + 1e-13 * (exact + np.abs(slopes).sum())
        tight += found.bound > 0.5 * exact
    assert tight > 50  # so that the comparison means something


def test_what_rounding_may_add_to_a_sum_that_cancels_is_subtracted():
    # Members e + v and e - v with v huge: every mix near the average pays |e|, and d . v must cancel exactly. The
    # rounding of sums is relative to |v|, not to what is left of them.
    rng = np.random.default_rng(3)
    above = 0
    for _ in range(200):
        d = 400
        e = rng.integers(1, 2**20, size=d) * rng.choice([-1.0, 1.0], size=d) / 2.0**24
        signs = np.sign(e)
        v = rng.integers(1, 2**20, size=d) * 2.0**7
        # Inputs in pairs, far apart, so that the sum of sign(e) v is zero exactly.
        one, two = rng.permutation(d).reshape(2, -1)
        v[two] = -signs[two] * signs[one] * v[one]
        slopes = np.stack([e + v, e - v])[:, None]
        assert (slopes[0] + slopes[1] == 2 * e).all()
        problem = weight_problem(slopes, np.zeros((2, 1)), 1.0)
        exact = 1 + sum(abs(Fraction(x)) for x in e)
        proof = [DualPoint(torch.tensor([0.5, 0.5]), 0.0, torch.ones(1))]
        found = recompute(problem, torch.tensor([0.5, 0.5]), proof)
        assert Fraction(found.bound) <= exact
        assert found.bound >= float(exact) * (1 - 1e-3)
        columns = problem.columns(slice(None))
        unguarded = 1 + float(torch.einsum("d,tmd->mt", torch.from_numpy(signs), columns).min())
        above += Fraction(unguarded) > exact
    assert above > 10  # without the subtraction, the "bound" is above the optimum


def test_magnitudes_that_kernels_report_are_those_of_the_sums():
    generator = torch.Generator().manual_seed(0)
    slopes = torch.randn(3, 2000, 100, generator=generator)  # enough for the compiled kernel
    problem = weight_problem(slopes, torch.zeros(3, 2000), 0.5)
    a = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    columns = problem.columns(slice(None))
    truth = torch.einsum("md,tmd->mt", torch.einsum("t,tmd->md", a, columns).sign().abs(), columns.abs()).amax(1)
    from robboost.weights.oracle import fast_pass

    found = fast_pass(problem, a, 0.0, double=True)
    assert found.sizes is not None
    assert bool((found.sizes >= truth * (1 - 1e-12)).all())
    assert fast_pass(problem, a, 0.0).sizes is None


def test_smoothing_alone_fails_where_rows_are_few_and_the_hybrid_does_not():
    failed = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        slopes, intercepts = rng.normal(size=(4, 40, 3)), 1 + rng.normal(size=(4, 40))
        exact = highs_optimum(slopes, intercepts, 1.0)
        problem = weight_problem(slopes, intercepts, 1.0)
        bundle, a = Bundle(problem), torch.full((4,), 0.25, dtype=torch.float64)
        for _ in range(15):  # smoothed Newton by itself: the best pass's cuts and its curvature
            bundle.add(a, 0.0, checked_pass(problem, a))
            assert bundle.best is not None
            # Lenient rule for what is enough to read a density from: the estimator itself would decline.
            columns = problem.columns(slice(None))
            mixed = torch.einsum("t,tmd->md", bundle.best.weights, columns)
            near = mixed.abs().flatten().sort()
            rows = columns.flatten(1)[:, near.indices[:12]]
            a = bundle.curved_step((rows @ rows.T / near.values[11]).numpy())
        failed += bundle.best_value > exact * (1 + 1e-5)
        found = solve(problem)
        assert found.status == "optimal"
        assert found.objective == pytest.approx(exact, rel=2e-6)
    assert failed >= 4
    assert estimate_curvature(weight_problem(np.ones((4, 5, 2)), np.ones((4, 5)), 1.0), a, torch.ones(5), 1e-3) is None


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("scale", [1e-200, 1e-12, 1e12, 1e120])
def test_units_do_not_matter(scale, norm):
    slopes, intercepts = families()["shared structure"]
    base = rb.solve_weights(slopes, intercepts, 1.0, norm=norm)
    # A power of two scales every sum exactly.
    scale = 2.0 ** np.round(np.log2(scale))
    other = rb.solve_weights(scale * slopes, scale * intercepts, 1.0, kappa=scale, norm=norm)
    assert other.status == "optimal"
    assert other.objective / scale == pytest.approx(base.objective, rel=2e-6)
    assert other.lower_bound <= scale * base.objective


def test_a_radius_of_zero_leaves_the_intercepts():
    slopes, intercepts = families()["shared structure"]
    exact = highs_optimum(np.zeros((8, 300, 1)), intercepts, 1.0)
    for radius in (0.0, np.zeros(40), np.zeros((300, 40))):
        for norm in ("linf", "l2", "l1"):
            assert rb.solve_weights(slopes, intercepts, radius, norm=norm).objective == pytest.approx(exact, rel=2e-6)


def test_simplices_of_three_members_by_their_vertices():
    # The optimum of a piecewise linear loss lies where two of its kinks, or a kink and an edge, meet.
    rng = np.random.default_rng(4)
    for _ in range(25):
        slopes, intercepts = rng.normal(size=(3, 2, 2)), rng.normal(size=(3, 2)) + 1
        lines = [slopes[:, n, i] for n in range(2) for i in range(2)] + list(np.eye(3))
        # A pair's cost is zero on one line for each choice of its rows' signs.
        for n, signs in itertools.product(range(2), itertools.product((-1, 1), repeat=2)):
            lines.append(1 - intercepts[:, n] + slopes[:, n] @ np.array(signs))
        points = list(np.eye(3))
        for first, second in itertools.combinations(lines, 2):
            point = np.cross(first, second)
            if abs(point.sum()) > 1e-9 and (point / point.sum() >= -1e-12).all():
                points.append(np.maximum(point / point.sum(), 0))
        problem = weight_problem(slopes, intercepts, 1.0)
        exact = min(objective(problem, p / p.sum()) for p in points)
        found = solve(problem)
        assert found.lower_bound <= exact + 1e-12
        assert found.objective == pytest.approx(exact, rel=2e-6, abs=2e-9)


def test_the_proof_may_come_from_other_pairs_weights_but_not_from_another_problem():
    rng = np.random.default_rng(5)
    slopes, intercepts = rng.normal(size=(3, 30, 4)), rng.normal(size=(3, 30)) + 1
    problem = weight_problem(slopes, intercepts, 1.0)
    best = solve(problem)
    bundle = Bundle(problem)
    a = torch.tensor(best.weights, dtype=torch.float64)
    bundle.add(a, 0.0, checked_pass(problem, a))
    bundle.improve_bound()
    # The same proof read against easier arrays proves nothing above their optimum.
    easier = replace(problem, intercepts=problem.intercepts + 0.5)
    exact = highs_optimum(slopes, intercepts + 0.5, 1.0)
    assert recompute(easier, torch.tensor(best.weights), bundle.proof).bound <= exact + 1e-9

"""The certified optimum: on every family, against two other solvers, by brute force, and under symmetries."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from weight_families import families
from weight_solvers import conic_optimum, highs_optimum

import robboost as rb
from robboost.weights import SolverSettings, margins, objective, weight_problem

FAMILIES = families()
LP_SIZED = [name for name, (slopes, _) in FAMILIES.items() if slopes[0].size <= 6000]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_solved_to_a_certified_gap(name):
    slopes, intercepts = FAMILIES[name]
    found = rb.solve_weights(slopes, intercepts, 1.0, kappa=1e6 if name == "large numbers" else 1.0)
    assert found.status == "optimal"
    assert found.gap <= 1e-6
    assert found.passes <= 25
    assert min(found.weights) >= 0
    assert sum(found.weights) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("name", LP_SIZED)
def test_families_meet_highs(name):
    slopes, intercepts = FAMILIES[name]
    kappa = 1.0
    if name == "large numbers":  # HiGHS has absolute tolerances
        slopes, intercepts = slopes / 1e6, intercepts / 1e6
    exact = highs_optimum(slopes, intercepts, 1.0, kappa)
    found = rb.solve_weights(slopes, intercepts, 1.0, kappa=kappa)
    assert found.lower_bound <= exact + 1e-6 * (1 + exact)
    assert found.objective == pytest.approx(exact, rel=2e-6, abs=1e-6)


@pytest.mark.parametrize("norm", ["l2", "l1", "linf"])
@pytest.mark.parametrize("seed", range(4))
def test_other_norms_meet_a_conic_solver(norm, seed):
    rng = np.random.default_rng(seed)
    members, n, d = (2, 6, 3), (12, 25, 40), (5, 3, 8)
    k = seed % 3
    slopes = rng.normal(size=(members[k], n[k], d[k])) * 0.4
    intercepts = 1 + 0.5 * rng.normal(size=(members[k], n[k]))
    radius = 0.2 + rng.random((n[k], d[k]))
    exact = conic_optimum(slopes, intercepts, radius, norm)
    found = rb.solve_weights(slopes, intercepts, radius, norm=norm)
    assert found.status == "optimal"
    assert found.lower_bound <= exact + 1e-6 * (1 + exact)
    assert found.objective == pytest.approx(exact, rel=3e-6, abs=1e-7)


def test_two_members_by_brute_force_on_the_line():
    rng = np.random.default_rng(5)
    for _ in range(40):
        n, d = int(rng.integers(1, 6)), int(rng.integers(1, 5))
        slopes, intercepts = rng.normal(size=(2, n, d)), rng.normal(size=(2, n)) + 1
        problem = weight_problem(slopes, intercepts, 0.5)
        found = rb.solve_weights(slopes, intercepts, 0.5)
        columns = 0.5 * slopes
        with np.errstate(all="ignore"):
            kinks = (-columns[1] / (columns[0] - columns[1])).ravel()
        grid = np.concatenate([np.linspace(0, 1, 2001), kinks[(kinks > 0) & (kinks < 1)]])
        mixed = grid[:, None, None] * columns[0] + (1 - grid[:, None, None]) * columns[1]
        costs = 1 - (grid[:, None] * intercepts[0] + (1 - grid[:, None]) * intercepts[1]) + np.abs(mixed).sum(2)
        values = np.maximum(costs, 0).sum(1)
        assert found.lower_bound <= values.min() + 1e-12
        assert found.objective <= values.min() + 1e-6 * (1 + values.min())
        assert found.objective == pytest.approx(objective(problem, found.weights), rel=1e-12, abs=1e-12)


def test_three_members_by_brute_force_on_a_grid():
    rng = np.random.default_rng(6)
    grid = [np.array(w) / 40 for w in itertools.product(range(41), repeat=3) if sum(w) == 40]
    for _ in range(5):
        slopes, intercepts = rng.normal(size=(3, 4, 2)) * 0.5, rng.normal(size=(3, 4)) + 1
        problem = weight_problem(slopes, intercepts, 1.0)
        found = rb.solve_weights(slopes, intercepts, 1.0)
        values = [objective(problem, w) for w in grid]
        assert found.lower_bound <= min(values)
        assert found.objective <= min(values) + 1e-6


def test_lower_bound_is_below_every_mix_on_thousands_of_instances():
    rng = np.random.default_rng(7)
    for _ in range(700):
        members, n, d = (int(rng.integers(1, high)) for high in (6, 6, 5))
        slopes = torch.from_numpy(rng.normal(size=(members, n, d)) * rng.choice([0.1, 1.0, 10.0]))
        intercepts = torch.from_numpy(rng.normal(size=(members, n)) + 1)
        norm = str(rng.choice(["linf", "l2", "l1"]))
        limits = SolverSettings(max_passes=int(rng.integers(1, 6)))
        found = rb.solve_weights(slopes, intercepts, 1.0, norm=norm, settings=limits)
        problem = weight_problem(slopes, intercepts, 1.0, norm=norm)
        # Many mixes at once: the loss in plain NumPy, corners and near the answer included.
        mixes = rng.dirichlet(np.full(members, 0.5), size=60)
        near = np.abs(np.array(found.weights) + 0.01 * rng.normal(size=(20, members)))
        mixes = np.concatenate([mixes, np.eye(members), near / near.sum(1, keepdims=True), [found.weights]])
        mixed = np.einsum("pt,tnd->pnd", mixes, slopes.numpy())
        order = {"linf": 1, "l2": 2, "l1": np.inf}[norm]
        values = np.maximum(0, 1 - mixes @ intercepts.numpy() + np.linalg.norm(mixed, order, axis=2)).sum(1)
        assert found.lower_bound <= values.min() * (1 + 1e-13)
        assert found.objective == pytest.approx(objective(problem, found.weights), rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("name", ["shared structure", "heavy tails", "ties"])
def test_order_and_scale_do_not_matter(name):
    slopes, intercepts = FAMILIES[name]
    base = rb.solve_weights(slopes, intercepts, 1.0)
    rng = np.random.default_rng(0)
    t, n, d = (rng.permutation(size) for size in slopes.shape)
    moved = rb.solve_weights(slopes[t][:, n][:, :, d], intercepts[t][:, n], 1.0)
    assert moved.objective == pytest.approx(base.objective, rel=2e-6)
    signs = rng.choice([-1.0, 1.0], size=slopes.shape[1:])
    flipped = rb.solve_weights(slopes * signs, intercepts, 1.0)
    assert flipped.objective == pytest.approx(base.objective, rel=2e-6)
    scaled = rb.solve_weights(4 * slopes, 2 * intercepts, 0.5, kappa=2.0)
    assert scaled.objective == pytest.approx(2 * base.objective, rel=2e-6)


def test_tensors_arrays_and_mapped_files_give_the_same(tmp_path):
    slopes, intercepts = FAMILIES["tiny"]
    path = tmp_path / "slopes.npy"
    np.save(path, slopes)
    mapped = np.load(path, mmap_mode="r")
    base = rb.solve_weights(slopes, intercepts, 1.0)
    for other in (torch.from_numpy(slopes), mapped, slopes.reshape(4, 5, 2, 1), slopes.tolist()):
        assert rb.solve_weights(other, intercepts, 1.0).weights == pytest.approx(base.weights, abs=1e-12)
    assert rb.solve_weights(slopes, intercepts, np.ones(2)).weights == base.weights
    assert rb.solve_weights(slopes, intercepts, np.ones((5, 2))).weights == base.weights


def test_limits_end_with_true_bounds_and_say_so():
    slopes, intercepts = FAMILIES["64 members"]
    best = rb.solve_weights(slopes, intercepts, 1.0)
    passes = rb.solve_weights(slopes, intercepts, 1.0, settings=SolverSettings(max_passes=4))
    assert (passes.status, passes.passes) == ("pass-limit", pytest.approx(4.0))
    seconds = rb.solve_weights(slopes, intercepts, 1.0, settings=SolverSettings(max_seconds=1e-9))
    assert seconds.status == "time-limit"
    for found in (passes, seconds):
        assert found.lower_bound <= best.objective
        assert found.objective >= best.lower_bound
        assert found.gap > 1e-6
    impossible = rb.solve_weights(slopes, intercepts, 1.0, settings=SolverSettings(gap=0.0))
    assert impossible.status in ("stalled", "pass-limit", "optimal")
    assert impossible.gap < 1e-6


def test_hopeless_and_perfect_pools():
    slopes, intercepts = FAMILIES["all certified"]
    perfect = rb.solve_weights(slopes, intercepts, 1.0)
    assert (perfect.objective, perfect.lower_bound, perfect.gap) == (0.0, 0.0, 0.0)
    problem = weight_problem(slopes, intercepts, 1.0)
    assert bool((margins(problem, perfect.weights) > 1).all())

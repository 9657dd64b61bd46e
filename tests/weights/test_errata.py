"""Each row of the errata of the paper's coordinate step: the printed formula fails, the corrected one does not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from printed_step import ALL_FIXES, printed_minimum, printed_terms, sorted_minimum, value

import robboost as rb
from robboost.weights import SolverSettings, eliminate, margins, objective, screen, weight_problem
from robboost.weights.line import Rows, minimise_line


def problem(seed, members=4, n=6, d=5):
    rng = np.random.default_rng(seed)
    columns = rng.normal(size=(n, d, members))
    intercepts = rng.normal(size=(n, members)) + 3
    a = rng.random(members) + 0.05
    return columns, intercepts, a / a.sum()


def loss(columns, intercepts, a):
    return np.maximum(0, 1 + np.abs(columns @ a).sum(1) - intercepts @ a).sum()


def on_line(a, t, s):
    rest = a.copy()
    rest[t] = 0
    moved = (1 - s) * rest / rest.sum()
    moved[t] = s
    return moved


def our_minimum(terms):
    omega, nu, gamma, mu = (torch.from_numpy(np.ascontiguousarray(x)) for x in terms)
    return minimise_line(lambda: [Rows(gamma, mu, omega, nu)], n_rows=omega.numel())


def brute_minimum(terms):
    """Every breakpoint, every crossing of every linear piece, and both ends."""
    omega, nu, gamma, mu = terms
    with np.errstate(all="ignore"):
        rows = (-nu / omega).reshape(-1)
    grid = np.unique(np.concatenate([[0.0, 1.0], rows[(rows > 0) & (rows < 1)]]))
    points = list(grid)
    for low, high in itertools.pairwise(grid):
        middle = 0.5 * (low + high)
        sign = np.sign(omega * middle + nu)
        a, b = (sign * omega).sum(1) + gamma, (sign * nu).sum(1) + mu
        with np.errstate(all="ignore"):
            cross = -b / a
        points += list(cross[(cross > low) & (cross < high)])
    return min(value(terms, s) for s in points)


def test_corrected_terms_are_the_loss_on_the_line():
    for seed in range(50):
        columns, intercepts, a = problem(seed)
        t = seed % 4
        terms = printed_terms(columns, intercepts, a, t, ALL_FIXES)
        for s in (0.0, 0.3, float(a[t]), 1.0):
            assert value(terms, s) == pytest.approx(loss(columns, intercepts, on_line(a, t, s)), rel=1e-12)


@pytest.mark.parametrize("left_out", sorted(ALL_FIXES))
def test_each_printed_term_is_wrong(left_out):
    wrong = 0
    for seed in range(50):
        columns, intercepts, a = problem(seed)
        terms = printed_terms(columns, intercepts, a, 0, ALL_FIXES - {left_out})
        truth = loss(columns, intercepts, on_line(a, 0, 0.4))
        wrong += abs(value(terms, 0.4) - truth) > 1e-6 * (1 + truth)
    assert wrong == 50


def test_printed_steps_end_above_the_optimum():
    above = 0
    for seed in range(20):
        columns, intercepts, a = problem(seed)
        a = np.full(4, 0.25)
        for _ in range(3):
            for t in range(4):
                moved = on_line(a, t, printed_minimum(printed_terms(columns, intercepts, a, t))[0])
                a = moved if np.isfinite(moved).all() and moved[t] < 1 else a
        best = rb.solve_weights(columns.transpose(2, 0, 1), intercepts.T, 1.0)
        above += loss(columns, intercepts, a) > best.objective * (1 + 1e-4) + 1e-9
    assert above >= 15


def test_the_end_of_the_line_is_never_looked_at_in_print():
    # Member 0 is right (slope 0, intercept 2), the rest is not: the minimum is at s = 1, after the only breakpoint.
    terms = printed_terms(np.array([[[0.5, 1.0]]]), np.array([[2.0, 0.0]]), np.array([0.5, 0.5]), 0, ALL_FIXES)
    assert value(terms, 1.0) < printed_minimum(terms)[1]
    found = our_minimum(terms)
    assert (found.position, found.value) == (1.0, value(terms, 1.0))


def test_few_breakpoints_go_wrong_in_print_and_not_here():
    wrong = 0
    for seed in range(60):
        columns, intercepts, a = problem(seed, members=3, n=2, d=1)
        # Slopes of one sign: no row changes sign between two mixes.
        terms = printed_terms(np.abs(columns), intercepts - 2, a, 0, ALL_FIXES)
        truth = brute_minimum(terms)
        wrong += printed_minimum(terms)[1] > truth + 1e-9
        assert our_minimum(terms).value == pytest.approx(truth, abs=1e-12)
        assert sorted_minimum(terms)[1] == pytest.approx(truth, abs=1e-9)
    assert wrong > 20


def test_dead_rows_are_no_breakpoints():
    columns, intercepts, a = problem(3)
    columns[:, 1:3] = 0.0
    terms = printed_terms(columns, intercepts, a, 1, ALL_FIXES)
    with np.errstate(all="ignore"):
        assert np.isnan(-terms[1] / terms[0]).any()  # what a comparison sort is handed in print
    assert our_minimum(terms).value == pytest.approx(brute_minimum(terms), abs=1e-12)


def test_flat_pieces_have_no_crossing():
    # One pair whose slope is exactly zero, so that -b / a divides by zero.
    terms = (np.array([[1.0], [1.0]]), np.array([[0.5], [-0.3]]), np.array([-1.0, 0.5]), np.array([-0.5, 0.2]))
    omega, nu, gamma, _ = terms
    assert (np.sign(nu) * omega).sum(1)[0] + gamma[0] == 0.0
    assert our_minimum(terms).value == pytest.approx(brute_minimum(terms), abs=1e-12)


def test_all_weight_on_one_member():
    columns, intercepts, _ = problem(5)
    with np.errstate(all="ignore"):
        terms = printed_terms(columns, intercepts, np.array([1.0, 0.0, 0.0, 0.0]), 0)
    assert np.isnan(terms[0]).any()
    # Our sweep passes through a corner (member 1 is best by far at first sight) and comes out with numbers.
    intercepts[:, 1] += 50
    found = rb.solve_weights(columns.transpose(2, 0, 1), intercepts.T, 1.0, method="coordinate")
    assert found.weights == pytest.approx((0.0, 1.0, 0.0, 0.0)) or found.objective == pytest.approx(0.0, abs=1e-9)
    assert np.isfinite(found.weights).all()


def test_printed_step_sums_every_term_at_every_breakpoint():
    columns, intercepts, a = problem(0, n=20, d=10)
    terms = printed_terms(columns, intercepts, a, 0, ALL_FIXES)
    count: list[int] = []
    printed_minimum(terms, count)
    assert sum(count) > 10 * terms[0].size  # quadratic; ours reads the rows once
    assert our_minimum(terms).reads == 1


def test_negative_margins_everywhere_do_not_rule_a_pair_out():
    hopeless = weight_problem(np.array([[[2.0]], [[-2.0]]]), np.ones((2, 1)), 1.0)
    assert eliminate(hopeless).hopeless.tolist() == [True]
    assert margins(hopeless, [0.5, 0.5]).tolist() == [1.0]
    screened = screen(hopeless)
    assert screened.possible.tolist() == [True]
    assert screened.impossible.tolist() == [False]


def test_dropping_certified_pairs_changes_the_loss():
    # Both members certify pair 0 with margin 0.5, which still costs 0.5 at kappa 1.
    certified = weight_problem(np.zeros((2, 1, 1)), np.full((2, 1), 0.5), 1.0)
    assert eliminate(certified).robust.tolist() == [True]
    assert objective(certified, [0.5, 0.5]) == 0.5
    assert screen(certified).costless.tolist() == [False]


def test_coordinate_descent_sticks_where_auto_does_not():
    stuck = 0
    for seed in range(20):
        columns, intercepts, _ = problem(seed, members=4, n=4, d=3)
        slopes, c = columns.transpose(2, 0, 1) * 0.5, intercepts.T - 1.5
        limits = SolverSettings(epochs=30, order="cyclic")
        descent = rb.solve_weights(slopes, c, 1.0, method="coordinate", settings=limits)
        best = rb.solve_weights(slopes, c, 1.0)
        assert best.status == "optimal"
        assert best.objective <= descent.objective + 1e-6 * best.objective + 1e-12
        stuck += descent.objective > best.objective * (1 + 1e-4) + 1e-9
    assert stuck > 3


def test_large_lines_take_the_same_minimum_through_bracket_and_compiled_fold():
    rng = np.random.default_rng(0)
    n, d = 900, 300
    for target in (0.0, 0.02, 0.6, 1.0):
        omega = rng.normal(size=(n, d)) / d
        # The norm's own minimum is put near the target; the first pairs, which are sampled, would have it elsewhere.
        nu = -target * omega + 0.02 * rng.normal(size=(n, d)) / d
        gamma = np.where(np.arange(n) % 2 == 0, 0.02, -0.02) * rng.random(n)
        terms = (omega, nu, gamma, 0.1 + rng.normal(size=n) * 0.02)
        rows = Rows(*(torch.from_numpy(x) for x in (gamma, terms[3], omega, nu)))
        found = minimise_line(lambda rows=rows: [rows.every(1)], n_rows=n * d)
        assert found.value == pytest.approx(sorted_minimum(terms)[1], rel=1e-11)
        assert value(terms, found.position) == pytest.approx(found.value, rel=1e-12)

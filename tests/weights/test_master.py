"""The master problem: against two other solvers, by hand, in blocks of any size, and with a goal."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from robboost.weights import master
from robboost.weights.master import minimise_model


def model(groups, pieces, members, seed, kind="random"):
    """Constants [G, K], slopes [G, K, T] and linear [T] of a model."""
    rng = np.random.default_rng(seed)
    constants = np.ones((groups, pieces))
    slopes = 0.5 * rng.normal(size=(groups, 1, 1)) - 1 + 0.3 * rng.normal(size=(groups, pieces, members))
    linear = 0.05 * max(groups, 1) * rng.normal(size=members)
    if kind == "absent pieces":
        absent = rng.random((groups, pieces)) < 0.4
        constants[absent], slopes[absent] = 0.0, 0.0
    elif kind == "zero slopes":
        slopes[:], linear[:] = 0.0, 0.0
    elif kind == "duplicates":
        slopes[:, :, members // 2 :] = slopes[:, :, : members - members // 2]
        linear[members // 2 :] = linear[: members - members // 2]
        slopes[groups // 2 :] = slopes[: groups - groups // 2]
    elif kind == "nearly parallel":
        slopes = -1 + 1e-5 * slopes
        linear *= 1e-5
    elif kind == "large":
        constants, slopes, linear = 1e6 * constants, 1e6 * slopes, 1e6 * linear
    elif kind == "nothing costs":
        slopes, linear = slopes - 10, 0 * linear
    return constants, slopes, linear


SIZES = [(1, 1, 1), (7, 1, 1), (40, 1, 5), (40, 3, 5), (200, 2, 12), (3, 4, 2), (30, 2, 40), (0, 1, 4)]
KINDS = ["random", "absent pieces", "zero slopes", "duplicates", "nearly parallel", "large", "nothing costs"]


def by_highs(constants, slopes, linear):
    groups, pieces, members = slopes.shape
    tops = np.repeat(np.eye(groups), pieces, axis=0)
    found = linprog(
        np.concatenate([linear, np.ones(groups)]),
        A_ub=np.hstack([slopes.reshape(-1, members), -tops]) if groups else None,
        b_ub=-constants.reshape(-1) if groups else None,
        A_eq=np.concatenate([np.ones(members), np.zeros(groups)])[None],
        b_eq=[1.0],
        method="highs",
    )
    assert found.status == 0, found.message
    return found.fun


def value_at(weights, constants, slopes, linear):
    pieces = constants + slopes @ weights
    return float(linear @ weights + np.maximum(pieces.max(axis=1, initial=0.0), 0.0).sum())


def proved(found, constants, slopes, linear):
    """The lower bound of a minimum's multipliers, from the arrays alone."""
    mu = np.maximum(found.multipliers, 0.0)
    mu = mu / np.maximum(mu.sum(axis=1, keepdims=True), 1.0)
    return float((mu * constants).sum() + (linear + np.einsum("gk,gkt->t", mu, slopes)).min())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_piecewise_linear_models_meet_highs_and_prove_it(size, kind):
    arrays = model(*size, seed=3, kind=kind)
    scaled = tuple(part / 1e6 for part in arrays) if kind == "large" else arrays  # HiGHS has absolute tolerances
    exact = by_highs(*scaled) * (1e6 if kind == "large" else 1.0)
    found = minimise_model(*arrays)
    room = 1e-9 * (abs(exact) + np.abs(arrays[2]).sum() + np.abs(arrays[0]).sum())
    assert found.weights.min() >= 0
    assert found.weights.sum() == pytest.approx(1.0, abs=1e-14)
    assert found.multipliers.shape == arrays[0].shape
    assert found.multipliers.min(initial=0.0) >= 0
    assert found.multipliers.sum(axis=1).max(initial=0.0) <= 1 + 1e-9
    assert found.value == pytest.approx(value_at(found.weights, *arrays), rel=1e-12, abs=room)
    assert found.value == pytest.approx(exact, abs=room)
    assert exact - room <= proved(found, *arrays) <= exact + room


@pytest.mark.parametrize("size", [(20, 1, 4), (15, 3, 6), (0, 1, 3), (5, 2, 1)], ids=str)
def test_curved_models_meet_a_conic_solver(size):
    import cvxpy

    constants, slopes, linear = model(*size, seed=5)
    members = size[2]
    rng = np.random.default_rng(6)
    root = rng.normal(size=(members, max(1, members - 1)))  # singular: positive semidefinite is enough
    curvature, centre = root @ root.T * max(size[0], 1) * 0.1, rng.dirichlet(np.ones(members))
    found = minimise_model(constants, slopes, linear, bowl=(curvature, centre))
    a = cvxpy.Variable(members, nonneg=True)
    cost = linear @ a + 0.5 * cvxpy.quad_form(a - centre, cvxpy.psd_wrap(curvature))
    for c, s in zip(constants, slopes, strict=True):
        cost += cvxpy.pos(cvxpy.max(c + s @ a))
    exact = cvxpy.Problem(cvxpy.Minimize(cost), [cvxpy.sum(a) == 1])
    exact.solve(solver="CLARABEL", tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    offset = found.weights - centre
    here = value_at(found.weights, constants, slopes, linear) + 0.5 * offset @ curvature @ offset
    assert found.value == pytest.approx(here, rel=1e-12, abs=1e-12)
    assert found.value == pytest.approx(float(exact.value), rel=1e-8, abs=1e-8)


def test_by_hand():
    # max(0, 1 - 4 a_1) + max(0, 1 - 2 a_2) on a_1 + a_2 = 1: zero from a_1 = 1/4 to 1/2.
    slopes = np.array([[[-4.0, 0.0]], [[0.0, -2.0]]])
    found = minimise_model(np.ones((2, 1)), slopes, np.zeros(2))
    assert found.value == pytest.approx(0.0, abs=1e-9)
    assert 0.25 - 1e-8 <= found.weights[0] <= 0.5 + 1e-8
    # The middle is at 3/4: max(0, 1 - 2 a_2) + 8 (a_1 - 3/4)^2 is least at a_1 = 5/8, with 1/4 + 1/8.
    found = minimise_model(np.ones((2, 1)), slopes, np.zeros(2), bowl=(8 * np.eye(2), np.array([0.75, 0.25])))
    assert found.weights == pytest.approx([0.625, 0.375], abs=1e-7)
    assert found.value == pytest.approx(0.375, abs=1e-9)
    assert found.multipliers[:, 0] == pytest.approx([0.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("size", [(1, 2, 3), (40, 1, 5), (41, 3, 5), (97, 2, 12)], ids=str)
def test_blocks_do_not_matter(size, monkeypatch):
    arrays = model(*size, seed=8)
    curvature = np.eye(size[2])
    bowl = (curvature, np.full(size[2], 1.0 / size[2]))
    whole = [minimise_model(*arrays), minimise_model(*arrays, bowl=bowl)]
    for numbers in (1, 100, 777):  # one group a block, and numbers that leave the last block short
        monkeypatch.setattr(master, "_BLOCK_NUMBERS", numbers)
        for one, other in zip(whole, (minimise_model(*arrays), minimise_model(*arrays, bowl=bowl)), strict=True):
            assert other.value == pytest.approx(one.value, rel=1e-9)
            assert other.weights == pytest.approx(one.weights, abs=1e-6)
            assert other.multipliers == pytest.approx(one.multipliers, abs=1e-4)


def test_blocks_are_too_small_for_threads():
    # OpenBLAS starts threads from 9216 numbers in a matrix times a vector, 262144 products in one times a matrix.
    for size in [(3000, 1, 12), (3000, 4, 12), (500, 1, 64), (500, 4, 64), (10, 1, 1)]:
        constants, slopes, linear = model(*size, seed=1)
        blocked = master._Model.blocked(constants, slopes, linear, np.zeros((size[2], size[2])))
        _, members, width = blocked.slopes.shape
        assert width == size[1] or (members * width <= 9216 and members * members * width <= 262144)


def test_a_goal_far_above_saves_digits_and_no_more():
    arrays = model(300, 2, 8, seed=9)
    exact = minimise_model(*arrays).value
    for missing in (1.0, 1e-3, 1e-6):
        bound = proved(minimise_model(*arrays, goal=exact * (1 + missing)), *arrays)
        assert exact * (1 - 0.03 * missing) - 1e-8 * abs(exact) <= bound <= exact * (1 + 1e-12)
    loose = minimise_model(*arrays, goal=2 * exact)
    assert proved(loose, *arrays) < exact * (1 - 1e-6)

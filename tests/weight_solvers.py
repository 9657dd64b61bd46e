"""Independent solvers of the weight problem: a linear program for HiGHS, a conic program for Clarabel."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, eye_array, hstack, kron, vstack


def highs_optimum(slopes, intercepts, radius, kappa=1.0):
    """The l_inf loss as a linear program: v_n >= kappa - c.a + sum_i s_ni, s_ni >= |u_ni|, solved by HiGHS."""
    members, n, d = slopes.shape
    columns = (np.asarray(slopes, dtype=np.float64) * radius).transpose(1, 2, 0).reshape(n * d, members)
    columns = coo_array(columns)
    rows = eye_array(n * d)
    sums = kron(eye_array(n), np.ones((1, d)))
    blank = coo_array((n * d, n))
    above = vstack(
        [
            hstack([columns, blank, -rows]),
            hstack([-columns, blank, -rows]),
            hstack([coo_array(-np.asarray(intercepts, dtype=np.float64).T), -eye_array(n), sums]),
        ]
    ).tocsr()
    limits = np.concatenate([np.zeros(2 * n * d), np.full(n, -kappa)])
    size = members + n + n * d
    cost = np.concatenate([np.zeros(members), np.ones(n), np.zeros(n * d)])
    equal = np.concatenate([np.ones(members), np.zeros(n + n * d)])[None]
    found = linprog(cost, A_ub=above, b_ub=limits, A_eq=equal, b_eq=[1.0], bounds=[(0, None)] * size, method="highs")
    assert found.status == 0, found.message
    return found.fun


def conic_optimum(slopes, intercepts, radius, norm, kappa=1.0):
    """The loss for any threat norm as a conic program, solved by Clarabel through CVXPY."""
    import cvxpy

    members, n, _ = slopes.shape
    columns = np.asarray(slopes, dtype=np.float64) * radius
    a = cvxpy.Variable(members, nonneg=True)
    dual = {"linf": 1, "l2": 2, "l1": "inf"}[norm]
    costs = [cvxpy.pos(kappa - intercepts[:, k] @ a + cvxpy.norm(columns[:, k].T @ a, dual)) for k in range(n)]
    found = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum(costs)), [cvxpy.sum(a) == 1])
    found.solve(solver="CLARABEL", tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
    return float(found.value)

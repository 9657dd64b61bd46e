"""The paper's coordinate step as printed (algorithm 1), its corrections one by one, and a sorted exact step.

Kept apart from the library: the tests show each row of the errata by it, the benchmark times it.
"""

from __future__ import annotations

import numpy as np

ALL_FIXES = frozenset({"sign of u", "u in gamma", "one 1"})


def printed_terms(columns, intercepts, a, t, fixes=frozenset()):
    """omega, nu [n, d] and gamma, mu [n] of equation 12 for columns [n, d, T], intercepts [n, T]."""
    others = a.copy()
    others[t] = 0.0
    rest = others.sum()
    v = columns @ others
    u = (intercepts @ others) * (-1.0 if "sign of u" in fixes else 1.0)
    omega, nu = columns[:, :, t] - v / rest, v / rest
    gamma = -intercepts[:, t] - (u / rest if "u in gamma" in fixes else 1.0 / rest)
    mu = u / rest + 1.0
    return omega, nu, gamma, mu if "one 1" in fixes else mu + 1.0


def value(terms, s):
    """g(s) of equation 12, its constant already in mu."""
    omega, nu, gamma, mu = terms
    return np.maximum(0.0, np.abs(omega * s + nu).sum(1) + gamma * s + mu).sum()


def printed_minimum(terms, count=None):
    """Algorithm 1 as printed: walks the sorted row breakpoints in (0, 1), with the zero crossings met on the way.

    Neither s = 1 nor a crossing after the last breakpoint is looked at, and every loss is summed anew. `count`, a list,
    takes the number of terms that were summed.
    """
    omega, nu, gamma, mu = (x.copy() for x in terms)
    n, d = omega.shape
    with np.errstate(all="ignore"):
        r = (-nu / omega).reshape(-1)
    plus = (nu > 0) | ((nu == 0) & (omega > 0))
    minus = (nu < 0) | ((nu == 0) & (omega < 0))
    a = (omega * plus).sum(1) - (omega * minus).sum(1) + gamma
    b = (nu * plus).sum(1) - (nu * minus).sum(1) + mu
    with np.errstate(all="ignore"):
        h = np.where(-b / a > 0, -b / a, np.inf)
    best, where = np.maximum(b, 0).sum(), 0.0
    order = np.argsort(r)
    i = 0
    while i < n * d:
        k, row = divmod(order[i], d)
        if r[order[i]] <= 0 or r[order[i]] >= 1:
            i += 1
            continue
        first = np.argmin(h)
        if r[order[i]] > h[first] and h[first] > 0:
            x = h[first]
            h[first] = np.inf
        else:
            sign = 2.0 if minus[k, row] else -2.0
            a[k] += sign * omega[k, row]
            b[k] += sign * nu[k, row]
            with np.errstate(all="ignore"):
                crossing = -b[k] / a[k]
            h[k] = crossing if crossing > r[order[i]] else np.inf
            x = r[order[i]]
            i += 1
        loss = np.maximum(a * x + b, 0).sum()
        if count is not None:
            count.append(n)
        if loss < best:
            best, where = loss, x
    return where, best


def sorted_minimum(terms):
    """The exact minimiser by sorting every breakpoint, hinge crossings included, with a running slope."""
    omega, nu, gamma, mu = terms
    n = omega.shape[0]
    with np.errstate(all="ignore"):
        r = np.where(omega != 0, -nu / omega, -1.0)
    inside = (r > 0) & (r < 1)
    order = np.argsort(np.where(inside, r, 2.0), axis=1)
    points = np.concatenate(
        [np.zeros((n, 1)), np.take_along_axis(np.where(inside, r, 1.0), order, 1), np.ones((n, 1))], 1
    )
    sign = np.where(nu != 0, np.sign(nu), np.sign(omega))
    # A row whose only crossing lies at 0 has the sign of its slope from there on.
    slope = (sign * omega).sum(1) + gamma
    jumps = np.take_along_axis(np.where(inside, 2 * np.abs(omega), 0.0), order, 1)
    slopes = np.concatenate([slope[:, None], slope[:, None] + np.cumsum(jumps, 1)], 1)
    values = np.concatenate([np.zeros((n, 1)), np.cumsum(slopes * np.diff(points, axis=1), 1)], 1)
    values += (np.abs(nu).sum(1) + mu)[:, None]
    # Hinge: slope counts where the value is above zero; crossings split a piece in two.
    low, high = values[:, :-1], values[:, 1:]
    with np.errstate(all="ignore"):
        cross = points[:, :-1] - low / slopes
    ends, change = [], []
    up, down = (low < 0) & (high > 0), (low > 0) & (high < 0)
    positive = (low >= 0) & (high >= 0) & ~((low == 0) & (high == 0))
    for start, stop, mask in (
        (points[:, :-1], points[:, 1:], positive),
        (cross, points[:, 1:], up),
        (points[:, :-1], cross, down),
    ):
        ends += [start[mask], stop[mask]]
        change += [slopes[mask], -slopes[mask]]
    ends, change = np.concatenate(ends), np.concatenate(change)
    order = np.argsort(ends)
    running = np.cumsum(change[order])
    # Smallest point from which on the slope is not negative.
    rising = np.nonzero((running >= -1e-12 * np.abs(change).sum()) & np.append(np.diff(ends[order]) > 0, True))[0]
    candidates = {0.0, 1.0}
    if rising.size:
        candidates.add(float(ends[order][rising[0]]))
    best = min(candidates, key=lambda s: value(terms, s))
    return best, value(terms, best)

"""Folding the rows of a line in one read, as a compiled CPU kernel."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

__all__ = ["fold_rows"]


@numba.njit(nogil=True, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def fold_rows(omega: Any, nu: Any, low: float, high: float, gamma: Any, mu: Any, kept: Any, kept_pair: Any) -> int:
    """Adds rows that keep their sign on [low, high] to gamma and mu [n]; returns how many others went to `kept`.

    omega, nu: [n, d]; kept: [2, n d] takes omega and nu of the others, kept_pair [n d] their pair.
    """
    count = 0
    for n in range(omega.shape[0]):
        slope, offset = 0.0, 0.0
        for i in range(omega.shape[1]):
            w, v = omega[n, i], nu[n, i]
            at_low, at_high = w * low + v, w * high + v
            if (at_low < 0 < at_high) or (at_low > 0 > at_high):
                kept[0, count] = w
                kept[1, count] = v
                kept_pair[count] = n
                count += 1
            else:
                total = at_low + at_high
                sign = np.float64(total > 0) - np.float64(total < 0)
                slope += sign * w
                offset += sign * v
        gamma[n] += slope
        mu[n] += offset
    return count

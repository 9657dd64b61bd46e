"""Families of weight problems that have broken solvers: (slopes [T, n, d], intercepts [T, n]) by name."""

from __future__ import annotations

import numpy as np


def families(seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)

    def plain(members: int, n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.normal(size=(members, n, d)) / d, 1 + 0.5 * rng.normal(size=(members, n))

    def shared(members: int, n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
        common, own = rng.normal(size=(1, n, d)), rng.normal(size=(members, n, d))
        size = np.exp(0.5 * rng.normal(size=(n, 1))) / d
        return (common + own) * size, 1 + 0.5 * rng.normal(size=(1, n)) + 0.2 * rng.normal(size=(members, n))

    found = {
        "shared structure": shared(8, 300, 40),
        "independent": plain(8, 200, 30),
        "tiny": plain(4, 5, 2),
        "one pair": plain(5, 1, 3),
        "one input": plain(5, 40, 1),
        "one member": plain(1, 30, 5),
        "64 members": shared(64, 120, 25),
        "many pairs, few inputs": plain(6, 3000, 3),
        "few pairs, many inputs": shared(6, 8, 2000),
        "cancelling members": (np.array([[[1.0, 0.5]], [[-1.0, -0.5]], [[3.0, 0.1]]]).repeat(10, 1), np.ones((3, 10))),
        "all certified": (shared(5, 50, 20)[0] * 0.01, 3 + rng.random((5, 50))),
        "none certified": (shared(5, 50, 20)[0], -2 - rng.random((5, 50))),
        "zero slopes": (np.zeros((4, 30, 6)), 1 + 0.5 * rng.normal(size=(4, 30))),
        "large numbers": (shared(6, 60, 20)[0] * 1e6, 1e6 * rng.normal(size=(6, 60))),
        "small numbers": (shared(6, 60, 20)[0] * 1e-5, 1 + 1e-5 * rng.normal(size=(6, 60))),
        "ties": (rng.integers(-2, 3, size=(5, 40, 4)) / 4, rng.integers(0, 3, size=(5, 40)) / 2),
    }
    slopes, intercepts = shared(4, 60, 12)
    copies = [0, 1, 2, 3, 0, 1, 2, 3, 0]
    found["duplicates"] = (slopes[copies], intercepts[copies])
    better, offset = slopes.copy(), intercepts.copy()
    better[2], offset[2] = 0.1 * slopes[2], intercepts.max(0) + 0.1
    found["a dominating member"] = (better, offset)
    worse, offset = slopes.copy(), intercepts.copy()
    offset[1] = -5 - rng.random(60)
    found["a member with everything negative"] = (worse, offset)
    heavy = rng.standard_cauchy(size=(6, 80, 15))
    found["heavy tails"] = (np.clip(heavy, -1e3, 1e3) / 15, 1 + rng.normal(size=(6, 80)))
    sparse = rng.normal(size=(6, 100, 50)) * (rng.random((6, 100, 50)) < 0.05)
    found["sparse"] = (sparse, 1 + 0.5 * rng.normal(size=(6, 100)))
    return found

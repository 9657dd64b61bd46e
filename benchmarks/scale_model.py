"""The model of what bounds on disk cost, fitted to measurements, and applied to a problem far larger.

fill    = a T n d / P + b T n / P + s           (computing bounds, rounding, writing; start)
pass    = c T n d / P + e n T + f               (reading and folding; what every process does for all pairs)
solve   = pass * passes + g n T + k             (the search between passes)
read    = r * 4 T n d * passes                  (bytes of all processes)
memory  = m + h n T                             (bytes of one process: buffers, and what is held of each pass)

Seconds are core seconds of the busiest process, with T members, n pairs, d inputs and P processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

__all__ = ["Costs", "Run", "fit_costs", "on_paper"]


@dataclass(frozen=True)
class Run:
    """One measured size."""

    members: int
    pairs: int
    dim: int
    processes: int
    fill: float
    fill_pairs: int
    one_pass: float
    solve: float
    passes: float
    read: float
    memory: float

    @property
    def numbers(self) -> float:
        return float(self.members) * self.pairs * self.dim

    @property
    def bytes(self) -> float:
        return 4 * self.numbers


@dataclass(frozen=True)
class Costs:
    """Fitted coefficients, seconds and bytes, with the largest relative miss of each law."""

    fill: tuple[float, ...]
    one_pass: tuple[float, ...]
    between: tuple[float, ...]
    memory: tuple[float, ...]
    read: float
    misses: dict[str, float]

    def pass_seconds(self, members: float, pairs: float, dim: float, processes: float) -> float:
        c, e, f = self.one_pass
        return c * members * pairs * dim / processes + e * members * pairs + f

    def __str__(self) -> str:
        c, e, f = self.one_pass
        lines = [
            "Fitted model (T members, n pairs, d inputs, P processes), core seconds of a process and bytes:",
            f"  fill, s    = {self.fill[0]:.2e} T n d / P + {self.fill[1]:.2e} T n / P + {self.fill[2]:.2g}"
            f"   [{self._miss('fill')}]",
            f"  pass, s    = {c:.2e} T n d / P + {e:.2e} T n + {f:.2g}   [{self._miss('pass')};"
            f" {4 / c / 1e9:.2f} GB/s a core]",
            f"  solve, s   = passes * pass + {self.between[0]:.2e} T n + {self.between[1]:.2g}"
            f"   [{self._miss('solve')}]",
            f"  read, B    = {self.read:.2f} * 4 T n d * passes   [{self._miss('read')}]",
            f"  memory, B  = {self.memory[0] / 1e6:.0f}e6 + {self.memory[1]:.0f} T n   [{self._miss('memory')}]",
        ]
        return "\n".join(lines)

    def _miss(self, name: str) -> str:
        return f"worst miss {100 * self.misses[name]:.0f}%"


def fit_costs(runs: Sequence[Run]) -> Costs:
    """Least squares on relative errors, no negative coefficient."""
    misses = {}

    def law(name: str, rows: list[list[float]], values: list[float]) -> list[float]:
        target = np.array(values)
        design = np.array(rows)
        found, _ = nnls(design / target[:, None], np.ones(len(target)))
        misses[name] = float(np.abs(design @ found / target - 1).max())
        return [float(v) for v in found]

    share = [r.members * r.fill_pairs / r.processes for r in runs]
    fill = law("fill", [[s * r.dim, s, 1.0] for s, r in zip(share, runs, strict=True)], [r.fill for r in runs])
    one_pass = law(
        "pass", [[r.numbers / r.processes, r.members * r.pairs, 1] for r in runs], [r.one_pass for r in runs]
    )
    size = [float(r.members * r.pairs) for r in runs]
    between, *_ = nnls(
        np.array([[s / r.solve, 1 / r.solve] for s, r in zip(size, runs, strict=True)]),
        np.array([max(0.0, 1 - r.passes * r.one_pass / r.solve) for r in runs]),
    )
    found = [r.passes * r.one_pass + between @ np.array([s, 1.0]) for s, r in zip(size, runs, strict=True)]
    misses["solve"] = max(abs(f / r.solve - 1) for f, r in zip(found, runs, strict=True))
    (read,) = law("read", [[r.bytes * r.passes] for r in runs], [r.read for r in runs])
    memory = law("memory", [[1, s] for s in size], [r.memory for r in runs])
    return Costs(tuple(fill), tuple(one_pass), tuple(between), tuple(memory), read, misses)


# 1.2 million images x 1,000 classes at 224 x 224 x 3, twelve members; what exact screening leaves of the targets.
_IMAGES, _CLASSES, _DIM, _MEMBERS, _KEPT = 1_200_000, 1_000, 150_528, 12, 10


def on_paper(costs: Costs) -> str:
    """The same model where nothing can be measured."""
    lines = [f"\nOn paper: {_IMAGES:,} images x {_CLASSES:,} classes, d = {_DIM:,}, T = {_MEMBERS}"]
    for name, targets, item in (
        ("every target, float32", _CLASSES - 1, 4),
        (f"{_KEPT} targets an image, float32", _KEPT, 4),
        (f"{_KEPT} targets an image, int8", _KEPT, 1),
    ):
        pairs = _IMAGES * targets
        size = float(_MEMBERS) * pairs * _DIM * item
        state = costs.memory[1] * _MEMBERS * pairs
        lines.append(
            f"  {name:<32} store {size / 1e12:>8.1f} TB; a pass at 2 GB/s a machine: {size / 2e9 / 3600:>7.1f} h on 1,"
            f" {size / 2e9 / 256 / 60:>7.1f} min on 256; held by every process {state / 1e9:>6.0f} GB"
        )
    pairs = _IMAGES * _KEPT
    lines.append(
        f"  between passes, {_KEPT} targets, one process as now: {costs.between[0] * _MEMBERS * pairs:.0f} s in all"
    )
    return "\n".join(lines)

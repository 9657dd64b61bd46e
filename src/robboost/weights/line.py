"""The exact minimiser on a line, in linear time: the corrected coordinate step of the paper (section 3.3, algorithm 1).

On the line a(s) = s e_t + (1 - s) b the loss is, with omega = A_t - A b, nu = A b, gamma = -(c_t - c . b) and
mu = kappa - c . b,

    g(s) = sum_n max(0, gamma_n s + mu_n + sum_i |omega_ni s + nu_ni|),      convex and piecewise linear on [0, 1].

Sorting every breakpoint is not needed. A row keeps its sign over a bracket unless it has opposite strict signs at the
two ends; such rows are folded into the slope of their pair (no division, so dead rows need no care), and few remain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

__all__ = ["Line", "LineMinimum", "Rows", "minimise_line"]

# Rows read for the first bracket, and the width of that bracket.
_SAMPLE_ROWS = 30_000
_BRACKET = 0.02
# Below this many rows the plain form is done before a compiled kernel has started.
_WORTH_COMPILING = 50_000


@dataclass(frozen=True, eq=False)
class Line:
    """Pairs `gamma s + mu` [n] plus rows `|omega s + nu|` [k], each belonging to the pair `pair[k]`; float64."""

    gamma: torch.Tensor
    mu: torch.Tensor
    omega: torch.Tensor
    nu: torch.Tensor
    pair: torch.Tensor

    def fold(self, low: float, high: float) -> Line:
        """The same function on [low, high], with the rows that keep their sign there folded into their pairs."""
        at_low, at_high = self.omega * low + self.nu, self.omega * high + self.nu
        crosses = ((at_low < 0) & (at_high > 0)) | ((at_low > 0) & (at_high < 0))
        sign = torch.where(crosses, 0.0, (at_low + at_high).sign())
        n = self.gamma.shape[0]
        gamma = self.gamma + _by_pair(self.pair, sign * self.omega, n)
        mu = self.mu + _by_pair(self.pair, sign * self.nu, n)
        return Line(gamma, mu, self.omega[crosses], self.nu[crosses], self.pair[crosses])

    def evaluate(self, s: float) -> tuple[float, float, float]:
        """Value, left and right derivative at s."""
        n = self.gamma.shape[0]
        z = self.omega * s + self.nu
        value = self.gamma * s + self.mu + _by_pair(self.pair, z.abs(), n)
        slope = self.gamma + _by_pair(self.pair, z.sign() * self.omega, n)
        turn = _by_pair(self.pair, torch.where(z == 0, self.omega.abs(), 0.0), n)
        left, right = slope - turn, slope + turn
        above, at = value > 0, value == 0
        left = torch.where(above, left, torch.where(at, left.clamp(max=0), 0.0))
        right = torch.where(above, right, torch.where(at, right.clamp(min=0), 0.0))
        return float(value.clamp(min=0).sum()), float(left.sum()), float(right.sum())


@dataclass(frozen=True, eq=False)
class Rows:
    """Pairs `gamma s + mu` [n], each with its own rows `|omega s + nu|` [n, d]; float64."""

    gamma: torch.Tensor
    mu: torch.Tensor
    omega: torch.Tensor
    nu: torch.Tensor

    def fold(self, low: float, high: float) -> Line:
        """The same function on [low, high] as a line with few rows."""
        n, d = self.omega.shape
        if self.omega.is_cuda or n * d < _WORTH_COMPILING or not find_spec("numba"):
            pair = torch.arange(n, device=self.omega.device).repeat_interleave(d)
            return Line(self.gamma, self.mu, self.omega.reshape(-1), self.nu.reshape(-1), pair).fold(low, high)
        from robboost.weights.kernel_line import fold_rows

        gamma, mu = self.gamma.clone(), self.mu.clone()
        kept, pair = torch.empty(2, n * d, dtype=torch.float64), torch.empty(n * d, dtype=torch.long)
        count = fold_rows(
            self.omega.numpy(), self.nu.numpy(), low, high, gamma.numpy(), mu.numpy(), kept.numpy(), pair.numpy()
        )
        return Line(gamma, mu, kept[0, :count].clone(), kept[1, :count].clone(), pair[:count].clone())

    def every(self, step: int) -> Rows:
        """Every `step`-th pair, so that a sorted data set is sampled evenly."""
        return Rows(self.gamma[::step], self.mu[::step], self.omega[::step], self.nu[::step])


@dataclass(frozen=True)
class LineMinimum:
    """Minimiser s in [0, 1], the loss there, and how many times the rows were read."""

    position: float
    value: float
    reads: float


def minimise_line(chunks: Callable[[], Iterable[Rows]], *, n_rows: int) -> LineMinimum:
    """The exact minimiser of g on [0, 1].

    `chunks` runs over all pairs anew at each call, as rows of disjoint pairs. A subsample of the pairs gives a
    bracket; one read folds everything outside it; if the derivatives at its ends show that the minimiser lies beyond,
    the bracket moves and widens.
    """
    low, high, reads = 0.0, 1.0, 0.0
    if n_rows > 2 * _SAMPLE_ROWS:
        step = n_rows // _SAMPLE_ROWS
        middle, _ = _on_folded(_joined([rows.every(step).fold(0.0, 1.0) for rows in chunks()]), 0.0, 1.0)
        low, high, reads = max(0.0, middle - _BRACKET), min(1.0, middle + _BRACKET), 1.0 / step
    width = high - low
    while True:
        line = _joined([rows.fold(low, high) for rows in chunks()])
        reads += 1
        width *= 8
        if low > 0 and line.evaluate(low)[1] > 0:
            low, high = max(0.0, low - width), low
        elif high < 1 and line.evaluate(high)[2] < 0:
            low, high = high, min(1.0, high + width)
        else:
            break
    position, value = _on_folded(line, low, high)
    return LineMinimum(position=position, value=value, reads=reads)


def _on_folded(line: Line, low: float, high: float) -> tuple[float, float]:
    """Minimiser of the line on a bracket: tangents of both ends meet at the next point, halving when that is slow."""
    at_low, _, slope_low = line.evaluate(low)
    at_high, slope_high, _ = line.evaluate(high)
    if slope_low >= 0:
        return low, at_low
    if slope_high <= 0:
        return high, at_high
    best, best_value = (low, at_low) if at_low <= at_high else (high, at_high)
    width = high - low
    for step in range(200):
        meet = (at_high - at_low + slope_low * low - slope_high * high) / (slope_low - slope_high)
        s = 0.5 * (low + high) if step % 3 == 2 else meet
        if not low < s < high:
            s = 0.5 * (low + high)
        if not low < s < high:
            break
        value, left, right = line.evaluate(s)
        if value < best_value:
            best, best_value = s, value
        if right < 0:
            low, at_low, slope_low = s, value, right
        elif left > 0:
            high, at_high, slope_high = s, value, left
        else:
            return s, value
        if high - low < width / 4:
            line, width = line.fold(low, high), high - low
    return best, best_value


def _joined(lines: list[Line]) -> Line:
    offset, pairs = 0, []
    for line in lines:
        pairs.append(line.pair + offset)
        offset += line.gamma.shape[0]
    return Line(
        gamma=torch.cat([line.gamma for line in lines]),
        mu=torch.cat([line.mu for line in lines]),
        omega=torch.cat([line.omega for line in lines]),
        nu=torch.cat([line.nu for line in lines]),
        pair=torch.cat(pairs),
    )


def _by_pair(pair: torch.Tensor, values: torch.Tensor, n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=values.dtype, device=values.device).index_add_(0, pair, values)

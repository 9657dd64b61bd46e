"""How sure a measured share is: Wilson's interval, and McNemar's exact test of two classifiers on the same images."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from robboost.errors import InputError

__all__ = ["PairedTest", "Share", "paired_test", "wilson"]

_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Share:
    """A share of examples with its 95% Wilson interval.

    The interval says how far the share on the whole population of images may lie from the share on these; it says
    nothing about the proof for each image.
    """

    count: int
    total: int

    @property
    def value(self) -> float:
        return self.count / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.count, self.total)

    def __format__(self, spec: str) -> str:
        """Percent; "i" appends the interval: `f"{share:i}"` gives "12.30 [10.40, 14.50]"."""
        if not self.total:
            return "-"
        text = f"{100 * self.value:.2f}"
        lower, upper = self.interval
        return f"{text} [{100 * lower:.2f}, {100 * upper:.2f}]" if "i" in spec else text

    def to_dict(self) -> dict[str, float | int]:
        """Count, total, value and interval as plain numbers."""
        lower, upper = self.interval
        return {"count": self.count, "total": self.total, "value": self.value, "lower": lower, "upper": upper}


@dataclass(frozen=True)
class PairedTest:
    """Two classifiers on the same examples: where exactly one of them fails, and the two-sided exact p-value."""

    only_first_fails: int
    only_second_fails: int
    p_value: float

    @property
    def difference(self) -> int:
        """Examples by which the first fails less often than the second."""
        return self.only_second_fails - self.only_first_fails

    def to_dict(self) -> dict[str, float | int]:
        """Plain numbers."""
        return {
            "only_first_fails": self.only_first_fails,
            "only_second_fails": self.only_second_fails,
            "p_value": self.p_value,
        }


def wilson(count: int, total: int) -> tuple[float, float]:
    """Wilson's 95% interval of count / total; (0, 1) for no examples.

    centre = (p + z^2/2n) / (1 + z^2/n), half-width = z sqrt(p(1-p)/n + z^2/4n^2) / (1 + z^2/n).
    """
    if not 0 <= count <= total:
        raise InputError(f"count={count} of total={total}: expected 0 <= count <= total")
    if total == 0:
        return 0.0, 1.0
    share, spread = count / total, _Z95**2 / total
    centre = (share + spread / 2) / (1 + spread)
    half = _Z95 * math.sqrt(share * (1 - share) / total + spread / (4 * total)) / (1 + spread)
    # At the ends the formula gives 0 and 1 up to rounding.
    return (0.0 if count == 0 else centre - half), (1.0 if count == total else centre + half)


def paired_test(first_fails: Tensor, second_fails: Tensor) -> PairedTest:
    """McNemar's exact test on two failure masks [N] over the same examples.

    Under "both fail equally often", of the examples where exactly one fails each is the first's with probability 1/2:
    the p-value is the binomial probability of a split at least as uneven.
    """
    if first_fails.shape != second_fails.shape or first_fails.ndim != 1:
        raise InputError(
            f"failure masks of shapes {list(first_fails.shape)} and {list(second_fails.shape)}: expected two of [N]"
        )
    first = int((first_fails & ~second_fails).sum())
    second = int((~first_fails & second_fails).sum())
    return PairedTest(first, second, _two_sided(min(first, second), first + second))


def _two_sided(successes: int, trials: int) -> float:
    """min(1, 2 P[Binomial(trials, 1/2) <= successes]), exactly, in integers until the last division."""
    tail = sum(math.comb(trials, k) for k in range(successes + 1))
    return min(1.0, 2 * tail / 2**trials) if trials else 1.0

"""A positive scale for each member, so that one margin means about the same in all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from robboost.errors import InputError
from robboost.weights.problem import Array, weight_tensor

__all__ = ["Normalisers", "Rule", "normalisers"]

Rule = Literal["mean", "mean-absolute", "one"]

# A mean this much smaller than the mean absolute value is the difference of two large numbers: no measure of scale.
_UNRELIABLE = 0.05


@dataclass(frozen=True)
class Normalisers:
    """Scales Z_t > 0 [T] and the rule of each: "mean", "mean-absolute" (fallback) or "one" (nothing to go by)."""

    values: tuple[float, ...]
    rules: tuple[Rule, ...]

    @property
    def fallback(self) -> tuple[int, ...]:
        """Members whose scale is not the paper's."""
        return tuple(t for t, rule in enumerate(self.rules) if rule != "mean")


def normalisers(intercepts: Array) -> Normalisers:
    """Scale of each member: the paper's Z_t = mean intercept over all pairs (section 3.2), where it is safe.

    On a weak member, or under bad arithmetic, that mean can be zero or negative; dividing by it would turn the
    classifier upside down. Where it is not above a twentieth of the mean absolute value, the mean absolute value is
    taken instead, and 1 where that is zero too; `rules` says so. Intercepts are [T, n].
    """
    c = weight_tensor(intercepts, "intercepts").detach().to(torch.float64)
    if c.ndim != 2 or c.numel() == 0 or not bool(torch.isfinite(c).all()):
        raise InputError(f"intercepts of shape {tuple(c.shape)}: expected [members, pairs] with finite numbers")
    values: list[float] = []
    rules: list[Rule] = []
    for mean, size in zip(c.mean(1).tolist(), c.abs().mean(1).tolist(), strict=True):
        if size > 0 and mean > _UNRELIABLE * size:
            values.append(mean)
            rules.append("mean")
        elif size > 0:
            values.append(size)
            rules.append("mean-absolute")
        else:
            values.append(1.0)
            rules.append("one")
    return Normalisers(values=tuple(values), rules=tuple(rules))

"""Which pairs can still matter to the choice of weights, decided exactly while all members' columns are at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robboost.errors import InputError

__all__ = ["CERTIFIED", "HOPELESS", "KEEP", "Screening", "dual_size", "settled_pairs"]

# Verdicts, as stored.
KEEP, CERTIFIED, HOPELESS = 0, 1, 2


@dataclass(frozen=True)
class Screening:
    """A rule with a name; the name is part of a store's identity and must tell rules with other parameters apart.

    Attributes:
        name: as in the manifest.
        judge: columns [T, k, d] and intercepts [T, k] in float64 -> verdicts [k] int8: KEEP, CERTIFIED (every mix
            certifies the pair, or it costs every mix nothing) or HOPELESS (no mix certifies it).
    """

    name: str
    judge: Callable[[Tensor, Tensor], Tensor]


def settled_pairs(norm: str, *, kappa: float = 0.0, scales: Sequence[float] | None = None) -> Screening:
    """Drops the pairs on which every member's margin is above `kappa`: then so is every mix's, by concavity.

    Exact for verified error with kappa = 0, where the members' scales do not matter. Exact for the loss with its kappa
    (or a larger one) and with the scales that the mix will use. A pair is dropped only with room for float64 rounding.
    """
    if not kappa >= 0:
        raise InputError(f"kappa={kappa}: expected at least 0")
    if kappa > 0 and scales is None:
        raise InputError(f"kappa={kappa} without scales: the loss compares scaled margins, so pass the members' scales")

    def judge(columns: Tensor, intercepts: Tensor) -> Tensor:
        sizes = dual_size(columns, norm)
        slack = 2.0**-50 * (columns.shape[-1] + 8) * (sizes + intercepts.abs())
        needed = torch.zeros(len(columns), 1, dtype=torch.float64)
        if scales is not None:
            needed += kappa * torch.tensor(list(scales), dtype=torch.float64)[:, None]
        settled = (intercepts - sizes - slack > needed).all(0)
        return torch.where(settled, CERTIFIED, KEEP).to(torch.int8)

    name = "settled" if kappa == 0 else f"settled kappa {kappa!r} scales {[float(s) for s in scales or ()]!r}"
    return Screening(name=name, judge=judge)


def dual_size(columns: Tensor, norm: str) -> Tensor:
    """||column||_q, q dual to `norm`, over the last axis."""
    if norm == "linf":
        return columns.abs().sum(-1)
    return torch.linalg.vector_norm(columns, dim=-1) if norm == "l2" else columns.abs().amax(-1)

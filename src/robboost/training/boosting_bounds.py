"""What a boosted margin is made of: linear bounds that carry gradients, and the frozen sum of earlier members.

The frozen sum is data: slopes and intercepts of all earlier members together, one row for each training image. Members
are added one at a time, and after each the sum is rounded for storage; what the rounding can cost is taken off the
intercepts, so that the stored sum is itself a bound (of real arithmetic, like the engine's bounds that it is made of).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from robboost.bounds import Options, margin_bounds
from robboost.errors import InputError
from robboost.threat import Threat
from robboost.training.losses import Batch, point_margins

__all__ = ["STORAGE", "FrozenSum", "Lines", "concrete_margins", "engine_bounds", "frozen_sum", "stored_bytes"]

STORAGE: dict[str, torch.dtype] = {"float16": torch.float16, "float32": torch.float32}
# Images bounded at once.
_CHUNK = 500
# Raises the float64 sum that bounds the cost of storage by more than its own rounding.
_SLACK = 1 + 1e-9


class Lines(NamedTuple):
    """margin_j(x + d) >= <slope_j, d> + intercept_j on the whole set around x.

    slope: [N, C-1, *input]; None stands for zero (what interval bounds give). intercept: [N, C-1].
    """

    slope: Tensor | None
    intercept: Tensor

    @classmethod
    def total(cls, parts: Sequence[Lines]) -> Lines:
        """The lines of the sum."""
        slopes = [part.slope for part in parts if part.slope is not None]
        slope = None
        for part in slopes:
            slope = part if slope is None else slope + part
        return cls(slope, torch.stack([part.intercept for part in parts]).sum(0))

    def scaled(self, coefficient: float | Tensor) -> Lines:
        """The lines of coefficient * network; a negative coefficient would turn the inequality around."""
        return Lines(None if self.slope is None else coefficient * self.slope, coefficient * self.intercept)

    def mean(self, shares: Tensor) -> Lines:
        """The line [N, 1] of sum_j shares_j margin_j, shares [N, C-1] from 0 to 1."""
        intercept = (shares * self.intercept).sum(1, keepdim=True)
        if self.slope is None:
            return Lines(None, intercept)
        slope = torch.bmm(shares.unsqueeze(1), self.slope.flatten(2))
        return Lines(slope.view(len(shares), 1, *self.slope.shape[2:]), intercept)


@dataclass(frozen=True)
class FrozenSum:
    """sum_t a_t (slope_t, intercept_t) of the frozen members on N training images, a_t their coefficients.

    Attributes:
        slope: [N, C-1, *input] in the type of storage; None where every member's is zero.
        intercept: [N, C-1], float32: the bound's value at the image itself.
        points: [N, C-1], float32: margins of the images themselves, without any attack.
    """

    slope: Tensor | None
    intercept: Tensor
    points: Tensor

    def rows(self, chosen: Tensor) -> Lines:
        """The bounds of the images at positions `chosen` [N], in float32; nothing leaves the device."""
        slope = None if self.slope is None else self.slope.index_select(0, chosen).float()
        return Lines(slope, self.intercept.index_select(0, chosen))

    def at(self, batch: Batch) -> tuple[Lines, Tensor]:
        """Lines of the sum on the batch, and its margins at the images themselves."""
        return self.rows(batch.chosen), self.points.index_select(0, batch.chosen)

    @torch.no_grad()
    def add(
        self, member: nn.Module, coefficient: float, examples: tuple[Tensor, Tensor], threat: Threat, method: str
    ) -> None:
        """Adds coefficient * member in place, chunk by chunk: only the new member is bounded.

        With r the stored, q the rounded slope of r + a L, the intercept loses max over the set of <r + a L - q, d>.
        """
        x, y = examples
        for start in range(0, len(x), _CHUNK):
            part = slice(start, start + _CHUNK)
            found = engine_bounds(member, x[part], y[part], threat, method)
            total = self.intercept[part].double() + coefficient * found.intercept.double()
            if self.slope is not None and found.slope is not None:
                slopes = self.slope[part].double() + coefficient * found.slope.double()
                self.slope[part] = _stored(slopes, self.slope.dtype)
                total -= _storage_error(slopes, self.slope[part], x[part], threat)
            self.intercept[part] = _below(total)
            self.points[part] += coefficient * point_margins(member(x[part]), y[part])


def concrete_margins(parts: Sequence[Lines], x: Tensor, region: tuple[Tensor, Tensor]) -> Tensor:
    """M = sum_t c_t + <sum_t L_t, centre - x> - <radius, |sum_t L_t|>, [N, C-1] (paper, section 3.5, with the box).

    The set is the interval centre +- radius around the images x. Slopes cancel before their size is taken: this is what
    lets a member help where it certifies nothing itself.
    """
    slope, intercept = Lines.total(parts)
    if slope is None:
        return intercept
    centre, radius = (side.flatten(1).unsqueeze(2) for side in region)
    flat = slope.flatten(2)
    shift = torch.bmm(flat, centre - x.flatten(1).unsqueeze(2))
    return intercept + (shift - torch.bmm(flat.abs(), radius)).squeeze(2)


def engine_bounds(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, method: str) -> Lines:
    """The engine's float32 bounds of a finished network; "a+b" takes the tighter of methods a and b for each pair."""
    if method == "ibp":
        return Lines(None, margin_bounds(model, x, y, threat, "ibp").lower)
    if "+" in method:
        parts = tuple(part.strip() for part in method.split("+"))
        found = margin_bounds(model, x, y, threat, "tightest", options=Options(parts=parts))
    else:
        found = margin_bounds(model, x, y, threat, method)
    return Lines(found.slope, found.intercept)


def stored_bytes(x: Tensor, targets: int, method: str, storage: str) -> int:
    """What the rows of images x [N, *input] take: slopes in the type of storage, two float32 numbers a pair."""
    slope = 0 if method == "ibp" else x[0].numel() * STORAGE[storage].itemsize
    return len(x) * targets * (slope + 8)


@torch.no_grad()
def frozen_sum(
    members: Sequence[nn.Module],
    coefficients: Sequence[float],
    examples: tuple[Tensor, Tensor],
    threat: Threat,
    method: str,
    *,
    storage: str = "float16",
    budget: int = 8 * 2**30,
) -> FrozenSum:
    """Bounds all members on all images and adds them up in order, in as much memory as the rows themselves take.

    The same as a sum over the first few to which the others are added by `FrozenSum.add`, bit for bit.

    Args:
        members: finished networks on the images' device; any module that the engine bounds.
        coefficients: a_t, none negative.
        examples: images [N, *input] and labels [N].
        threat: the set; the rows hold on it, and so on every smaller one around the same images.
        method: of `margin_bounds`, or several joined by "+".
        storage: "float16" or "float32".
        budget: bytes that the rows may take.
    """
    x, _ = examples
    sloped = method != "ibp"
    kind = STORAGE[storage]
    targets = members[0](x[:1]).shape[1] - 1
    needed = stored_bytes(x, targets, method, storage)
    if needed > budget:
        raise InputError(
            f"frozen bounds of {len(x)} images take {needed / 1e9:.1f} GB in {storage}; expected at most"
            f" {budget / 1e9:.1f}: raise the budget, use float16, or let them be recomputed"
        )
    slope = torch.zeros((len(x), targets, *x.shape[1:]), dtype=kind, device=x.device) if sloped else None
    intercept = torch.zeros((len(x), targets), device=x.device)
    found = FrozenSum(slope, intercept, torch.zeros_like(intercept))
    for member, coefficient in zip(members, coefficients, strict=True):
        found.add(member, coefficient, examples, threat, method)
    return found


def _stored(slopes: Tensor, kind: torch.dtype) -> Tensor:
    limit = torch.finfo(kind).max
    return slopes.clamp(-limit, limit).to(kind)


def _below(values: Tensor) -> Tensor:
    """float64 as float32, never above."""
    rounded = values.float()
    down = torch.nextafter(rounded, torch.full_like(rounded, -torch.inf))
    return torch.where(rounded.double() > values, down, rounded)


def _storage_error(exact: Tensor, stored: Tensor, x: Tensor, threat: Threat) -> Tensor:
    """max over the set of <exact - stored, d>, rounded up: [N, C-1]. The set's d reach |centre - x| + radius."""
    centre, radius = threat.region(x)
    reach = ((centre - x).abs() + radius).flatten(1).double().unsqueeze(2)
    gap = (exact - stored.double()).abs().flatten(2)
    return torch.bmm(gap, reach).squeeze(2) * _SLACK

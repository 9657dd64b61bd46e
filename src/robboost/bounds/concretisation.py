"""The exact minimum of a linear function over the threat set, by the dual norm."""

from __future__ import annotations

from torch import Tensor

from robboost.bounds.intervals import Interval
from robboost.threat import Norm, Region

__all__ = ["box_hull", "spread"]


def spread(slope: Tensor, radius: Tensor, norm: Norm) -> Tensor:
    """max <slope, d> over the centred set: radius * ||slope||_q, q dual to p.

    Shapes: slope [N, R, *input]; radius [N, *input] for l_inf and [N] otherwise; result [N, R].
    """
    flat = slope.flatten(2)
    if norm == "linf":
        return (flat.abs() @ radius.flatten(1).unsqueeze(2)).squeeze(2)
    size = flat.norm(dim=2) if norm == "l2" else flat.abs().amax(2)
    return size * radius.unsqueeze(1)


def box_hull(region: Region) -> Interval:
    """The smallest interval per pixel that holds the set."""
    centre, radius = region
    if radius.dim() != centre.dim():
        radius = radius.view(-1, *[1] * (centre.dim() - 1))
    return Interval(centre - radius, centre + radius)

"""The exact extremes of a linear function over the threat set, by the dual norm."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from robboost.bounds.acceleration import kernels_for
from robboost.bounds.intervals import Interval
from robboost.bounds.pieces import Piece, Rows, gather_windows
from robboost.threat import Norm, Region

__all__ = ["box_hull", "reach", "unit_reach"]


def reach(piece: Piece, rows: Rows, region: Region, norm: Norm) -> Tensor:
    """max <row, dx> over the set centred at zero, [S, M]: sum of radius * |row| for l_inf, else radius * ||row||_q."""
    radius = region.radius
    if norm != "linf":
        return unit_reach(piece, rows, tuple(region.centre.shape[1:]), norm) * radius[rows.example]
    kernels = kernels_for(piece.values, radius)
    if kernels is not None:
        origin = None
        if piece.window is not None and rows.position is not None:
            origin = piece.window.starts(rows.position)
        return cast(Tensor, kernels.reach(piece.values, rows.example, radius, origin))
    if piece.window is not None:  # zero beyond the image, where entries of a window mean nothing
        return (piece.values.abs() * gather_windows(radius, piece.window, piece.size, rows)).flatten(2).sum(2)
    flat = piece.values.flatten(2).abs()
    if rows.uniform is not None:
        split = flat.unflatten(1, (-1, rows.uniform))
        return (split @ radius.flatten(1).unsqueeze(2)).squeeze(3).flatten(1)
    if radius.device.type == "cpu" and not (radius.requires_grad or flat.requires_grad):
        parts = flat.new_empty(flat.shape[:2])
        for example, start, stop in rows.segments:
            parts[:, start:stop] = flat[:, start:stop] @ radius[example].flatten()
        return parts
    return (flat * radius.flatten(1)[rows.example]).sum(2)


def unit_reach(piece: Piece, rows: Rows, shape: tuple[int, ...], norm: Norm) -> Tensor:
    """The dual norm of each row, [S, M], for balls of radius one."""
    values = piece.cleaned(rows, shape).values.flatten(2)
    if norm == "linf":
        return values.abs().sum(2)
    return values.norm(dim=2) if norm == "l2" else values.abs().amax(2)


def box_hull(region: Region) -> Interval:
    """The smallest interval per pixel that holds the set."""
    centre, radius = region
    if radius.dim() != centre.dim():
        radius = radius.view(-1, *[1] * (centre.dim() - 1))
    return Interval(centre - radius, centre + radius)

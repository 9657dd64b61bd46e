"""One nonlinear node of a backward pass: coefficients meet the lines below and above the function.

The positive part of a coefficient meets the line below, the negative part the line above.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from robboost.bounds.acceleration import kernels_for
from robboost.bounds.network import Node
from robboost.bounds.pieces import Piece, Rows, Window, gather_windows
from robboost.bounds.relaxations import Lines

__all__ = ["Maps", "maps_of", "relaxed"]


class Maps(NamedTuple):
    """Lines seen from the centre. For a coefficient a and its negative part n = min(a, 0):

    a * slope + n * slope_step is the coefficient that is passed on, and a * gap + n * gap_step the loss.
    Each [N, *shape], or [N, R, *shape] where every row has its own. Without `slope` nothing is passed on; without
    `slope_step` both lines have the same slope.
    """

    slope: Tensor | None
    slope_step: Tensor | None
    gap: Tensor
    gap_step: Tensor
    choice: Tensor | None = None


def maps_of(lines: Lines, before: Tensor, after: Tensor) -> Maps:
    """`lines` seen from the centre, where the operand of the function is `before` and its value `after`.

    For max pooling `before` is the chosen operand.
    """
    if lines.lower_slope is None or lines.upper_slope is None:
        gap = lines.lower_intercept - after
        return Maps(None, None, gap, lines.upper_intercept - after - gap)
    if lines.lower_slope.dim() > before.dim():
        before, after = before.unsqueeze(1), after.unsqueeze(1)
    upper_slope, upper_intercept, lower_intercept = (
        value.unsqueeze(1) if value.dim() < before.dim() else value
        for value in (lines.upper_slope, lines.upper_intercept, lines.lower_intercept)
    )
    gap = lines.lower_slope * before + lower_intercept - after
    above = upper_slope * before + upper_intercept - after
    step = None if lines.upper_slope is lines.lower_slope else upper_slope - lines.lower_slope
    return Maps(lines.lower_slope, step, gap, above - gap, lines.choice)


def relaxed(
    node: Node, piece: Piece, rows: Rows, maps: Maps, source: tuple[int, ...], both: bool
) -> tuple[Piece | None, Tensor]:
    """The piece on the operand (of shape `source`; None where nothing passes), and the losses [S, M]."""
    if node.kind == "maxpool":
        piece = piece.dense(rows, node.shape)
    if both and maps.slope_step is not None:
        piece = piece.copied()
    shared = maps.gap.dim() == piece.values.dim() - 1
    kernels = kernels_for(piece.values, maps.gap) if shared else None
    if kernels is not None:
        start = None if piece.window is None else piece.window.starts(_given(rows.position))
        values, losses = kernels.relax(piece.values, rows.example, list(maps[:4]), start, both)
    elif piece.window is not None:
        values, losses = _windows(piece, piece.window, rows, maps, both)
    elif rows.uniform is not None:
        values, losses = _uniform(piece, rows.uniform, maps, both)
    elif piece.values.device.type == "cpu" and not (torch.is_grad_enabled() and maps.gap.requires_grad):
        values, losses = _segments(piece, rows, maps, both)
    else:
        picked = [None if part is None else part[rows.example].unsqueeze(0) for part in maps[:4]]
        values, losses = _applied(piece.values, picked, 2, both, piece.owned)
    if values is None:
        return None, losses
    if maps.choice is not None:
        own = maps.choice.repeat_interleave(rows.uniform, 0) if rows.uniform is not None else maps.choice[rows.example]
        values = _scattered(values, own, source)
    return replace(piece, values=values, clean=True, owned=True), losses


def _given(position: Tensor | None) -> Tensor:
    assert position is not None
    return position


def _windows(piece: Piece, window: Window, rows: Rows, maps: Maps, both: bool) -> tuple[Tensor | None, Tensor]:
    """Each row meets the part of its example's maps that its window sees."""
    present = [part for part in maps[:4] if part is not None]
    seen = gather_windows(torch.cat(present, 1), window, piece.size, rows).unsqueeze(0)
    parts = iter(seen.split(present[0].shape[1], 2))
    picked = [None if part is None else next(parts) for part in maps[:4]]
    return _applied(piece.values, picked, 2, both, piece.owned)


def _uniform(piece: Piece, count: int, maps: Maps, both: bool) -> tuple[Tensor | None, Tensor]:
    """Equally many rows for each example: its maps are broadcast to them."""
    split = piece.values.unflatten(1, (-1, count))
    own = maps.gap.dim() == split.dim() - 1
    picked = [None if part is None else (part if own else part.unsqueeze(1)).unsqueeze(0) for part in maps[:4]]
    values, losses = _applied(split, picked, 3, both, piece.owned)
    return (None if values is None else values.flatten(1, 2)), losses.flatten(1)


def _segments(piece: Piece, rows: Rows, maps: Maps, both: bool) -> tuple[Tensor | None, Tensor]:
    """Example by example, so that its maps stay in the cache instead of being copied to every row."""
    losses = piece.values.new_empty((2 if both else 1, len(rows.example)))
    owned = piece.values if piece.owned else piece.values.clone()
    for example, start, stop in rows.segments:
        part = owned[:, start:stop]
        picked = [None if value is None else value[example] for value in maps[:4]]
        _, losses[:, start:stop] = _applied(part, picked, 2, both, True)
    return (None if maps.slope is None else owned), losses


def _applied(
    values: Tensor, maps: list[Tensor | None], lead: int, both: bool, owned: bool
) -> tuple[Tensor | None, Tensor]:
    """Coefficients behind the relaxation and the losses of the rows; values that are owned are overwritten.

    values [S, M, ...] (lead = 2) or [S, N, R, ...] (lead = 3); maps broadcast to them.
    """
    slope, slope_step, gap, gap_step = maps
    assert gap is not None
    assert gap_step is not None
    negative = values.clamp(max=0)
    straight, bent = _inner(values, gap, lead), _inner(negative, gap_step, lead)
    losses = straight + bent
    if both and len(values) == 1:
        # The row of the negative: coefficients -a, negative part -max(a, 0) = n - a.
        losses = torch.cat([losses, bent - straight - _inner(values, gap_step, lead)])
    if slope is None:
        return None, losses
    if torch.is_grad_enabled() and (values.requires_grad or slope.requires_grad or gap.requires_grad):
        passed = values * slope
        return (passed if slope_step is None else passed + negative * slope_step), losses
    passed = values.mul_(slope) if owned else values * slope
    return (passed if slope_step is None else passed.addcmul_(negative, slope_step)), losses


def _inner(values: Tensor, maps: Tensor, lead: int) -> Tensor:
    """Sum of values * maps over everything behind the leading axes."""
    flat = values.flatten(lead)
    if maps.dim() == values.dim() - lead:  # one map for all rows
        return flat @ maps.flatten()
    if lead == 3 and maps.shape[2] == 1:
        return (flat @ maps.flatten(3).transpose(2, 3)).squeeze(3)
    return (flat * maps.flatten(lead)).sum(-1)


def _scattered(values: Tensor, choice: Tensor, source: tuple[int, ...]) -> Tensor:
    """Coefficients of pooled values [S, M, C, H', W'], moved to the chosen pixels of the operand."""
    index = choice.unsqueeze(0).expand(values.shape).flatten(3)
    empty = values.new_zeros((*values.shape[:3], source[1] * source[2]))
    return empty.scatter_add(3, index, values.flatten(3)).unflatten(3, source[1:])

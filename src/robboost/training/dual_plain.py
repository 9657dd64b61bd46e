"""Lines around a ReLU, and what `dual_kernels` does with them, in plain PyTorch; `dual_triton` is its twin on a GPU.

Shapes: centre and radius [N, ...] of the ReLU's inputs; random columns [K, M, ...] with M = N, or 1 where all examples
share them; fresh columns [K, 1, ...]; rows [N, T, ...] of a backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "LEAST",
    "TINY",
    "cauchy_scale",
    "estimated_backward",
    "estimated_forward",
    "given_backward",
    "given_forward",
    "relaxation",
    "rows_backward",
    "rows_forward",
]

# Where all columns are 0 so is their scale, with gradient 0.
TINY, LEAST = 1e-30, 1e-12


def relaxation(centre: Tensor, radius: Tensor, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """Slope of the lower line (through 0), slope and intercept of the upper line of ReLU on [centre +- radius]."""
    lower, upper = centre - radius, centre + radius
    unstable = (lower < 0) & (upper > 0)
    active = (lower >= 0).to(lower.dtype)
    width = torch.where(unstable, upper - lower, torch.ones_like(upper))
    up_slope = torch.where(unstable, upper / width, active)
    up_shift = torch.where(unstable, -upper * lower / width, torch.zeros_like(upper))
    low_slope = up_slope if rule == "same-slope" else torch.where(unstable, (upper > -lower).to(lower.dtype), active)
    return low_slope, up_slope, up_shift


def cauchy_scale(columns: Tensor) -> tuple[Tensor, Tensor]:
    """c and g + c for the scale g of Cauchy numbers v [K, ...]: exp(mean log sqrt(v^2 + c^2)) estimates g + c.

    Consistent for any c, since E log sqrt(v^2 + c^2) = log(g + c). At c = 0 it is the geometric mean of Wong et al.,
    whose gradient has a pole wherever a number is near 0; c of half that mean, held fixed, bounds the gradient, and
    every number takes part (in a median: one).
    """
    squares = columns * columns
    offset = (0.5 * torch.log(squares + TINY).mean(0)).exp().mul(0.5).clamp(min=LEAST)
    return offset, (0.5 * torch.log(squares + offset * offset).mean(0)).exp()


def estimated_forward(centre: Tensor, columns: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """c and g + c of `cauchy_scale`, the radius g, and centre and columns behind the ReLU."""
    offset, total = cauchy_scale(columns)
    radius = (total - offset).clamp(min=0)
    return offset, total, radius, *given_forward(centre, radius, columns, fresh)


def given_forward(centre: Tensor, radius: Tensor, columns: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and columns behind the ReLU: centre * slope + shift / 2, columns * slope + fresh * shift / 2."""
    slope, _, shift = relaxation(centre, radius, "same-slope")
    half = shift / 2
    return centre * slope + half, torch.addcmul(fresh * half, columns, slope)


def estimated_backward(
    kept: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], to_radius: Tensor, to_centre: Tensor, to_columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of centre and columns; `kept`: centre, columns, fresh, c, g + c.

    c is held fixed: dg / dv_k = (g + c) / K * v_k / (v_k^2 + c^2).
    """
    centre, columns, fresh, offset, total = kept
    radius = (total - offset).clamp(min=0)
    for_centre, for_radius, for_columns = given_backward((centre, radius, columns, fresh), to_centre, to_columns)
    share = torch.where(total >= offset, (to_radius + for_radius) * total / len(columns), torch.zeros_like(total))
    return for_centre, for_columns + share * columns / (columns * columns + offset * offset)


def given_backward(
    kept: tuple[Tensor, Tensor, Tensor, Tensor], to_centre: Tensor, to_columns: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of centre, radius and columns; `kept`: centre, radius, columns, fresh."""
    centre, radius, columns, fresh = kept
    slope, _, _ = relaxation(centre, radius, "same-slope")
    to_slope = to_centre * centre + (to_columns * columns).sum(0)
    to_half = to_centre + (to_columns * fresh).sum(0)
    for_centre, for_radius = _through_lines(centre, radius, to_slope, to_half / 2)
    for_columns = to_columns * slope
    if columns.shape[1] < len(centre):
        for_columns = for_columns.sum(1, keepdim=True)
    return to_centre * slope + for_centre, for_radius, for_columns


def rows_forward(rows: Tensor, centre: Tensor, radius: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """rows+ * low + rows- * up, and the intercept [N, T] that is lost: <rows-, shift>."""
    low, up, shift = relaxation(centre, radius, rule)
    negative = rows.clamp(max=0)
    lost = torch.bmm(negative.flatten(2), shift.flatten(1).unsqueeze(2)).squeeze(2)
    if up is low:
        return rows * low.unsqueeze(1), lost
    return rows * low.unsqueeze(1) + negative * (up - low).unsqueeze(1), lost


def rows_backward(
    kept: tuple[Tensor, Tensor, Tensor], to_passed: Tensor, to_lost: Tensor, rule: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, centre and radius; `kept`: these three."""
    rows, centre, radius = kept
    low, up, shift = relaxation(centre, radius, rule)
    negative = rows.clamp(max=0)
    lost = to_lost.view(*to_lost.shape, *[1] * (rows.dim() - 2))
    for_rows = to_passed * low.unsqueeze(1)
    below = to_passed * (up - low).unsqueeze(1) + lost * shift.unsqueeze(1)
    for_rows = for_rows + torch.where(rows <= 0, below, torch.zeros_like(below))
    # The lower line of rule "adaptive" does not move with the interval.
    to_slope = (to_passed * (rows if up is low else negative)).sum(1)
    return for_rows, *_through_lines(centre, radius, to_slope, (lost * negative).sum(1))


def _through_lines(centre: Tensor, radius: Tensor, to_slope: Tensor, to_shift: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of centre and radius from those of slope u / (u - l) and shift -u l / (u - l) of the upper line."""
    lower, upper = centre - radius, centre + radius
    unstable = (lower < 0) & (upper > 0)
    width = torch.where(unstable, upper - lower, torch.ones_like(upper))
    above, below = upper / width, -lower / width
    none = torch.zeros_like(upper)
    to_upper = torch.where(unstable, below * (to_slope / width + to_shift * below), none)
    to_lower = torch.where(unstable, above * (to_slope / width - to_shift * above), none)
    return to_upper + to_lower, to_upper - to_lower

"""Lines below and above each nonlinear function on the interval of its input.

lower_slope * z + lower_intercept <= f(z) <= upper_slope * z + upper_intercept for all z in [l, u] (paper, section 3.1).
For sigmoid and tanh any slope is made valid by its intercept, the exact extremum of f(z) - slope * z on [l, u], so that
no search has to converge for soundness.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from robboost.bounds.intervals import Interval
from robboost.bounds.network import Node

__all__ = ["Lines", "Rule", "constant_lines", "maxpool_lines", "relaxation", "tangent_lines"]

Rule = Literal["adaptive", "same-slope", "constant"]
_BISECTIONS = 24


class Lines(NamedTuple):
    """The two lines, each map [N, *shape] (or [N, R, *shape] where every row has its own); no slope: constants.

    For max pooling the shape is that of the pooled values, and `choice` [N, *shape] names for each the flat pixel
    (h * W + w) of its operand that the slopes belong to.
    """

    lower_slope: Tensor | None
    lower_intercept: Tensor
    upper_slope: Tensor | None
    upper_intercept: Tensor
    choice: Tensor | None = None


def relaxation(node: Node, bounds: Interval, rule: Rule) -> Lines:
    """The lines of `node` on the interval `bounds` of its input, by the rule that the method prescribes."""
    if rule == "constant":
        return constant_lines(node, bounds)
    if node.kind == "maxpool":
        return maxpool_lines(node, bounds)
    if node.kind == "relu":
        return _relu_lines(node.attributes["negative"], bounds, rule)
    return _smooth_lines(node.kind, bounds, rule)


def constant_lines(node: Node, bounds: Interval) -> Lines:
    """The interval itself as two lines of slope zero."""
    from robboost.bounds.intervals import interval_rule

    image = interval_rule(node, [bounds])
    return Lines(None, image.lower, None, image.upper)


def _relu_lines(negative: float, bounds: Interval, rule: Rule) -> Lines:
    """max(negative * z, z): the chord above; below, the chord's slope or the steeper or flatter of the two pieces."""
    lower, upper = bounds
    low, high = lower.clamp(max=0), upper.clamp(min=0)
    crossing = (lower < 0) & (upper > 0)
    width = torch.where(crossing, high - low, torch.ones_like(low))
    # Stable neurons are linear: slope 1 or `negative`, exactly, with intercept 0. A bound that is no number proves
    # nothing: it stays NaN to the end, where it is never certified.
    # Full tensors: `where` of two numbers would round them to float32.
    steep, flat = torch.ones_like(low), torch.full_like(low, negative)
    piece = torch.where(lower >= 0, steep, flat).masked_fill((lower - upper).isnan(), torch.nan)
    chord = torch.where(crossing, ((high - negative * low) / width).clamp(negative, 1), piece)
    zero = torch.zeros_like(low)
    intercept = torch.where(crossing, (negative - chord) * low, zero)
    if rule == "same-slope":
        return Lines(chord, zero, chord, intercept)
    adaptive = torch.where(crossing, torch.where(upper > -lower, steep, flat), piece)
    return Lines(adaptive, zero, chord, intercept)


def maxpool_lines(node: Node, bounds: Interval) -> Lines:
    """Below: the operand with the largest lower bound. Above: that operand if surely the largest, else a constant.

    max_i z_i >= z_k for every k; max_i z_i <= max_i u_i; and max_i z_i = z_k if l_k >= u_i for all other i.
    """
    a = node.attributes
    lower, upper = bounds
    best, choice = F.max_pool2d(lower, a["kernel"], a["stride"], a["padding"], ceil_mode=a["ceil"], return_indices=True)
    highest = F.max_pool2d(upper, a["kernel"], a["stride"], a["padding"], ceil_mode=a["ceil"])
    sure = best >= _runner_up(node, upper, choice)
    one = torch.ones_like(best)
    zero = torch.zeros_like(best)
    return Lines(one, zero, torch.where(sure, one, zero), torch.where(sure, zero, highest), choice)


def _runner_up(node: Node, upper: Tensor, choice: Tensor) -> Tensor:
    """The largest upper bound in each window, the chosen operand left out."""
    a = node.attributes
    (kh, kw), (sh, sw), (ph, pw) = a["kernel"], a["stride"], a["padding"]
    batch, channels, height, width = upper.shape
    rows, columns = node.shape[-2:]
    bottom, right = (
        (n - 1) * s + k - size - p for n, s, k, size, p in ((rows, sh, kh, height, ph), (columns, sw, kw, width, pw))
    )
    padded = F.pad(upper, (pw, max(right, 0), ph, max(bottom, 0)), value=-torch.inf)
    windows = padded.unfold(2, kh, sh)[:, :, :rows].unfold(3, kw, sw)[:, :, :, :columns]
    y = choice // width - (torch.arange(rows, device=choice.device) * sh - ph)[:, None]
    x = choice % width - (torch.arange(columns, device=choice.device) * sw - pw)[None, :]
    flat = windows.reshape(batch, channels, rows, columns, kh * kw)
    chosen = F.one_hot(y * kw + x, kh * kw).bool()
    return flat.masked_fill(chosen, -torch.inf).amax(-1)


def _smooth_lines(kind: str, bounds: Interval, rule: Rule) -> Lines:
    """Sigmoid is 1/2 + tanh(z / 2) / 2, so the lines of tanh serve both."""
    dtype = bounds.lower.dtype
    factor = 0.5 if kind == "sigmoid" else 1.0
    # Maps are small: float64 keeps every rounding far below the slack that is added at the end.
    lower, upper = bounds.lower.double() * factor, bounds.upper.double() * factor
    if rule == "same-slope":
        slope_below = slope_above = torch.minimum(_steepness(lower), _steepness(upper))
    else:
        slope_above = _slope_above(lower.detach(), upper.detach())
        slope_below = _slope_above(-upper.detach(), -lower.detach())
    if kind == "sigmoid":
        slope_below, slope_above = slope_below / 4, slope_above / 4
    return tangent_lines(kind, bounds, slope_below.to(dtype), slope_above.to(dtype))


def tangent_lines(kind: str, bounds: Interval, slope_below: Tensor, slope_above: Tensor) -> Lines:
    """Lines of the given slopes (any at all), with the best intercepts that keep them valid."""
    dtype = slope_below.dtype
    factor, gain = (0.5, 4.0) if kind == "sigmoid" else (1.0, 1.0)
    lower, upper = bounds.lower.double() * factor, bounds.upper.double() * factor
    if slope_below.dim() > lower.dim():
        lower, upper = lower.unsqueeze(1), upper.unsqueeze(1)
    above = _intercept_above(lower, upper, slope_above.double() * gain)
    below = -_intercept_above(-upper, -lower, slope_below.double() * gain)
    if kind == "sigmoid":
        above, below = 0.5 + above / 2, 0.5 + below / 2
    # Outward by more than the rounding of the conversion to the working precision.
    slack = 4 * torch.finfo(dtype).eps
    above, below = above + slack * (1 + above.abs()), below - slack * (1 + below.abs())
    return Lines(slope_below, below.to(dtype), slope_above, above.to(dtype))


def _steepness(z: Tensor) -> Tensor:
    return 1 / torch.cosh(z.clamp(-300, 300)).square()


def _slope_above(lower: Tensor, upper: Tensor) -> Tensor:
    """A good slope for the line above tanh: the chord where tanh is convex, a tangent where it is concave.

    Across zero the tangent through the left end touches at d > 0; a chord where d would lie right of the interval.
    """
    width = upper - lower
    flat = torch.minimum(_steepness(lower), _steepness(upper))
    chord = torch.where(width > 1e-6, (torch.tanh(upper) - torch.tanh(lower)) / width.clamp(min=1e-6), flat)
    left, right = torch.zeros_like(lower), upper.clamp(min=0)
    start = torch.tanh(lower)
    reaches = torch.tanh(right) + _steepness(right) * (lower - right) >= start
    for _ in range(_BISECTIONS):
        middle = (left + right) / 2
        above = torch.tanh(middle) + _steepness(middle) * (lower - middle) >= start
        right, left = torch.where(above, middle, right), torch.where(above, left, middle)
    crossing = torch.where(reaches, _steepness(right), chord)
    slope = torch.where(lower >= 0, _steepness((lower + upper) / 2), torch.where(upper <= 0, chord, crossing))
    return slope.clamp(0, 1)


def _intercept_above(lower: Tensor, upper: Tensor, slope: Tensor) -> Tensor:
    """max of tanh(z) - slope * z on [lower, upper]: at an end, or where tanh is concave and has that slope."""
    # tanh'(z) = slope at z = arcosh(slope^-1/2); the envelope theorem leaves that point out of the gradient.
    inner = slope.detach().clamp(1e-300, 1)
    root = inner.sqrt()
    touching = torch.log((1 + (1 - inner).sqrt()) / root)
    ends = torch.maximum(torch.tanh(lower) - slope * lower, torch.tanh(upper) - slope * upper)
    # Outside the interval an end is the maximum (and a tie with it would halve the gradient).
    inside = (touching > lower) & (touching < upper)
    return torch.where(inside, torch.maximum(ends, torch.tanh(touching) - slope * touching), ends)

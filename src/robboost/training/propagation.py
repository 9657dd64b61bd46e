"""Points, intervals and linear bounds through a training program: the fast twins of the engine's bounds.

Nothing here is a certificate: training may run in TF32 and with the statistics of a batch. What is certified is the
saved network, by `robboost.margin_bounds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from robboost.training.dual_kernels import relax_rows
from robboost.training.kernels import interval_relu
from robboost.training.network import BN_EPS, Conv, Fc, Flatten, Network, Norm, Op, Relu, Skip, conv

__all__ = [
    "Norms",
    "Trace",
    "box",
    "interval_margins",
    "intervals",
    "linear_bounds",
    "linear_margins",
    "points",
    "transposed",
]

Scale = tuple[Tensor, Tensor]


@dataclass
class Norms:
    """The (scale, shift) of every batch normalisation.

    Empty at first: the first propagation that meets a normalisation takes the statistics of its values (for intervals:
    of the centres), with gradient, and every later propagation of the step uses the same ones.
    """

    pairs: dict[int, Scale] = field(default_factory=dict)
    means: dict[int, Tensor] = field(default_factory=dict)
    variances: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def running(cls, net: Network, weights: Sequence[Tensor], means: Tensor, variances: Tensor) -> Norms:
        """From running statistics, all normalisations' channels in one vector each."""
        norms, start = cls(), 0
        for op in _norms(net.trunk):
            part = slice(start, start + op.channels)
            start += op.channels
            norms._set(op, weights, means[part], variances[part])
        return norms

    def of(self, op: Norm, weights: Sequence[Tensor], values: Tensor) -> Scale:
        if op.index not in self.pairs:
            variance, mean = torch.var_mean(values, dim=(0, 2, 3), correction=0)
            self._set(op, weights, mean, variance)
        return self.pairs[op.index]

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Means and variances of all normalisations in one vector each, without gradient."""
        order = sorted(self.means)
        return (
            torch.cat([self.means[i] for i in order]).detach(),
            torch.cat([self.variances[i] for i in order]).detach(),
        )

    def in_order(self) -> list[Scale]:
        return [self.pairs[i] for i in sorted(self.pairs)]

    def _set(self, op: Norm, weights: Sequence[Tensor], mean: Tensor, variance: Tensor) -> None:
        scale = weights[op.gamma] * torch.rsqrt(variance + BN_EPS)
        self.pairs[op.index] = (scale, weights[op.beta] - mean * scale)
        self.means[op.index], self.variances[op.index] = mean, variance


@dataclass
class Trace:
    """What an interval pass leaves behind: the last hidden interval and that of every ReLU's input, in order."""

    centre: Tensor
    radius: Tensor
    relus: list[tuple[Tensor, Tensor]]


def box(x: Tensor, eps: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Centre and radius of {x' : |x' - x| <= eps, 0 <= x' <= 1}, behind the mask."""
    lower, upper = (x - eps).clamp(min=0), (x + eps).clamp(max=1)
    centre, radius = (lower + upper) / 2, (upper - lower) / 2
    return (centre, radius) if mask is None else (centre * mask, radius * mask)


def points(net: Network, weights: Sequence[Tensor], x: Tensor, norms: Norms) -> Tensor:
    """Logits of x [N, C, H, W]."""
    x = x if net.mask is None else x * net.mask
    return F.linear(_points(net.trunk, weights, x, norms), weights[net.head.weight], weights[net.head.bias])


def intervals(net: Network, weights: Sequence[Tensor], centre: Tensor, radius: Tensor, norms: Norms) -> Trace:
    """Interval bounds up to the last hidden layer: W centre + b and |W| radius, layer by layer."""
    absolute = [w.abs() if w.dim() > 1 else w for w in weights]
    relus: list[tuple[Tensor, Tensor]] = []
    centre, radius = _intervals(net.trunk, weights, absolute, centre, radius, norms, relus)
    return Trace(centre, radius, relus)


def interval_margins(net: Network, weights: Sequence[Tensor], trace: Trace, y: Tensor) -> Tensor:
    """Lower bounds of the margins [N, C-1], the margin difference folded into the last layer.

    All C (C-1) differences of rows are bounded for all examples by one matrix product each for centre and radius: that
    is cheaper than one matrix of differences for each example.
    """
    rows, shifts = _differences(net, weights)
    classes, targets, hidden = rows.shape
    flat = rows.reshape(classes * targets, hidden)
    lower = F.linear(trace.centre, flat, shifts.reshape(-1)) - F.linear(trace.radius, flat.abs())
    return lower.view(-1, classes, targets).gather(1, y.view(-1, 1, 1).expand(-1, 1, targets)).squeeze(1)


def linear_margins(
    net: Network,
    weights: Sequence[Tensor],
    trace: Trace,
    region: tuple[Tensor, Tensor],
    y: Tensor,
    norms: Norms,
    rule: str,
) -> Tensor:
    """Lower bounds of the margins [N, C-1]: the minimum of `linear_bounds` over the region."""
    slope, intercept = linear_bounds(net, weights, trace, y, norms, rule)
    centre, radius = (part.flatten(1).unsqueeze(2) for part in region)
    flat = slope.flatten(2)
    return intercept + torch.bmm(flat, centre).squeeze(2) - torch.bmm(flat.abs(), radius).squeeze(2)


def linear_bounds(
    net: Network, weights: Sequence[Tensor], trace: Trace, y: Tensor, norms: Norms, rule: str
) -> tuple[Tensor, Tensor]:
    """Slope [N, C-1, *input] and intercept [N, C-1] with margin_j(x') >= <slope_j, x'> + intercept_j, x' masked.

    One backward pass over the ReLU intervals of `trace`.
    rule "adaptive": the lower line of an unstable ReLU is 0 or the identity, whichever loses less area (CROWN).
    rule "same-slope": lower and upper line have the slope u / (u - l) (Wong and Kolter; the paper's base models).
    """
    rows, shifts = _differences(net, weights)
    # A product in place of rows[y]: the gradient of indexing is a sum in an order that changes from run to run.
    chosen = F.one_hot(y, len(rows)).to(rows.dtype)
    start = (chosen @ rows.flatten(1)).view(-1, *rows.shape[1:])
    return _backward(net.trunk, weights, start, chosen @ shifts, trace.relus, norms, rule)


def _differences(net: Network, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows [C, C-1, hidden] and shifts [C, C-1] of true class minus target, targets in class order."""
    weight, bias = weights[net.head.weight], weights[net.head.bias]
    rows = _without_diagonal(weight.unsqueeze(1) - weight.unsqueeze(0))
    return rows, _without_diagonal((bias.unsqueeze(1) - bias.unsqueeze(0)).unsqueeze(2)).squeeze(2)


def _without_diagonal(square: Tensor) -> Tensor:
    """[C, C, h] -> [C, C-1, h] without the entries (i, i): views alone, so that the gradient needs no scatter."""
    classes, _, hidden = square.shape
    return square.flatten(0, 1)[1:].view(classes - 1, classes + 1, hidden)[:, :-1].reshape(classes, classes - 1, hidden)


def _norms(ops: Sequence[Op]) -> list[Norm]:
    found: list[Norm] = []
    for op in ops:
        if isinstance(op, Norm):
            found.append(op)
        elif isinstance(op, Skip):
            found += _norms(op.body)
    return found


def _points(ops: Sequence[Op], weights: Sequence[Tensor], x: Tensor, norms: Norms) -> Tensor:
    for op in ops:
        match op:
            case Conv():
                x = conv(op, weights, x)
            case Fc():
                x = F.linear(x, weights[op.weight], weights[op.bias])
            case Norm():
                scale, shift = norms.of(op, weights, x)
                x = torch.addcmul(shift.view(1, -1, 1, 1), x, scale.view(1, -1, 1, 1))
            case Relu():
                x = torch.relu(x)
            case Flatten():
                x = x.flatten(1)
            case Skip():
                x = _points(op.body, weights, x, norms) + conv(op.skip, weights, x)
    return x


def _intervals(
    ops: Sequence[Op],
    weights: Sequence[Tensor],
    absolute: Sequence[Tensor],
    c: Tensor,
    r: Tensor,
    norms: Norms,
    relus: list[tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    for op in ops:
        match op:
            case Conv():
                c, r = conv(op, weights, c), conv(op, absolute, r, bias=False)
            case Fc():
                c = F.linear(c, weights[op.weight], weights[op.bias])
                r = F.linear(r, absolute[op.weight])
            case Norm():
                scale, shift = norms.of(op, weights, c)
                c = torch.addcmul(shift.view(1, -1, 1, 1), c, scale.view(1, -1, 1, 1))
                r = r * scale.abs().view(1, -1, 1, 1)
            case Relu():
                relus.append((c, r))
                c, r = interval_relu(c, r)
            case Flatten():
                c, r = c.flatten(1), r.flatten(1)
            case Skip():
                side = conv(op.skip, weights, c), conv(op.skip, absolute, r, bias=False)
                c, r = _intervals(op.body, weights, absolute, c, r, norms, relus)
                c, r = c + side[0], r + side[1]
    return c, r


def _backward(
    ops: Sequence[Op],
    weights: Sequence[Tensor],
    slope: Tensor,
    intercept: Tensor,
    relus: Sequence[tuple[Tensor, Tensor]],
    norms: Norms,
    rule: str,
) -> tuple[Tensor, Tensor]:
    """Pulls <slope [N, K, ...], value after ops> + intercept [N, K] back to the value before `ops`."""
    for position in range(len(ops) - 1, -1, -1):
        op = ops[position]
        match op:
            case Fc():
                intercept = intercept + slope @ weights[op.bias]
                slope = slope @ weights[op.weight]
            case Flatten():
                slope = slope.unflatten(2, op.shape)
            case Norm():
                scale, shift = norms.pairs[op.index]
                intercept = intercept + torch.einsum("nkchw,c->nk", slope, shift)
                slope = slope * scale.view(1, 1, -1, 1, 1)
            case Conv():
                if op.bias is not None:
                    intercept = intercept + torch.einsum("nkchw,c->nk", slope, weights[op.bias])
                slope = transposed(op, weights, slope)
            case Relu():
                slope, lost = relax_rows(slope, *relus[op.index], rule)
                intercept = intercept + lost
            case Skip():
                side = transposed(op.skip, weights, slope)
                if op.skip.bias is not None:
                    intercept = intercept + torch.einsum("nkchw,c->nk", slope, weights[op.skip.bias])
                slope, intercept = _backward(op.body, weights, slope, intercept, relus, norms, rule)
                slope = slope + side
    return slope, intercept


def transposed(op: Conv, weights: Sequence[Tensor], slope: Tensor) -> Tensor:
    """The slope [N, K, out, h, w] before the convolution: its transpose, padded to the input's size."""
    folded = F.conv_transpose2d(
        slope.flatten(0, 1), weights[op.weight], stride=op.stride, padding=op.padding, output_padding=op.output_padding
    )
    return folded.unflatten(0, slope.shape[:2])

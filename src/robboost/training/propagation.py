"""Points, intervals and linear bounds through a training program: the fast twins of the engine's bounds.

Nothing here is a certificate: training may run in TF32 and with the statistics of a batch. What is certified is the
saved network, by `robboost.margin_bounds`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from robboost.mixtures import target_classes
from robboost.training.dual_kernels import relax_rows
from robboost.training.kernels import absolute, interval_relu
from robboost.training.network import BN_EPS, Conv, Fc, Flatten, Network, Norm, Op, Relu, Skip, conv
from robboost.training.normalisation import normalisation, scaled, scaled_interval

__all__ = [
    "Norms",
    "Trace",
    "box",
    "fused_sum",
    "interval_margins",
    "intervals",
    "linear_bounds",
    "linear_margins",
    "mean_line",
    "mean_margins",
    "mean_shares",
    "middle_margins",
    "point_margins",
    "points",
    "spread",
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
        norms, found = cls(), _norms(net.trunk)
        sizes = [op.channels for op in found]
        gammas, betas = (torch.cat([weights[slot] for slot in slots]) for slots in _slots(found))
        scales = gammas * torch.rsqrt(variances + BN_EPS)
        shifts = betas - means * scales
        parts = (vector.split(sizes) for vector in (scales, shifts, means, variances))
        for op, scale, shift, mean, variance in zip(found, *parts, strict=True):
            norms._set(op, scale, shift, mean, variance)
        return norms

    def met(self, op: Norm, weights: Sequence[Tensor], values: Tensor) -> tuple[Tensor, Scale]:
        """The values as they came, to go on from (see `normalisation`), and the pair to apply to them."""
        if op.index not in self.pairs:
            values, *found = normalisation(values, weights[op.gamma], weights[op.beta], BN_EPS)
            self._set(op, *found)
        return values, self.pairs[op.index]

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Means and variances of all normalisations in one vector each, without gradient."""
        order = sorted(self.means)
        return (
            torch.cat([self.means[i] for i in order]).detach(),
            torch.cat([self.variances[i] for i in order]).detach(),
        )

    def in_order(self) -> list[Scale]:
        return [self.pairs[i] for i in sorted(self.pairs)]

    def _set(self, op: Norm, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor) -> None:
        self.pairs[op.index] = (scale, shift)
        self.means[op.index], self.variances[op.index] = mean, variance


@dataclass
class Trace:
    """What an interval pass leaves behind: the last hidden interval and, if traced, every ReLU's input in order."""

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


def point_margins(logits: Tensor, y: Tensor) -> Tensor:
    """True logit minus target logit [N, C-1], targets in class order."""
    return logits.gather(1, y.unsqueeze(1)) - logits.gather(1, target_classes(y, logits.shape[1]))


def intervals(
    net: Network, weights: Sequence[Tensor], centre: Tensor, radius: Tensor, norms: Norms, *, traced: bool = True
) -> Trace:
    """Interval bounds up to the last hidden layer: W centre + b and |W| radius, layer by layer.

    traced False: without the inputs of the ReLUs, which linear bounds need; they then never lie in memory.
    """
    wide = [slot for slot, w in enumerate(weights) if w.dim() > 1 and slot != net.head.weight]
    sizes = dict(zip(wide, absolute([weights[slot] for slot in wide]), strict=True))
    sized = [sizes.get(slot, w) for slot, w in enumerate(weights)]
    relus: list[tuple[Tensor, Tensor]] | None = [] if traced else None
    centre, radius = _intervals(net.trunk, weights, sized, centre, radius, norms, relus)
    return Trace(centre, radius, relus or [])


def interval_margins(net: Network, weights: Sequence[Tensor], trace: Trace, y: Tensor) -> Tensor:
    """Lower bounds of the margins [N, C-1], the margin difference folded into the last layer.

    All C (C-1) differences of rows are bounded for all examples by one matrix product each for centre and radius: that
    is cheaper than one matrix of differences for each example.
    """
    lower, _ = _margin_intervals(net, weights, trace, y)
    return lower


def _margin_intervals(net: Network, weights: Sequence[Tensor], trace: Trace, y: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper interval bounds of the margins, [N, C-1] each."""
    rows, shifts = _differences(net, weights)
    classes, targets, hidden = rows.shape
    flat = rows.reshape(classes * targets, hidden)
    middle, reach = F.linear(trace.centre, flat, shifts.reshape(-1)), F.linear(trace.radius, flat.abs())
    chosen = y.view(-1, 1, 1).expand(-1, 1, targets)
    lower, upper = (
        part.view(-1, classes, targets).gather(1, chosen).squeeze(1) for part in (middle - reach, middle + reach)
    )
    return lower, upper


def fused_sum(
    net: Network, weights: Sequence[Tensor], trace: Trace, region: tuple[Tensor, Tensor], y: Tensor, norms: Norms
) -> Tensor:
    """log of an upper bound of sum_j exp(-margin_j) on the region, [N]: one backward pass for all targets together.

    On the interval bounds [l_j, u_j] of a margin m the chord lies above exp(-m):

        exp(-m) <= exp(-l_j) - w_j (m - l_j),    w_j = (exp(-l_j) - exp(-u_j)) / (u_j - l_j) >= 0

    so the sum is at most sum_j (exp(-l_j) + w_j l_j) - min of sum_j w_j margin_j, a single linear bound (Xu et al.
    2020, "loss fusion"). Below 0 it proves that all margins are positive.
    """
    lower, upper = _margin_intervals(net, weights, trace, y)
    # Everything is divided by exp(top), so that wide intervals do not overflow.
    top = (-lower).amax(1, keepdim=True).clamp(min=0).detach()
    width = (upper - lower).clamp(min=1e-6)
    heights = torch.exp(-lower - top)
    chords = heights * (-torch.expm1(-width) / width)
    least = _least(*mean_line(net, weights, trace, y, norms, chords), region).squeeze(1)
    # Rounding aside the sum is no smaller than that at the upper bounds.
    total = (heights + chords * lower).sum(1) - least
    return torch.maximum(total, torch.exp(-upper - top).sum(1) + 1e-30).log() + top.squeeze(1)


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
    return _least(*linear_bounds(net, weights, trace, y, norms, rule), region)


def mean_margins(
    net: Network, weights: Sequence[Tensor], trace: Trace, region: tuple[Tensor, Tensor], y: Tensor, norms: Norms
) -> Tensor:
    """An ESTIMATE of the linear lower bounds of the margins [N, C-1], by one backward pass for all targets together.

    The mean of the margins m_j(c) at the centres, with weights p = softmax(-m(c)) that carry no gradient, is bounded:
    sum_j p_j m_j(x) >= L on the region. What it loses, sum_j p_j m_j(c) - L, is taken off every margin alike: the loss
    and its gradient are then those of `linear_margins` where the targets lose alike. L is a bound, the result is not.
    """
    middle = middle_margins(net, weights, trace, y)
    shares = mean_shares(middle)
    return spread(middle, shares, _least(*mean_line(net, weights, trace, y, norms, shares), region))


def middle_margins(net: Network, weights: Sequence[Tensor], trace: Trace, y: Tensor) -> Tensor:
    """Margins [N, C-1] of the last hidden interval's centre."""
    return point_margins(F.linear(trace.centre, weights[net.head.weight], weights[net.head.bias]), y)


def mean_shares(middle: Tensor) -> Tensor:
    """Weights of the targets in the mean: the gradient of the cross-entropy, up to its size."""
    return torch.softmax(-middle.detach(), 1)


def mean_line(
    net: Network, weights: Sequence[Tensor], trace: Trace, y: Tensor, norms: Norms, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """Slope [N, 1, *input] and intercept [N, 1] of a linear lower bound of sum_j shares_j margin_j."""
    return _backward(net.trunk, weights, *_row_of_sum(net, weights, y, shares), trace.relus, norms, "adaptive")


def spread(middle: Tensor, shares: Tensor, lower: Tensor) -> Tensor:
    """The margins less what their mean loses; lower [N, 1]: its bound."""
    return middle - ((shares * middle).sum(1, keepdim=True) - lower)


def _least(slope: Tensor, intercept: Tensor, region: tuple[Tensor, Tensor]) -> Tensor:
    """Minimum of <slope, x> + intercept on the box of `region`, [N, K]."""
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


def _row_of_sum(net: Network, weights: Sequence[Tensor], y: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Row [N, 1, hidden] and shift [N, 1] of sum_j shares_j margin_j over the last hidden layer."""
    weight, bias = weights[net.head.weight], weights[net.head.bias]
    others = torch.zeros(len(y), len(weight), dtype=shares.dtype, device=shares.device)
    others = others.scatter(1, target_classes(y, len(weight)), shares)
    signs = F.one_hot(y, len(weight)) * shares.sum(1, keepdim=True) - others
    return (signs @ weight).unsqueeze(1), (signs @ bias).unsqueeze(1)


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


def _slots(norms: Sequence[Norm]) -> tuple[list[int], list[int]]:
    return [op.gamma for op in norms], [op.beta for op in norms]


def _joined(ops: Sequence[Op], *, join: bool) -> Iterator[tuple[Op, bool]]:
    """Each operation; with `join`, a ReLU right behind a normalisation is not one of its own: True marks the latter."""
    behind = False
    for op, following in zip(ops, [*ops[1:], None], strict=True):
        if not behind:
            behind = join and isinstance(op, Norm) and isinstance(following, Relu)
            yield op, behind
        else:
            behind = False


def _points(ops: Sequence[Op], weights: Sequence[Tensor], x: Tensor, norms: Norms) -> Tensor:
    for op, rectified in _joined(ops, join=True):
        match op:
            case Conv():
                x = conv(op, weights, x)
            case Fc():
                x = F.linear(x, weights[op.weight], weights[op.bias])
            case Norm():
                x, pair = norms.met(op, weights, x)
                x = scaled(x, *pair, relu=rectified)
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
    sized: Sequence[Tensor],
    c: Tensor,
    r: Tensor,
    norms: Norms,
    relus: list[tuple[Tensor, Tensor]] | None,
) -> tuple[Tensor, Tensor]:
    for op, rectified in _joined(ops, join=relus is None):
        match op:
            case Conv():
                c, r = conv(op, weights, c), conv(op, sized, r, bias=False)
            case Fc():
                c = F.linear(c, weights[op.weight], weights[op.bias])
                r = F.linear(r, sized[op.weight])
            case Norm():
                c, pair = norms.met(op, weights, c)
                c, r = scaled_interval(c, r, *pair, relu=rectified)
            case Relu():
                if relus is not None:
                    relus.append((c, r))
                c, r = interval_relu(c, r)
            case Flatten():
                c, r = c.flatten(1), r.flatten(1)
            case Skip():
                side = conv(op.skip, weights, c), conv(op.skip, sized, r, bias=False)
                c, r = _intervals(op.body, weights, sized, c, r, norms, relus)
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

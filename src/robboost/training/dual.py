"""Same-slope bounds of every ReLU's input: what the paper's base models are trained on (Wong and Kolter 2018).

A ReLU on [l, u] lies between the lines d z and d z + s with d = u / (u - l), s = -u l / (u - l). Since both lines have
one slope, every value of the network is an affine function of the input and of one free number in [0, s] per ReLU:

    value in centre +- radius,    centre: the network with d z + s / 2 in place of its ReLUs,
    radius_i = ||A_i diag(r)||_1 + sum over earlier layers j of ||B_ij diag(s_j) / 2||_1

where A_i and B_ij are the (linear) ways from the input and from layer j to neuron i. Exact radii come by one backward
pass for each neuron. The ESTIMATE of Wong et al. (2018) sends random columns forward instead: a sum of independent
Cauchy numbers with coefficients a is Cauchy with scale ||a||_1, so a few such sums estimate all norms of the formula at
once. An estimate may be too small: it serves training alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from robboost.training.dual_kernels import relu_estimated, relu_given
from robboost.training.dual_plain import relaxation
from robboost.training.network import Conv, Fc, Flatten, Network, Norm, Op, Relu, Skip, conv
from robboost.training.propagation import Norms, Trace, transposed

__all__ = ["ball", "dual_trace", "source_sizes"]

# Numbers of one tensor of a backward pass: what does not fit is passed in parts, and passed again for the gradient.
_CHUNK = 2**27


def ball(x: Tensor, eps: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Centre [N, ...] and radius [1, ...] of {x' : |x' - x| <= eps} without a box, behind the mask."""
    radius = eps.expand(1, *x.shape[1:])
    return (x, radius) if mask is None else (x * mask, radius * mask)


def source_sizes(net: Network) -> list[int]:
    """How many random numbers a projection takes: one for each pixel, then one for each neuron of every ReLU."""
    shapes = [shape for _, shape in _queries(net.trunk, (), net.input_shape, net)]
    return [math.prod(net.input_shape), *(math.prod(shape) for shape in shapes)]


def dual_trace(
    net: Network,
    weights: Sequence[Tensor],
    region: tuple[Tensor, Tensor],
    noise: Tensor | None,
    norms: Norms,
) -> Trace:
    """Centre and radius of every ReLU's input, in order, and of the last hidden layer.

    Args:
        region: centre [N, *input] and radius [N or 1, *input] of the set, masked.
        noise: None for exact bounds; Cauchy numbers [projections, sum of source_sizes] for estimated ones.
        norms: filled; normalisations need to have been met before (by points).
    """
    centre, radius = region
    run = _Run(net, weights, norms, radius, dict(_by_index(net)))
    streams = None
    if noise is not None:
        run.noise = list(noise.split(source_sizes(net), dim=1))
        streams = (_columns(run.noise[0], net.input_shape) * radius).flatten(0, 1)
    centre, _ = run.forward(net.trunk, centre, streams)
    return Trace(centre, centre, run.relus)


@dataclass
class _Run:
    """One pass over the network: `relus` grows from layer to layer, and every bound reads those before it."""

    net: Network
    weights: Sequence[Tensor]
    norms: Norms
    radius: Tensor
    prefixes: dict[int, tuple[tuple[Op, ...], tuple[int, ...]]]
    relus: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    noise: list[Tensor] | None = None

    def forward(self, ops: Sequence[Op], c: Tensor, streams: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Centres [N, ...] and random columns [projections * (N or 1), ...] (None: exact) behind `ops`."""
        for op in ops:
            match op:
                case Conv():
                    c = conv(op, self.weights, c)
                    streams = None if streams is None else conv(op, self.weights, streams, bias=False)
                case Fc():
                    weight = self.weights[op.weight]
                    c = F.linear(c, weight, self.weights[op.bias])
                    streams = None if streams is None else F.linear(streams, weight)
                case Norm():
                    scale, shift = (part.view(1, -1, 1, 1) for part in self.norms.pairs[op.index])
                    c = torch.addcmul(shift, c, scale)
                    streams = None if streams is None else streams * scale
                case Flatten():
                    c = c.flatten(1)
                    streams = None if streams is None else streams.flatten(1)
                case Relu():
                    c, streams = self._relu(op, c, streams)
                case Skip():
                    side = conv(op.skip, self.weights, c)
                    beside = None if streams is None else conv(op.skip, self.weights, streams, bias=False)
                    c, streams = self.forward(op.body, c, streams)
                    c = c + side
                    if streams is not None and beside is not None:
                        streams = (self._split(streams) + self._split(beside)).flatten(0, 1)
        return c, streams

    def _relu(self, op: Relu, c: Tensor, streams: Tensor | None) -> tuple[Tensor, Tensor | None]:
        prefix, shape = self.prefixes[op.index]
        if streams is None:
            radius = self._exact(prefix, shape).expand_as(c)
            self.relus.append((c, radius))
            slope, _, shift = relaxation(c, radius, "same-slope")
            return c * slope + shift / 2, None
        assert self.noise is not None
        columns, fresh = self._split(streams), _columns(self.noise[op.index + 1], shape)
        if _is_layer(prefix):
            # The first layer is exact in any case, since that costs one convolution.
            radius = self._of_layer(prefix).expand_as(c)
            centre, columns = relu_given(c, radius, columns, fresh)
        else:
            radius, centre, columns = relu_estimated(c, columns, fresh)
        self.relus.append((c, radius))
        return centre, columns.flatten(0, 1)

    def _split(self, streams: Tensor) -> Tensor:
        assert self.noise is not None
        return streams.unflatten(0, (len(self.noise[0]), -1))

    def _exact(self, prefix: tuple[Op, ...], shape: tuple[int, ...]) -> Tensor:
        """Radii of all values [*shape] behind `prefix`, by backward passes of so many of them at once as fit."""
        if _is_layer(prefix):
            return self._of_layer(prefix)
        count = math.prod(shape)
        widest = max(self.radius[0].numel(), *(centre[0].numel() for centre, _ in self.relus), count)
        examples = len(self.relus[0][0]) if self.relus else 1
        size = max(1, min(count, _CHUNK // (widest * examples)))
        eye = torch.eye(count, device=self.radius.device, dtype=self.radius.dtype)
        parts = []
        for rows in eye.split(size):
            seed = rows.view(1, -1, *shape)
            if size >= count:
                parts.append(self._pulled(prefix, seed))
            else:
                parts.append(checkpoint(self._pulled, prefix, seed, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(parts, dim=1).unflatten(1, shape)

    def _pulled(self, prefix: tuple[Op, ...], seed: Tensor) -> Tensor:
        """||A diag(r)||_1 + sum_j ||B_j diag(s_j) / 2||_1 of the rows `seed` [1, K, *shape]: [N or 1, K]."""
        slope, total = self._back(prefix, seed, torch.zeros(1, seed.shape[1], device=seed.device, dtype=seed.dtype))
        return total + _reach(slope, self.radius)

    def _back(self, ops: Sequence[Op], slope: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        for op in reversed(ops):
            match op:
                case Conv():
                    slope = transposed(op, self.weights, slope)
                case Fc():
                    slope = slope @ self.weights[op.weight]
                case Norm():
                    slope = slope * self.norms.pairs[op.index][0].view(1, 1, -1, 1, 1)
                case Flatten():
                    slope = slope.unflatten(2, op.shape)
                case Relu():
                    chord, _, shift = relaxation(*self.relus[op.index], "same-slope")
                    # The lines of the rows before the first ReLU from above are the same for all examples.
                    total = total + _reach(slope, shift / 2)
                    slope = slope * chord.unsqueeze(1)
                case Skip():
                    side = transposed(op.skip, self.weights, slope)
                    slope, total = self._back(op.body, slope, total)
                    slope = slope + side
        return slope, total

    def _of_layer(self, prefix: tuple[Op, ...]) -> Tensor:
        """|W| r, and |scale| |W| r behind a normalisation: exact intervals of one layer."""
        r = self.radius
        for op in prefix:
            match op:
                case Conv():
                    r = F.conv2d(r, self.weights[op.weight].abs(), stride=op.stride, padding=op.padding)
                case Fc():
                    r = F.linear(r, self.weights[op.weight].abs())
                case Norm():
                    r = r * self.norms.pairs[op.index][0].abs().view(1, -1, 1, 1)
                case _:
                    r = r.flatten(1)
        return r


def _reach(slope: Tensor, width: Tensor) -> Tensor:
    """<|slope|, width>: [N or 1, K, ...] and [N or 1, ...] to [N or 1, K]; what is shared is not copied."""
    rows, flat = slope.abs().flatten(2), width.flatten(1)
    if len(rows) == 1:
        return F.linear(flat, rows[0])
    if len(flat) == 1:
        return torch.matmul(rows, flat[0])
    return torch.bmm(rows, flat.unsqueeze(2)).squeeze(2)


def _columns(noise: Tensor, shape: Sequence[int]) -> Tensor:
    """[projections, numbers] as [projections, 1, *shape], with channels last in memory as convolutions leave them."""
    if len(shape) != 3:
        return noise.view(len(noise), 1, *shape)
    channels, height, width = shape
    return noise.view(len(noise), 1, height, width, channels).permute(0, 1, 4, 2, 3)


def _is_layer(prefix: Sequence[Op]) -> bool:
    """Whether one affine layer alone (and what only scales or reshapes it) stands before the ReLU."""
    return sum(isinstance(op, Conv | Fc) for op in prefix) <= 1 and not any(
        isinstance(op, Relu | Skip) for op in prefix
    )


def _by_index(net: Network) -> Iterator[tuple[int, tuple[tuple[Op, ...], tuple[int, ...]]]]:
    yield from enumerate(_queries(net.trunk, (), net.input_shape, net))


def _queries(
    ops: Sequence[Op], before: tuple[Op, ...], shape: tuple[int, ...], net: Network
) -> Iterator[tuple[tuple[Op, ...], tuple[int, ...]]]:
    """For each ReLU, in the order of their numbers, all operations before it as one chain, and its shape.

    The chain of a ReLU within a block leads through the body alone: its own skip is added later.
    """
    for position, op in enumerate(ops):
        if isinstance(op, Relu):
            yield (*before, *ops[:position]), shape
        elif isinstance(op, Skip):
            yield from _queries(op.body, (*before, *ops[:position]), shape, net)
        shape = _shape_behind(op, shape, net)


def _shape_behind(op: Op, shape: tuple[int, ...], net: Network) -> tuple[int, ...]:
    match op:
        case Conv():
            channels, height, width, _ = net.shapes[op.weight]
            sides = zip(shape[1:], (height, width), strict=True)
            return (channels, *((side + 2 * op.padding - kernel) // op.stride + 1 for side, kernel in sides))
        case Fc():
            return (net.shapes[op.weight][0],)
        case Flatten():
            return (math.prod(shape),)
        case Skip():
            return _shape_behind(op.skip, shape, net)
        case _:
            return shape

"""The GPU kernels of `normalisation`: values as a table [rows, channels], as channels-last tensors lie in memory.

A program goes down `steps` tiles of the table one after another, and keeps its sums over rows to itself; a second small
kernel adds up what the programs found, always in the same order, so that results repeat bit for bit.
"""

# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "channels_last",
    "interval_backward",
    "interval_forward",
    "normalisation_backward",
    "normalisation_forward",
    "point_backward",
    "point_forward",
    "totals",
]

# Numbers of a tile, and the most channels of one: more channels are cut into groups.
_TILE = 1024
_WIDEST = 128
# Programs enough to fill a device, few enough that one tile holds what they found for a few channels.
_PROGRAMS = 512
_COLUMNS = 8


@triton.jit
def _place(STEPS: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr):
    """This program's first row, its channels, and which of those there are."""
    column = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    return tl.program_id(0).to(tl.int64) * STEPS * TALL, column, column < CHANNELS


@triton.jit
def _tile(first, step, rows, column, known, CHANNELS: tl.constexpr, TALL: tl.constexpr):
    """Addresses of one tile [TALL, WIDE], and which of them are in the table."""
    row = first + step * TALL + tl.arange(0, TALL)
    return row[:, None] * CHANNELS + column[None, :], (row < rows)[:, None] & known[None, :]


@triton.jit
def _positive(value):
    """max(0, value) that leaves NaN what it is: a run that diverges must show."""
    return tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["rows"])
def _moments(
    values, means, squares, rows, STEPS: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr
):  # fmt: skip
    """Mean and sum of squared deviations of a program's rows, by sums of differences to its first row."""
    first, column, known = _place(STEPS, CHANNELS, WIDE, TALL)
    origin = tl.load(values + first * CHANNELS + column, mask=known, other=0.0)
    total = tl.zeros((TALL, WIDE), dtype=values.dtype.element_ty)
    square = tl.zeros((TALL, WIDE), dtype=values.dtype.element_ty)
    for step in range(STEPS):
        at, inside = _tile(first, step, rows, column, known, CHANNELS, TALL)
        value = tl.load(values + at, mask=inside, other=0.0)
        offset = tl.where(inside, value - origin[None, :], 0.0)
        total += offset
        square += offset * offset
    count = tl.minimum(rows - first, STEPS * TALL).to(values.dtype.element_ty)
    summed = tl.sum(total, axis=0)
    mean = summed / count
    at = tl.program_id(0).to(tl.int64) * CHANNELS + column
    tl.store(means + at, origin + mean, mask=known)
    tl.store(squares + at, tl.maximum(tl.sum(square, axis=0) - summed * mean, 0.0), mask=known)


@triton.jit(do_not_specialize=["rows", "rows_each", "blocks"])
def _combine(
    means, squares, gamma, beta, scale, shift, mean, variance,
    rows, rows_each, blocks, eps, CHANNELS: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Mean and variance of all rows (Chan et al.), and from them scale and shift."""
    column = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    known = column < CHANNELS
    block = tl.arange(0, BLOCKS).to(tl.int64)
    inside = (block < blocks)[:, None] & known[None, :]
    at = block[:, None] * CHANNELS + column[None, :]
    part = tl.load(means + at, mask=inside, other=0.0)
    count = tl.maximum(tl.minimum(rows - block * rows_each, rows_each), 0).to(means.dtype.element_ty)
    # Means of blocks as differences to the first one's: what they have in common costs no digits.
    origin = tl.load(means + column, mask=known, other=0.0)
    offset = tl.where(inside, part - origin[None, :], 0.0)
    centre = tl.sum(count[:, None] * offset, axis=0) / rows
    apart = tl.where(inside, offset - centre[None, :], 0.0)
    whole = tl.load(squares + at, mask=inside, other=0.0) + count[:, None] * apart * apart
    average, spread = origin + centre, tl.sum(whole, axis=0) / rows
    factor = tl.load(gamma + column, mask=known, other=0.0) / tl.sqrt(spread + eps)
    tl.store(scale + column, factor, mask=known)
    tl.store(shift + column, tl.load(beta + column, mask=known, other=0.0) - average * factor, mask=known)
    tl.store(mean + column, average, mask=known)
    tl.store(variance + column, spread, mask=known)


@triton.jit(do_not_specialize=["rows"])
def _normalisation_backward(
    values, gradient, gamma, mean, variance, to_scale, to_shift, out, to_gamma,
    rows, eps,
    STEPS: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """out = gradient + (to_mean + 2 to_variance (values - mean)) / rows, and the gradient of gamma."""
    first, column, known = _place(STEPS, CHANNELS, WIDE, TALL)
    average = tl.load(mean + column, mask=known, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.load(variance + column, mask=known, other=1.0) + eps)
    factor = tl.load(gamma + column, mask=known, other=0.0) * inverse
    moved = tl.load(to_shift + column, mask=known, other=0.0)
    scaled = (tl.load(to_scale + column, mask=known, other=0.0) - average * moved) * inverse
    tl.store(to_gamma + column, scaled, mask=known & (tl.program_id(0) == 0))
    constant, slope = -factor * moved / rows, -scaled * factor * inverse / rows
    for step in range(STEPS):
        at, inside = _tile(first, step, rows, column, known, CHANNELS, TALL)
        value = tl.load(values + at, mask=inside, other=0.0)
        given = tl.load(gradient + at, mask=inside, other=0.0)
        tl.store(out + at, given + constant[None, :] + slope[None, :] * (value - average[None, :]), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _interval_forward(
    centre, radius, scale, shift, out_centre, out_radius,
    rows, STEPS: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    first, column, known = _place(STEPS, CHANNELS, WIDE, TALL)
    factor = tl.load(scale + column, mask=known, other=0.0)[None, :]
    moved = tl.load(shift + column, mask=known, other=0.0)[None, :]
    for step in range(STEPS):
        at, inside = _tile(first, step, rows, column, known, CHANNELS, TALL)
        c = tl.load(centre + at, mask=inside, other=0.0) * factor + moved
        r = tl.load(radius + at, mask=inside, other=0.0) * tl.abs(factor)
        if RELU:
            lower, upper = _positive(c - r), _positive(c + r)
            c, r = 0.5 * (lower + upper), 0.5 * (upper - lower)
        tl.store(out_centre + at, c, mask=inside)
        tl.store(out_radius + at, r, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _interval_backward(
    centre, radius, scale, shift, to_centre, to_radius, out_centre, out_radius, partials, rows,
    STEPS: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr,
    RELU: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Gradients of centre and radius; partials [programs, 2, channels]: those of scale and shift."""
    first, column, known = _place(STEPS, CHANNELS, WIDE, TALL)
    factor = tl.load(scale + column, mask=known, other=0.0)[None, :]
    moved = tl.load(shift + column, mask=known, other=0.0)[None, :]
    size = tl.abs(factor)
    sign = tl.where(factor > 0, 1.0, tl.where(factor < 0, -1.0, 0.0)).to(centre.dtype.element_ty)
    to_scale = tl.zeros((TALL, WIDE), dtype=centre.dtype.element_ty)
    to_shift = tl.zeros((TALL, WIDE), dtype=centre.dtype.element_ty)
    for step in range(STEPS):
        at, inside = _tile(first, step, rows, column, known, CHANNELS, TALL)
        c = tl.load(centre + at, mask=inside, other=0.0)
        r = tl.load(radius + at, mask=inside, other=0.0)
        gc = tl.load(to_centre + at, mask=inside, other=0.0)
        gr = tl.load(to_radius + at, mask=inside, other=0.0)
        if RELU:
            middle, reach = c * factor + moved, r * size
            upper = tl.where(middle + reach > 0, 0.5 * (gc + gr), 0.0)
            lower = tl.where(middle - reach > 0, 0.5 * (gc - gr), 0.0)
            gc, gr = upper + lower, upper - lower
        tl.store(out_centre + at, gc * factor, mask=inside)
        tl.store(out_radius + at, gr * size, mask=inside)
        if SUMS:
            to_scale += gc * c + gr * r * sign
            to_shift += gc
    if SUMS:
        at = tl.program_id(0).to(tl.int64) * 2 * CHANNELS + column
        tl.store(partials + at, tl.sum(to_scale, axis=0), mask=known)
        tl.store(partials + at + CHANNELS, tl.sum(to_shift, axis=0), mask=known)


@triton.jit(do_not_specialize=["rows"])
def _point_forward(
    values, scale, shift, out,
    rows, STEPS: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    first, column, known = _place(STEPS, CHANNELS, WIDE, TALL)
    factor = tl.load(scale + column, mask=known, other=0.0)[None, :]
    moved = tl.load(shift + column, mask=known, other=0.0)[None, :]
    for step in range(STEPS):
        at, inside = _tile(first, step, rows, column, known, CHANNELS, TALL)
        value = tl.load(values + at, mask=inside, other=0.0) * factor + moved
        if RELU:
            value = _positive(value)
        tl.store(out + at, value, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _point_backward(
    values, scale, shift, gradient, out, partials, rows,
    STEPS: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr,
    RELU: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Gradient of the values; partials [programs, 2, channels]: those of scale and shift."""
    first, column, known = _place(STEPS, CHANNELS, WIDE, TALL)
    factor = tl.load(scale + column, mask=known, other=0.0)[None, :]
    moved = tl.load(shift + column, mask=known, other=0.0)[None, :]
    to_scale = tl.zeros((TALL, WIDE), dtype=values.dtype.element_ty)
    to_shift = tl.zeros((TALL, WIDE), dtype=values.dtype.element_ty)
    for step in range(STEPS):
        at, inside = _tile(first, step, rows, column, known, CHANNELS, TALL)
        value = tl.load(values + at, mask=inside, other=0.0)
        given = tl.load(gradient + at, mask=inside, other=0.0)
        if RELU:
            given = tl.where(value * factor + moved > 0, given, 0.0)
        tl.store(out + at, given * factor, mask=inside)
        if SUMS:
            to_scale += given * value
            to_shift += given
    if SUMS:
        at = tl.program_id(0).to(tl.int64) * 2 * CHANNELS + column
        tl.store(partials + at, tl.sum(to_scale, axis=0), mask=known)
        tl.store(partials + at + CHANNELS, tl.sum(to_shift, axis=0), mask=known)


@triton.jit(do_not_specialize=["blocks"])
def _totals(partials, out, blocks, CHANNELS: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr):
    """Sums over the first dimension of partials [blocks, CHANNELS]."""
    column = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    block = tl.arange(0, BLOCKS).to(tl.int64)
    inside = (block < blocks)[:, None] & (column < CHANNELS)[None, :]
    part = tl.load(partials + block[:, None] * CHANNELS + column[None, :], mask=inside, other=0.0)
    tl.store(out + column, tl.sum(part, axis=0), mask=column < CHANNELS)


class _Table(NamedTuple):
    """How the table of a tensor is divided: tiles of [tall, wide], `steps` of them a program, `blocks` of programs."""

    rows: int
    channels: int
    wide: int
    tall: int
    steps: int
    blocks: int

    @classmethod
    def of(cls, values: Tensor) -> _Table:
        channels = values.shape[1]
        rows = values.numel() // channels
        wide = min(triton.next_power_of_2(channels), _WIDEST)
        tall = _TILE // wide
        tiles = _ratio(rows, tall)
        steps = triton.next_power_of_2(_ratio(tiles, _PROGRAMS))
        return cls(rows, channels, wide, tall, steps, _ratio(tiles, steps))

    @property
    def grid(self) -> tuple[int, int]:
        return self.blocks, _ratio(self.channels, self.wide)

    @property
    def shape(self) -> dict[str, int]:
        return {"STEPS": self.steps, "CHANNELS": self.channels, "WIDE": self.wide, "TALL": self.tall}

    def partials(self, model: Tensor) -> Tensor:
        return model.new_empty((self.blocks, 2, self.channels))


def normalisation_forward(values: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Scale, shift, mean and variance [C] of values [N, C, H, W]."""
    values, table = channels_last(values), _Table.of(values)
    means, squares = table.partials(values).view(2, table.blocks, table.channels)
    _moments[table.grid](values, means, squares, table.rows, **table.shape)
    outputs = tuple(torch.empty_like(means[0]) for _ in range(4))
    _combine[(_ratio(table.channels, _COLUMNS),)](
        means,
        squares,
        gamma.contiguous(),
        beta.contiguous(),
        *outputs,
        table.rows,
        table.steps * table.tall,
        table.blocks,
        eps,
        CHANNELS=table.channels,
        WIDE=_COLUMNS,
        BLOCKS=triton.next_power_of_2(table.blocks),
    )
    return outputs


def normalisation_backward(
    values: Tensor,
    gamma: Tensor,
    statistics: tuple[Tensor, Tensor],
    gradient: Tensor,
    to_scale: Tensor,
    to_shift: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of values and gamma; `statistics` are mean and variance."""
    values, table = channels_last(values), _Table.of(values)
    out, to_gamma = _empty(values), torch.empty_like(statistics[0])
    vectors = [v.contiguous() for v in (gamma, *statistics, to_scale, to_shift)]
    _normalisation_backward[table.grid](
        values, channels_last(gradient), *vectors, out, to_gamma, table.rows, eps, **table.shape
    )
    return out, to_gamma


def interval_forward(
    centre: Tensor, radius: Tensor, scale: Tensor, shift: Tensor, *, relu: bool
) -> tuple[Tensor, Tensor]:
    """See `normalisation.scaled_interval`."""
    centre, radius, table = channels_last(centre), channels_last(radius), _Table.of(centre)
    outputs = _empty(centre), _empty(centre)
    vectors = scale.contiguous(), shift.contiguous()
    _interval_forward[table.grid](centre, radius, *vectors, *outputs, table.rows, **table.shape, RELU=relu)
    return outputs


def interval_backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor], gradients: tuple[Tensor, Tensor], *, relu: bool, sums: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `saved` (centre, radius, scale, shift); sums False: None for the last two."""
    centre, radius = channels_last(saved[0]), channels_last(saved[1])
    table = _Table.of(centre)
    outputs = _empty(centre), _empty(centre)
    partials = table.partials(centre) if sums else centre
    _interval_backward[table.grid](
        centre,
        radius,
        saved[2].contiguous(),
        saved[3].contiguous(),
        channels_last(gradients[0]),
        channels_last(gradients[1]),
        *outputs,
        partials,
        table.rows,
        **table.shape,
        RELU=relu,
        SUMS=sums,
    )
    return *outputs, *(totals(partials) if sums else (None, None))


def point_forward(values: Tensor, scale: Tensor, shift: Tensor, *, relu: bool) -> Tensor:
    """See `normalisation.scaled`."""
    values, table = channels_last(values), _Table.of(values)
    out = _empty(values)
    vectors = scale.contiguous(), shift.contiguous()
    _point_forward[table.grid](values, *vectors, out, table.rows, **table.shape, RELU=relu)
    return out


def point_backward(
    saved: tuple[Tensor, Tensor, Tensor], gradient: Tensor, *, relu: bool, sums: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `saved` (values, scale, shift); sums False: None for the last two."""
    values = channels_last(saved[0])
    table, out = _Table.of(values), _empty(values)
    partials = table.partials(values) if sums else values
    vectors = saved[1].contiguous(), saved[2].contiguous()
    _point_backward[table.grid](
        values,
        *vectors,
        channels_last(gradient),
        out,
        partials,
        table.rows,
        **table.shape,
        RELU=relu,
        SUMS=sums,
    )
    return out, *(totals(partials) if sums else (None, None))


def totals(partials: Tensor) -> Tensor:
    """Sums over the first dimension, that of programs."""
    out = partials.new_empty(partials.shape[1:])
    width, blocks = out.numel(), len(partials)
    grid = (_ratio(width, _COLUMNS),)
    _totals[grid](partials, out, blocks, CHANNELS=width, WIDE=_COLUMNS, BLOCKS=triton.next_power_of_2(blocks))
    return out


def channels_last(values: Tensor) -> Tensor:
    """values [N, C, H, W] themselves if they are a dense table [N * H * W, C], else a copy that is."""
    return values.contiguous(memory_format=torch.channels_last)


def _empty(model: Tensor) -> Tensor:
    return torch.empty_like(model, memory_format=torch.channels_last)


def _ratio(number: int, size: int) -> int:
    return (number + size - 1) // size

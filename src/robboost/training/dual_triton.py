"""The GPU kernels of `dual_kernels` (formulas: `dual_plain`): a program owns some neurons and all their columns.

Sums over columns, rows and examples are thus taken in one fixed order. Inner dimensions [C, H, W] lie in memory as
those of the centre do, channels last as a rule; what comes in another order is copied.
"""

# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from robboost.training.dual_plain import LEAST, TINY
from robboost.training.triton_kernels import dense

__all__ = [
    "estimated_backward",
    "estimated_forward",
    "given_backward",
    "given_forward",
    "rows_backward",
    "rows_forward",
]

# Numbers of one tile [columns, neurons], and examples whose shared columns' gradients one program adds up.
_TILE = 4096
_WARPS = 8
_SPAN = 8
_TINY, _LEAST = tl.constexpr(TINY), tl.constexpr(LEAST)


@triton.jit
def _lines(c, r):
    """Ends, width (1 where the ReLU is stable), whether it is not, slope and shift of the upper line."""
    lower = c - r
    upper = c + r
    unstable = (lower < 0) & (upper > 0)
    width = tl.where(unstable, upper - lower, 1.0)
    slope = tl.where(unstable, upper / width, tl.where(lower >= 0, 1.0, 0.0))
    shift = tl.where(unstable, -upper * lower / width, 0.0)
    return lower, upper, width, unstable, slope, shift


@triton.jit
def _through_lines(lower, upper, width, unstable, to_slope, to_shift):
    """Gradients of centre and radius from those of slope and shift."""
    above = upper / width
    below = -lower / width
    to_upper = tl.where(unstable, below * (to_slope / width + to_shift * below), 0.0)
    to_lower = tl.where(unstable, above * (to_slope / width - to_shift * above), 0.0)
    return to_upper + to_lower, to_upper - to_lower


@triton.jit
def _columns_forward(
    centre,
    radius,
    columns,
    fresh,
    out_offset,
    out_total,
    out_radius,
    out_centre,
    out_columns,
    count,
    size,
    examples,
    radius_step,
    column_step,
    column_row,
    fresh_row,
    ESTIMATED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One example, BLOCK of its `size` neurons, all `count` columns."""
    n = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    k = tl.arange(0, COLUMNS).to(tl.int64)[:, None]
    filled = (k < count) & inside[None, :]
    here = n * size + place
    v = tl.load(columns + k * column_row + (n * column_step + place)[None, :], mask=filled, other=0.0)
    own = tl.load(fresh + k * fresh_row + place[None, :], mask=filled, other=0.0)
    c = tl.load(centre + here, mask=inside, other=0.0)
    if ESTIMATED:
        squares = v * v
        typical = tl.sum(tl.where(filled, 0.5 * tl.log(squares + _TINY), 0.0), axis=0) / count
        offset = tl.maximum(0.5 * tl.exp(typical), _LEAST)
        logs = 0.5 * tl.log(squares + (offset * offset)[None, :])
        total = tl.exp(tl.sum(tl.where(filled, logs, 0.0), axis=0) / count)
        r = tl.maximum(total - offset, 0.0)
        tl.store(out_offset + here, offset, mask=inside)
        tl.store(out_total + here, total, mask=inside)
        tl.store(out_radius + here, r, mask=inside)
    else:
        r = tl.load(radius + n * radius_step + place, mask=inside, other=0.0)
    _, _, _, _, slope, shift = _lines(c, r)
    half = 0.5 * shift
    tl.store(out_centre + here, c * slope + half, mask=inside)
    passed = v * slope[None, :] + own * half[None, :]
    tl.store(out_columns + k * (examples * size) + here[None, :], passed, mask=filled)


@triton.jit
def _columns_backward(
    centre,
    radius,
    columns,
    fresh,
    offsets,
    totals,
    to_radius,
    to_centre,
    to_columns,
    out_centre,
    out_radius,
    out_columns,
    count,
    size,
    examples,
    groups,
    radius_step,
    column_step,
    column_row,
    fresh_row,
    ESTIMATED: tl.constexpr,
    SPAN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """SPAN examples one after the other, whose gradients of columns are added up: [count, groups, size]."""
    group = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    k = tl.arange(0, COLUMNS).to(tl.int64)[:, None]
    filled = (k < count) & inside[None, :]
    own = tl.load(fresh + k * fresh_row + place[None, :], mask=filled, other=0.0)
    summed = tl.zeros_like(own)
    for turn in range(SPAN):
        n = group * SPAN + turn
        within = inside & (n < examples)
        present = filled & (n < examples)
        here = n * size + place
        v = tl.load(columns + k * column_row + (n * column_step + place)[None, :], mask=present, other=0.0)
        tv = tl.load(to_columns + k * (examples * size) + here[None, :], mask=present, other=0.0)
        c = tl.load(centre + here, mask=within, other=0.0)
        tc = tl.load(to_centre + here, mask=within, other=0.0)
        if ESTIMATED:
            offset = tl.load(offsets + here, mask=within, other=1.0)
            total = tl.load(totals + here, mask=within, other=1.0)
            r = tl.maximum(total - offset, 0.0)
        else:
            r = tl.load(radius + n * radius_step + place, mask=within, other=0.0)
        lower, upper, width, unstable, slope, _ = _lines(c, r)
        to_slope = tc * c + tl.sum(tv * v, axis=0)
        to_half = tc + tl.sum(tv * own, axis=0)
        for_centre, for_radius = _through_lines(lower, upper, width, unstable, to_slope, 0.5 * to_half)
        tl.store(out_centre + here, tc * slope + for_centre, mask=within)
        summed += tv * slope[None, :]
        if ESTIMATED:
            whole = for_radius + tl.load(to_radius + here, mask=within, other=0.0)
            share = tl.where(total >= offset, whole * total / count, 0.0)
            summed += share[None, :] * v / (v * v + (offset * offset)[None, :])
        else:
            tl.store(out_radius + here, for_radius, mask=within)
    tl.store(out_columns + k * (groups * size) + (group * size + place)[None, :], summed, mask=filled)


@triton.jit
def _rows_forward(
    rows, centre, radius, out_rows, out_lost, count, size, radius_step, SAME: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One example, BLOCK of its neurons, all `count` rows; `out_lost` [N, count, blocks] takes what the block loses."""
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    t = tl.arange(0, ROWS).to(tl.int64)
    filled = (t < count)[:, None] & inside[None, :]
    c = tl.load(centre + n * size + place, mask=inside, other=0.0)
    r = tl.load(radius + n * radius_step + place, mask=inside, other=0.0)
    lower, upper, _, unstable, up, shift = _lines(c, r)
    there = ((n * count + t) * size)[:, None] + place[None, :]
    row = tl.load(rows + there, mask=filled, other=0.0)
    negative = tl.minimum(row, 0.0)
    if SAME:
        passed = row * up[None, :]
    else:
        low = tl.where(unstable, tl.where(upper > -lower, 1.0, 0.0), up)
        passed = row * low[None, :] + negative * (up - low)[None, :]
    tl.store(out_rows + there, passed, mask=filled)
    lost = tl.sum(negative * shift[None, :], axis=1)
    tl.store(out_lost + (n * count + t) * tl.num_programs(1) + block, lost, mask=t < count)


@triton.jit
def _rows_backward(
    rows, centre, radius, to_rows, to_lost, out_rows, out_centre, out_radius, count, size, radius_step,
    SAME: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    t = tl.arange(0, ROWS).to(tl.int64)
    filled = (t < count)[:, None] & inside[None, :]
    here = n * size + place
    c = tl.load(centre + here, mask=inside, other=0.0)
    r = tl.load(radius + n * radius_step + place, mask=inside, other=0.0)
    lower, upper, width, unstable, up, shift = _lines(c, r)
    there = ((n * count + t) * size)[:, None] + place[None, :]
    row = tl.load(rows + there, mask=filled, other=0.0)
    passed = tl.load(to_rows + there, mask=filled, other=0.0)
    lost = tl.load(to_lost + n * count + t, mask=t < count, other=0.0)[:, None]
    negative = tl.minimum(row, 0.0)
    if SAME:
        low = up
        to_slope = tl.sum(passed * row, axis=0)
    else:
        low = tl.where(unstable, tl.where(upper > -lower, 1.0, 0.0), up)
        to_slope = tl.sum(passed * negative, axis=0)
    below = passed * (up - low)[None, :] + lost * shift[None, :]
    tl.store(out_rows + there, passed * low[None, :] + tl.where(row <= 0, below, 0.0), mask=filled)
    to_shift = tl.sum(lost * negative, axis=0)
    for_centre, for_radius = _through_lines(lower, upper, width, unstable, to_slope, to_shift)
    tl.store(out_centre + here, for_centre, mask=inside)
    tl.store(out_radius + here, for_radius, mask=inside)


def estimated_forward(centre: Tensor, columns: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `dual_plain`."""
    centre = dense(centre)
    offset, total, radius = (torch.empty_like(centre) for _ in range(3))
    return offset, total, radius, *_forward(centre, None, columns, fresh, (offset, total, radius))


def given_forward(centre: Tensor, radius: Tensor, columns: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """See `dual_plain`."""
    return _forward(dense(centre), radius, columns, fresh, None)


def estimated_backward(
    kept: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], to_radius: Tensor, to_centre: Tensor, to_columns: Tensor
) -> tuple[Tensor, Tensor]:
    """See `dual_plain`."""
    centre, columns, fresh, *scales = kept
    for_centre, _, for_columns = _backward((centre, None, columns, fresh), scales, (to_radius, to_centre, to_columns))
    return for_centre, for_columns


def given_backward(
    kept: tuple[Tensor, Tensor, Tensor, Tensor], to_centre: Tensor, to_columns: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `dual_plain`."""
    return _backward(kept, None, (to_centre, to_centre, to_columns))


def rows_forward(rows: Tensor, centre: Tensor, radius: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """See `dual_plain`."""
    centre = dense(centre)
    radius, step = _radius(radius, centre)
    rows = _ordered(rows, centre)
    passed = torch.empty_like(rows)
    (examples, count), size = rows.shape[:2], centre[0].numel()
    height, block, blocks = _tile(count, size)
    lost = torch.empty(examples, count, blocks, dtype=rows.dtype, device=rows.device)
    _rows_forward[(examples, blocks)](
        rows, centre, radius, passed, lost, count, size, step,
        SAME=rule == "same-slope", ROWS=height, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
    return passed, lost[:, :, 0] if blocks == 1 else lost.sum(2)


def rows_backward(
    kept: tuple[Tensor, Tensor, Tensor], to_passed: Tensor, to_lost: Tensor, rule: str
) -> tuple[Tensor, Tensor, Tensor]:
    """See `dual_plain`."""
    rows, centre, radius = kept
    centre = dense(centre)
    radius, step = _radius(radius, centre)
    rows, to_passed = _ordered(rows, centre), _ordered(to_passed, centre)
    outputs = torch.empty_like(rows), torch.empty_like(centre), torch.empty_like(centre)
    (examples, count), size = rows.shape[:2], centre[0].numel()
    height, block, blocks = _tile(count, size)
    _rows_backward[(examples, blocks)](
        rows, centre, radius, to_passed, to_lost.contiguous(), *outputs, count, size, step,
        SAME=rule == "same-slope", ROWS=height, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
    return outputs


def _forward(
    centre: Tensor, radius: Tensor | None, columns: Tensor, fresh: Tensor, scales: Sequence[Tensor] | None
) -> tuple[Tensor, Tensor]:
    columns = _ordered(columns, centre)
    fresh, fresh_row = _fresh(fresh, centre)
    (count, held), (examples, size) = columns.shape[:2], (len(centre), centre[0].numel())
    known, radius_step = (centre, 0) if radius is None else _radius(radius, centre)
    out_centre, out_columns = torch.empty_like(centre), _empty((count, *centre.shape), centre)
    height, block, blocks = _tile(count, size)
    _columns_forward[(examples, blocks)](
        centre, known, columns, fresh, *(scales or (centre, centre, centre)), out_centre, out_columns,
        count, size, examples, radius_step, 0 if held < examples else size, held * size, fresh_row,
        ESTIMATED=radius is None, COLUMNS=height, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
    return out_centre, out_columns


def _backward(
    kept: tuple[Tensor, Tensor | None, Tensor, Tensor],
    scales: Sequence[Tensor] | None,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of centre, radius (empty where it is estimated) and columns; those of radius, centre, columns given."""
    centre, radius, columns, fresh = kept
    centre = dense(centre)
    columns = _ordered(columns, centre)
    fresh, fresh_row = _fresh(fresh, centre)
    (count, held), (examples, size) = columns.shape[:2], (len(centre), centre[0].numel())
    known, radius_step = (centre, 0) if radius is None else _radius(radius, centre)
    offset, total = (_ordered(part, centre) for part in scales or (centre, centre))
    to_radius, to_centre, to_columns = (_ordered(part, centre) for part in gradients)
    span = 1 if held == examples else _SPAN
    groups = triton.cdiv(examples, span)
    for_columns = _empty((count, groups, *centre.shape[1:]), centre)
    for_centre, for_radius = torch.empty_like(centre), torch.empty_like(centre)
    height, block, blocks = _tile(count, size)
    _columns_backward[(groups, blocks)](
        centre, known, columns, fresh, offset, total, to_radius, to_centre, to_columns,
        for_centre, for_radius, for_columns,
        count, size, examples, groups, radius_step, 0 if held < examples else size, held * size, fresh_row,
        ESTIMATED=radius is None, SPAN=span, COLUMNS=height, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
    return for_centre, for_radius, for_columns if held == groups else for_columns.sum(1, keepdim=True)


def _tile(count: int, size: int) -> tuple[int, int, int]:
    """Height [columns or rows] and width [neurons] of a tile, powers of two, and how many cover all neurons."""
    height = triton.next_power_of_2(count)
    block = max(1, min(_TILE // height, triton.next_power_of_2(size)))
    return height, block, triton.cdiv(size, block)


def _strides(shape: Sequence[int], centre: Tensor) -> list[int]:
    """Of a dense tensor [..., *inner] with the inner dimensions in the order of a dense `centre` [N, *inner]."""
    strides = list(centre.stride()[1:])
    step = centre[0].numel()
    for length in reversed(shape[: len(shape) - len(strides)]):
        strides.insert(0, step)
        step *= length
    return strides


def _empty(shape: Sequence[int], centre: Tensor) -> Tensor:
    return torch.empty_strided(shape, _strides(shape, centre), dtype=centre.dtype, device=centre.device)


def _ordered(tensor: Tensor, centre: Tensor) -> Tensor:
    """The tensor [..., *inner], dense in the order of `centre`."""
    if _lies(tensor, _strides(tensor.shape, centre)):
        return tensor
    return _empty(tensor.shape, centre).copy_(tensor)


def _radius(radius: Tensor, centre: Tensor) -> tuple[Tensor, int]:
    """The radius in the order of `centre`, and the step from example to example: 0 where all share it."""
    if radius.stride(0) == 0:
        return _ordered(radius[:1], centre), 0
    return _ordered(radius, centre), centre[0].numel()


def _fresh(fresh: Tensor, centre: Tensor) -> tuple[Tensor, int]:
    """The columns [K, 1, *inner] in the order of `centre`, and the step from column to column."""
    if not _lies(fresh[0, 0], centre.stride()[1:]):
        fresh = _ordered(fresh, centre)
    return fresh, fresh.stride(0)


def _lies(tensor: Tensor, strides: Sequence[int]) -> bool:
    return all(
        length == 1 or found == wanted
        for length, found, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )

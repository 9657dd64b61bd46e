"""Relaxations, reaches and placements of rows on a GPU (Triton), called through `kernels`, which checks them."""

# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["place", "reach", "relax"]


@triton.jit
def _map_index(
    i, top, left, AREA: tl.constexpr, W: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr
):
    """Where entry i of a row lies in its example's maps, and whether it lies inside them."""
    if WINDOW:
        channel, pixel = i // AREA, i % AREA
        y, x = top + pixel // W, left + pixel % W
        inside = (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
        return (channel * HEIGHT + y) * WIDTH + x, inside
    return i, i >= 0


@triton.jit(do_not_specialize=["rows"])
def _relax(
    values,
    target,
    example,
    tops,
    lefts,
    slope,
    slope_step,
    gap,
    gap_step,
    losses,
    rows,
    map_size,
    LENGTH: tl.constexpr,
    AREA: tl.constexpr,
    W: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    PASSES: tl.constexpr,
    STEPS: tl.constexpr,
    BOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: coefficients a become a * slope + min(a, 0) * slope_step; the sums of a * gap + min(a, 0) * gap_step."""
    row = tl.program_id(0).to(tl.int64)
    number = row % rows
    base = tl.load(example + number).to(tl.int64) * map_size
    top = tl.load(tops + number) if WINDOW else 0
    left = tl.load(lefts + number) if WINDOW else 0
    straight = tl.zeros((BLOCK,), dtype=values.dtype.element_ty)
    bent = tl.zeros((BLOCK,), dtype=values.dtype.element_ty)
    turned = tl.zeros((BLOCK,), dtype=values.dtype.element_ty)
    for start in range(0, LENGTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        valid = i < LENGTH
        index, inside = _map_index(i, top, left, AREA, W, HEIGHT, WIDTH, WINDOW)
        inside = inside & valid
        a = tl.load(values + row * LENGTH + i, mask=inside, other=0.0)
        n = tl.minimum(a, 0.0)
        step = tl.load(gap_step + base + index, mask=inside, other=0.0)
        straight += a * tl.load(gap + base + index, mask=inside, other=0.0)
        bent += n * step
        if BOTH:
            turned += a * step
        if PASSES:
            passed = a * tl.load(slope + base + index, mask=inside, other=0.0)
            if STEPS:
                passed += n * tl.load(slope_step + base + index, mask=inside, other=0.0)
            tl.store(target + row * LENGTH + i, passed, mask=valid)
    first, second = tl.sum(straight), tl.sum(bent)
    tl.store(losses + row, first + second)
    if BOTH:
        tl.store(losses + rows + row, second - first - tl.sum(turned))


@triton.jit(do_not_specialize=["rows"])
def _reach(
    values,
    example,
    tops,
    lefts,
    radius,
    result,
    rows,
    map_size,
    LENGTH: tl.constexpr,
    AREA: tl.constexpr,
    W: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum of |a| * radius over one row."""
    row = tl.program_id(0).to(tl.int64)
    number = row % rows
    base = tl.load(example + number).to(tl.int64) * map_size
    top = tl.load(tops + number) if WINDOW else 0
    left = tl.load(lefts + number) if WINDOW else 0
    total = tl.zeros((BLOCK,), dtype=values.dtype.element_ty)
    for start in range(0, LENGTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        index, inside = _map_index(i, top, left, AREA, W, HEIGHT, WIDTH, WINDOW)
        inside = inside & (i < LENGTH)
        a = tl.load(values + row * LENGTH + i, mask=inside, other=0.0)
        total += tl.abs(a) * tl.load(radius + base + index, mask=inside, other=0.0)
    tl.store(result + row, tl.sum(total))


@triton.jit(do_not_specialize=["rows"])
def _place(
    values,
    target,
    tops,
    lefts,
    rows,
    H: tl.constexpr,
    W: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row's window in the full map, zeros around it; what lies beyond the map is dropped."""
    row = tl.program_id(0).to(tl.int64)
    number = row % rows
    top, left = tl.load(tops + number), tl.load(lefts + number)
    length: tl.constexpr = CHANNELS * HEIGHT * WIDTH
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        channel, pixel = i // (HEIGHT * WIDTH), i % (HEIGHT * WIDTH)
        y, x = pixel // WIDTH - top, pixel % WIDTH - left
        inside = (i < length) & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        a = tl.load(values + row * (CHANNELS * H * W) + (channel * H + y) * W + x, mask=inside, other=0.0)
        tl.store(target + row * length + i, a, mask=i < length)


def _block(length: int) -> int:
    return int(min(1024, max(32, triton.next_power_of_2(length))))


def _geometry(values: Tensor, shape: tuple[int, ...], origin: Any) -> tuple[Any, Any, int, int, int, int]:
    """tops, lefts, window area and width, map height and width (unused numbers for dense maps)."""
    if origin is None:
        return values, values, 1, 1, 1, 1
    return origin[0], origin[1], values.shape[-2] * values.shape[-1], values.shape[-1], shape[-2], shape[-1]


def relax(
    values: Tensor, example: Tensor, maps: list[Tensor | None], origin: tuple[Tensor, Tensor] | None, both: bool
) -> tuple[Tensor | None, Tensor]:
    """`relaxing._applied` for rows [S, M, ...] of the given examples; windows start at `origin` (tops, lefts)."""
    slope, slope_step, gap, gap_step = (None if part is None else part.contiguous() for part in maps)
    assert gap is not None
    assert gap_step is not None
    copies, rows = values.shape[:2]
    values = values.contiguous()
    length = values[0, 0].numel()
    double = both and copies == 1
    losses = values.new_empty((2 if double else copies, rows))
    target = torch.empty_like(values) if slope is not None else values
    tops, lefts, area, w, height, width = _geometry(values, tuple(gap.shape), origin)
    _relax[(copies * rows,)](
        values,
        target,
        example,
        tops,
        lefts,
        gap if slope is None else slope,
        gap if slope_step is None else slope_step,
        gap,
        gap_step,
        losses,
        rows,
        gap[0].numel(),
        LENGTH=length,
        AREA=area,
        W=w,
        HEIGHT=height,
        WIDTH=width,
        WINDOW=origin is not None,
        PASSES=slope is not None,
        STEPS=slope_step is not None,
        BOTH=double,
        BLOCK=_block(length),
        num_warps=1 if length <= 128 else 4,
    )
    return (None if slope is None else target), losses


def reach(values: Tensor, example: Tensor, radius: Tensor, origin: tuple[Tensor, Tensor] | None) -> Tensor:
    """Sum of radius * |row| for rows [S, M, ...], [S, M]."""
    copies, rows = values.shape[:2]
    values, radius = values.contiguous(), radius.contiguous()
    length = values[0, 0].numel()
    result = values.new_empty((copies, rows))
    tops, lefts, area, w, height, width = _geometry(values, tuple(radius.shape), origin)
    _reach[(copies * rows,)](
        values,
        example,
        tops,
        lefts,
        radius,
        result,
        rows,
        radius[0].numel(),
        LENGTH=length,
        AREA=area,
        W=w,
        HEIGHT=height,
        WIDTH=width,
        WINDOW=origin is not None,
        BLOCK=_block(length),
        num_warps=1 if length <= 128 else 4,
    )
    return result


def place(values: Tensor, shape: tuple[int, ...], origin: tuple[Tensor, Tensor]) -> Tensor:
    """Windows [S, M, C, h, w] as full maps [S, M, *shape]."""
    copies, rows = values.shape[:2]
    values = values.contiguous()
    target = values.new_empty((copies, rows, *shape))
    h, w = values.shape[-2:]
    _place[(copies * rows,)](
        values,
        target,
        origin[0],
        origin[1],
        rows,
        H=h,
        W=w,
        CHANNELS=shape[0],
        HEIGHT=shape[1],
        WIDTH=shape[2],
        BLOCK=1024,
        num_warps=4,
    )
    return target

"""Rows of linear coefficients on one node: dense maps, or windows where only a receptive field can be nonzero.

A row is one linear function of the network's values, of one example. Rows of a convolution's neurons start as the
filter's taps and grow by every convolution that they pass; the window of a row starts at
position * stride + offset in the node's map, and may reach beyond the map, where its entries mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from robboost.bounds.acceleration import kernels_for

__all__ = ["Piece", "Rows", "Window", "gather_windows"]


@dataclass(frozen=True)
class Rows:
    """Which rows a pass carries: the example of each, and the position (y, x) of its neuron where windows are used.

    example: [M], sorted. uniform: rows of each example where all of them have equally many, in order; else None.
    position: [M, 2] or None.
    """

    example: Tensor
    uniform: int | None = None
    position: Tensor | None = None

    @cached_property
    def segments(self) -> list[tuple[int, int, int]]:
        """(example, first row, row behind the last), for each example that has rows."""
        found, start = [], 0
        for example, count in enumerate(torch.bincount(self.example).tolist()):
            if count:
                found.append((example, start, start + count))
            start += count
        return found


class Window(NamedTuple):
    """Origin of a row's window: position * stride + offset; `extent` counts the positions (rows, columns) there are."""

    stride: tuple[int, int]
    offset: tuple[int, int]
    extent: tuple[int, int]

    def padding(self, size: tuple[int, int], shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """How far windows of that size reach beyond a map [C, H, W]: left, right, top, bottom (as F.pad takes them)."""
        ends = []
        for axis in (1, 0):
            first = self.offset[axis]
            last = (self.extent[axis] - 1) * self.stride[axis] + first + size[axis]
            ends += [max(0, -first), max(0, last - shape[1 + axis])]
        return ends[0], ends[1], ends[2], ends[3]

    def starts(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column where each window starts in the map, as the kernels take them."""
        y, x = self.origins(position, (0, 0, 0, 0))
        return y.int(), x.int()

    def origins(self, position: Tensor, padding: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
        """Row and column where each window starts in a map padded so."""
        y = position[:, 0] * self.stride[0] + (self.offset[0] + padding[2])
        x = position[:, 1] * self.stride[1] + (self.offset[1] + padding[0])
        return y, x


@dataclass(frozen=True)
class Piece:
    """Coefficients of all rows on one node.

    values: [S, M, *shape] dense, or [S, M, C, h, w] windows; S is 2 once the lower and the upper bound of the same
        neurons need different coefficients (the upper ones are lower bounds of the negatives), else 1.
    window: None for dense maps.
    clean: whether entries beyond the map are zero.
    owned: whether nothing else reads `values`, so that it may be overwritten.
    """

    values: Tensor
    window: Window | None = None
    clean: bool = True
    owned: bool = True

    @property
    def size(self) -> tuple[int, int]:
        return self.values.shape[-2], self.values.shape[-1]

    @property
    def flat(self) -> Tensor:
        """values with both leading axes in one."""
        return self.values.flatten(0, 1)

    def cleaned(self, rows: Rows, shape: tuple[int, ...]) -> Piece:
        """The same with zeros beyond the map."""
        if self.clean or self.window is None:
            return self
        inside = gather_windows(self.values.new_ones((1, 1, *shape[1:])), self.window, self.size, rows)
        return replace(self, values=self.values * inside, clean=True, owned=True)

    def dense(self, rows: Rows, shape: tuple[int, ...]) -> Piece:
        """The same as full maps."""
        if self.window is None:
            return self
        assert rows.position is not None
        kernels = kernels_for(self.values)
        if kernels is not None:
            return Piece(kernels.place(self.values, shape, self.window.starts(rows.position)))
        left, right, top, bottom = self.window.padding(self.size, shape)
        height, width = shape[1] + top + bottom, shape[2] + left + right
        y, x = self.window.origins(rows.position, (left, right, top, bottom))
        device = self.values.device
        taps = torch.arange(self.size[0], device=device)[:, None] * width + torch.arange(self.size[1], device=device)
        index = ((y * width + x)[:, None] + taps.flatten())[None, :, None, :]
        canvas = self.values.new_zeros((*self.values.shape[:2], shape[0], height * width))
        canvas = canvas.scatter(3, index.expand(len(self.values), -1, shape[0], -1), self.values.flatten(3))
        maps = canvas.unflatten(3, (height, width))[..., top : top + shape[1], left : left + shape[2]]
        return Piece(maps.contiguous())

    def plus(self, other: Piece, rows: Rows, shape: tuple[int, ...]) -> Piece:
        """The sum of two pieces on one node: windows are widened to hold both."""
        first, second = self, other
        if len(first.values) != len(second.values):
            first, second = first.copied(), second.copied()
        if first.window is None or second.window is None:
            return Piece(first.dense(rows, shape).values + second.dense(rows, shape).values)
        if first.window.stride != second.window.stride:
            return Piece(first.dense(rows, shape).values + second.dense(rows, shape).values)
        low = [min(a, b) for a, b in zip(first.window.offset, second.window.offset, strict=True)]
        high = [max(first.window.offset[i] + first.size[i], second.window.offset[i] + second.size[i]) for i in (0, 1)]
        size = (high[0] - low[0], high[1] - low[1])
        window = first.window._replace(offset=(low[0], low[1]))
        if second.size == size:  # the one that spans both is the one to add to
            first, second = second, first
        total = first._within(window, size)
        if torch.is_grad_enabled() and (first.values.requires_grad or second.values.requires_grad):
            total = total + second._within(window, size)
        else:
            total = total.clone() if total is first.values and not first.owned else total
            assert second.window is not None
            top, left = (second.window.offset[i] - low[i] for i in (0, 1))
            total[..., top : top + second.size[0], left : left + second.size[1]] += second.values
        return Piece(total, window, first.clean and second.clean)

    def _within(self, window: Window, size: tuple[int, int]) -> Tensor:
        """The values in a larger window of the same stride, zeros around them."""
        if self.size == size:
            return self.values
        assert self.window is not None
        top, left = (self.window.offset[i] - window.offset[i] for i in (0, 1))
        bottom, right = (size[i] - self.size[i] - (top, left)[i] for i in (0, 1))
        return F.pad(self.values, (left, right, top, bottom))

    def copied(self) -> Piece:
        """Lower and upper rows side by side (S = 2): the upper ones start as the negatives."""
        if len(self.values) == 2:
            return self
        return replace(self, values=torch.cat([self.values, -self.values]), owned=True)


def gather_windows(maps: Tensor, window: Window, size: tuple[int, int], rows: Rows) -> Tensor:
    """The part of each row's maps [N, C, H, W] that its window sees, [M, C, h, w]; zero beyond the map.

    N = 1: the maps serve all examples.
    """
    assert rows.position is not None
    padding = window.padding(size, tuple(maps.shape[1:]))
    padded = F.pad(maps, padding)
    y, x = window.origins(rows.position, padding)
    views = padded.unfold(2, size[0], 1).unfold(3, size[1], 1)
    if len(maps) == 1:
        return views[0].permute(1, 2, 0, 3, 4)[y, x]
    return views.permute(0, 2, 3, 1, 4, 5)[rows.example, y, x]

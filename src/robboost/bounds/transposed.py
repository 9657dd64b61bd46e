"""Transposed convolutions with few channels: where a backward pass spends its arithmetic.

Libraries are tuned for many channels. Seen from a tile of T x T output pixels, a transposed convolution to c channels
is an ordinary convolution to c * T * T channels (its kernel holds some zeros), which CPU libraries run several times
faster; small windows are a product with one fixed matrix; and on a GPU there is a kernel of our own.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from robboost.bounds.acceleration import kernels_for

__all__ = ["library_conv", "transposed_conv", "transposed_matrix"]

Pair = tuple[int, int]
# A tile has at least this many output channels: the width of the vector units.
_TILE_CHANNELS = 12


def transposed_conv(
    values: Tensor,
    weight: Tensor,
    *,
    attributes: Any,
    padding: Pair,
    size: Pair,
    cache: dict[Any, Tensor],
) -> Tensor:
    """The transpose of a convolution, [M, C', H', W'] -> [M, C, *size].

    attributes: "stride", and where they are not one "dilation" and "groups". padding and size: of the convolution's
    operand; `cache` keeps the rearranged kernels of this weight.
    """
    stride, dilation = attributes["stride"], attributes.get("dilation", (1, 1))
    groups = attributes.get("groups", 1)
    tracked = torch.is_grad_enabled() and (values.requires_grad or weight.requires_grad)
    kernel = (weight.shape[2], weight.shape[3])
    plain = groups == 1 and dilation == (1, 1) and not tracked and len(values) > 0
    kernels = kernels_for(values, weight) if plain else None
    if kernels is not None:
        if "packed" not in cache:
            cache["packed"] = kernels.pack(weight)
        packed = cache["packed"]
        return cast(Tensor, kernels.transpose_conv(values, weight, stride, padding, size, packed))
    overlapping = kernel[0] > stride[0] or kernel[1] > stride[1]
    if plain and overlapping and values.device.type == "cpu" and values.dtype == torch.float32:
        return _tiled(values, weight, stride, padding, size, cache)
    return library_conv(values, weight, (stride, padding, dilation), groups, size)


def library_conv(values: Tensor, weight: Tensor, settings: tuple[Pair, Pair, Pair], groups: int, size: Pair) -> Tensor:
    """The same by PyTorch's own transposed convolution; settings: stride, padding and dilation."""
    stride, padding, dilation = settings
    natural = [
        (values.shape[2 + i] - 1) * stride[i] + dilation[i] * (weight.shape[2 + i] - 1) + 1 - 2 * padding[i]
        for i in (0, 1)
    ]
    extra = tuple(size[i] - natural[i] for i in (0, 1))
    if all(0 <= extra[i] < max(stride[i], dilation[i]) for i in (0, 1)):
        return F.conv_transpose2d(values, weight, None, stride, padding, extra, groups, dilation)
    # Windows end well before the padded operand does (unused pixels), or after it (ceil mode).
    full = F.conv_transpose2d(values, weight, None, stride, 0, 0, groups, dilation)
    ends = [max(0, padding[i] + size[i] - full.shape[2 + i]) for i in (0, 1)]
    full = F.pad(full, (0, ends[1], 0, ends[0]))
    return full[:, :, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]].contiguous()


def _tiled(values: Tensor, weight: Tensor, stride: Pair, padding: Pair, size: Pair, cache: dict[Any, Tensor]) -> Tensor:
    tile, channels = list(stride), weight.shape[1]
    while channels * tile[0] * tile[1] < _TILE_CHANNELS:
        tile = [2 * side for side in tile]
    first = [math.ceil((padding[i] - weight.shape[2 + i] + 1) / stride[i]) for i in (0, 1)]
    key = ("tiles", tuple(stride), tuple(padding))
    if key not in cache:
        cache[key] = _tile_kernel(weight, stride, padding, (tile[0], tile[1]), first)
    kernel = cache[key]
    steps = (tile[0] // stride[0], tile[1] // stride[1])
    tiles = [-(-size[i] // tile[i]) for i in (0, 1)]
    needed = [(tiles[i] - 1) * steps[i] + kernel.shape[2 + i] for i in (0, 1)]
    before = [-first[i] for i in (0, 1)]
    after = [needed[i] - values.shape[2 + i] - before[i] for i in (0, 1)]
    if before == after and min(before) >= 0:
        result = F.conv2d(values, kernel, None, steps, (before[0], before[1]))
    else:
        result = F.conv2d(F.pad(values, (before[1], after[1], before[0], after[0])), kernel, None, steps)
    if tile == [1, 1]:
        return result
    split = result.view(-1, channels, tile[0], tile[1], tiles[0], tiles[1]).permute(0, 1, 4, 2, 5, 3)
    whole = split.reshape(-1, channels, tiles[0] * tile[0], tiles[1] * tile[1])
    return whole if whole.shape[2:] == size else whole[:, :, : size[0], : size[1]].contiguous()


def _tile_kernel(weight: Tensor, stride: Pair, padding: Pair, tile: Pair, first: list[int]) -> Tensor:
    """Kernel [C * Ty * Tx, C', h, w] of the convolution that gives one tile: found by transposing unit impulses."""
    outer, inner = weight.shape[:2]
    spans = [(tile[i] - 1 + padding[i]) // stride[i] - first[i] + 1 for i in (0, 1)]
    basis = torch.eye(outer * spans[0] * spans[1], dtype=weight.dtype, device=weight.device)
    spread = F.conv_transpose2d(basis.view(-1, outer, *spans), weight, None, stride)
    start = [padding[i] - stride[i] * first[i] for i in (0, 1)]
    ends = [max(0, start[i] + tile[i] - spread.shape[2 + i]) for i in (0, 1)]
    spread = F.pad(spread, (0, ends[1], 0, ends[0]))
    cut = spread[:, :, start[0] : start[0] + tile[0], start[1] : start[1] + tile[1]]
    return cut.reshape(outer, *spans, inner * tile[0] * tile[1]).permute(3, 0, 1, 2).contiguous()


def transposed_matrix(weight: Tensor, *, attributes: Any, size: Pair, cache: dict[Any, Tensor]) -> Tensor:
    """Matrix [C' * h * w, C * H * W] of the transposed convolution of windows of `size`, without cropping."""
    key = ("matrix", size)
    if key not in cache:
        channels = weight.shape[0]
        basis = torch.eye(channels * size[0] * size[1], dtype=weight.dtype, device=weight.device)
        settings = (attributes.get("groups", 1), attributes.get("dilation", (1, 1)))
        cache[key] = F.conv_transpose2d(
            basis.view(-1, channels, *size), weight, None, attributes["stride"], 0, 0, *settings
        ).flatten(1)
    return cache[key]

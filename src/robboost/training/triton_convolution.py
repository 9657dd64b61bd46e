"""The GPU kernel of `first_convolution`: the weights' gradient as out'^T columns, columns read as they are needed."""

# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from robboost.training.triton_channels import channels_last, totals

__all__ = ["weight_gradient"]

# Numbers of a tile of columns (registers hold them and their addresses), and the pixels of one.
_TILE = 2048
_FEWEST, _MOST = 32, 128
_PROGRAMS = 512
# Output channels of a program at most; products of matrices have sides of at least 16.
_WIDEST, _LEAST = 64, 16


@triton.jit(do_not_specialize=["rows", "zero"])
def _weight_gradient(
    image, gradient, partials, rows, zero,
    STEPS: tl.constexpr, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUTER: tl.constexpr, UP: tl.constexpr, ACROSS: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr,
    PIXELS: tl.constexpr, WIDE: tl.constexpr, TAPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """partials [programs, OUTER, KERNEL, KERNEL, CHANNELS]: sums over a program's pixels of gradient * image."""
    # `zero` is 0. Ranges that the compiler knows it narrows to packed 16-bit numbers, and ptxas 12.8 and 12.9 then drop
    # constants of their sums (see `bounds.kernels_conv`).
    tap = tl.arange(0, TAPS) + zero
    down, right = tap // (KERNEL * CHANNELS) + zero, tap // CHANNELS % KERNEL + zero
    channel = tap % CHANNELS + zero
    out = tl.program_id(1) * WIDE + tl.arange(0, WIDE) + zero
    total = tl.zeros((WIDE, TAPS), dtype=tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0) * STEPS + step) * PIXELS + tl.arange(0, PIXELS) + zero
        pixel = row % (UP * ACROSS) + zero
        top = pixel // ACROSS * STRIDE - PADDING + zero
        left = pixel % ACROSS * STRIDE - PADDING + zero
        y, x = top[:, None] + down[None, :], left[:, None] + right[None, :]
        inside = (row < rows)[:, None] & (tap < KERNEL * KERNEL * CHANNELS)[None, :]
        inside = inside & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
        base = row // (UP * ACROSS) * (HEIGHT * WIDTH * CHANNELS)
        at = base[:, None] + (y * WIDTH + x) * CHANNELS + channel[None, :]
        column = tl.load(image + at, mask=inside, other=0.0)
        known = (row < rows)[:, None] & (out < OUTER)[None, :]
        given = tl.load(gradient + row.to(tl.int64)[:, None] * OUTER + out[None, :], mask=known, other=0.0)
        total = tl.dot(tl.trans(given), column, total, input_precision=PRECISION)
    at = (tl.program_id(0).to(tl.int64) * OUTER + out)[:, None] * (KERNEL * KERNEL * CHANNELS) + tap[None, :]
    tl.store(partials + at, total, mask=(out < OUTER)[:, None] & (tap < KERNEL * KERNEL * CHANNELS)[None, :])


def weight_gradient(x: Tensor, gradient: Tensor, shape: Sequence[int], stride: int, padding: int) -> Tensor:
    """Gradient of a square kernel of `shape` [O, C, k, k] from the image x and the gradient of the output."""
    x, gradient = channels_last(x), channels_last(gradient)
    outer, channels, kernel, _ = shape
    rows = gradient.numel() // outer
    wide = min(max(triton.next_power_of_2(outer), _LEAST), _WIDEST)
    taps = max(triton.next_power_of_2(kernel * kernel * channels), _LEAST)
    pixels = min(max(_TILE // taps, _FEWEST), _MOST)
    tiles = triton.cdiv(rows, pixels)
    steps = triton.next_power_of_2(triton.cdiv(tiles, _PROGRAMS))
    blocks = triton.cdiv(tiles, steps)
    partials = x.new_empty((blocks, outer, kernel, kernel, channels))
    _weight_gradient[(blocks, triton.cdiv(outer, wide))](
        x,
        gradient,
        partials,
        rows,
        0,
        STEPS=steps,
        CHANNELS=channels,
        HEIGHT=x.shape[2],
        WIDTH=x.shape[3],
        OUTER=outer,
        UP=gradient.shape[2],
        ACROSS=gradient.shape[3],
        KERNEL=kernel,
        STRIDE=stride,
        PADDING=padding,
        PIXELS=pixels,
        WIDE=wide,
        TAPS=taps,
        PRECISION="tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
        num_stages=1,
    )
    return totals(partials).permute(0, 3, 1, 2)

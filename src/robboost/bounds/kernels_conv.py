"""Transposed convolutions on a GPU (Triton), called through `kernels`, which checks them.

Plain fused multiply-adds in the type of the data: no matrix units, hence full float32 or float64.
"""

# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["pack", "transpose_conv"]

Pair = tuple[int, int]
# Output pixels of a program of one warp: 64 sums in the registers of each thread.
_SUMS = 2048
# From so many channels on both sides, float32 goes through shared memory as the products of a matrix.
_PRODUCT_CHANNELS = 8
_CHUNK = 16


@triton.jit(do_not_specialize=["pixels", "zero"])
def _transpose_conv(
    source,
    weight,
    target,
    pixels,
    zero,
    H: tl.constexpr,
    W: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PAD_Y: tl.constexpr,
    PAD_X: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    PADDED: tl.constexpr,
    KERNEL_Y: tl.constexpr,
    KERNEL_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """target[m, :, y, x] = sum over outer channels and taps of weight * source; one stride phase of pixels a program.

    Lanes run over (row m, pixel of the phase), registers over the INNER channels: each value that is read from `source`
    meets INNER weights.
    """
    # Sizes are compile-time constants: divisions become multiplications, addresses constant offsets.
    columns: tl.constexpr = (WIDTH + STRIDE_X - 1) // STRIDE_X
    per_row: tl.constexpr = ((HEIGHT + STRIDE_Y - 1) // STRIDE_Y) * columns
    # All phases of some pixels run side by side: they share what they read, and the sectors that they write.
    phase = tl.program_id(0) % (STRIDE_Y * STRIDE_X)
    lane = tl.program_id(0) // (STRIDE_Y * STRIDE_X) * BLOCK + tl.arange(0, BLOCK)
    phase_y, phase_x = phase // STRIDE_X, phase % STRIDE_X
    # `zero` is 0. Ranges that the compiler knows it narrows to packed 16-bit numbers, and ptxas 12.8 and 12.9 then drop
    # constants of VIADD.16x2 (triton-lang/triton#11581): pixels took their values from a wrong row.
    row, pixel = lane // per_row, lane % per_row + zero
    base_y, base_x = pixel // columns + zero, pixel % columns + zero
    y, x = base_y * STRIDE_Y + phase_y, base_x * STRIDE_X + phase_x
    valid = (lane < pixels) & (y < HEIGHT) & (x < WIDTH)
    first_y, first_x = (phase_y + PAD_Y) % STRIDE_Y, (phase_x + PAD_X) % STRIDE_X
    shift_y, shift_x = (phase_y + PAD_Y) // STRIDE_Y, (phase_x + PAD_X) // STRIDE_X
    channel = tl.arange(0, PADDED)
    total = tl.zeros((PADDED, BLOCK), dtype=source.dtype.element_ty)
    start = row * (OUTER * H * W)
    taps_x: tl.constexpr = (KERNEL_X + STRIDE_X - 1) // STRIDE_X
    taps_y: tl.constexpr = (KERNEL_Y + STRIDE_Y - 1) // STRIDE_Y
    for tap in range(taps_y * taps_x):
        tap_y, tap_x = tap // taps_x, tap % taps_x
        kernel_y, kernel_x = first_y + STRIDE_Y * tap_y, first_x + STRIDE_X * tap_x
        from_y, from_x = base_y + shift_y - tap_y, base_x + shift_x - tap_x
        inside = valid & (from_y >= 0) & (from_y < H) & (from_x >= 0) & (from_x < W)
        inside = inside & (kernel_y < KERNEL_Y) & (kernel_x < KERNEL_X)
        pointer = source + (start + from_y * W + from_x)
        chosen = tl.minimum(kernel_y, KERNEL_Y - 1) * KERNEL_X + tl.minimum(kernel_x, KERNEL_X - 1)
        factors = weight + chosen * (OUTER * PADDED) + channel
        # Unrolled with constant offsets: no address arithmetic between the multiply-adds.
        for outer in tl.static_range(OUTER):
            value = tl.load(pointer + outer * H * W, mask=inside, other=0.0)
            factor = tl.load(factors + outer * PADDED)
            total += factor[:, None] * value[None, :]
    spot = row * (INNER * HEIGHT * WIDTH) + y * WIDTH + x
    pointers = target + spot[None, :] + channel[:, None] * (HEIGHT * WIDTH)
    tl.store(pointers, total, mask=(channel < INNER)[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["pixels", "zero"])
def _transpose_product(
    source,
    weight,
    target,
    pixels,
    zero,
    H: tl.constexpr,
    W: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PAD_Y: tl.constexpr,
    PAD_X: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    PADDED: tl.constexpr,
    KERNEL_Y: tl.constexpr,
    KERNEL_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """As `_transpose_conv`, as products [pixels, outer channels] x [outer channels, INNER], one for each tap.

    Both factors pass through shared memory, so that a value that is read meets INNER weights and a weight BLOCK values.
    "ieee": multiply-adds in float32, not the matrix units.
    """
    columns: tl.constexpr = (WIDTH + STRIDE_X - 1) // STRIDE_X
    per_row: tl.constexpr = ((HEIGHT + STRIDE_Y - 1) // STRIDE_Y) * columns
    # All phases of some pixels run side by side: they share what they read, and the sectors that they write.
    phase = tl.program_id(0) % (STRIDE_Y * STRIDE_X)
    lane = tl.program_id(0) // (STRIDE_Y * STRIDE_X) * BLOCK + tl.arange(0, BLOCK)
    phase_y, phase_x = phase // STRIDE_X, phase % STRIDE_X
    # `zero` is 0. Ranges that the compiler knows it narrows to packed 16-bit numbers, and ptxas 12.8 and 12.9 then drop
    # constants of VIADD.16x2 (triton-lang/triton#11581): pixels took their values from a wrong row.
    row, pixel = lane // per_row, lane % per_row + zero
    base_y, base_x = pixel // columns + zero, pixel % columns + zero
    y, x = base_y * STRIDE_Y + phase_y, base_x * STRIDE_X + phase_x
    valid = (lane < pixels) & (y < HEIGHT) & (x < WIDTH)
    first_y, first_x = (phase_y + PAD_Y) % STRIDE_Y, (phase_x + PAD_X) % STRIDE_X
    shift_y, shift_x = (phase_y + PAD_Y) // STRIDE_Y, (phase_x + PAD_X) // STRIDE_X
    channel, part = tl.arange(0, PADDED), tl.arange(0, CHUNK)
    total = tl.zeros((BLOCK, PADDED), dtype=tl.float32)
    start = row * (OUTER * H * W)
    taps_x: tl.constexpr = (KERNEL_X + STRIDE_X - 1) // STRIDE_X
    taps_y: tl.constexpr = (KERNEL_Y + STRIDE_Y - 1) // STRIDE_Y
    taps: tl.constexpr = taps_y * taps_x
    # Few outer channels: several taps share a product.
    shared: tl.constexpr = CHUNK // OUTER if CHUNK % OUTER == 0 else 1
    chunks: tl.constexpr = (OUTER + CHUNK - 1) // CHUNK
    for step in range((taps + shared - 1) // shared * chunks):
        if shared > 1:
            tap, outer = step * shared + part // OUTER, part % OUTER
        else:
            tap, outer = step // chunks + part * 0, (step % chunks) * CHUNK + part
        tap_y, tap_x = tap // taps_x, tap % taps_x
        kernel_y, kernel_x = first_y + STRIDE_Y * tap_y, first_x + STRIDE_X * tap_x
        known = (outer < OUTER) & (tap < taps) & (kernel_y < KERNEL_Y) & (kernel_x < KERNEL_X)
        from_y, from_x = (base_y + shift_y)[:, None] - tap_y[None, :], (base_x + shift_x)[:, None] - tap_x[None, :]
        inside = (from_y >= 0) & (from_y < H) & (from_x >= 0) & (from_x < W)
        corner = start + (base_y + shift_y) * W + base_x + shift_x
        values = tl.load(
            source + corner[:, None] + (outer * (H * W) - tap_y * W - tap_x)[None, :],
            mask=inside & valid[:, None] & known[None, :],
            other=0.0,
        )
        chosen = kernel_y * KERNEL_X + kernel_x
        factors = tl.load(
            weight + (chosen * OUTER + outer)[:, None] * PADDED + channel[None, :], mask=known[:, None], other=0.0
        )
        total = tl.dot(values, factors, total, input_precision="ieee")
    spot = row * (INNER * HEIGHT * WIDTH) + y * WIDTH + x
    pointers = target + spot[:, None] + channel[None, :] * (HEIGHT * WIDTH)
    tl.store(pointers, total, mask=(channel < INNER)[None, :] & valid[:, None])


def transpose_conv(values: Tensor, weight: Tensor, stride: Pair, padding: Pair, size: Pair, packed: Any) -> Tensor:
    """The transposed convolution [M, C', h, w] -> [M, C, *size]; `packed` is `pack(weight)`, kept by the caller."""
    rows, outer, h, w = values.shape
    inner, kernel_y, kernel_x = weight.shape[1:]
    target = values.new_empty((rows, inner, *size))
    per_phase = (-(-size[0] // stride[0]), -(-size[1] // stride[1]))
    pixels = rows * per_phase[0] * per_phase[1]
    padded = packed.shape[-1]
    kernel, block, settings = _transpose_conv, min(512, max(32, _SUMS // padded)), {"num_warps": 1}
    if values.dtype == torch.float32 and min(outer, inner) >= _PRODUCT_CHANNELS:
        block = 256 if padded <= 16 else 128
        kernel, settings = _transpose_product, {"CHUNK": _CHUNK, "num_warps": 4}
    grid = (triton.cdiv(pixels, block) * stride[0] * stride[1],)
    kernel[grid](
        values.contiguous(),
        packed,
        target,
        pixels,
        0,
        H=h,
        W=w,
        HEIGHT=size[0],
        WIDTH=size[1],
        PAD_Y=padding[0],
        PAD_X=padding[1],
        OUTER=outer,
        INNER=inner,
        PADDED=padded,
        KERNEL_Y=kernel_y,
        KERNEL_X=kernel_x,
        STRIDE_Y=stride[0],
        STRIDE_X=stride[1],
        BLOCK=block,
        **settings,
    )
    return target


def pack(weight: Tensor) -> Tensor:
    """weight [C', C, kh, kw] as [kh, kw, C', C filled up to a power of two]."""
    padded = triton.next_power_of_2(weight.shape[1])
    full = weight.new_zeros((*weight.shape[2:], weight.shape[0], padded))
    full[..., : weight.shape[1]] = weight.permute(2, 3, 0, 1)
    return full

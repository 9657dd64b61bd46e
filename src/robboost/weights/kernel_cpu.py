"""The fused pass as a compiled CPU kernel: one read of memory gives every pair's norm and minorant.

A block of inputs of all members is small enough for the first caches, so the second use of each number (the minorant)
costs no memory traffic. float16 is widened by the processor where it can; otherwise, and for bfloat16, by integer
arithmetic into such a block.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from robboost.weights.oracle import Pass

__all__ = ["cpu_pass"]

# Long runs keep the hardware prefetchers going; widened blocks are shorter, since they are written too.
_BLOCK_FLOAT, _BLOCK_HALF = 1024, 512
_RADII = 2**18
# Sums may be reordered into vector lanes; NaN and infinity keep their meaning.
_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "fastmath": {"reassoc", "contract", "nsz"},
    "error_model": "numpy",
    "cache": True,
}
_ONE, _ZERO = np.float32(1), np.float32(0)
# Whether the processor itself turns float16 into float32 (and the compiler so need not call for help).
_WIDENS = bool(llvmlite.binding.get_host_cpu_features().get("f16c", False))


@intrinsic  # type: ignore[untyped-decorator]
def _number(_: Any, value: Any) -> Any:
    """Sixteen bits as the float16 that they are, widened to float32; any other number as it is."""
    if value == types.uint16:
        return types.float32(value), lambda _, builder, __, args: builder.fpext(
            builder.bitcast(args[0], ir.HalfType()), ir.FloatType()
        )
    return value(value), lambda _, __, ___, args: args[0]


@numba.njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _block(
    flat: Any, base: int, stride: int, width: int, weights: Any, reach: Any, inverse: Any, mixed: Any, out: Any
) -> Any:
    """Adds the minorant of `width` inputs from `base` on to `out` [T] and returns their norm."""
    members = weights.shape[0]
    fours = members // 4 * 4
    for i in range(width):
        mixed[i] = _ZERO
    for t in range(0, fours, 4):
        at = base + t * stride
        row0, row1 = flat[at : at + width], flat[at + stride : at + stride + width]
        at += 2 * stride
        row2, row3 = flat[at : at + width], flat[at + stride : at + stride + width]
        w0, w1, w2, w3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        for i in range(width):
            mixed[i] += w0 * _number(row0[i]) + w1 * _number(row1[i]) + w2 * _number(row2[i]) + w3 * _number(row3[i])
    for t in range(fours, members):
        at = base + t * stride
        row0, w0 = flat[at : at + width], weights[t]
        for i in range(width):
            mixed[i] += w0 * _number(row0[i])
    norm = _ZERO
    for i in range(width):
        value = mixed[i] * reach[i]
        norm += abs(value)
        dual = value * inverse
        dual = dual if dual < _ONE else _ONE
        dual = dual if dual > -_ONE else -_ONE
        mixed[i] = dual * reach[i]
    for t in range(0, fours, 4):
        at = base + t * stride
        row0, row1 = flat[at : at + width], flat[at + stride : at + stride + width]
        at += 2 * stride
        row2, row3 = flat[at : at + width], flat[at + stride : at + stride + width]
        s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
        for i in range(width):
            dual = mixed[i]
            s0 += dual * _number(row0[i])
            s1 += dual * _number(row1[i])
            s2 += dual * _number(row2[i])
            s3 += dual * _number(row3[i])
        out[t] += s0
        out[t + 1] += s1
        out[t + 2] += s2
        out[t + 3] += s3
    for t in range(fours, members):
        at = base + t * stride
        row0 = flat[at : at + width]
        s0 = _ZERO
        for i in range(width):
            s0 += mixed[i] * _number(row0[i])
        out[t] += s0
    return norm


@numba.njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _magnitude(flat: Any, base: int, stride: int, width: int, members: int, mixed: Any) -> Any:
    """Sum of the absolute values of the minorant's terms, which `_block` left in `mixed` and in the caches."""
    total = _ZERO
    for t in range(members):
        at = base + t * stride
        row = flat[at : at + width]
        for i in range(width):
            total += abs(mixed[i] * _number(row[i]))
    return total


@numba.njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _pass_direct(
    flat: Any, strides: Any, dim: int, weights: Any, reach: Any, stride_reach: int, inverse: Any, mixed: Any,
    norms: Any, out: Any, sizes: Any, first: int, last: int,
) -> None:  # fmt: skip
    for n in range(first, last):
        total = 0.0
        for start in range(0, dim, _BLOCK_FLOAT):
            width = min(_BLOCK_FLOAT, dim - start)
            reached = reach[(n - first) * stride_reach + start : (n - first) * stride_reach + start + width]
            base = n * strides[1] + start
            total += _block(flat, base, strides[0], width, weights, reached, inverse, mixed, out[n])
            if sizes.shape[0] > 0:
                sizes[n] += _magnitude(flat, base, strides[0], width, weights.shape[0], mixed)
        norms[n] = total


@numba.njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _pass_widened(
    flat: Any, strides: Any, dim: int, weights: Any, reach: Any, stride_reach: int, inverse: Any, mixed: Any,
    norms: Any, out: Any, sizes: Any, first: int, last: int, brain: bool,
) -> None:  # fmt: skip
    members = weights.shape[0]
    widened = np.empty(members * _BLOCK_HALF, dtype=np.uint32)
    tile = widened.view(np.float32)
    special = np.uint32(0x7F80) if brain else np.uint32(0x7C00)
    for n in range(first, last):
        total = 0.0
        for start in range(0, dim, _BLOCK_HALF):
            width = min(_BLOCK_HALF, dim - start)
            worst = np.uint32(0)
            for t in range(members):
                at = n * strides[1] + t * strides[0] + start
                bits = flat[at : at + width]
                row = widened[t * _BLOCK_HALF : t * _BLOCK_HALF + width]
                if brain:
                    for i in range(width):
                        h = np.uint32(bits[i])
                        worst = max(worst, h & special)
                        row[i] = h << np.uint32(16)
                else:
                    for i in range(width):
                        h = np.uint32(bits[i])
                        worst = max(worst, h & special)
                        row[i] = ((h & np.uint32(0x7FFF)) << np.uint32(13)) | ((h & np.uint32(0x8000)) << np.uint32(16))
            reached = reach[(n - first) * stride_reach + start : (n - first) * stride_reach + start + width]
            total += _block(tile, 0, _BLOCK_HALF, width, weights, reached, inverse, mixed, out[n])
            if sizes.shape[0] > 0:
                sizes[n] += _magnitude(tile, 0, _BLOCK_HALF, width, members, mixed)
            if worst == special:  # NaN or infinity, which widening to float16's small exponents would hide
                total = np.nan
        norms[n] = total


def cpu_pass(
    slopes: torch.Tensor,
    radius: torch.Tensor,
    weights: torch.Tensor,
    width: float,
    *,
    double: bool = False,
    threads: int = 1,
) -> Pass:
    """One pass for l_inf threats over slopes [T, n, d] in memory (or mapped into it), inputs contiguous.

    Sums are float32 over blocks of inputs and float64 over blocks (with `double`, float64 throughout): against the
    float64 twin, norms and minorants differ by a few units of 2^-24 of the sum of magnitudes. Threads take equal runs
    of pairs.
    """
    members, pairs, dim = slopes.shape
    number = np.float64 if double else np.float32
    norms, out, sizes = np.zeros(pairs), np.zeros((pairs, members)), np.zeros(pairs if double else 0)
    scale = float(radius) if radius.ndim == 0 else 1.0
    every = torch.ones(dim, dtype=torch.float64) if radius.ndim == 0 else radius
    # A radius of each pair's own is brought to the sums' precision a few pairs at a time.
    step = max(1, _RADII // dim) if radius.ndim == 2 else max(1, pairs)
    # Without smoothing any huge number does for 1 / 0: what it leaves unclipped is below every sum's rounding.
    inverse = number(min(scale / width, 1e38)) if width > 0 else number(1e38)
    # Widened float16 numbers are 2^-112 times their value: an exact power of two, moved to the weights and the sums.
    half = slopes.dtype in (torch.float16, torch.bfloat16)
    widened = half and not (slopes.dtype == torch.float16 and _WIDENS)
    lift = 2.0**112 if widened and slopes.dtype == torch.float16 else 1.0
    mix = (weights.cpu().numpy() * lift).astype(number)
    flat = slopes.as_strided((int(np.dot(np.subtract(slopes.shape, 1), slopes.stride())) + 1,), (1,))
    strides = np.array(slopes.stride()[:2], dtype=np.int64)
    numbers = flat.view(torch.int16).numpy().view(np.uint16) if half else flat.numpy()

    def run(first: int, last: int) -> None:
        mixed = np.empty(max(_BLOCK_FLOAT, _BLOCK_HALF), dtype=number)
        for start in range(first, last, step):
            stop = min(start + step, last)
            reach = (every[start:stop] if radius.ndim == 2 else every).numpy().astype(number, copy=False).reshape(-1)
            shared = (strides, dim, mix, reach, dim if radius.ndim == 2 else 0, inverse, mixed, norms, out, sizes)
            if widened:
                _pass_widened(numbers, *shared, start, stop, slopes.dtype == torch.bfloat16)
            else:
                _pass_direct(numbers, *shared, start, stop)

    if threads == 1:
        run(0, pairs)
    else:
        cuts = np.linspace(0, pairs, threads + 1).astype(int)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, cuts[:-1], cuts[1:]))
    return Pass(
        norms=torch.from_numpy(norms * scale),
        slopes=torch.from_numpy(out * (scale * lift)),
        sizes=torch.from_numpy(sizes * (scale * lift)) if double else None,
    )

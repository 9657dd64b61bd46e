"""The fused pass as a Triton kernel: one read of the slopes gives every pair's norm and minorant.

One program takes one pair. It holds a tile of all members over a block of inputs, so that the mixed column, its norm
and the products with the minorant's d come from the same registers. Sums over inputs are taken lane by lane, then by a
tree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from robboost.weights.oracle import Pass

__all__ = ["gpu_pass"]


@triton.jit  # type: ignore[untyped-decorator]
def _pass_kernel(  # type: ignore[no-untyped-def]  # Triton resolves annotations of its own
    slopes,
    weights,
    radius,
    norms,
    minorants,
    sizes,
    inverse_width,
    members,
    stride_member,
    stride_pair,
    stride_radius,
    MEMBERS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RADIUS: tl.constexpr,
    SMOOTH: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    number = tl.float64 if DOUBLE else tl.float32
    # 64-bit offsets: a member alone can hold more than 2^31 numbers.
    pair = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, MEMBERS)
    in_pool = t < members
    weight = tl.load(weights + t, mask=in_pool, other=0.0).to(number)
    rows = slopes + pair * stride_pair + t.to(tl.int64)[:, None] * stride_member
    norm = tl.zeros([BLOCK], dtype=number)
    minorant = tl.zeros([MEMBERS, BLOCK], dtype=number)
    size = tl.zeros([BLOCK], dtype=number)
    for start in range(0, DIM, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < DIM
        tile = tl.load(rows + i[None, :], mask=in_pool[:, None] & inside[None, :], other=0.0)
        tile = tile.to(number)
        mixed = tl.sum(tile * weight[:, None], axis=0)
        if HAS_RADIUS:
            reach = tl.load(radius + pair * stride_radius + i, mask=inside, other=0.0).to(number)
            mixed = mixed * reach
        norm += tl.abs(mixed)
        if SMOOTH:
            dual = tl.minimum(tl.maximum(mixed * inverse_width, -1.0), 1.0)
        else:
            dual = tl.where(mixed > 0, 1.0, tl.where(mixed < 0, -1.0, 0.0)).to(number)
        if HAS_RADIUS:
            dual = dual * reach
        terms = tile * dual[None, :]
        minorant += terms
        if DOUBLE:
            size += tl.sum(tl.abs(terms), axis=0)
    tl.store(norms + pair, tl.sum(norm, axis=0))
    if DOUBLE:
        tl.store(sizes + pair, tl.sum(size, axis=0))
    tl.store(minorants + pair * members + t, tl.sum(minorant, axis=1), mask=in_pool)


def gpu_pass(
    slopes: torch.Tensor,
    radius: torch.Tensor,
    weights: torch.Tensor,
    width: float,
    *,
    double: bool = False,
    warps: int | None = None,
    tile: int | None = None,
) -> Pass:
    """One pass for l_inf threats over slopes [T, n, d] on the GPU, any strides with contiguous inputs.

    Sums are float32 (float64 with `double`), the results float64: against the float64 twin, norms and minorants differ
    by a few units of 2^-24 of the sum of magnitudes.
    """
    members, pairs, dim = slopes.shape
    number = torch.float64 if double else torch.float32
    padded = triton.next_power_of_2(members)
    groups = warps if warps is not None else (1 if dim <= 1024 else 2)
    if tile is None:
        # Registers bound the numbers that a warp can hold of tile and sums.
        tile = 4096 if slopes.element_size() == 2 and radius.ndim == 0 and padded <= 16 and not double else 2048
    # At least 32 inputs, so that a warp reads whole sectors.
    block = max(32, min(triton.next_power_of_2(dim), groups * tile // max(padded, 8)))
    scale = float(radius) if radius.ndim == 0 else 1.0
    norms = torch.empty(pairs, dtype=number, device=slopes.device)
    minorants = torch.empty((pairs, members), dtype=number, device=slopes.device)
    sizes = torch.empty(pairs if double else 0, dtype=number, device=slopes.device)
    # A radius of 0 makes every column 0; any finite value serves for the width then. Beyond 1e38 it is a step anyway.
    inverse = min(scale / width, 1e38) if width > 0 else 0.0
    _pass_kernel[(pairs,)](
        slopes,
        weights.to(device=slopes.device, dtype=number),
        radius.contiguous(),
        norms,
        minorants,
        sizes,
        inverse,
        members,
        slopes.stride(0),
        slopes.stride(1),
        dim if radius.ndim == 2 else 0,
        MEMBERS=padded,
        DIM=dim,
        BLOCK=block,
        HAS_RADIUS=radius.ndim > 0,
        SMOOTH=width > 0,
        DOUBLE=double,
        num_warps=groups,
    )
    return Pass(
        norms=norms.to(torch.float64) * scale,
        slopes=minorants.to(torch.float64) * scale,
        sizes=sizes * scale if double else None,
    )

"""GPU kernels of the backward pass (Triton), each compiled form checked against plain PyTorch before its first use.

A compiler may be wrong where the source is right: ptxas was seen to drop constants of packed 16-bit additions, and the
float64 bounds of some layers came from a wrong row, without a word. So every form that is compiled (by sizes, type and
device) is first run on random numbers and held against the same formula in float64. One that disagrees is never used:
plain PyTorch takes its place, and a warning says so.

Small work in float64 goes to plain PyTorch at once: it is there to settle close calls of a few images, for which
compiling would take longer than computing, and it is then a second way to the same bound.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from robboost.bounds import kernels_conv, kernels_rows
from robboost.bounds.kernels_conv import pack
from robboost.bounds.transposed import library_conv

__all__ = ["pack", "place", "reach", "relax", "transpose_conv"]

Pair = tuple[int, int]
Origin = tuple[Tensor, Tensor] | None
# Rows and examples of a check: more than one block of pixels, and not a round number.
_ROWS, _EXAMPLES = 67, 3
# Allowed difference, relative to the sum of the magnitudes that are added up.
_ROOM = {torch.float32: 4e-6, torch.float64: 1e-13}
# Float64: multiply-adds of a call (for the pointwise kernels: numbers) from which compiling pays.
_COMPILED_PRODUCTS, _COMPILED_NUMBERS = 10**10, 2**24
_SOUND: dict[Hashable, bool] = {}


def transpose_conv(values: Tensor, weight: Tensor, stride: Pair, padding: Pair, size: Pair, packed: Any) -> Tensor:
    """The transposed convolution [M, C', h, w] -> [M, C, *size]; `packed` is `pack(weight)`, kept by the caller."""
    if _small(values, values.numel() * weight[0].numel(), _COMPILED_PRODUCTS):
        return _plain_conv(values, weight, stride, padding, size)
    shape = tuple(values.shape[1:])
    key = ("transpose_conv", shape, tuple(weight.shape), stride, padding, size)

    def agrees() -> bool:
        mine, factors = _random(values, _ROWS, *shape), _random(values, *weight.shape)
        found = kernels_conv.transpose_conv(mine, factors, stride, padding, size, pack(factors))
        exact = _plain_conv(mine.double(), factors.double(), stride, padding, size)
        return _near(found, exact, _plain_conv(mine.double().abs(), factors.double().abs(), stride, padding, size))

    if _sound(key, values, agrees):
        return kernels_conv.transpose_conv(_aligned(values), weight, stride, padding, size, _aligned(packed))
    return _plain_conv(values, weight, stride, padding, size)


def relax(
    values: Tensor, example: Tensor, maps: list[Tensor | None], origin: Origin, both: bool
) -> tuple[Tensor | None, Tensor]:
    """`relaxing._applied` for rows [S, M, ...] of the given examples; windows start at `origin` (tops, lefts).

    maps: slope, slope step, gap and gap step, as in `relaxing.Maps`; both: the rows of the negatives as well (S = 1).
    """
    if _small(values, values.numel(), _COMPILED_NUMBERS):
        return _plain_relax(values, example, maps, origin, both)
    copies, shape = values.shape[0], tuple(values.shape[2:])
    full = tuple(next(part for part in maps[2:] if part is not None).shape[1:])
    given = tuple(part is not None for part in maps)
    key = ("relax", copies, shape, full, given, origin is None, both)

    def agrees() -> bool:
        mine, rows, start = (
            _random(values, copies, _ROWS, *shape),
            _some_examples(values),
            _some_origin(values, origin, full),
        )
        own = [_random(values, _EXAMPLES, *full) if there else None for there in given]
        passed, losses = kernels_rows.relax(mine, rows, own, start, both)
        wide = [None if part is None else part.double() for part in own]
        wanted, exact = _plain_relax(mine.double(), rows, wide, start, both)
        sizes = [None if part is None else part.abs() for part in wide]
        _, most = _plain_relax(-mine.double().abs(), rows, [s if s is None else -s for s in sizes], start, False)
        near = _near(losses, exact, 2 * most.amax(0))
        if passed is None or wanted is None:
            return near and passed is wanted
        return near and _near(passed, wanted, wanted.abs() + 8)

    if _sound(key, values, agrees):
        ready = [None if part is None else _aligned(part) for part in maps]
        return kernels_rows.relax(_aligned(values), _aligned(example), ready, _aligned_origin(origin), both)
    return _plain_relax(values, example, maps, origin, both)


def reach(values: Tensor, example: Tensor, radius: Tensor, origin: Origin) -> Tensor:
    """Sum of radius * |row| for rows [S, M, ...], [S, M]."""
    if _small(values, values.numel(), _COMPILED_NUMBERS):
        return _plain_reach(values, example, radius, origin)
    copies, shape, full = values.shape[0], tuple(values.shape[2:]), tuple(radius.shape[1:])
    key = ("reach", copies, shape, full, origin is None)

    def agrees() -> bool:
        mine, rows, start = (
            _random(values, copies, _ROWS, *shape),
            _some_examples(values),
            _some_origin(values, origin, full),
        )
        own = _random(values, _EXAMPLES, *full).abs()
        exact = _plain_reach(mine.double(), rows, own.double(), start)
        return _near(kernels_rows.reach(mine, rows, own, start), exact, exact)

    if _sound(key, values, agrees):
        return kernels_rows.reach(_aligned(values), _aligned(example), _aligned(radius), _aligned_origin(origin))
    return _plain_reach(values, example, radius, origin)


def place(values: Tensor, shape: tuple[int, ...], origin: tuple[Tensor, Tensor]) -> Tensor:
    """Windows [S, M, C, h, w] as full maps [S, M, *shape]."""
    if _small(values, values.numel(), _COMPILED_NUMBERS):
        return _plain_place(values, shape, origin)
    copies, window = values.shape[0], tuple(values.shape[2:])
    key = ("place", copies, window, tuple(shape))

    def agrees() -> bool:
        mine, start = _random(values, copies, _ROWS, *window), _some_origin(values, origin, shape)
        assert start is not None
        return torch.equal(kernels_rows.place(mine, shape, start), _plain_place(mine, shape, start))

    if _sound(key, values, agrees):
        return kernels_rows.place(_aligned(values), shape, (_aligned(origin[0]), _aligned(origin[1])))
    return _plain_place(values, shape, origin)


# The check ---------------------------------------------------------------------------------------------------------


def _small(values: Tensor, work: int, least: int) -> bool:
    return values.dtype == torch.float64 and work < least


def _sound(key: tuple[Any, ...], values: Tensor, agrees: Callable[[], bool]) -> bool:
    """Whether the form that serves these sizes has agreed on this device; asked once a process."""
    full = (*key, values.dtype, values.device)
    if full not in _SOUND:
        with torch.no_grad():
            _SOUND[full] = agrees()
        if not _SOUND[full]:
            warnings.warn(
                f"the compiled kernel {key[0]} for {key[1:]}, {values.dtype}, disagrees with its formula on"
                f" {values.device}: it is not used, plain PyTorch takes its place (slower, and right)",
                RuntimeWarning,
                stacklevel=3,
            )
    return _SOUND[full]


def _near(found: Tensor, exact: Tensor, sizes: Tensor) -> bool:
    """NaN is never near."""
    return bool(((found.double() - exact).abs() <= _ROOM[found.dtype] * (sizes + 1e-30)).all())


def _aligned(values: Tensor) -> Tensor:
    """Pointers that are no multiple of 16 bytes would be served by another compiled form than the one checked."""
    values = values.contiguous()
    return values if values.data_ptr() % 16 == 0 else values.clone()


def _aligned_origin(origin: Origin) -> Origin:
    return None if origin is None else (_aligned(origin[0]), _aligned(origin[1]))


def _random(like: Tensor, *shape: int) -> Tensor:
    """Normal numbers of the type and on the device of `like`; no global generator is touched."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)


def _some_examples(like: Tensor) -> Tensor:
    return (torch.arange(_ROWS) % _EXAMPLES).to(like.device)


def _some_origin(like: Tensor, origin: Origin, full: tuple[int, ...]) -> Origin:
    """Starts of windows inside a map [C, H, W], at its edges and beyond."""
    if origin is None:
        return None
    steps = torch.arange(_ROWS)
    starts = (steps % (full[1] + 4) - 3, (3 * steps) % (full[2] + 4) - 3)
    return starts[0].int().to(like.device), starts[1].int().to(like.device)


# The same in plain PyTorch -----------------------------------------------------------------------------------------


def _plain_conv(values: Tensor, weight: Tensor, stride: Pair, padding: Pair, size: Pair) -> Tensor:
    return library_conv(values, weight, (stride, padding, (1, 1)), 1, size)


def _seen(part: Tensor, example: Tensor, origin: Origin, window: tuple[int, ...]) -> Tensor:
    """What the rows see of their examples' maps [N, *shape]: [M, *window], zero beyond the map."""
    if origin is None:
        return part[example]
    y, x, inside = _positions(origin, window, tuple(part.shape[1:]))
    channel = torch.arange(window[0], device=part.device)[None, :, None, None]
    picked = part[example[:, None, None, None], channel, y[:, None], x[:, None]]
    return torch.where(inside[:, None], picked, torch.zeros_like(picked))


def _positions(origin: tuple[Tensor, Tensor], window: tuple[int, ...], full: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Row and column [M, h, w] of each window entry in the map (clamped to it), and whether it lies inside."""
    tops, lefts = (start.long() for start in origin)
    device = tops.device
    y = (tops[:, None, None] + torch.arange(window[1], device=device)[:, None]).expand(-1, -1, window[2])
    x = (lefts[:, None, None] + torch.arange(window[2], device=device)).expand(-1, window[1], -1)
    inside = (y >= 0) & (y < full[1]) & (x >= 0) & (x < full[2])
    return y.clamp(0, full[1] - 1), x.clamp(0, full[2] - 1), inside


def _plain_relax(
    values: Tensor, example: Tensor, maps: list[Tensor | None], origin: Origin, both: bool
) -> tuple[Tensor | None, Tensor]:
    window = tuple(values.shape[2:])
    slope, step, gap, gap_step = (None if part is None else _seen(part, example, origin, window) for part in maps)
    assert gap is not None
    assert gap_step is not None
    # Entries beyond the map mean nothing: what is seen there is zero, but for a slope it must be so in the result too.
    negative = values.clamp(max=0)
    straight, bent = (values * gap).flatten(2).sum(2), (negative * gap_step).flatten(2).sum(2)
    losses = straight + bent
    if both and len(values) == 1:
        losses = torch.cat([losses, bent - straight - (values * gap_step).flatten(2).sum(2)])
    if slope is None:
        return None, losses
    passed = values * slope
    return (passed if step is None else passed + negative * step), losses


def _plain_reach(values: Tensor, example: Tensor, radius: Tensor, origin: Origin) -> Tensor:
    return (values.abs() * _seen(radius, example, origin, tuple(values.shape[2:]))).flatten(2).sum(2)


def _plain_place(values: Tensor, shape: tuple[int, ...], origin: tuple[Tensor, Tensor]) -> Tensor:
    y, x, inside = _positions(origin, tuple(values.shape[2:]), tuple(shape))
    copies, rows, channels = values.shape[:3]
    flat = (y * shape[2] + x).flatten(1)[None, :, None].expand(copies, -1, channels, -1)
    kept = torch.where(inside[:, None], values, torch.zeros_like(values)).flatten(3)
    # Entries beyond the map are clamped onto it: adding their zeros changes nothing.
    canvas = values.new_zeros((copies, rows, channels, shape[1] * shape[2])).scatter_add(3, flat, kept)
    return canvas.unflatten(3, (shape[1], shape[2]))

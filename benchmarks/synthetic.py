"""Slopes and intercepts with the structure of real ones, made on any device at any size.

Slopes of certified networks on one pair share most of their direction, are smooth over neighbouring inputs, vanish on a
part of the inputs, and differ in size from pair to pair by a factor of a few. Members differ in quality; intercepts are
strongly correlated across members. Sizes are set so that a part of the pairs is certified by all members, a part by
none, and the rest by some.
"""

from __future__ import annotations

import torch

_CHUNK = 20_000


def realistic(
    members: int,
    pairs: int,
    dim: int,
    *,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    uneven: float = 0.3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slopes [T, n, d] and intercepts [T, n] for radius 1."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    row = max(2, round(dim**0.5))
    live = torch.rand(dim, generator=generator, device=device) < 0.8
    quality = torch.exp(uneven * normal(members)).tolist()
    slopes = torch.empty(members, pairs, dim, dtype=dtype, device=device)
    for start in range(0, pairs, _CHUNK):
        part = slice(start, min(start + _CHUNK, pairs))
        m = part.stop - part.start
        common = _smooth(normal(m, dim), row)
        support = live * (_smooth(normal(m, dim), row) > -0.3)
        size = torch.exp(0.5 * normal(m, 1)) * 0.45 / dim
        for t in range(members):
            own = _smooth(normal(m, dim), row)
            slopes[t, part] = ((common + 0.9 * quality[t] * own) * support * size).to(dtype)
    intercepts = 1.0 + 0.5 * normal(1, pairs) + 0.2 * normal(members, pairs)
    return slopes, intercepts.to(torch.float64)


def _smooth(values: torch.Tensor, row: int) -> torch.Tensor:
    """White noise averaged with its neighbours to the right and below."""
    values = values + values.roll(1, dims=1)
    return 0.5 * (values + values.roll(row, dims=1))

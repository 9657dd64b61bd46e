"""The GPU kernel of `adam`: pointwise."""

# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from robboost.training.schedule import BETA1, BETA2

if TYPE_CHECKING:
    from robboost.training.adam import AdamState

__all__ = ["step"]

_BLOCK = 1024


@triton.jit
def _step(
    flat, average, first_moment, second_moment, gradient, length, scalars,
    count, fresh1, fresh2, clip_norm, least, eps, CLIPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    g = tl.load(gradient + index, mask=inside, other=0.0)
    if CLIPPED:
        factor = clip_norm / (tl.load(length) + least)
        g = g * tl.where(factor > 1.0, 1.0, factor)
    first = tl.load(first_moment + index, mask=inside, other=0.0)
    second = tl.load(second_moment + index, mask=inside, other=0.0)
    first += fresh1 * (g - first)
    second += fresh2 * (g * g - second)
    root = tl.sqrt(second) * tl.load(scalars + 1) + eps
    moved = tl.load(flat + index, mask=inside, other=0.0) - first / root * tl.load(scalars)
    mean = tl.load(average + index, mask=inside, other=0.0)
    share = tl.load(scalars + 2)
    # As in torch.lerp: a share of 1 gives the new parameters bit for bit.
    near, far = mean + share * (moved - mean), moved - (1.0 - share) * (moved - mean)
    tl.store(flat + index, moved, mask=inside)
    tl.store(average + index, tl.where(share < 0.5, near, far), mask=inside)
    tl.store(first_moment + index, first, mask=inside)
    tl.store(second_moment + index, second, mask=inside)


def step(
    state: AdamState,
    gradient: Tensor,
    length: Tensor,
    scalars: Tensor,
    *,
    clip_norm: float,
    least: float,
    eps: float,
) -> None:
    """See `adam.adam_step`."""
    count = gradient.numel()
    numbers = count, 1 - BETA1, 1 - BETA2, float(clip_norm), least, eps
    tensors = *state, gradient.contiguous(), length, scalars.contiguous()
    _step[((count + _BLOCK - 1) // _BLOCK,)](*tensors, *numbers, CLIPPED=clip_norm > 0, BLOCK=_BLOCK)

"""ReLU on intervals in centre-radius form and sizes of many tensors: few kernels where there is a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["absolute", "fused", "interval_relu"]


class _IntervalRelu(torch.autograd.Function):
    """[c - r, c + r] -> [relu(c - r), relu(c + r)], again as centre and radius."""

    @staticmethod
    def forward(ctx: Any, centre: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(centre, radius)
        if fused(centre):
            from robboost.training import triton_kernels

            return triton_kernels.interval_relu_forward(centre, radius)
        lower, upper = torch.relu(centre - radius), torch.relu(centre + radius)
        return (lower + upper) / 2, (upper - lower) / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        centre, radius = ctx.saved_tensors
        to_centre, to_radius = gradients
        if fused(centre):
            from robboost.training import triton_kernels

            return triton_kernels.interval_relu_backward(centre, radius, to_centre, to_radius)
        upper = (to_centre + to_radius) / 2 * (centre + radius > 0)
        lower = (to_centre - to_radius) / 2 * (centre - radius > 0)
        return upper + lower, upper - lower


def interval_relu(centre: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and radius of {max(0, z) : |z - centre| <= radius}; radius must not be negative."""
    out = _IntervalRelu.apply(centre, radius)
    return out[0], out[1]


class _Absolute(torch.autograd.Function):
    """|w| of all tensors, and w' = |w|' sign(w), each in one kernel."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        return tuple(torch._foreach_abs(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch._foreach_mul(torch._foreach_sign(ctx.saved_tensors), gradients))


def absolute(tensors: Sequence[Tensor]) -> list[Tensor]:
    """|w| of every tensor."""
    return list(_Absolute.apply(*tensors)) if tensors else []


@cache
def _interpreted() -> bool:
    """Triton's own switch: its interpreter runs the kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def fused(values: Tensor) -> bool:
    """Whether Triton's kernels take these values (otherwise: PyTorch's)."""
    return (values.is_cuda or _interpreted()) and values.numel() > 0

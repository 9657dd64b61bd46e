"""ReLU on intervals in centre-radius form, one kernel forward and one backward where Triton is there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["interval_relu"]


class _IntervalRelu(torch.autograd.Function):
    """[c - r, c + r] -> [relu(c - r), relu(c + r)], again as centre and radius."""

    @staticmethod
    def forward(ctx: Any, centre: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(centre, radius)
        if centre.is_cuda:
            from robboost.training import triton_kernels

            return triton_kernels.interval_relu_forward(centre, radius)
        lower, upper = torch.relu(centre - radius), torch.relu(centre + radius)
        return (lower + upper) / 2, (upper - lower) / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        centre, radius = ctx.saved_tensors
        to_centre, to_radius = gradients
        if centre.is_cuda:
            from robboost.training import triton_kernels

            return triton_kernels.interval_relu_backward(centre, radius, to_centre, to_radius)
        upper = (to_centre + to_radius) / 2 * (centre + radius > 0)
        lower = (to_centre - to_radius) / 2 * (centre - radius > 0)
        return upper + lower, upper - lower


def interval_relu(centre: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and radius of {max(0, z) : |z - centre| <= radius}; radius must not be negative."""
    out = _IntervalRelu.apply(centre, radius)
    return out[0], out[1]

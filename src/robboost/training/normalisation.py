"""Batch normalisation of points and intervals, with the ReLU behind it: few passes over memory where Triton is there.

A normalisation is a pair (scale, shift) [C]: z -> scale z + shift on points, and on an interval in centre-radius form
(c, r) -> (scale c + shift, |scale| r). Each function has the same gradient on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from robboost.training.kernels import fused

__all__ = ["normalisation", "scaled", "scaled_interval"]


def normalisation(values: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Values [N, C, H, W] as they are; scale, shift, mean and variance [C] of them.

    scale = gamma / sqrt(variance + eps), shift = beta - mean scale, with gradient; mean and variance without.
    Whoever goes on should go on from the values returned: their gradient and that of the statistics then become one
    sum in one pass.
    """
    if fused(values):
        values = values.contiguous(memory_format=torch.channels_last)
    return _Normalisation.apply(values, gamma, beta, eps)


def scaled(values: Tensor, scale: Tensor, shift: Tensor, *, relu: bool) -> Tensor:
    """scale z + shift of values [N, C, H, W], with `relu` the positive part of it."""
    return _Scaled.apply(values, scale, shift, relu)


def scaled_interval(
    centre: Tensor, radius: Tensor, scale: Tensor, shift: Tensor, *, relu: bool
) -> tuple[Tensor, Tensor]:
    """(scale c + shift, |scale| r) of an interval [N, C, H, W], with `relu` what ReLU makes of that interval."""
    out = _ScaledInterval.apply(centre, radius, scale, shift, relu)
    return out[0], out[1]


class _Normalisation(torch.autograd.Function):
    """values -> (values, scale, shift, mean, variance)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, ...]:
        if fused(values):
            from robboost.training import triton_channels

            scale, shift, mean, variance = triton_channels.normalisation_forward(values, gamma, beta, eps)
        else:
            variance, mean = torch.var_mean(values, dim=(0, 2, 3), correction=0)
            scale = gamma * torch.rsqrt(variance + eps)
            shift = beta - mean * scale
        ctx.eps = eps
        ctx.save_for_backward(values, gamma, mean, variance)
        ctx.mark_non_differentiable(mean, variance)
        return values, scale, shift, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """to_mean = -scale to_shift, to_variance = -(to_scale - mean to_shift) scale / (2 (variance + eps)), and

        to_values += (to_mean + 2 to_variance (values - mean)) / count.
        """
        values, gamma, mean, variance = ctx.saved_tensors
        gradient, to_scale, to_shift = gradients[:3]
        if fused(values):
            from robboost.training import triton_channels

            statistics = mean, variance
            out, to_gamma = triton_channels.normalisation_backward(
                values, gamma, statistics, gradient, to_scale, to_shift, ctx.eps
            )
            return out, to_gamma, to_shift, None
        count = values.numel() // values.shape[1]
        inverse = torch.rsqrt(variance + ctx.eps)
        to_gamma = (to_scale - mean * to_shift) * inverse
        slope = -to_gamma * gamma * inverse * inverse / count
        constant = -gamma * inverse * to_shift / count
        out = gradient + torch.addcmul(_wide(constant - slope * mean), values, _wide(slope))
        return out, to_gamma, to_shift, None


class _Scaled(torch.autograd.Function):
    """See `scaled`; only its arguments are kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> Tensor:
        ctx.relu = relu
        ctx.save_for_backward(values, scale, shift)
        if fused(values):
            from robboost.training import triton_channels

            return triton_channels.point_forward(values, scale, shift, relu=relu)
        out = torch.addcmul(_wide(shift), values, _wide(scale))
        return torch.relu(out) if relu else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, scale, shift = ctx.saved_tensors
        (gradient,) = gradients
        sums = any(ctx.needs_input_grad[1:3])
        if fused(values):
            from robboost.training import triton_channels

            saved = values, scale, shift
            return *triton_channels.point_backward(saved, gradient, relu=ctx.relu, sums=sums), None
        if ctx.relu:
            gradient = gradient * (torch.addcmul(_wide(shift), values, _wide(scale)) > 0)
        pair = (_summed(gradient * values), _summed(gradient)) if sums else (None, None)
        return gradient * _wide(scale), *pair, None


class _ScaledInterval(torch.autograd.Function):
    """See `scaled_interval`; only its arguments are kept for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, centre: Tensor, radius: Tensor, scale: Tensor, shift: Tensor, relu: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.relu = relu
        ctx.save_for_backward(centre, radius, scale, shift)
        if fused(centre):
            from robboost.training import triton_channels

            return triton_channels.interval_forward(centre, radius, scale, shift, relu=relu)
        centre, radius = _scaled_plainly(centre, radius, scale, shift)
        if not relu:
            return centre, radius
        lower, upper = torch.relu(centre - radius), torch.relu(centre + radius)
        return (lower + upper) / 2, (upper - lower) / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        centre, radius, scale, shift = ctx.saved_tensors
        to_centre, to_radius = gradients
        sums = any(ctx.needs_input_grad[2:4])
        if fused(centre):
            from robboost.training import triton_channels

            both = to_centre, to_radius
            return *triton_channels.interval_backward(ctx.saved_tensors, both, relu=ctx.relu, sums=sums), None
        if ctx.relu:
            middle, reach = _scaled_plainly(centre, radius, scale, shift)
            upper = (to_centre + to_radius) / 2 * (middle + reach > 0)
            lower = (to_centre - to_radius) / 2 * (middle - reach > 0)
            to_centre, to_radius = upper + lower, upper - lower
        pair: tuple[Tensor | None, Tensor | None] = (None, None)
        if sums:
            pair = _summed(to_centre * centre) + _summed(to_radius * radius) * scale.sign(), _summed(to_centre)
        return to_centre * _wide(scale), to_radius * _wide(scale.abs()), *pair, None


def _scaled_plainly(centre: Tensor, radius: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    return torch.addcmul(_wide(shift), centre, _wide(scale)), radius * _wide(scale.abs())


def _wide(vector: Tensor) -> Tensor:
    return vector.view(1, -1, 1, 1)


def _summed(values: Tensor) -> Tensor:
    return values.sum(dim=(0, 2, 3))

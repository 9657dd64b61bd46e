"""The convolution of an image: few channels, and no gradient but that of the weights.

Libraries are slow at that one gradient; where Triton is there it is one product of tables, summed over all pixels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from robboost.training.kernels import fused

__all__ = ["first_convolution", "reads_an_image"]

_FEW_CHANNELS = 4
_MOST_TAPS = 128


def reads_an_image(x: Tensor, weight: Tensor) -> bool:
    """Whether `first_convolution` may stand for the convolution, and is likely to be faster."""
    _, channels, height, width = weight.shape
    small = channels <= _FEW_CHANNELS and height == width and channels * height * width <= _MOST_TAPS
    return small and not x.requires_grad and weight.requires_grad and _taken(x)


def first_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """The convolution of x [N, C, H, W], which must need no gradient, with weight [O, C, k, k]."""
    return _FirstConvolution.apply(x, weight, bias, stride, padding)


class _FirstConvolution(torch.autograd.Function):
    """weight'[o, c, i, j] = sum over n, y, x of out'[n, o, y, x] image[n, c, y stride + i - padding, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.form = weight.shape, stride, padding
        return F.conv2d(x, weight, bias, stride=stride, padding=padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        shape, stride, padding = ctx.form
        to_bias = gradient.sum(dim=(0, 2, 3)) if ctx.needs_input_grad[2] else None
        if _taken(x):
            from robboost.training import triton_convolution

            to_weight = triton_convolution.weight_gradient(x, gradient, shape, stride, padding)
        else:
            to_weight = conv2d_weight(x, shape, gradient, stride=stride, padding=padding)
        return None, to_weight, to_bias, None, None


def _taken(x: Tensor) -> bool:
    """Whether the kernel takes these images: it counts and adds up in 32 bits."""
    return fused(x) and x.dtype == torch.float32 and x.numel() < 2**31

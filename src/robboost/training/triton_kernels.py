"""The GPU kernels of `kernels`: pointwise, so they only need all tensors to lie in memory in the same order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["dense", "interval_relu_backward", "interval_relu_forward"]

_BLOCK = 1024


@triton.jit  # type: ignore
def _forward(centre, radius, out_centre, out_radius, count, block: tl.constexpr):  # type: ignore
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    c = tl.load(centre + index, mask=inside, other=0.0)
    r = tl.load(radius + index, mask=inside, other=0.0)
    lower = tl.maximum(c - r, 0.0)
    upper = tl.maximum(c + r, 0.0)
    tl.store(out_centre + index, 0.5 * (lower + upper), mask=inside)
    tl.store(out_radius + index, 0.5 * (upper - lower), mask=inside)


@triton.jit  # type: ignore
def _backward(centre, radius, to_centre, to_radius, out_centre, out_radius, count, block: tl.constexpr):  # type: ignore
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    c = tl.load(centre + index, mask=inside, other=0.0)
    r = tl.load(radius + index, mask=inside, other=0.0)
    gc = tl.load(to_centre + index, mask=inside, other=0.0)
    gr = tl.load(to_radius + index, mask=inside, other=0.0)
    upper = tl.where(c + r > 0, 0.5 * (gc + gr), 0.0)
    lower = tl.where(c - r > 0, 0.5 * (gc - gr), 0.0)
    tl.store(out_centre + index, upper + lower, mask=inside)
    tl.store(out_radius + index, upper - lower, mask=inside)


def interval_relu_forward(centre: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.interval_relu`."""
    centre = dense(centre)
    radius = _like(radius, centre)
    outputs = torch.empty_like(centre), torch.empty_like(centre)
    count = centre.numel()
    _forward[((count + _BLOCK - 1) // _BLOCK,)](centre, radius, *outputs, count, block=_BLOCK)
    return outputs


def interval_relu_backward(
    centre: Tensor, radius: Tensor, to_centre: Tensor, to_radius: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of centre and radius from those of the outputs."""
    centre = dense(centre)
    others = [_like(tensor, centre) for tensor in (radius, to_centre, to_radius)]
    outputs = torch.empty_like(centre), torch.empty_like(centre)
    count = centre.numel()
    _backward[((count + _BLOCK - 1) // _BLOCK,)](centre, *others, *outputs, count, block=_BLOCK)
    return outputs


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself if it fills its memory without holes in NCHW or NHWC order, else a copy that does."""
    if tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):
        return tensor
    return tensor.contiguous()


def _like(tensor: Tensor, model: Tensor) -> Tensor:
    """The tensor in the memory order of `model`."""
    if tensor.stride() == model.stride():
        return tensor
    return torch.empty_like(model).copy_(tensor)

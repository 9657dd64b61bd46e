"""First layers of a network that prepare its images, so that eps stays in pixel units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robboost.errors import InputError

__all__ = ["Normalize", "PixelMask"]


class Normalize(nn.Module):
    """(x - mean) / std for each channel of images [N, C, ...]; both are buffers and are saved with the network.

    A radius quoted for normalised inputs is not a radius in pixels: with this layer in front of a network that was
    trained on normalised images, the network takes pixels, and so does every threat.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], *, axes: int = 2) -> None:
        super().__init__()
        if len(mean) != len(std) or not mean or not axes >= 0:
            raise InputError(f"mean={tuple(mean)}, std={tuple(std)}: expected one number per channel in each")
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).reshape(-1, *(1,) * axes))
        if not bool((self.std > 0).all() and self.mean.isfinite().all() and self.std.isfinite().all()):
            raise InputError(f"mean={tuple(mean)}, std={tuple(std)}: expected finite numbers, and std above zero")

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"


class PixelMask(nn.Module):
    """x * mask: pixels with mask 0 do not reach the network. `mask` [C, H, W] is a buffer and is saved with it."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise InputError("mask holds values other than 0 and 1, expected one of the two for each pixel")
        self.register_buffer("mask", mask.to(torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask

    def extra_repr(self) -> str:
        return f"shape={list(self.mask.shape)}"

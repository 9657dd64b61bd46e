"""A network as a program over one flat parameter vector, so that a training step is few and large tensor operations.

The module that `build` returns is read once into a list of operations; weights are slices of one vector (one `split`
forward, one `cat` backward), so that clipping, Adam, averaging and L1 touch a single tensor. Convolution weights lie in
the vector as [out, height, width, in]: their view is "channels last", which is what tensor cores read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robboost.errors import InputError
from robboost.models.architectures import Residual, build

__all__ = ["BN_EPS", "Conv", "Fc", "Flatten", "Network", "Norm", "Op", "PixelMask", "Relu", "Skip", "pixel_mask"]

BN_EPS = 1e-5


@dataclass(frozen=True)
class Conv:
    """A convolution; `weight` and `bias` are slots (bias None: a normalisation follows).

    `output_padding` makes the transposed convolution return to the input's size.
    """

    weight: int
    bias: int | None
    stride: int
    padding: int
    output_padding: tuple[int, int]


@dataclass(frozen=True)
class Fc:
    """A fully connected layer."""

    weight: int
    bias: int


@dataclass(frozen=True)
class Norm:
    """Batch normalisation of one convolution's channels; `index` counts the normalisations of the network."""

    gamma: int
    beta: int
    index: int
    channels: int


@dataclass(frozen=True)
class Relu:
    """max(0, z); `index` counts the ReLUs of the network."""

    index: int


@dataclass(frozen=True)
class Flatten:
    """[N, C, H, W] -> [N, C * H * W]."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Skip:
    """body(x) + skip(x)."""

    body: tuple[Op, ...]
    skip: Conv


Op = Conv | Fc | Norm | Relu | Flatten | Skip


class PixelMask(nn.Module):
    """Keeps a fixed share of the pixels and sets the others to zero: the member's feature subsample (Table 3)."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def pixel_mask(shape: Sequence[int], share: float, seed: int) -> Tensor:
    """A fixed random `share` of the pixels as ones [1, 1, H, W]; all channels of a pixel go together."""
    height, width = shape[1:]
    count = height * width
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(count)
    mask[torch.randperm(count, generator=generator)[: round(share * count)]] = 1.0
    return mask.view(1, 1, height, width)


@dataclass
class Network:
    """Operations, the shapes of their slots in the flat vector, and the input mask (None: every pixel is seen).

    The last operation is always the fully connected layer of the logits; `trunk` is everything before it.
    """

    structure: str
    input_shape: tuple[int, ...]
    num_classes: int
    batch_norm: bool
    mask: Tensor | None
    trunk: tuple[Op, ...] = ()
    head: Fc = field(default_factory=lambda: Fc(0, 0))
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    num_norms: int = 0
    num_relus: int = 0

    @classmethod
    def of(
        cls, structure: str, input_shape: Sequence[int], *, num_classes: int, batch_norm: bool, mask: Tensor | None
    ) -> Network:
        """The program of `build(structure, input_shape, ...)`."""

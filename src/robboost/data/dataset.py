"""The value that every loader returns: images, labels, and where they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robboost.errors import DataError, InputError

__all__ = ["Dataset"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels of one split.

    Attributes:
        name: such as "mnist"; a subset says so in its name.
        split: "train", "heldout", "test", or the name given for an .npz file.
        images: float32 [N, channels, height, width] in [0, 1].
        labels: int64 [N], in [0, number of classes).
        indices: int64 [N], where each image stands in the official file of its split (train and heldout share one).
        classes: the name of each class.
    """

    name: str
    split: str
    images: Tensor
    labels: Tensor
    indices: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        count = len(self.images)
        if self.images.dim() != 4 or self.images.dtype != torch.float32:
            got = f"{self.images.dtype} {tuple(self.images.shape)}"
            raise DataError(f"{self.name}: images are {got}; expected float32 [N, channels, height, width]")
        if self.labels.shape != (count,) or self.labels.dtype != torch.int64:
            got = f"{self.labels.dtype} {tuple(self.labels.shape)}"
            raise DataError(f"{self.name}: labels are {got}; expected int64 [{count}]")
        if count == 0:
            raise DataError(f"{self.name}: holds no images")
        if not (self.images.min() >= 0 and self.images.max() <= 1):  # also refuses NaN
            low, high = self.images.min().item(), self.images.max().item()
            raise DataError(f"{self.name}: pixels reach from {low:g} to {high:g}; expected numbers within [0, 1]")
        if self.labels.min() < 0 or self.labels.max() >= len(self.classes):
            low, high = int(self.labels.min()), int(self.labels.max())
            raise DataError(f"{self.name}: labels reach from {low} to {high}; expected 0 to {len(self.classes) - 1}")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def take(self, which: int | slice | Sequence[int] | Tensor) -> Dataset:
        """The first `which` images (a number), or those of a slice, of positions, or of a mask."""
        if isinstance(which, int):
            if not 0 < which <= len(self):
                raise InputError(f"take({which}): expected a number of images from 1 to {len(self)}")
            which = slice(which)
        elif not isinstance(which, slice):
            which = torch.as_tensor(which)
        return replace(self, images=self.images[which], labels=self.labels[which], indices=self.indices[which])

    def at_most(self, count: int | None) -> Dataset:
        """The first `count` images, or all where there are fewer or `count` is None; below one it is refused."""
        return self if count is None else self.take(min(count, len(self)))

    def sha256(self) -> str:
        """Hash of pixels and labels: what a stored bound was computed on."""
        digest = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        digest.update(self.images.contiguous().numpy().tobytes())
        digest.update(self.labels.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.input_shape))
        return f"Dataset({self.name!r}, split={self.split!r}: {len(self)} images {shape}, {len(self.classes)} classes)"

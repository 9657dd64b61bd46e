"""`load_dataset`: a data set and split by name.

The training images of each data set are divided once and for all: every k-th image is held out ("heldout", 5,000
images), the rest is "train". Members are trained on "train", weights are fitted on "heldout", results are measured on
"test".
"""

from __future__ import annotations

import lzma
import os
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from robboost.data.dataset import Dataset
from robboost.data.files import data_directory, official_file
from robboost.data.formats import parse_cifar10, parse_idx, parse_npz
from robboost.errors import DataError, InputError

__all__ = ["DATASETS", "SPLITS", "load_dataset"]

DATASETS: dict[str, str] = {
    "mnist-small": "a subset of MNIST that ships with RobBoost: 4,000 train, 1,000 heldout, 1,000 test images",
    "mnist": "handwritten digits 28x28: 55,000 train, 5,000 heldout, 10,000 test",
    "fashion-mnist": "clothes 28x28: 55,000 train, 5,000 heldout, 10,000 test",
    "cifar10": "colour photographs 32x32: 45,000 train, 5,000 heldout, 10,000 test",
}
SPLITS = ("train", "heldout", "test")

_DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_PHOTOS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_HELDOUT = 5_000

Images = NDArray[np.uint8] | NDArray[np.float32]


def load_dataset(
    name: str | os.PathLike[str],
    *,
    split: str = "test",
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = True,
) -> Dataset:
    """One split of a data set, as float32 images in [0, 1] and int64 labels.

    Args:
        name: a key of `DATASETS`, or the path of an .npz file with `images` and `labels`.
        split: "train", "heldout" (5,000 training images that no member is trained on) or "test"; for an .npz file it is
            only noted in the result.
        data_dir: the folder with the official files; default: the environment variable ROBBOOST_DATA, else a cache.
        download: fetch files that are not there (checked by SHA-256).
    """
    if str(name).endswith(".npz"):
        return _load_npz(Path(name), split)
    if name not in DATASETS:
        raise InputError(f"data set {str(name)!r}: expected one of {', '.join(DATASETS)}, or the path of an .npz file")
    if split not in SPLITS:
        raise InputError(f"split={split!r}: expected one of {', '.join(SPLITS)}")
    if name == "mnist-small":
        images, labels, indices = _embedded(split)
        return _dataset("mnist-small", split, images, labels, indices, _DIGITS)
    classes: tuple[str, ...]
    part = "test" if split == "test" else "train"
    folder = data_directory(data_dir)
    if name == "cifar10":
        images, labels = _load_cifar10(part, folder, download)
        classes = _PHOTOS
    else:
        prefix = f"{name}/{'t10k' if part == 'test' else 'train'}"
        images = parse_idx(official_file(f"{prefix}-images-idx3-ubyte", folder=folder, download=download), name=prefix)
        labels = parse_idx(official_file(f"{prefix}-labels-idx1-ubyte", folder=folder, download=download), name=prefix)
        images = images[:, None]
        classes = _DIGITS if name == "mnist" else _CLOTHES
    if len(images) != len(labels):
        raise DataError(f"{name}: {len(images)} images and {len(labels)} labels; expected the official files")
    indices = _positions(len(images), split)
    return _dataset(str(name), split, images[indices], labels[indices], indices, classes)


def _positions(count: int, split: str) -> NDArray[np.int64]:
    """Which images of the official file belong to the split: every k-th is held out, so that 5,000 are."""
    everything = np.arange(count)
    if split == "test":
        return everything
    step = count // _HELDOUT
    held = everything % step == step - 1
    return everything[held if split == "heldout" else ~held]


def _embedded(split: str) -> tuple[Images, NDArray[np.uint8], NDArray[np.int64]]:
    """The embedded subset: records of a label and 784 pixels; 4,000 of train, 1,000 of heldout, 1,000 of test.

    Its images were chosen by position (`embedded_positions`), so that a pool trained on all of MNIST's "train" has not
    seen its "heldout" either.
    """
    packed = files("robboost.data").joinpath("mnist_small.xz").read_bytes()
    rows = np.frombuffer(lzma.decompress(packed), np.uint8).reshape(6_000, 785)
    start, stop = {"train": (0, 4_000), "heldout": (4_000, 5_000), "test": (5_000, 6_000)}[split]
    rows = rows[start:stop]
    return rows[:, 1:].reshape(-1, 1, 28, 28), rows[:, 0], embedded_positions(split)


def embedded_positions(split: str) -> NDArray[np.int64]:
    """Where the images of mnist-small stand in the official MNIST files."""
    official = _positions(10_000 if split == "test" else 60_000, split)
    count = 4_000 if split == "train" else 1_000
    return official[np.arange(count) * len(official) // count]


def _load_cifar10(part: str, folder: Path, download: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    names = ["test_batch"] if part == "test" else [f"data_batch_{i}" for i in range(1, 6)]
    batches = []
    for name in names:
        path = f"cifar-10-batches-bin/{name}.bin"
        batches.append(parse_cifar10(official_file(path, folder=folder, download=download), name=path))
    return np.concatenate([b[0] for b in batches]), np.concatenate([b[1] for b in batches])


def _load_npz(path: Path, split: str) -> Dataset:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); expected an .npz file") from None
    images, labels = parse_npz(raw, name=str(path))
    count = int(labels.max()) + 1 if len(labels) else 0
    return _dataset(path.stem, split, images, labels, np.arange(len(labels)), tuple(map(str, range(count))))


def _dataset(
    name: str,
    split: str,
    images: Images,
    labels: NDArray[np.integer],
    indices: NDArray[np.int64],
    classes: tuple[str, ...],
) -> Dataset:
    pixels = torch.from_numpy(np.array(images))
    if pixels.dtype == torch.uint8:
        pixels = pixels.to(torch.float32) / 255
    return Dataset(name, split, pixels, torch.from_numpy(labels.astype(np.int64)), torch.from_numpy(indices), classes)

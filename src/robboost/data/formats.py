"""Readers of the file formats: IDX (MNIST), the CIFAR-10 binary records, and .npz. Bytes in, arrays out."""

from __future__ import annotations

import io
import math
import zipfile

import numpy as np
from numpy.typing import NDArray

from robboost.errors import DataError

__all__ = ["parse_cifar10", "parse_idx", "parse_npz"]

# No data set that RobBoost is made for is larger; a forged header must not make it allocate more.
MAX_NPZ_BYTES = 64 * 2**30

Bytes = NDArray[np.uint8]


def parse_idx(raw: bytes, *, name: str) -> Bytes:
    """An IDX file of unsigned bytes: magic 0, 0, 8, rank, then the rank sizes in big-endian, then the values."""
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08" or not 1 <= raw[3] <= 3:
        raise DataError(f"{name}: not an IDX file of unsigned bytes; expected the official file")
    rank = raw[3]
    body = raw[4 + 4 * rank :]
    sizes = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, 4 + 4 * rank, 4)]
    if len(raw) < 4 + 4 * rank or math.prod(sizes) != len(body):
        raise DataError(f"{name}: its header promises {sizes} values and {len(body)} bytes follow; the file is damaged")
    return np.frombuffer(body, np.uint8).reshape(sizes)


def parse_cifar10(raw: bytes, *, name: str) -> tuple[Bytes, Bytes]:
    """The CIFAR-10 binary version: records of a label byte and 3072 pixels (red, green, blue planes, row by row)."""
    if not raw or len(raw) % 3073:
        raise DataError(f"{name}: {len(raw)} bytes is no whole number of 3073-byte records; expected the official file")
    rows = np.frombuffer(raw, np.uint8).reshape(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def parse_npz(raw: bytes, *, name: str) -> tuple[NDArray[np.float32] | Bytes, NDArray[np.int64]]:
    """An .npz with `images` (uint8, or floats in [0, 1]; [N, H, W] or [N, C, H, W]) and integer `labels` [N]."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_NPZ_BYTES:
            raise DataError(f"{name}: unpacks to {size} bytes; expected at most {MAX_NPZ_BYTES}")
        with np.load(io.BytesIO(raw), allow_pickle=False) as arrays:
            if missing := {"images", "labels"} - set(arrays):
                raise DataError(f"{name}: has no array {min(missing)!r}; expected 'images' and 'labels'")
            images, labels = arrays["images"], arrays["labels"]
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError, zipfile.LargeZipFile):
        raise DataError(f"{name}: not a readable .npz file without pickled objects") from None
    if images.ndim == 3:
        images = images[:, None]
    if images.ndim != 4 or not (images.dtype == np.uint8 or np.issubdtype(images.dtype, np.floating)):
        got = f"{images.dtype} {images.shape}"
        raise DataError(f"{name}: images are {got}; expected uint8 or floats, [N, H, W] or [N, C, H, W]")
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{name}: labels are {labels.dtype} {labels.shape}; expected integers [{len(images)}]")
    if images.dtype != np.uint8:
        images = images.astype(np.float32)
    return images, labels.astype(np.int64)

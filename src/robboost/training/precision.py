"""Fast arithmetic while training, full float32 while measuring; the process's settings are put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["fast_training", "full_float32"]


@contextmanager
def fast_training() -> Iterator[None]:
    """TF32 in products and convolutions (a training loss is no bound), and algorithms that repeat their results."""
    with _settings(tf32=True):
        yield


@contextmanager
def full_float32() -> Iterator[None]:
    """No TF32 anywhere: TF32 has been seen to turn bounds wrong."""
    with _settings(tf32=False):
        yield


@contextmanager
def _settings(*, tf32: bool) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul

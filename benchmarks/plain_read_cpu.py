"""A compiled CPU loop that reads everything once: the ceiling that a memory-bound pass is held against."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np


@numba.njit(nogil=True)
def _read(words: Any) -> Any:
    total = np.int32(0)
    for i in range(words.shape[0]):
        total ^= words[i]
    return total


def read(words: np.ndarray, threads: int = 1) -> int:
    """Exclusive or of all words [int32], each read once."""
    if threads == 1:
        return int(_read(words))
    with ThreadPoolExecutor(threads) as pool:
        return int(np.bitwise_xor.reduce(list(pool.map(_read, np.array_split(words, threads)))))

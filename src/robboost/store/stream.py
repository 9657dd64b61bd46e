"""The columns of a store as the solver's pass wants them: all members of a few pairs at a time, read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from robboost.distributed import ALONE, Processes
from robboost.errors import InputError
from robboost.observability import span
from robboost.store.bound_store import BoundStore
from robboost.store.disk import Array

__all__ = ["StoredColumns"]

_SLAB_BYTES = 32 * 2**20


@dataclass(frozen=True)
class _Slab:
    """Pairs of one shard that are read together: `pairs` of the problem, from piece `first` of the shard."""

    pairs: slice
    shard: int
    first: int


@dataclass(frozen=True, eq=False)
class StoredColumns:
    """Columns [T, n, d] of a complete store, never in memory as a whole.

    Attributes:
        store: a complete store.
        processes: under several processes each streams its own stretch of the pairs.
        slab_bytes: bytes of one slab; `ahead` + 1 of them are held.
        ahead: slabs that are read while one is computed on.
        threads: reads under way at a time.
    """

    store: BoundStore
    processes: Processes = ALONE
    slab_bytes: int = _SLAB_BYTES
    ahead: int = 2
    threads: int = 2
    _slabs: tuple[_Slab, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("slab_bytes", "ahead", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: expected at least 1")
        self.store.require_complete()
        whole = _slabs(self.store, self.slab_bytes)
        share = whole[self.processes.part(len(whole))]
        object.__setattr__(self, "_slabs", tuple(share))

    @property
    def pairs(self) -> slice:
        """The stretch of the store's pairs that this process streams."""
        return slice(self._slabs[0].pairs.start, self._slabs[-1].pairs.stop) if self._slabs else slice(0, 0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """[T, n, d], n of this process."""
        return len(self.store.identity.members), self.pairs.stop - self.pairs.start, self.store.identity.dim

    @property
    def dtype(self) -> torch.dtype:
        """Type of the slabs: that of storage, float32 for int8."""
        name = self.store.identity.storage
        kind: torch.dtype = getattr(torch, "float32" if name == "int8" else name)
        return kind

    @property
    def nbytes(self) -> int:
        """Bytes that one pass reads."""
        members, n, d = self.shape
        return members * n * d * self.store.disk.dtype.itemsize

    def slabs(self) -> Iterator[tuple[slice, Tensor]]:
        """Runs over the pairs in order: a slice of this process's pairs, and their columns [T, m, d].

        The next slabs are read meanwhile. A slab is valid until the next one is asked for: its memory is used again.
        """
        members, _, d = self.shape
        if not self._slabs:
            return
        longest = max(s.pairs.stop - s.pairs.start for s in self._slabs)
        kind = np.float32 if self.store.identity.storage == "int8" else self.store.disk.dtype
        free: deque[Array] = deque(np.empty((members, longest, d), kind) for _ in range(self.ahead + 1))
        waiting: deque[tuple[_Slab, Array, list[Future[None]]]] = deque()
        offset = self.pairs.start
        with ThreadPoolExecutor(self.threads, thread_name_prefix="robboost-read") as pool:
            todo = iter(self._slabs)
            try:
                while True:
                    while free and (slab := next(todo, None)) is not None:
                        buffer = free.popleft()
                        jobs = [pool.submit(self._read, slab, t, buffer[t]) for t in range(members)]
                        waiting.append((slab, buffer, jobs))
                    if not waiting:
                        return
                    slab, buffer, jobs = waiting.popleft()
                    with span("waiting for the disk"):
                        for job in jobs:
                            job.result()
                    count = slab.pairs.stop - slab.pairs.start
                    part = slice(slab.pairs.start - offset, slab.pairs.stop - offset)
                    yield part, torch.from_numpy(buffer)[:, :count]
                    free.append(buffer)
            finally:
                for _, _, jobs in waiting:
                    for job in jobs:
                        job.cancel()

    def load(self) -> Tensor:
        """All columns in memory, [T, n, d]; for problems that fit."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        for part, columns in self.slabs():
            whole[:, part] = columns
        return whole

    def _read(self, slab: _Slab, member: int, out: Array) -> None:
        count = slab.pairs.stop - slab.pairs.start
        with span("reading (all threads)"):
            if self.store.identity.storage != "int8":
                self.store.disk.read_columns(member, slab.shard, slab.first, out[:count])
                return
            raw = np.empty((count, out.shape[1]), np.int8)
            self.store.disk.read_columns(member, slab.shard, slab.first, raw)
            scales = self.store.scales(member, slab.shard)
            start = slab.first * self.store.identity.chunk_pairs
            if scales is not None:
                np.multiply(raw, scales[start : start + count, None], out=out[:count], dtype=np.float32)


def _slabs(store: BoundStore, slab_bytes: int) -> list[_Slab]:
    identity = store.identity
    size = identity.chunk_pairs
    piece = len(identity.members) * size * identity.dim * store.disk.dtype.itemsize
    step = max(1, slab_bytes // piece)
    found: list[_Slab] = []
    begin = 0
    for shard, count in enumerate(store.counts()):
        for first in range(0, -(-count // size), step):
            low, high = first * size, min((first + step) * size, count)
            found.append(_Slab(slice(begin + low, begin + high), shard, first))
        begin += count
    return found

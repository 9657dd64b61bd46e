"""The columns of a store as the solver's pass wants them: all members of a few pairs at a time, read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robboost.distributed import ALONE, Processes
from robboost.errors import InputError
from robboost.observability import span
from robboost.store.bound_store import BoundStore
from robboost.store.disk import Array
from robboost.store.handles import OpenFiles

__all__ = ["StoredColumns"]

# Few enough that what was read is still in a cache when it is checked and used.
_SLAB_BYTES = 8 * 2**20
# Members whose files stay open while their shard is streamed: well below the usual limit of 1024 files a process.
_KEPT_OPEN = 100


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
        factors: positive number for each member that its columns are multiplied by while they are read, in float32 (or
            float64, if stored so): the inverse of its scale Z_t. Multiply the intercepts alike.
        members: the members that are read, by position; None: all.
        ahead: slabs that are read while one is computed on.
        threads: reads under way at a time.
    """

    store: BoundStore
    processes: Processes = ALONE
    slab_bytes: int = _SLAB_BYTES
    factors: tuple[float, ...] | None = None
    members: tuple[int, ...] | None = None
    ahead: int = 2
    threads: int = 3
    _slabs: tuple[_Slab, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("slab_bytes", "ahead", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: expected at least 1")
        members = len(self._members)
        if members == 0 or not set(self._members) <= set(range(len(self.store.identity.members))):
            raise InputError(f"members={self.members}: expected positions below {len(self.store.identity.members)}")
        if self.factors is not None and (len(self.factors) != members or not all(0 < f < inf for f in self.factors)):
            raise InputError(f"factors={self.factors}: expected {members} positive numbers, one for each member")
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
        return len(self._members), self.pairs.stop - self.pairs.start, self.store.identity.dim

    @property
    def dtype(self) -> torch.dtype:
        """Type of the slabs: that of storage, or float32 for int8 and where factors are applied."""
        name = self.store.identity.storage
        widened = name == "int8" or (self.factors is not None and name == "float16")
        kind: torch.dtype = getattr(torch, "float32" if widened else name)
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
        count, _, d = self.shape
        if not self._slabs:
            return
        longest = max(s.pairs.stop - s.pairs.start for s in self._slabs)
        free: deque[Array] = deque(np.empty((count, longest, d), self._kind) for _ in range(self.ahead + 1))
        waiting: deque[tuple[_Slab, Array, list[Future[None]]]] = deque()
        offset = self.pairs.start
        files: dict[int, OpenFiles] = {}
        with ThreadPoolExecutor(self.threads, thread_name_prefix="robboost-read") as pool:
            todo = iter(self._slabs)
            try:
                while True:
                    while free and (slab := next(todo, None)) is not None:
                        buffer = free.popleft()
                        kept = files.setdefault(slab.shard, OpenFiles()) if count <= _KEPT_OPEN else None
                        jobs = [pool.submit(self._read, slab, i, buffer[i], kept) for i in range(count)]
                        waiting.append((slab, buffer, jobs))
                    if not waiting:
                        return
                    slab, buffer, jobs = waiting.popleft()
                    for past in [shard for shard in files if shard < slab.shard]:
                        files.pop(past).close()
                    with span("waiting for the disk"):
                        for job in jobs:
                            job.result()
                    part = slice(slab.pairs.start - offset, slab.pairs.stop - offset)
                    yield part, torch.from_numpy(buffer)[:, : part.stop - part.start]
                    free.append(buffer)
            finally:
                for _, _, jobs in waiting:
                    for job in jobs:
                        job.cancel()
                pool.shutdown()
                for held in files.values():
                    held.close()

    def intercepts(self) -> Tensor:
        """Sound intercepts [T, n] of this process's pairs, float64, times the factors."""
        mine = self.store.intercepts()[list(self._members), self.pairs]
        return mine if self.factors is None else mine * torch.tensor(self.factors, dtype=torch.float64)[:, None]

    def load(self) -> Tensor:
        """All columns in memory, [T, n, d]; for problems that fit."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        for part, columns in self.slabs():
            whole[:, part] = columns
        return whole

    def take(self, pairs: Tensor) -> Tensor:
        """Columns [T, k, d] of a few of this process's pairs, ascending; for samples (their checksums are not read)."""
        wanted = pairs.numpy() + self.pairs.start
        members, _, d = self.shape
        found = np.empty((members, len(wanted), d), self._kind)
        starts = np.concatenate([[0], np.cumsum(self.store.counts())])
        shards = np.searchsorted(starts, wanted, side="right") - 1
        for shard in np.unique(shards):
            inside = np.flatnonzero(shards == shard)
            rows = wanted[inside] - starts[shard]
            raw = np.empty((len(rows), d), self.store.disk.dtype)
            for i, t in enumerate(self._members):
                self.store.disk.read_rows(t, int(shard), rows, raw)
                self._decode(i, int(shard), rows, raw, found[i, inside[0] : inside[-1] + 1])
        return torch.from_numpy(found)

    def spread(self, count: int) -> Tensor:
        """About `count` of this process's pairs in runs of one piece each, evenly from all over."""
        size = self.store.identity.chunk_pairs
        pieces = max(1, -(-self.shape[1] // size))
        chosen = np.unique(np.linspace(0, pieces - 1, max(1, count // size)).round().astype(np.int64))
        index = (chosen[:, None] * size + np.arange(min(size, max(1, count)))).reshape(-1)
        return torch.from_numpy(index[index < self.shape[1]])

    def take_members(self, members: Sequence[int]) -> StoredColumns:
        """The columns of some of these members alone; the others are not read."""
        factors = None if self.factors is None else tuple(self.factors[i] for i in members)
        return replace(self, members=tuple(self._members[i] for i in members), factors=factors)

    @property
    def _members(self) -> tuple[int, ...]:
        return tuple(range(len(self.store.identity.members))) if self.members is None else self.members

    @property
    def _kind(self) -> Any:
        return np.float32 if self.dtype == torch.float32 else self.store.disk.dtype

    def _read(self, slab: _Slab, place: int, out: Array, files: OpenFiles | None) -> None:
        count, member = slab.pairs.stop - slab.pairs.start, self._members[place]
        with span("reading (all threads)"):
            disk = self.store.disk
            if disk.dtype == out.dtype and self.factors is None:
                disk.read_columns(member, slab.shard, slab.first, out[:count], files=files)
                return
            raw = np.empty((count, out.shape[1]), disk.dtype)
            disk.read_columns(member, slab.shard, slab.first, raw, files=files)
            start = slab.first * self.store.identity.chunk_pairs
            self._decode(place, slab.shard, np.arange(start, start + count), raw, out[:count])

    def _decode(self, place: int, shard: int, rows: Array, raw: Array, out: Array) -> None:
        """Steps of int8 first, to the columns that the errors belong to; then the member's factor."""
        scales = self.store.scales(self._members[place], shard)
        if scales is None:
            out[:] = raw
        else:
            np.multiply(raw, scales[rows, None], out=out, dtype=np.float32)
        if self.factors is not None:
            np.multiply(out, out.dtype.type(self.factors[place]), out=out)


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

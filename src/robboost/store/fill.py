"""Computes what a store still lacks, shard by shard, within a memory budget, on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from robboost.bounds import margin_bounds
from robboost.distributed import ALONE, Processes
from robboost.errors import InputError, StoreError
from robboost.observability import event, span
from robboost.rounding import check_storage
from robboost.store.bound_store import BoundStore, Rounder
from robboost.store.identity import Identity, identify, like, with_layout
from robboost.store.screening import KEEP, Screening
from robboost.threat import Threat

__all__ = ["FillSettings", "Progress", "fill_store", "margin_columns"]

# Called with what is being done, steps done and steps in all.
Progress = Callable[[str, int, int], None]

_SHARD_BYTES = 64 * 2**20
_CHUNK_BYTES = 2**20
# Float64 temporaries per element of a batch: slope, column, its decoded twin, their difference and its size.
_TEMPORARY = 48


@dataclass(frozen=True)
class FillSettings:
    """How bounds are computed and stored.

    Attributes:
        method: of `margin_bounds`.
        precision: arithmetic of the bounds, "float32" or "float64".
        storage: "float32", "float16" (half the bytes), "int8" (a quarter) or "float64"; the error of every pair is kept
            and taken off its intercept, so that each is sound.
        memory: bytes for the shards being built and their temporaries; networks and their bounds come on top.
        screening: rule that leaves out pairs which cannot matter; None keeps all.
        shard_bytes: size of a file, at most.
    """

    method: str = "tightest"
    precision: str = "float32"
    storage: str = "float32"
    memory: int = 2**30
    screening: Screening | None = None
    shard_bytes: int = _SHARD_BYTES

    def __post_init__(self) -> None:
        check_storage(self.storage)
        if self.memory < 2**20:
            raise InputError(f"memory={self.memory}: expected bytes, at least {2**20} (1 MiB)")
        if self.shard_bytes < 1:
            raise InputError(f"shard_bytes={self.shard_bytes}: expected bytes, at least 1")


def fill_store(
    url: str,
    pool: Sequence[nn.Module],
    examples: tuple[Tensor, Tensor],
    threat: Threat,
    *,
    settings: FillSettings | None = None,
    progress: Progress | None = None,
    processes: Processes = ALONE,
) -> BoundStore:
    """Writes the bounds of every member on every example to a store, or what of them is missing.

    Interrupted or killed at any instant and run again with the same arguments, it continues; the result is bit-equal to
    an uninterrupted run on the same kind of machine. Without screening it works member by member, with screening shard
    by shard for all members together. Under several processes each takes its share of the shards.

    Args:
        url: a folder, or any URL that fsspec knows.
        pool: members in evaluation mode.
        examples: images [N, *input] and labels [N].
        threat: the set the bounds hold on.
        settings: see `FillSettings`.
        progress: told what is being done, pairs done, and pairs in all (of this process).
        processes: see `robboost.distributed`.
    """
    chosen = settings or FillSettings()
    x, y = examples
    identity = _planned(identify(pool, x, y, threat, method=chosen.method, precision=chosen.precision), chosen)
    if processes.rank == 0:
        store = BoundStore.prepare(url, identity)
        with store.writing():
            processes.barrier()
            _fill(store, pool, examples, threat, identity=identity, progress=progress, settings=chosen, processes=processes)
            processes.barrier()
    else:
        # The first process lays the store out and holds the lock for all.
        processes.barrier()
        store = BoundStore.prepare(url, identity)
        _fill(store, pool, examples, threat, identity=identity, progress=progress, settings=chosen, processes=processes)
        processes.barrier()
    store.require_complete()
    return store

"""Computes what a store still lacks, shard by shard, within a memory budget, on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robboost.bounds import Options, checked_examples, cross_check, margin_bounds
from robboost.distributed import ALONE, Processes
from robboost.errors import InputError, StoreError
from robboost.observability import event, resources, span
from robboost.rounding import check_storage
from robboost.store.bound_store import BoundStore, ShardBuffer
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
_BOUNDS_MEMORY = 2**30


@dataclass(frozen=True)
class FillSettings:
    """How bounds are computed and stored.

    Attributes:
        method: of `margin_bounds`; "a+b" takes the tighter of methods a and b for each pair.
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
    wanted = _planned(identify(pool, x, y, threat, method=chosen.method, precision=chosen.precision), chosen)
    with ExitStack() as held:
        if processes.rank == 0:
            # The first process lays the store out and holds the lock for all.
            store = BoundStore.prepare(url, wanted)
            held.enter_context(store.writing())
            processes.barrier()
        else:
            processes.barrier()
            store = BoundStore.prepare(url, wanted)
        job = _Job(store, pool, x, y, threat, chosen.screening)
        _run(job, wanted, progress, processes)
        processes.barrier()
    store.require_complete()
    event("store complete", {"store": store.url, "process": processes.rank, **resources().to_dict()})
    return store


def margin_columns(
    member: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    method: str,
    precision: str,
    checked: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Bounds of one member as the solver takes them: columns [N (C-1), d] and intercepts [N (C-1)], float64, on CPU.

    The threat set becomes the unit ball: margin >= intercept - ||column||_q, with column = radius * slope and intercept
    = c + <slope, centre - x> (the box is in both, for l_inf). Slopes and radii are multiplied in float64. The bounds of
    the examples at the positions `checked` are computed again in float64; PrecisionError tells of a disagreement.
    """
    images = like(member, x)
    # A fixed share of memory, not of what happens to be free: the bits must not depend on it.
    options = Options(memory=_BOUNDS_MEMORY)
    if "+" in method:
        method, options = "tightest", replace(options, parts=tuple(part.strip() for part in method.split("+")))
    with span("bounds"):
        found = margin_bounds(member, images, y.to(images.device), threat, method, precision=precision, options=options)  # type: ignore[arg-type]
        cross_check(member, found, images, y.to(images.device), threat, checked, options)
    with span("columns"):
        slope = found.slope.detach().flatten(2).to("cpu", torch.float64)
        intercept = found.intercept.detach().to("cpu", torch.float64)
        points = x.to("cpu", torch.float64)
        centre, radius = threat.region(points)
        shift = (centre - points).flatten(1)
        intercept = intercept + (slope @ shift.unsqueeze(2)).squeeze(2)
        columns = slope * (radius.flatten(1).unsqueeze(1) if threat.norm == "linf" else radius.view(-1, 1, 1))
    return columns.flatten(0, 1), intercept.flatten()


@dataclass(frozen=True)
class _Job:
    """What one process fills, and from what."""

    store: BoundStore
    pool: Sequence[nn.Module]
    x: Tensor
    y: Tensor
    threat: Threat
    screening: Screening | None

    def tasks(self) -> list[tuple[list[int], int]]:
        """(members, shard) in order: one member after the other, or all together where a screening judges them."""
        everyone = list(range(len(self.pool)))
        groups = [[t] for t in everyone] if self.screening is None else [everyone]
        return [(group, shard) for group in groups for shard in range(self.store.identity.n_shards)]


def _run(job: _Job, wanted: Identity, progress: Progress | None, processes: Processes) -> None:
    store, identity = job.store, job.store.identity
    mine = job.tasks()[processes.rank :: processes.size]
    complete = store.complete()
    todo = [any((t, shard) not in complete for t in members) for members, shard in mine]
    if any(todo):
        identity.require_same_versions(wanted, store.url)
    event("fill begun", {"store": store.url, "shards": len(mine), "missing": sum(todo), "process": processes.rank})
    buffers = [ShardBuffer(identity) for _ in mine[0][0]] if mine else []
    sizes = [len(members) * _length(store, shard) for members, shard in mine]
    done = 0
    for (members, shard), size, missing in zip(mine, sizes, todo, strict=True):
        if missing:
            _fill_shard(job, members, shard, buffers)
            event("shard written", {"members": members, "shard": shard, "pairs": buffers[0].count})
        done += size
        if progress is not None:
            progress(f"bounds ({identity.method})", done, sum(sizes))


def _fill_shard(job: _Job, members: list[int], shard: int, buffers: list[ShardBuffer]) -> None:
    identity = job.store.identity
    slots = job.store.disk.slots(shard)
    first, last = slots.start // identity.n_targets, slots.stop // identity.n_targets
    for buffer in buffers:
        buffer.clear()
    verdicts: list[Tensor] = []
    for start in range(first, last, identity.batch):
        part = slice(start, min(start + identity.batch, last))
        columns, intercepts = _batch(job, members, part)
        kept = torch.ones(columns.shape[1], dtype=torch.bool)
        if job.screening is not None:
            with span("screening"):
                verdicts.append(job.screening.judge(columns, intercepts))
            kept = verdicts[-1] == KEEP
        with span("rounding"):
            for i, buffer in enumerate(buffers):
                buffer.add(columns[i, kept], intercepts[i, kept])
    with span("writing"):
        if job.screening is not None:
            job.store.disk.write("verdicts", 0, shard, torch.cat(verdicts).to(torch.int8).numpy())
        for t, buffer in zip(members, buffers, strict=True):
            job.store.write(t, shard, buffer)


def _batch(job: _Job, members: list[int], part: slice) -> tuple[Tensor, Tensor]:
    """Columns [T, k, d] and intercepts [T, k] of a few examples."""
    identity = job.store.identity
    checked = checked_examples(part.start, part.stop - part.start, identity.n_examples)
    chosen: dict[str, Any] = {"method": identity.method, "precision": identity.precision, "checked": checked}
    found = [margin_columns(job.pool[t], job.x[part], job.y[part], job.threat, **chosen) for t in members]
    columns, intercepts = (torch.stack(list(parts)) for parts in zip(*found, strict=True))
    good = torch.isfinite(columns).all(2) & torch.isfinite(intercepts)
    if not bool(good.all()):
        i, pair = (int(v) for v in (~good).nonzero()[0])
        example, target = part.start + pair // identity.n_targets, pair % identity.n_targets
        raise StoreError(
            f"{job.store.url}: the bound of member {members[i]} on example {example}, target {target}, is not a finite"
            " number; leave this member out of the pool"
        )
    return columns, intercepts


def _length(store: BoundStore, shard: int) -> int:
    slots = store.disk.slots(shard)
    return slots.stop - slots.start


def _planned(identity: Identity, settings: FillSettings) -> Identity:
    """Sizes of shard, piece and batch: pieces of about a megabyte, files of at most 64, within the memory budget."""
    members = 1 if settings.screening is None else len(identity.members)
    item = np.dtype(settings.storage).itemsize
    targets, d = identity.n_targets, identity.dim
    # One copy is collected, and one more is encoded while it is written.
    budget = min(settings.shard_bytes, settings.memory // (4 * members))
    piece, example = min(_CHUNK_BYTES, max(1, budget // 4)), targets * d * item
    if example <= piece:
        chunk = targets * min(piece // example, identity.n_examples)
    else:
        chunk = max(k for k in range(1, targets + 1) if targets % k == 0 and (k == 1 or k * d * item <= piece))
    unit = math.lcm(chunk, targets)
    shard = unit * max(1, budget // (unit * d * item))
    shard = min(shard, unit * -(-identity.n_slots // unit))
    batch = max(1, min(256, settings.memory // (2 * members * targets * d * _TEMPORARY)))
    screening = "none" if settings.screening is None else settings.screening.name
    return with_layout(identity, storage=settings.storage, screening=screening, batch=batch, shard=shard, chunk=chunk)

"""The bound store: certified margins of many members, examples and targets on disk, as the solver reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robboost.errors import StoreError
from robboost.rounding import decode_columns, round_columns
from robboost.store.disk import Array, Disk, create_disk, open_disk
from robboost.store.identity import Identity
from robboost.store.lock import break_lock, writer_lock
from robboost.store.screening import CERTIFIED, HOPELESS, KEEP

__all__ = ["BoundStore", "Damage", "Pairs", "ShardBuffer"]


@dataclass(frozen=True)
class Pairs:
    """Which (example, target) each stored pair is, and what became of the others.

    Attributes:
        examples, targets: [n] int64. Targets number the other classes in class order, the true one skipped.
        certified: [m, 2] int64, pairs (example, target) left out because every mix certifies them.
        hopeless: [m, 2] int64, pairs left out because no mix certifies them.
    """

    examples: Tensor
    targets: Tensor
    certified: Tensor
    hopeless: Tensor


@dataclass(frozen=True)
class Damage:
    """A shard that cannot be read, and why."""

    member: int
    shard: int
    reason: str


class BoundStore:
    """Margins of T members on n pairs as linear functions of the attacker's move, on disk.

    Member t certifies `intercepts[t, n] - ||columns[t, n]||_q` on pair n, for the threat that the identity names: the
    columns are radius times slope, with the box already in radius and intercept. So `solve_weights` takes them with
    radius 1. What the rounding to the storage type can cost is taken off the intercepts.
    """

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    @classmethod
    def open(cls, url: str) -> BoundStore:
        """An existing store, for whatever its manifest says it holds."""
        disk = open_disk(url)
        if disk is None:
            raise StoreError(f"{url}: no bound store here; write one with `robboost bounds`")
        return cls(disk)

    @classmethod
    def prepare(cls, url: str, identity: Identity) -> BoundStore:
        """The store of exactly these bounds: a new one, or the one that is there if it is of the same."""
        disk = open_disk(url)
        if disk is None:
            return cls(create_disk(url, identity))
        disk.identity.require(identity, url)
        return cls(disk)

    @property
    def url(self) -> str:
        return self.disk.url

    @property
    def identity(self) -> Identity:
        return self.disk.identity

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the store for writing; a second writer is refused with the name of the first."""
        with writer_lock(self.disk):
            yield

    def break_lock(self) -> None:
        """Removes the lock that a killed writer left in an object store."""
        break_lock(self.disk)

    def complete(self) -> set[tuple[int, int]]:
        """(member, shard) of everything that is there."""
        return self.disk.complete()

    def missing(self) -> list[tuple[int, int]]:
        """(member, shard) of everything that is still to be computed."""
        identity = self.identity
        complete = self.complete()
        everything = ((t, s) for t in range(len(identity.members)) for s in range(identity.n_shards))
        return [piece for piece in everything if piece not in complete]

    def require_complete(self) -> None:
        """Refuses a store that a fill has not finished."""
        missing = self.missing()
        if missing:
            total = len(self.identity.members) * self.identity.n_shards
            member, shard = missing[0]
            raise StoreError(
                f"{self.url}: {len(missing)} of {total} shards are missing (first: member {member}, shard {shard});"
                " run `robboost bounds` again to compute them"
            )

    def to_dict(self) -> dict[str, Any]:
        """What the store holds, as plain numbers and text."""
        identity = self.identity
        pairs = self.pairs()
        return {
            "store": self.url,
            "members": list(identity.members),
            "data": identity.data,
            "threat": identity.threat,
            "method": identity.method,
            "precision": identity.precision,
            "storage": identity.storage,
            "screening": identity.screening,
            "examples": identity.n_examples,
            "targets": identity.n_targets,
            "pairs": len(pairs.examples),
            "certified_by_all": len(pairs.certified),
            "hopeless": len(pairs.hopeless),
            "bytes": self._bytes(len(pairs.examples)),
            "largest_error": float(self.errors().max()) if len(pairs.examples) else 0.0,
            "missing": len(self.missing()),
            "versions": identity.versions,
        }

    def __str__(self) -> str:
        values = self.to_dict()
        screened = values["certified_by_all"] + values["hopeless"]
        left_out = f", {screened} left out" if screened else ""
        lines = [
            f"store         {self.url}",
            f"bounds        {values['method']}, {values['precision']}, of {len(values['members'])} members",
            f"pairs         {values['pairs']} ({values['examples']} images, {values['targets']} targets{left_out})",
            f"on disk       {values['bytes'] / 1e6:.1f} MB as {values['storage']}; rounding costs a margin at most"
            f" {values['largest_error']:.2g}",
        ]
        return "\n".join(lines)

    def write(self, member: int, shard: int, block: ShardBuffer) -> None:
        """Writes one shard of one member: first what belongs to the columns, then they."""
        # A shard without pairs still leaves its files.
        count = max(1, block.count)
        self.disk.write("intercepts", member, shard, block.intercepts[:count])
        self.disk.write("errors", member, shard, block.errors[:count])
        if block.scales is not None:
            self.disk.write("scales", member, shard, block.scales[:count])
        self.disk.write("slopes", member, shard, block.values[:count])

    def pairs(self) -> Pairs:
        """The pairs in the order of the solver."""
        found = [self._verdicts(shard) for shard in range(self.identity.n_shards)]
        verdicts = torch.from_numpy(np.concatenate(found))

        def where(verdict: int) -> Tensor:
            slots = (verdicts == verdict).nonzero()[:, 0]
            return torch.stack((slots // self.identity.n_targets, slots % self.identity.n_targets), 1)

        kept = where(KEEP)
        return Pairs(kept[:, 0], kept[:, 1], certified=where(CERTIFIED), hopeless=where(HOPELESS))

    def counts(self) -> list[int]:
        """Stored pairs of each shard."""
        if self.identity.screening == "none":
            slots = [self.disk.slots(shard) for shard in range(self.identity.n_shards)]
            return [part.stop - part.start for part in slots]
        return [int((self._verdicts(shard) == KEEP).sum()) for shard in range(self.identity.n_shards)]

    def intercepts(self) -> Tensor:
        """Sound intercepts [T, n], float64: those of the bounds less the rounding error of the columns."""
        return self._small("intercepts") - self._small("errors")

    def errors(self) -> Tensor:
        """What storage can cost each pair at most, [T, n] float64."""
        return self._small("errors")

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
        """Reads every byte and checks every checksum; names the shards that are damaged or missing."""
        found: list[Damage] = []
        identity = self.identity
        total = len(identity.members) * identity.n_shards
        for shard in range(identity.n_shards):
            for member in range(len(identity.members)):
                try:
                    self.read(member, shard)
                except StoreError as error:
                    found.append(Damage(member, shard, str(error)))
                if progress is not None:
                    progress(shard * len(identity.members) + member + 1, total)
        return found

    def repair(self) -> list[Damage]:
        """Removes every damaged shard, so that the next fill computes it anew; returns what was damaged."""
        with self.writing():
            damaged = self.verify()
            # In a screened store the shards of all members were chosen together.
            members = range(len(self.identity.members))
            for item in damaged:
                for member in [item.member] if self.identity.screening == "none" else members:
                    self.disk.delete(member, item.shard)
        return damaged

    def read(self, member: int, shard: int) -> tuple[Tensor, Tensor]:
        """Columns [k, d] and sound intercepts [k] of one shard, decoded."""
        count = self._count(shard)
        values = np.empty((max(1, count), self.identity.dim), self.disk.dtype)
        self.disk.read_columns(member, shard, 0, values)
        scales = None
        if self.identity.storage == "int8":
            scales = torch.from_numpy(self.disk.read_small("scales", member, shard)[:count])
        intercepts = self.disk.read_small("intercepts", member, shard) - self.disk.read_small("errors", member, shard)
        return decode_columns(torch.from_numpy(values[:count]), scales), torch.from_numpy(intercepts[:count])

    def scales(self, member: int, shard: int) -> Array | None:
        """Steps of an int8 shard [k], None for other types."""
        if self.identity.storage != "int8":
            return None
        return self.disk.read_small("scales", member, shard)[: self._count(shard)]

    def _bytes(self, pairs: int) -> int:
        """Size of the columns and intercepts of so many pairs."""
        small = 16 + 4 * (self.identity.storage == "int8")
        return len(self.identity.members) * pairs * (self.identity.dim * self.disk.dtype.itemsize + small)

    def _count(self, shard: int) -> int:
        return int((self._verdicts(shard) == KEEP).sum())

    def _verdicts(self, shard: int) -> Array:
        if self.identity.screening != "none":
            return self.disk.read_small("verdicts", 0, shard)
        part = self.disk.slots(shard)
        return np.full(part.stop - part.start, KEEP, np.int8)

    def _small(self, name: str) -> Tensor:
        counts = self.counts()
        rows = [
            np.concatenate([self.disk.read_small(name, t, s)[:k] for s, k in enumerate(counts)])
            for t in range(len(self.identity.members))
        ]
        return torch.from_numpy(np.stack(rows))


class ShardBuffer:
    """Collects the pairs of one shard of one member in the type of storage."""

    def __init__(self, identity: Identity) -> None:
        size = identity.shard_pairs
        self._identity = identity
        self.values: Array = np.zeros((size, identity.dim), identity.storage)
        self.intercepts: Array = np.zeros(size)
        self.errors: Array = np.zeros(size)
        self.scales: Array | None = np.zeros(size, np.float32) if identity.storage == "int8" else None
        self.count = 0

    def clear(self) -> None:
        """Forgets what was collected; what lies past `count` is written as zeros, so that the bits do not vary."""
        for array in (self.values, self.intercepts, self.errors, self.scales):
            if array is not None:
                array[:] = 0
        self.count = 0

    def add(self, columns: Tensor, intercepts: Tensor) -> None:
        """Rounds columns [k, d] with intercepts [k], both float64, and appends them."""
        rounded = round_columns(columns, self._identity.storage, norm=self._identity.threat["norm"])
        part = slice(self.count, self.count + len(columns))
        self.values[part] = rounded.values.numpy()
        self.intercepts[part] = intercepts.numpy()
        self.errors[part] = rounded.errors.numpy()
        if self.scales is not None and rounded.scales is not None:
            self.scales[part] = rounded.scales.numpy()
        self.count = part.stop

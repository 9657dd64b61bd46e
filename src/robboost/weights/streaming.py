"""Problems whose slopes are not in memory, or not in one process: read slab by slab, each process its own pairs.

The solvers see the same values as in memory: norms and minorants of all pairs, on every process. Those are T + 1
numbers a pair; the T * d numbers of its slopes stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from robboost.distributed import ALONE, Processes
from robboost.errors import InputError
from robboost.weights.problem import Array, WeightProblem, weight_problem

__all__ = ["HeldSlopes", "SlopeStream", "SomePairs", "StreamedProblem", "streamed_problem"]

# Bytes of the even part of the pairs that a solver may hold to find its starting point.
_SAMPLE_BYTES = 64 * 2**20


class SlopeStream(Protocol):
    """Slopes [T, n, d] of this process's pairs that can be run over any number of times, in the same order."""

    @property
    def shape(self) -> tuple[int, int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def slabs(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Every pair once: a slice, and its slopes [T, m, d], valid until the next."""
        ...

    def take(self, pairs: torch.Tensor) -> torch.Tensor:
        """Slopes [T, k, d] of a few pairs, given by index."""
        ...

    def spread(self, count: int) -> torch.Tensor:
        """About `count` pairs from all over, by index, that are cheap to take together."""
        ...

    def take_members(self, members: Sequence[int]) -> SlopeStream:
        """The stream of a part of the pool."""
        ...


@dataclass(frozen=True, eq=False)
class HeldSlopes:
    """The part of one process as a stream: slopes [T, n, d] in memory."""

    held: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        members, pairs, dim = self.held.shape
        return members, pairs, dim

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    def slabs(self) -> Iterator[tuple[slice, torch.Tensor]]:
        if self.held.shape[1]:
            yield slice(0, self.held.shape[1]), self.held

    def take(self, pairs: torch.Tensor) -> torch.Tensor:
        return self.held.index_select(1, pairs.to(self.held.device))

    def spread(self, count: int) -> torch.Tensor:
        return torch.arange(0, self.held.shape[1], max(1, self.held.shape[1] // max(1, count)))

    def take_members(self, members: Sequence[int]) -> HeldSlopes:
        return HeldSlopes(self.held[list(members)])


@dataclass(frozen=True, eq=False)
class SomePairs:
    """The part of a stream where `kept` [n] says so. All of it is read; what is left out costs reading only."""

    stream: SlopeStream
    kept: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        members, _, dim = self.stream.shape
        return members, int(self.kept.sum()), dim

    @property
    def dtype(self) -> torch.dtype:
        return self.stream.dtype

    def slabs(self) -> Iterator[tuple[slice, torch.Tensor]]:
        position = 0
        for part, slopes in self.stream.slabs():
            inside = slopes[:, self.kept[part]]
            if inside.shape[1]:
                yield slice(position, position + inside.shape[1]), inside
            position += inside.shape[1]

    def take(self, pairs: torch.Tensor) -> torch.Tensor:
        return self.stream.take(self.kept.nonzero()[:, 0][pairs])

    def spread(self, count: int) -> torch.Tensor:
        share = int(self.kept.sum()) / max(1, self.kept.numel())
        chosen = self.stream.spread(int(count / share) if share else 0)
        return (self.kept.cumsum(0) - 1)[chosen[self.kept[chosen]]]

    def take_members(self, members: Sequence[int]) -> SomePairs:
        return SomePairs(self.stream.take_members(members), self.kept)


@dataclass(frozen=True, eq=False)
class StreamedProblem(WeightProblem):
    """A problem of all processes' pairs, the first process's first.

    `slopes` is a shape without data (a meta tensor [T, n, d]); `intercepts` [T, n] of all pairs are held by every
    process. Results are the same bits on every process. Norms and minorants are also those of one process, bit for bit,
    as long as the kernel treats pairs on their own; sums over pairs differ by float64 rounding.

    Attributes:
        stream: the slopes of this process.
        processes: the processes that share the pairs.
        first: position of this process's first pair among all.
    """

    stream: SlopeStream = field(kw_only=True)
    processes: Processes = field(default=ALONE, kw_only=True)
    first: int = field(default=0, kw_only=True)

    @property
    def own_pairs(self) -> int:
        return self.stream.shape[1]

    @property
    def device(self) -> torch.device:
        return self.intercepts.device

    def runs(self, step: int) -> Iterator[tuple[slice, WeightProblem]]:
        """This process's pairs in memory, at most `step` at a time; slices count the pairs of all processes."""
        for part, slopes in self.stream.slabs():
            slab = self._held(slopes, slice(self.first + part.start, self.first + part.stop))
            for inner, run in slab.runs(step):
                start = self.first + part.start
                yield slice(start + inner.start, start + inner.stop), run

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        for part, run in self.runs(self.n_pairs):
            for inner, columns in run.chunks():
                yield slice(part.start + inner.start, part.start + inner.stop), columns

    def columns(self, part: slice) -> torch.Tensor:
        return self.take_pairs(torch.arange(self.n_pairs)[part]).columns(slice(None))

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        return self.processes.gather(rows)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return self.processes.sum(values)

    def take_pairs(self, pairs: torch.Tensor) -> WeightProblem:
        """The problem of a few pairs, in memory, on every process, ordered by position."""
        index = pairs.nonzero()[:, 0] if pairs.dtype == torch.bool else pairs
        index = index.cpu().sort().values
        mine = index[(index >= self.first) & (index < self.first + self.stream.shape[1])]
        slopes = self.stream.take(mine - self.first)
        if self.processes.size > 1:
            slopes = self.whole(slopes.permute(1, 0, 2).contiguous().to(self.device)).permute(1, 0, 2)
        return self._held(slopes, index)

    def only(self, kept: torch.Tensor) -> StreamedProblem:
        """The problem of the pairs where `kept` [n] is true. Nothing is loaded: the others are read and left out."""
        local = kept[self.first : self.first + self.stream.shape[1]].cpu()
        return replace(
            self,
            slopes=self.slopes[:, : int(kept.sum())],
            intercepts=self.intercepts[:, kept],
            radius=self.radius[kept] if self.radius.ndim == 2 else self.radius,
            stream=SomePairs(self.stream, local),
            first=int(kept[: self.first].sum()),
        )

    def every(self, step: int) -> WeightProblem:
        """The problem of about one pair in `step`, in memory and never larger than 64 MiB: pieces from all over."""
        per_pair = self.n_members * self.dim * self.slopes.element_size()
        count = min(self.n_pairs // step, _SAMPLE_BYTES // per_pair)
        share = -(-count * self.stream.shape[1] // self.n_pairs)
        mine = self.stream.spread(share) + self.first if share else torch.zeros(0, dtype=torch.int64)
        return self.take_pairs(self.whole(mine))

    def take_members(self, members: Sequence[int]) -> StreamedProblem:
        """The problem of a part of the pool; the slopes of the others are not read."""
        chosen = list(members)
        return replace(
            self,
            slopes=self.slopes[chosen],
            intercepts=self.intercepts[chosen],
            stream=self.stream.take_members(chosen),
        )

    def run(self, part: slice) -> WeightProblem:
        raise InputError(f"{part} of a streamed problem: expected `runs`, which visits it in order")

    def _held(self, slopes: torch.Tensor, pairs: slice | torch.Tensor) -> WeightProblem:
        radius = self.radius[pairs] if self.radius.ndim == 2 else self.radius
        return WeightProblem(
            slopes.to(self.device), self.intercepts[:, pairs], radius.to(self.device), self.kappa, self.norm
        )


def streamed_problem(
    stream: SlopeStream,
    intercepts: Array,
    radius: Array | float = 1.0,
    *,
    kappa: float = 1.0,
    norm: str = "linf",
    processes: Processes = ALONE,
) -> StreamedProblem:
    """Checks and wraps a stream like `weight_problem` does arrays; solve it with `solve`.

    Args:
        stream: slopes [T, n, d] of this process's pairs.
        intercepts: [T, n] of the same pairs.
        radius: scalar or [d]; 1 where the stream holds radius * slope, as a bound store does.
        kappa: margin from which on a pair costs nothing.
        norm: norm of the threat.
        processes: under several processes all call this together, each with its pairs.

    `method="coordinate"` needs the slopes in memory and is refused.
    """
    members, pairs, dim = stream.shape
    # The checks of arrays, on one pair in place of all: what the stream holds is first seen by the first pass.
    model = weight_problem(
        torch.zeros(members, 1, dim, dtype=stream.dtype),
        torch.zeros(members, 1),
        radius,
        kappa=kappa,
        norm=norm,
    )
    mine = torch.as_tensor(intercepts, dtype=torch.float64)
    if mine.shape != (members, pairs):
        raise InputError(
            f"intercepts have shape {tuple(mine.shape)}: expected [members, pairs] = {(members, pairs)}, as the stream"
        )
    if not bool(torch.isfinite(mine).all()):
        raise InputError("intercepts hold NaN or infinity: expected finite numbers")
    every = processes.gather(mine.T.contiguous()).T.contiguous()
    counts = processes.gather(torch.tensor([pairs], device=mine.device))
    if every.shape[1] == 0:
        raise InputError("the stream holds no pair: expected at least one (did screening settle all of them?)")
    return StreamedProblem(
        slopes=torch.empty(members, every.shape[1], dim, dtype=stream.dtype, device="meta"),
        intercepts=every,
        radius=model.radius,
        kappa=model.kappa,
        norm=model.norm,
        stream=stream,
        processes=processes,
        first=int(counts[: processes.rank].sum()),
    )

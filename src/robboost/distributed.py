"""Several processes as one job: shares of the examples, and sums and rows put together again.

Start a script or command with `torchrun`; without it everything here is a single process and costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from robboost.devices import usable_device
from robboost.errors import DistributedError, InputError

__all__ = ["ALONE", "Processes", "joined", "shared_examples"]

Result = TypeVar("Result")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Processes:
    """This process among `size` equal ones.

    Attributes:
        rank: number of this process, from 0.
        size: how many there are.
        device: where this process computes: its own GPU, or the CPU.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    def part(self, count: int, *, multiple: int = 1) -> slice:
        """This process's stretch of `count` items in order, cut at multiples of `multiple`; together they cover all."""
        if multiple < 1:
            raise InputError(f"multiple={multiple}: expected at least 1")
        units = -(-count // multiple)
        first, last = (units * r // self.size * multiple for r in (self.rank, self.rank + 1))
        return slice(min(first, count), min(last, count))

    def barrier(self) -> None:
        """Waits for all processes."""
        if self.size > 1:
            # A sum of nothing: unlike dist.barrier it needs no device to be named for NCCL.
            self.sum(torch.zeros(1, dtype=torch.float64))

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all processes, the same bits on each. Its order differs from one process's sum by float rounding."""
        if self.size == 1:
            return values
        total = values.detach().clone()
        self._collective(lambda: dist.all_reduce(total), "a sum")
        return total

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes, in the order of the processes, on each; exact. Each may have its own number."""
        if self.size == 1:
            return rows
        counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(self.size)]
        mine = torch.tensor([len(rows)], dtype=torch.int64, device=rows.device)
        self._collective(lambda: dist.all_gather(counts, mine), "row counts")
        longest = max(int(c) for c in counts)
        # Collectives know no booleans, and want equal shapes.
        sent = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
        padded = sent.new_zeros((longest, *rows.shape[1:]))
        padded[: len(rows)] = sent.detach()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._collective(lambda: dist.all_gather(parts, padded), "rows")
        return torch.cat([p[: int(c)] for p, c in zip(parts, counts, strict=True)]).to(rows.dtype)

    def _collective(self, call: Callable[[], object], what: str) -> None:
        try:
            call()
        except RuntimeError as error:
            reason = (str(error).splitlines() or [""])[0]
            raise DistributedError(
                f"process {self.rank} of {self.size}: another process ended or is out of reach (while exchanging"
                f" {what}: {reason[:120]}); finished shards are kept, so run the same command again"
            ) from None


ALONE = Processes()


@contextmanager
def joined(*, timeout: float = 1800.0, device: str = "cpu") -> Iterator[Processes]:
    """The processes that `torchrun` started, or a single one without it.

    gloo carries CPU tensors and NCCL GPU ones. A process that dies ends the job: the others' next exchange fails with a
    `DistributedError`, at the latest after `timeout` seconds.

    Args:
        timeout: seconds that an exchange may take.
        device: where a single process computes: "cpu", "cuda", ..., or "auto" for a GPU if there is one. Several
            processes take one GPU each where there are GPUs, whatever is asked here.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield replace(ALONE, device=usable_device(device))
        return
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    gpu = torch.cuda.is_available()
    own = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        # Half of a job on GPUs and half on CPUs could not agree on how to talk, nor on the last bit of a bound.
        if local >= (count := torch.cuda.device_count()):
            raise DistributedError(
                f"process {rank} of {size} is number {local} (from 0) on a machine with {count} GPUs:"
                " expected at most one process a GPU, so start fewer (--nproc-per-node), or hide the GPUs"
                " (CUDA_VISIBLE_DEVICES=) to compute on CPUs"
            )
        torch.cuda.set_device(own)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DistributedError(
            f"process {rank} of {size} cannot join: {reason[:160]}; start it with torchrun"
        ) from None
    yield Processes(rank, size, own)
    # Not in a finally: after a failure the others are gone, and taking leave of them would wait for the timeout.
    dist.destroy_process_group()


def shared_examples(
    processes: Processes,
    examples: tuple[Tensor, Tensor],
    compute: Callable[[Tensor, Tensor], Result],
    *,
    multiple: int = 1,
) -> Result:
    """`compute(x, y)` with the examples shared out, the result put together on every process.

    `compute` returns a dataclass whose tensors have one row per example: rows are gathered, whole numbers summed, and
    everything else must agree between the processes. Rows do not depend on the number of processes as long as
    `compute` treats batches of `multiple` examples on their own; otherwise by the float rounding of batch sizes.
    """
    x, y = examples
    if -(-len(x) // multiple) < processes.size:
        raise InputError(
            f"{len(x)} examples in batches of {multiple} for {processes.size} processes: expected at least one batch"
            " for each, so take fewer processes or smaller batches"
        )
    part = processes.part(len(x), multiple=multiple)
    found = compute(x[part], y[part])
    if processes.size == 1:
        return found
    if not is_dataclass(found) or isinstance(found, type):
        raise InputError(f"compute returned a {type(found).__name__}: expected a dataclass of rows")
    rows = part.stop - part.start
    values: dict[str, Any] = {}
    for item in fields(found):
        if not item.init:
            continue
        value = getattr(found, item.name)
        if isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows:
            values[item.name] = processes.gather(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            values[item.name] = int(processes.sum(torch.tensor([value], dtype=torch.int64)))
    return replace(found, **values)

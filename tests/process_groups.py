"""Several real processes joined by gloo, forked from the test so that they start at once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from typing import Any

import torch

from robboost.distributed import Processes, joined


def run_processes(size: int, work: Callable[[Processes], Any], *, timeout: float = 60.0) -> list[Any]:
    """`work(processes)` on each of `size` processes; the results by rank, an exception in place of its result.

    A process that dies without a word leaves None.
    """

    def join() -> Any:
        with joined(timeout=20) as processes:
            # One that is done at once would leave before the others have found it.
            torch.distributed.barrier()
            return work(processes)

    return run_ranks(size, join, timeout=timeout)


def run_ranks(size: int, work: Callable[[], Any], *, timeout: float = 60.0) -> list[Any]:
    """The same without joining: the processes find what torchrun would have told them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    children = [context.Process(target=_child, args=(r, size, port, work, pipes[r][1])) for r in range(size)]
    for child in children:
        child.start()
    for _, writer in pipes:
        writer.close()
    results = []
    for reader, _ in pipes:
        try:
            results.append(pickle.loads(reader.recv_bytes()) if reader.poll(timeout) else None)
        except EOFError:
            results.append(None)
    for child in children:
        child.join(5)
        if child.is_alive():
            child.kill()
    return results


def _child(rank: int, size: int, port: int, work: Callable[[], Any], writer: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    # Pickled by hand, tensors by value: a pipe would share their memory, which ends with this process.
    try:
        found = pickle.dumps(work())
    except Exception as error:
        found = pickle.dumps(error)
    writer.send_bytes(found)

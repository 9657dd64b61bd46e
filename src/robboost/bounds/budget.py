"""How much of a job is in memory at once: examples a chunk, and rows a backward pass."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from robboost.bounds.network import Network
from robboost.errors import InputError

__all__ = ["Budget", "free_bytes"]

# A share of what is free, so that several processes and the caller's own tensors have room.
_SHARE = 0.5
# Tensors of a pass: on a CPU they stay near the caches, on a GPU far below 2^31 elements, where libraries are right.
_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}
_LIVE_TENSORS = 6
_MAPS = 16


@dataclass(frozen=True)
class Budget:
    """examples: of one chunk. elements: numbers in one tensor of a backward pass."""

    examples: int
    elements: int

    @staticmethod
    def of(network: Network, dtype: torch.dtype, device: torch.device, memory: int | None, copies: int) -> Budget:
        """What fits into `memory` bytes (None: a share of what is free); `copies` of the maps of every margin row.

        Half of the memory is for the tensors of a pass, half for what is kept of every example. The result itself
        (the slopes of all examples) comes on top: its size is the caller's to know.
        """
        total = int(_SHARE * free_bytes(device)) if memory is None else memory
        if total < 2**20:
            raise InputError(f"memory={total}: expected at least one MiB (1048576 bytes) for intermediate tensors")
        size = dtype.itemsize
        numbers = [torch.Size(node.shape).numel() for node in network.nodes]
        targets = network.nodes[-1].shape[0] - 1
        most = _ELEMENTS.get(device.type, 2**24)
        elements = max(2 * max(numbers), min(most, total // 2 // (_LIVE_TENSORS * size)))
        kept = size * (_MAPS * sum(numbers) + targets * (4 * numbers[0] + 4 * max(numbers) + copies * sum(numbers)))
        # Row lists: two numbers and a position for every neuron, 64 bits each.
        examples = (total // 2) // (kept + 64 * max(numbers))
        # The pass of the margins takes all rows of a chunk at once.
        examples = min(examples, 4 * elements // (targets * max(numbers)))
        return Budget(int(max(1, examples)), int(elements))


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device: on a GPU with what PyTorch holds unused, on the machine as the system says."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused)
    limits = [_available()]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if os.path.exists(path) else "max"
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def _available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 * 2**30

"""A Triton kernel that reads everything once: the ceiling that a memory-bound pass is held against."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

_BLOCK, _COUNT = 4096, 8


@triton.jit
def _read(source, out, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * BLOCK * COUNT
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for k in range(COUNT):
        total ^= tl.load(source + base + k * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.xor_sum(total, axis=0))


def reader(values: torch.Tensor) -> Callable[[], object]:
    """A call that reads `values` (all but a last odd block) and writes one number per program."""
    words = values.view(torch.int32).view(-1)
    programs = words.numel() // (_BLOCK * _COUNT)
    out = torch.empty(programs, dtype=torch.int32, device=values.device)
    return lambda: _read[(programs,)](words, out, BLOCK=_BLOCK, COUNT=_COUNT, num_warps=8)

"""Tiny pools and stores of several shards, for the tests of the store."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import nn

import robboost as rb
from robboost.store import BoundStore, FillSettings, fill_store

THREAT = rb.Threat(0.05, clip=(0.0, 1.0))


def pool(members: int = 3, *, classes: int = 4, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [
        nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, classes)).eval() for _ in range(members)
    ]


def examples(count: int = 30, *, classes: int = 4, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 3, 4, generator=generator)
    return x, torch.randint(classes, (count,), generator=generator)


def settings(**changes: object) -> FillSettings:
    """Small enough that 30 examples make five shards of several pieces."""
    size = 250 * np.dtype(str(changes.get("storage", "float32"))).itemsize
    return FillSettings(**{"method": "crown", "shard_bytes": size, **changes})  # type: ignore[arg-type]


def filled(folder: Path, **changes: object) -> BoundStore:
    return fill_store(str(folder), pool(), examples(), THREAT, settings=settings(**changes))


def fingerprint(folder: Path) -> dict[str, str]:
    """Hash of every file of a store, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }

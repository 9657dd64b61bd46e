"""Bound stores of any size in seconds: rows of a small block, each scaled by a number of its own, without a network."""

from __future__ import annotations

import numpy as np
import torch

from robboost.store import BoundStore, Identity
from robboost.store.bound_store import ShardBuffer

TARGETS = 9
_BLOCK = 512


def synthetic_store(
    url: str, members: int, pairs: int, dim: int, *, seed: int = 0, shard_bytes: int = 64 * 2**20
) -> BoundStore:
    """A float32 store of `pairs` (a multiple of 9) whose best mix uses several members.

    Columns of one pair share most of their direction; a part of the pairs is certified by every member, a part by none.
    """
    store = BoundStore.prepare(url, _identity(members, pairs, dim, shard_bytes))
    rng = np.random.default_rng(seed)
    common = rng.standard_normal((_BLOCK, dim), np.float32)
    quality = np.exp(0.3 * rng.standard_normal(members)).astype(np.float32)
    base = [(common + q * rng.standard_normal((_BLOCK, dim), np.float32)) * (0.5 / dim) for q in quality]
    buffer = ShardBuffer(store.identity)
    with store.writing():
        for shard in range(store.identity.n_shards):
            slots = store.disk.slots(shard)
            count = slots.stop - slots.start
            rows = np.arange(slots.start, slots.stop) % _BLOCK
            factor = np.exp(0.5 * rng.standard_normal((count, 1), np.float32))
            shared = 1.0 + 0.5 * rng.standard_normal(count)
            for member in range(members):
                buffer.clear()
                np.multiply(base[member][rows], factor, out=buffer.values[:count])
                buffer.intercepts[:count] = shared + 0.2 * rng.standard_normal(count)
                buffer.count = count
                store.write(member, shard, buffer)
    store.require_complete()
    return store


def _identity(members: int, pairs: int, dim: int, shard_bytes: int) -> Identity:
    if pairs % TARGETS:
        raise ValueError(f"pairs={pairs}: expected a multiple of {TARGETS}")
    example = TARGETS * dim * 4
    chunk = TARGETS * max(1, min(2**20, shard_bytes // 4) // example)
    shard = chunk * max(1, shard_bytes // (chunk * dim * 4))
    return Identity(
        members=tuple(f"{t:064x}" for t in range(members)),
        data=f"{pairs:064x}",
        threat={"eps": 0.1, "norm": "linf", "clip": None},
        method="synthetic",
        precision="float32",
        screening="none",
        storage="float32",
        batch=1,
        input_shape=(dim,),
        n_examples=pairs // TARGETS,
        n_targets=TARGETS,
        shard_pairs=min(shard, chunk * -(-pairs // chunk)),
        chunk_pairs=chunk,
        versions={"format": 1, "robboost": "any", "torch": torch.__version__.split("+")[0]},
    )

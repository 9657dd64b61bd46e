"""A pool folder that says which mix of its members was published, such as those in the zoo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from robboost.errors import CheckpointError, InputError
from robboost.models.ensemble import Ensemble
from robboost.models.pools import MANIFEST, Pool, read_pool

__all__ = ["Shipped", "read_mix"]


@dataclass(frozen=True)
class Shipped:
    """The pool, its mix, and the notes of its manifest (data set, threat, bounds, published figures)."""

    pool: Pool = field(repr=False)
    ensemble: Ensemble = field(repr=False)
    notes: Mapping[str, Any]


def read_mix(folder: str | Path) -> Shipped:
    """The published mix of a pool folder; every file is compared with its SHA-256.

    The manifest's notes hold it as "ensemble": members (names), weights, scales.
    """
    pool = read_pool(folder)
    stated = pool.notes.get("ensemble")
    where = Path(folder) / MANIFEST
    if not isinstance(stated, Mapping):
        raise CheckpointError(
            f"{where}: names no mix of the pool (notes, ensemble); expected the folder of a shipped pool, or the file"
            " of a network or ensemble (`robboost fit` makes one from a pool)"
        )
    known = dict(zip(pool.names, pool.models, strict=True))
    names, weights, scales = (stated.get(key) for key in ("members", "weights", "scales"))
    if not isinstance(names, list) or not all(name in known for name in names):
        raise CheckpointError(f"{where}: the mix names {names!r}; expected members of the pool: {', '.join(known)}")
    try:
        mix = Ensemble([known[name] for name in names], weights or [], scales, names=names)
    except InputError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return Shipped(pool, mix, pool.notes)

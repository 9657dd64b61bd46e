"""A trained pool as a folder that `read_pool` reads: its members and a manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from robboost.data import Dataset
from robboost.models import Pool, PoolMember, write_pool
from robboost.training import files
from robboost.training.pool import Trained

__all__ = ["save_pool"]


def save_pool(
    folder: Path, trained: Sequence[Trained], data: Dataset, *, entries: Mapping[str, Any] | None = None
) -> Pool | None:
    """NAME.safetensors for each member, and manifest.json with hashes, configurations, seeds and held-out figures.

    Diverged members stay out; None where no other is left. `entries` go to the manifest's notes, beside the name of
    the data set that the members were trained on.
    """
    members = [
        PoolMember(
            name=run.config.short_name,
            model=run.model,
            input_shape=tuple(data.images.shape[1:]),
            metrics={} if run.figures is None else {f"heldout_{k}": v for k, v in run.figures.errors().items()},
            **files.notes(run.config),
        )
        for run in trained
        if not run.diverged
    ]
    kept = [run.config for run in trained if not run.diverged]
    notes = {"dataset": data.name, **files.estimates(kept), **(entries or {})}
    return write_pool(folder, members, notes) if members else None

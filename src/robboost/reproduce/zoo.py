"""From a training run to a pool that ships: rounded to float16 first; all figures are of the rounded networks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from robboost.errors import InputError
from robboost.models import Pool, PoolMember, read_pool, write_pool
from robboost.models.architectures import float32_bytes
from robboost.models.files import write_atomically
from robboost.models.pools import MANIFEST, parameter_digest

__all__ = ["LIMIT_BYTES", "RESULTS", "folder_bytes", "make_zoo_pool", "read_results", "rounded"]

RESULTS = "results.json"
# Of everything that ships.
LIMIT_BYTES = 24 * 2**20


def rounded(pool: Pool, folder: Path) -> Pool:
    """The pool with every weight rounded to a float16 value (kept as float32), by way of files in `folder`.

    Everything proved about the result is about the networks that the files hold.
    """
    write_pool(folder, pool.members, pool.notes, dtype=torch.float16)
    return read_pool(folder)


def make_zoo_pool(
    name: str,
    run: Pool,
    out: Path,
    measured: Callable[[Pool], dict[str, Any]],
    *,
    notes: Mapping[str, Any],
    keep: str = "all",
) -> dict[str, Any]:
    """Writes OUT/NAME: members in float16, manifest.json with hashes and the mix, results.json with all figures.

    Args:
        name: of the folder.
        run: the trained members.
        out: the zoo.
        measured: gives the figures (`measure`) of the rounded pool.
        notes: data set and threat, for the manifest.
        keep: "all" members, or those that are "used": with weight in the mix, and the best single one.

    Returns the figures. Refuses to let the zoo grow above `LIMIT_BYTES`; nothing of NAME is replaced then.
    """
    if keep not in ("all", "used"):
        raise InputError(f"--members {keep!r}: expected all or used")
    fresh = out / f".{name}.part"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        pool = rounded(run, fresh / "rounded")
        figures = measured(pool)
        figures = {"name": name, **figures, "hashes": [parameter_digest(member.model) for member in pool.members]}
        weights = dict(zip(figures["names"], figures["weights"], strict=True))
        used = [member for member in pool.members if weights[member.name] > 0]
        kept = list(pool.members)
        if keep == "used":
            kept = [m for m in kept if weights[m.name] > 0 or m.name == figures["best_single"]]
        scales = dict(zip(figures["names"], figures["scales"], strict=True))
        mix = {
            "members": [member.name for member in used],
            "weights": [weights[member.name] for member in used],
            "scales": [scales[member.name] for member in used],
        }
        stated = {
            **notes,
            "precision": "float16 values; all figures are of these rounded networks",
            "bounds": figures["bounds"],
            "trained_members": len(pool),
            "megabytes": round(sum(float32_bytes(member.model) for member in kept) / 1e6, 3),
            "ensemble": mix,
            "published": {"images": figures["test"]["images"], "split": "test", **_short(figures["rows"]["RobBoost"])},
        }
        write_pool(fresh / "pool", [_described(m, figures) for m in kept], stated, dtype=torch.float16)
        write_atomically(fresh / "pool" / RESULTS, (json.dumps(figures) + "\n").encode())
        _check_size(fresh / "pool", out, name)
        shutil.rmtree(out / name, ignore_errors=True)
        (fresh / "pool").rename(out / name)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return figures


def read_results(folder: Path, pool: Pool) -> dict[str, Any] | None:
    """The figures that lie beside a pool, where they are of exactly its members (or of these and more)."""
    file = folder / RESULTS
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    mine = {parameter_digest(model) for model in pool.models}
    return found if mine <= set(found.get("hashes", ())) else None


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _described(member: PoolMember, figures: Mapping[str, Any]) -> PoolMember:
    row = figures["rows"][member.name]
    return replace(member, metrics={**_short(row), "heldout_verified_error": row["verified_fit"]["value"]})


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a row that a manifest holds."""
    short = {
        "not_certified": row["verified_test"]["count"],
        "verified_error": row["verified_test"]["value"],
        "clean_error": row["clean"]["value"],
    }
    return short if row["attack"] is None else {**short, "attack_error": row["attack"]["value"]}


def _check_size(fresh: Path, out: Path, name: str) -> None:
    others = sum(folder_bytes(path.parent) for path in out.glob(f"*/{MANIFEST}") if path.parent.name != name)
    total = others + folder_bytes(fresh)
    if total > LIMIT_BYTES:
        raise InputError(
            f"{out}: {total} bytes with {name}, expected at most {LIMIT_BYTES} for the whole zoo; ship fewer members"
            " (--members used) or smaller ones"
        )

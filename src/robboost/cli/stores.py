"""bounds: fills a bound store, checks it, and mends it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from robboost.cli.console import progress, show, together
from robboost.cli.options import (
    ArchitectureOption,
    BoundsOption,
    ClipOption,
    DataOption,
    DeviceOption,
    EpsOption,
    JsonOption,
    LimitOption,
    NormOption,
    ShapeOption,
    ThreadsOption,
    open_data,
    open_pool,
    open_threat,
    set_threads,
)
from robboost.devices import usable_device
from robboost.errors import InputError, StoreError
from robboost.inputs import check_pool
from robboost.mixtures import pool_bounds
from robboost.store import BoundStore, FillSettings, fill_store, settled_pairs
from robboost.stored import decided_pairs

__all__ = ["register"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(name="bounds")(bounds)


def bounds(
    pool: Annotated[list[Path] | None, typer.Argument(help="A folder of networks, or several files.")] = None,
    store: Annotated[str, typer.Option("--store", help="Folder of the store, or a URL such as s3://bucket/name.")] = "",
    data: DataOption = None,
    split: Annotated[str, typer.Option("--split", help="train, heldout or test.")] = "heldout",
    limit: LimitOption = None,
    eps: EpsOption = None,
    norm: NormOption = None,
    clip: ClipOption = "0,1",
    method: BoundsOption = "tightest",
    precision: Annotated[str, typer.Option("--precision", help="Arithmetic: float32 or float64.")] = "float32",
    storage: Annotated[
        str, typer.Option("--storage", help="float32, float16, int8 or float64, all sound.")
    ] = "float32",
    memory: Annotated[
        str, typer.Option("--memory", help="Budget for what is being written, such as 500M or 2G.")
    ] = "1G",
    screen: Annotated[
        str,
        typer.Option(
            "--screen",
            help="none; settled: leave out pairs that every member certifies; decided: and those no mix does.",
        ),
    ] = "none",
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and check every checksum.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged, to be computed anew.")] = False,
    break_lock: Annotated[bool, typer.Option("--break-lock", help="Remove the lock of a dead writer (URLs).")] = False,
    architecture: ArchitectureOption = None,
    input_shape: ShapeOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the bounds of a pool once and keep them on disk, for `fit --store`.

    Interrupted or killed, the same command continues. Under torchrun the processes share the work.
    """
    set_threads(threads)
    place = usable_device(device)
    if not store:
        raise InputError("--store is missing: expected a folder or a URL for the bounds")
    if break_lock:
        BoundStore.open(store).break_lock()
    if verify or repair:
        _check(store, repair=repair, as_json=as_json)
    if not pool:
        if verify or repair or break_lock:
            return
        raise InputError("no networks are named: expected a folder of networks, or several files")
    found = open_pool(pool, architecture, input_shape)
    threat = open_threat(eps, norm, clip, found.notes)
    images = open_data(data, found.notes, split, limit)
    rules = {"none": None, "settled": settled_pairs(threat.norm), "decided": decided_pairs(threat.norm)}
    if screen not in rules:
        raise InputError(f"--screen {screen}: expected one of {', '.join(rules)}")
    settings = FillSettings(
        method=method,
        precision=precision,
        storage=storage,
        memory=_bytes(memory),
        screening=rules[screen],
    )
    # Before a store is begun, which would hold nothing and stand in the way of the corrected command: everything is
    # checked, and one image is bounded.
    x, y = check_pool(found.models, images.images, images.labels, found.names)
    pool_bounds(found.models, x[:1], y[:1], threat, method=method, precision=precision)  # type: ignore[arg-type]
    with together(place) as (processes, tell):
        members = [member.to(processes.device) for member in found.models]
        filled = fill_store(
            store,
            members,
            (images.images, images.labels),
            threat,
            settings=settings,
            progress=tell,
            processes=processes,
        )
        if processes.rank == 0:
            show(filled, as_json)


def _check(store: str, *, repair: bool, as_json: bool) -> None:
    opened = BoundStore.open(store)
    with progress() as tell:
        damage = opened.repair() if repair else opened.verify(lambda done, total: tell("checking", done, total))
    if not damage:
        show({"store": store, "damaged": 0} if as_json else f"{store}: every checksum fits", as_json)
    elif repair:
        lines = [f"removed: {item.reason}" for item in damage]
        show({"store": store, "removed": lines} if as_json else "\n".join(lines), as_json)
    else:
        raise StoreError(f"{damage[0].reason} ({len(damage)} damaged shards in all; --repair removes them)")


def _bytes(text: str) -> int:
    number, unit = text.strip().upper().removesuffix("B"), ""
    if number[-1:] in _UNITS:
        number, unit = number[:-1], number[-1]
    try:
        return int(float(number) * _UNITS[unit])
    except ValueError:
        raise InputError(f"--memory {text}: expected a number of bytes such as 500M or 2G") from None

"""One function for each thing that can be reproduced, giving text for people and values for JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robboost.errors import InputError
from robboost.mixtures import Progress
from robboost.models.files import write_atomically
from robboost.reproduce.loading import read_run, threat_of
from robboost.reproduce.request import Request, figures_of, measured
from robboost.reproduce.tables import TABLES
from robboost.reproduce.zoo import folder_bytes, make_zoo_pool
from robboost.tables import percent, test_sentence

__all__ = ["COMMANDS", "Outcome", "reproduce"]


@dataclass(frozen=True)
class Outcome:
    """What a command has to show."""

    text: str
    values: Mapping[str, Any]


def reproduce(what: str, paths: Sequence[Path], request: Request, progress: Progress | None = None) -> Outcome:
    """Runs one of `COMMANDS`.

    Args:
        what: its name.
        paths: for "zoo" the runs, for "figure2" the runs of boosting; the others take none.
        request: all options.
        progress: told what is being done, steps done, and steps in all.
    """
    if what not in COMMANDS:
        raise InputError(f"{what!r}: expected one of {', '.join(COMMANDS)}")
    return COMMANDS[what](what, paths, request, progress)


def _table(what: str, paths: Sequence[Path], request: Request, progress: Progress | None) -> Outcome:
    _no_paths(what, paths)
    table = TABLES[what](request.settings, lambda name: figures_of(name, request, progress))
    values = table.to_dict()
    if request.out is not None:
        _write(request.out / f"{what}.json", values)
        write_atomically(request.out / f"{what}.md", (table.to_markdown() + "\n").encode())
    return Outcome(str(table), values)


def _zoo(what: str, paths: Sequence[Path], request: Request, progress: Progress | None) -> Outcome:
    if not paths:
        raise InputError(f"{what}: no run is named; expected folders of trained pools, or ensemble files")
    out = request.out or Path("zoo")
    out.mkdir(parents=True, exist_ok=True)
    made, lines = {}, []
    for path in paths:
        run = read_run(path)
        name = path.resolve().stem if path.is_file() else path.resolve().name
        threat = threat_of(run, request.eps)
        stated = {"eps": threat.eps, "norm": threat.norm, "clip": list(threat.clip or ())}
        notes = {"dataset": request.data or run.notes.get("dataset"), "threat": stated}

        def figures(pool: Any) -> dict[str, Any]:
            return measured(pool, request, progress)

        made[name] = make_zoo_pool(name, run, out, figures, notes=notes, keep=request.members)
        lines.append(_summary(name, made[name]))
    total = folder_bytes(out)
    lines.append(f"{out}: {total} bytes ({total / 2**20:.1f} MiB) in all")
    return Outcome("\n".join(lines), {"pools": made, "bytes": total, "out": str(out)})


def _summary(name: str, figures: Mapping[str, Any]) -> str:
    """The figures of a pool in a few lines."""
    lines = [f"{name}: {figures['threat']}, bounds {figures['bounds']}, {figures['test']['images']} test images"]
    best = figures["best_single"]
    lines.append(f"  {'':<34} {'verified':>22} {'clean':>7} {'PGD':>7} {'train':>7} {'heldout':>8} {'MB':>6}  weight")
    weights = dict(zip(figures["names"], figures["weights"], strict=True))
    for row_name, row in figures["rows"].items():
        mark = " (best single)" if row_name == best else ""
        weight = f"{weights[row_name]:.3f}" if row_name in weights else f"{row['members']} members"
        lines.append(
            f"  {row_name + mark:<34} {percent(row['verified_test'], interval=True):>22} {percent(row['clean']):>7}"
            f" {percent(row['attack']):>7} {percent(row['verified_train']):>7} {percent(row['verified_fit']):>8}"
            f" {row['megabytes']:>6.2f}  {weight}"
        )
    lines += [f"  {test_sentence(what, test)}" for what, test in figures["tests"].items()]
    lines.append(
        f"  some member certifies all but {percent(figures['some_member'])} %; kappa {figures['kappa']:g},"
        f" {figures['chosen']}; {figures['precision']}"
    )
    return "\n".join(lines)


def _no_paths(what: str, paths: Sequence[Path]) -> None:
    if paths:
        raise InputError(f"{what} {paths[0]}: expected no further argument (--pools names the folder of the pools)")


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


COMMANDS: dict[str, Callable[[str, Sequence[Path], Request, Progress | None], Outcome]] = {
    **dict.fromkeys(TABLES, _table),
    "zoo": _zoo,
}

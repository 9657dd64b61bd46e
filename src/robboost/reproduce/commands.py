"""One function for each thing that can be reproduced, giving text for people and values for JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robboost.errors import InputError
from robboost.mixtures import Progress
from robboost.models.files import existing_file, parse_json, write_atomically
from robboost.reproduce.drawing import can_draw, draw
from robboost.reproduce.figures import figure1, figure2, figure3
from robboost.reproduce.loading import read_run, threat_of
from robboost.reproduce.page import fill_page
from robboost.reproduce.request import Request, figures_of, measured
from robboost.reproduce.summaries import above_zero
from robboost.reproduce.tables import TABLES
from robboost.reproduce.zoo import folder_bytes, make_zoo_pool, read_results
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
        paths: for "zoo" the runs, for "figure2" the runs of boosting, for a figure its saved numbers to draw them
            again, for "page" the page; the tables take none.
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


def _figure(what: str, paths: Sequence[Path], request: Request, progress: Progress | None) -> Outcome:
    """Numbers first, as OUT/figureN.json, then the drawings, where matplotlib is; saved numbers are drawn again."""
    if len(paths) == 1 and paths[0].suffix == ".json":
        values = _saved(paths[0], int(what.removeprefix("figure")))
    elif what == "figure2":
        values = figure2(paths, request, progress)
    else:
        _no_paths(what, paths)
        if what == "figure1":
            values = figure1(request, progress)
        else:
            values = figure3(request.settings, lambda name: figures_of(name, request, progress))
    out = request.out or Path("figures")
    numbers = out / f"{what}.json"
    _write(numbers, values)
    drawn = draw(values, out) if can_draw() else []
    later = (
        "" if drawn else f"; matplotlib is missing here, so draw them elsewhere: robboost reproduce {what} {numbers}"
    )
    lines = [f"numbers: {numbers}{later}", *(f"figure: {file}" for file in drawn)]
    return Outcome("\n".join([*_figure_lines(values), *lines]), values)


def _saved(file: Path, number: int) -> dict[str, Any]:
    found = parse_json(existing_file(file).read_bytes(), str(file))
    if not isinstance(found, dict) or found.get("figure") != number:
        raise InputError(f"{file}: expected the numbers of figure {number}, as an earlier call wrote them")
    return found


def _figure_lines(values: Mapping[str, Any]) -> list[str]:
    """What a figure shows, in numbers."""
    if values["figure"] == 1:
        return [
            f"{name}: slope L1 {net['l1']:.3f}, {100 * net['on_digit']:.1f} % of it on the digit, margin at least"
            f" {net['lower']:.3f}, clean error {100 * net['heldout_clean_error']:.2f} % after {net['epochs']} epochs"
            for name, net in values["networks"].items()
        ]
    lines = []
    for name, run in values.get("runs", {}).items():
        lines.append(f"{name}: {run['threat']}, bounds {run['bounds']}, {run['test']['images']} test images")
        for n, member in enumerate(run["members"]):
            verified, clean = (percent(run[key][n], interval=True) for key in ("verified", "clean"))
            lines.append(f"  {member:<28} verified {verified} %  clean {clean} %  {run['megabytes'][n]:.2f} MB")
        lines += [f"  {test_sentence(what, test)}" for what, test in run["tests"].items()]
        if run["paper"] is not None:
            lines.append(
                f"  paper: {run['paper']['first']:g} % with one member, {run['paper']['ensemble']:g} % boosted"
            )
    for name, pool in values.get("pools", {}).items():
        shares = [f"{mix} {100 * share:.2f} %" for mix, share in above_zero(pool).items()]
        lines.append(f"{name}: margins above zero: {', '.join(shares)}")
    return lines


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

        def figures(pool: Any, path: Path = path) -> dict[str, Any]:
            """Those beside a pool of exactly these networks are taken up, as in the tables."""
            found = read_results(path, pool) if request.plain and path.is_dir() else None
            return found or measured(pool, request, progress)

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


def _page(what: str, paths: Sequence[Path], request: Request, _progress: Progress | None) -> Outcome:
    if len(paths) != 1:
        raise InputError(f"{what}: {len(paths)} pages named; expected one Markdown file, such as docs/results.md")
    page = paths[0]
    found = fill_page(page, request.pools, request.out or page.parent / "results")
    lines = [f"{name:<10} {'filled' if there else 'not measured yet'}" for name, there in found.items()]
    return Outcome("\n".join([*lines, f"page: {page}"]), {"page": str(page), "sections": found})


def _no_paths(what: str, paths: Sequence[Path]) -> None:
    if paths:
        raise InputError(f"{what} {paths[0]}: expected no further argument (--pools names the folder of the pools)")


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


COMMANDS: dict[str, Callable[[str, Sequence[Path], Request, Progress | None], Outcome]] = {
    **dict.fromkeys(TABLES, _table),
    **dict.fromkeys(("figure1", "figure2", "figure3"), _figure),
    "zoo": _zoo,
    "page": _page,
}

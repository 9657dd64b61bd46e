"""The results page: its tables and pictures are filled in from results on disk, so that no number is typed by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from robboost.errors import InputError
from robboost.models.files import write_atomically
from robboost.reproduce.figures import figure3
from robboost.reproduce.summaries import above_zero
from robboost.reproduce.tables import TABLES
from robboost.reproduce.zoo import RESULTS, folder_bytes
from robboost.tables import percent, test_sentence
from robboost.threat import Threat

__all__ = ["SECTIONS", "fill_page"]

_MARK = re.compile(r"<!-- begin ([\w-]+) -->\n(.*?)<!-- end \1 -->", re.DOTALL)
_NOT_YET = "*Not measured yet.*"


def fill_page(page: Path, pools: Path, results: Path) -> dict[str, bool]:
    """Replaces what stands between `<!-- begin NAME -->` and `<!-- end NAME -->` for every NAME of `SECTIONS`.

    Args:
        page: a Markdown file.
        pools: the zoo; each pool's results.json lies beside it.
        results: further results: NAME.json of pools that do not ship, figure1.json, figure2.json, figureN.png.

    Returns for each section whether there are results for it.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{page}: cannot be read ({error.strerror}); expected the results page") from None
    found: dict[str, bool] = {}

    def section(match: re.Match[str]) -> str:
        name = match[1]
        if name not in SECTIONS:
            raise InputError(f"{page}: section {name!r}; expected one of {', '.join(SECTIONS)}")
        made = SECTIONS[name](name, pools, results)
        found[name] = made is not None
        return f"<!-- begin {name} -->\n{made or _NOT_YET}\n<!-- end {name} -->"

    filled = _MARK.sub(section, text)
    if not found:
        raise InputError(f"{page}: no section; expected '<!-- begin NAME -->' with NAME of {', '.join(SECTIONS)}")
    write_atomically(page, filled.encode())
    return found


def _known(pools: Path, results: Path) -> Callable[[str], Mapping[str, Any] | None]:
    def figures(name: str) -> Mapping[str, Any] | None:
        for file in (pools / name / RESULTS, results / f"{name}.json"):
            if file.exists():
                values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
                return values
        return None

    return figures


def _table(name: str, pools: Path, results: Path) -> str | None:
    try:
        return TABLES[name]((), _known(pools, results)).to_markdown()
    except InputError:
        return None


def _picture(name: str, pools: Path, results: Path) -> str | None:
    """The picture, linked relative to the page's folder, and what its numbers say."""
    file = results / f"{name}.json"
    if name == "figure3":
        try:
            values = figure3((), _known(pools, results))
        except InputError:
            return None
        lines = _figure3_lines(values)
    elif file.exists():
        values = json.loads(file.read_text(encoding="utf-8"))
        lines = _figure1_lines(values) if name == "figure1" else _figure2_lines(values)
    else:
        return None
    image = results / f"{name}.png"
    shown = [f"![{name}]({results.name}/{name}.png)", ""] if image.exists() else []
    return "\n".join([*shown, *(f"- {line}" for line in lines)])


def _figure1_lines(values: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: the slope's L1 norm is {net['l1']:.2f}, {100 * net['on_digit']:.0f}% of it on and beside"
        f" the digit; proved margin {net['lower']:.2f}; held-out clean error {100 * net['heldout_clean_error']:.2f}%"
        f" after {net['epochs']} epochs"
        for name, net in values["networks"].items()
    ]


def _figure2_lines(values: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, run in values["runs"].items():
        errors = ", ".join(f"{percent(share)}" for share in run["verified"])
        clean = ", ".join(f"{percent(share)}" for share in run["clean"])
        paper = run["paper"]
        beside = "" if paper is None else f" (paper: {paper['first']:g} to {paper['ensemble']:g})"
        lines.append(
            f"{name}: verified error % with 1 to {len(run['verified'])} members: {errors}{beside}; clean: {clean};"
            f" {run['test']['images']} test images"
        )
        lines += [f"{name}, {test_sentence(what, test)}" for what, test in run["tests"].items()]
    return lines


def _figure3_lines(values: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, pool in values["pools"].items():
        shares = [f"{mix} {100 * share:.2f}%" for mix, share in above_zero(pool).items()]
        lines.append(f"{name}: margins above zero: {', '.join(shares)}")
    return lines


def _boosting(name: str, pools: Path, results: Path) -> str | None:
    """What `python -m robboost.training.boosting` measured on the test set: boosted, alone and tuned ensembles."""
    del name, pools
    rows, notes = [], []
    for file in sorted(results.glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        if not {"kind", "chosen", "paired", "test"} <= set(found):
            continue
        for row in found["test"]:
            mark = " *" if row["name"] == found["chosen"] else ""
            rows.append(
                f"| {file.stem} | {row['name']}{mark} | {row['members']} | {row['size_mb']:.2f} |"
                f" {percent(row['verified_error'], interval=True)} | {percent(row['clean_error'])} |"
            )
        notes += [f"- {file.stem}, * against {test_sentence(other, test)}" for other, test in found["paired"].items()]
        notes.append(f"- {file.stem}: {found['threat']}, bounds {found['bounds']}, {found['test_images']} test images")
    head = "| run | ensemble | members | MB | verified % test | clean % |"
    return "\n".join([head, "|" + " --- |" * 6, *rows, "", *notes]) if rows else None


def _zoo(name: str, pools: Path, results: Path) -> str | None:
    del name, results
    rows = []
    for manifest in sorted(pools.glob("*/manifest.json")):
        stated = json.loads(manifest.read_text(encoding="utf-8"))
        notes = stated["notes"]
        if "published" not in notes:
            continue
        published = notes["published"]
        rows.append(
            f"| `{pools.name}/{manifest.parent.name}` | {notes['dataset']}, {Threat(notes['threat']['eps'])} |"
            f" {len(stated['members'])} of {notes['trained_members']} | {folder_bytes(manifest.parent) / 1e6:.2f} |"
            f" {100 * published['verified_error']:.2f} | {100 * published['clean_error']:.2f} |"
            f" {published['images']} | {notes['bounds']} |"
        )
    head = "| folder | data, threat | members | MB on disk | verified % | clean % | test images | bounds |"
    return "\n".join([head, "|" + " --- |" * 8, *rows]) if rows else None


SECTIONS: Mapping[str, Callable[[str, Path, Path], str | None]] = {
    **dict.fromkeys(TABLES, _table),
    **dict.fromkeys(("figure1", "figure2", "figure3"), _picture),
    "boosting": _boosting,
    "zoo": _zoo,
}

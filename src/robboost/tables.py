"""A comparison as text and as HTML, from its plain dictionary: the same code prints fresh and saved results."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["COLUMNS", "cells", "comparison_html", "comparison_text", "percent", "test_sentence"]

# Wider tables of overlaps than this are left to the report.
_MOST_NAMES = 16
COLUMNS = ("", "verified % test", "verified % fit", "targeted %", "clean %", "attack %", "MB", "members", "claim")


def percent(share: Mapping[str, Any] | None, *, interval: bool = False) -> str:
    """ "4.50" or "4.50 [3.38, 5.98]"; "-" where there is none."""
    if share is None:
        return "-"
    text = f"{100 * share['value']:.2f}"
    return f"{text} [{100 * share['lower']:.2f}, {100 * share['upper']:.2f}]" if interval else text


def cells(row: Mapping[str, Any], *, intervals: bool = False) -> list[str]:
    """The texts of one row, in the order of COLUMNS; with `intervals` every share has its own."""
    targeted = row["targeted_verified_error"]
    return [
        str(row["name"]),
        percent(row["verified_error"], interval=True),
        percent(row["verified_error_fit"], interval=intervals),
        "-" if targeted is None else f"{100 * targeted:.2f}",
        percent(row["clean_error"], interval=intervals),
        percent(row["attack_error"], interval=intervals),
        "-" if row["size_mb"] is None else f"{row['size_mb']:.2f}",
        "-" if row["members"] is None else str(row["members"]),
        str(row["claim"]),
    ]


def test_sentence(name: str, test: Mapping[str, Any]) -> str:
    """What a paired test says, in words."""
    gain = test["only_second_fails"] - test["only_first_fails"]
    verdict = "beyond doubt at 5%" if test["p_value"] < 0.05 else "could be chance"
    return (
        f"{name}: {gain:+d} images certified net ({test['only_second_fails']} gained, {test['only_first_fails']} lost,"
        f" exact paired p = {test['p_value']:.3g}: {verdict})"
    )


def comparison_text(result: Mapping[str, Any]) -> str:
    """The table in plain text."""
    table = [list(COLUMNS), *(cells(row) for row in result["rows"])]
    lines = _aligned(table)
    notes = [f"{row['name']}: {row['note']}" for row in result["rows"] if row["note"]]
    tests = [test_sentence(name, test) for name, test in result["tests"].items()]
    origin = result["provenance"]
    head = f"{origin['threat']}, {origin['test images']} test images, weights fitted on {origin['fit images']}"
    return "\n".join([head, *lines, *tests, *notes, *_overlap_lines(result)])


def _overlap_lines(result: Mapping[str, Any]) -> list[str]:
    """Percent of the test images that two members both certify: where all agree, no weights can help."""
    names, overlap = result["names"], result["overlap"]
    if not 2 <= len(names) <= _MOST_NAMES:
        return []
    short = [name if len(name) <= 12 else f"{name[:11]}…" for name in names]
    width = max(6, *map(len, short))
    lines = [f"{name:<{width}}" + "".join(f"  {100 * share:{width}.1f}" for share in row)
             for name, row in zip(short, overlap, strict=True)]  # fmt: skip
    head = " " * width + "".join(f"  {name:>{width}}" for name in short)
    return ["certified by both members, % of test images:", head, *lines]


def comparison_html(result: Mapping[str, Any]) -> str:
    """The table in HTML; every name is escaped."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in COLUMNS)
    body = "".join(
        f'<tr class="{_looks(row)}">'
        + "".join(
            f"<{'th scope=row' if n == 0 else 'td'}>{_cell(text)}</{'th' if n == 0 else 'td'}>"
            for n, text in enumerate(cells(row, intervals=True))
        )
        + "</tr>"
        for row in result["rows"]
    )
    tests = "".join(f"<li>{html.escape(test_sentence(name, test))}</li>" for name, test in result["tests"].items())
    notes = "".join(
        f"<li>{html.escape(row['name'])}: {html.escape(row['note'])}</li>" for row in result["rows"] if row["note"]
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div><ul>{tests}{notes}</ul>'


def _looks(row: Mapping[str, Any]) -> str:
    """A row's class on the page: the claim, or "ours"."""
    return "ours" if row["name"] == "RobBoost" else html.escape(str(row["claim"]).lower())


def _cell(text: str) -> str:
    """A figure with its interval below it."""
    value, bracket, interval = text.partition(" [")
    if not bracket or not interval.endswith("]") or not value.replace(".", "").isdigit():
        return html.escape(text)
    return f"{html.escape(value)} <small>[{html.escape(interval)}</small>"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[n]) for row in table) for n in range(len(table[0]))]
    lines = []
    for row in table:
        last = len(row) - 1
        padded = [text.ljust(widths[n]) if n in (0, last) else text.rjust(widths[n]) for n, text in enumerate(row)]
        lines.append("  ".join(padded).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]

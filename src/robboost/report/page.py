"""The HTML page: self-contained, readable on a phone, in light and dark, and safe whatever the members are called."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import Tensor

from robboost.comparison import Comparison
from robboost.errors import InputError
from robboost.mixtures import Members, Progress
from robboost.observability import span
from robboost.report.figures import captions, figures, to_png, to_svg
from robboost.report.study import study
from robboost.tables import comparison_html, percent, test_sentence

__all__ = ["write_report"]


def write_report(
    comparison: Comparison,
    pool: Members,
    test: tuple[Tensor, Tensor],
    folder: str | Path,
    *,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes FOLDER/report.html, which needs nothing else, and each figure as PNG and SVG beside it.

    Args:
        comparison: the result of `compare`.
        pool: the members it was made with.
        test: images and labels that it was measured on.
        folder: created where it is not there.
        about: more facts for the section on how it was made: file names, hashes, seeds.
        progress: told what is being done, steps done, and steps in all.

    Returns the path of the page.
    """
    x, y = test
    found = study(comparison, pool, x, y, progress=progress)
    with span("drawing"):
        drawn = figures(comparison, found, x, y)
        pictures = {name: to_svg(figure) for name, figure in drawn.items()}
    target = Path(folder)
    page = _page(comparison, pictures, captions(found), {**comparison.provenance, **(about or {})})
    try:
        (target / "figures").mkdir(parents=True, exist_ok=True)
        for name, figure in drawn.items():
            _write(target / "figures" / f"{name}.png", to_png(figure))
            # Alone, outside the page, the picture has no text colour to inherit.
            alone = pictures[name].replace("currentColor", "#404040")
            _write(target / "figures" / f"{name}.svg", alone.encode())
        _write(target / "report.html", page.encode())
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror}); expected free space and access") from None
    return target / "report.html"


def _write(path: Path, content: bytes) -> None:
    """The file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _page(
    comparison: Comparison,
    pictures: Mapping[str, str],
    texts: Mapping[str, tuple[str, str]],
    origin: Mapping[str, Any],
) -> str:
    result = comparison.to_dict()
    sections = "".join(
        f'<figure id="{name}"><h2>{escape(texts[name][0])}</h2>'
        f'<div class="picture">{_labelled(svg, texts[name][0])}</div>'
        f"<figcaption>{escape(texts[name][1])}</figcaption></figure>"
        for name, svg in pictures.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>RobBoost: {escape(str(comparison.fitted.threat))}</title>"
        f"<style>{files('robboost.report').joinpath('page.css').read_text(encoding='utf-8')}</style></head><body><main>"
        f"<header><h1>RobBoost report</h1>{_headline(result)}</header>"
        f"{_cards(result)}"
        f'<section id="comparison"><h2>The comparison</h2>{comparison_html(result)}{_LEGEND}'
        "</section>"
        f'<div class="figures">{sections}</div>'
        f"{_candidates(result)}{_provenance(origin)}"
        "</main></body></html>\n"
    )


def _headline(result: Mapping[str, Any]) -> str:
    rows = {row["name"]: row for row in result["rows"]}
    certified = rows["RobBoost"]["verified_error"]
    count = certified["total"] - certified["count"]
    text = (
        f"Under {result['provenance']['threat']}, the ensemble is proved robust on {count} of {certified['total']} test"
        f" images: {percent(certified)} % verified error."
    )
    sentences = "".join(f"<p>{escape(test_sentence(name, test))}.</p>" for name, test in result["tests"].items())
    return f'<p class="lead">{escape(text)}</p>{sentences}'


def _cards(result: Mapping[str, Any]) -> str:
    rows = {row["name"]: row for row in result["rows"]}
    best = result["rows"][0]
    cards = [
        ("RobBoost", percent(rows["RobBoost"]["verified_error"]), "% verified error"),
        (best["name"], percent(best["verified_error"]), "% verified error"),
        ("uniform", percent(rows["uniform"]["verified_error"]), "% verified error"),
        ("clean", percent(rows["RobBoost"]["clean_error"]), "% error of RobBoost"),
        ("size", f"{rows['RobBoost']['size_mb']:.2f}", f"MB, {rows['RobBoost']['members']} members"),
        ("optimality gap", f"{result['robboost']['solution']['gap']:.0e}", "of the weights' loss, proved"),
    ]
    body = "".join(
        f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b> {escape(unit)}</dd></div>"
        for name, value, unit in cards
    )
    return f'<dl class="cards">{body}</dl>'


def _labelled(svg: str, title: str) -> str:
    """The SVG with a name for those who cannot see it, as wide as its column."""
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)


_LEGEND = (
    "<p>Errors are shares of images in percent, with 95% Wilson intervals where brackets follow. "
    "<b>proved</b>: every image counted as right is proved right for the whole threat set. "
    "<b>UNSOUND</b>: the figure is no proof, and attacks break it. "
    "<b>oracle</b>: no network does this; it shows what the members know together.</p>"
)


def _candidates(result: Mapping[str, Any]) -> str:
    fitted = result["robboost"]
    rows = "".join(
        f"<tr><th scope=row>{escape(str(candidate['name']))}</th>"
        f"<td>{escape(percent(candidate['validation_verified_error'], interval=True))}</td></tr>"
        for candidate in fitted["candidates"]
    )
    weights = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{weight:.6f}</td><td>{scale:.6g}</td></tr>"
        for name, weight, scale in zip(fitted["names"], fitted["weights"], fitted["scales"], strict=True)
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in fitted["notes"])
    return (
        "<details><summary>How the weights were chosen</summary>"
        f"<p>Chosen: {escape(fitted['chosen'])}. Each candidate was judged on the third of the fit images that it was"
        " not solved on (the one marked 'all images' was solved on all of them).</p>"
        '<div class="scroll"><table><thead><tr><th>candidate</th><th>verified error there, %</th></tr></thead>'
        f"<tbody>{rows}</tbody></table><table><thead><tr><th>member</th><th>weight</th><th>scale</th></tr></thead>"
        f"<tbody>{weights}</tbody></table></div><ul>{notes}</ul></details>"
    )


def _provenance(origin: Mapping[str, Any]) -> str:
    body = "".join(f"<dt>{escape(str(name))}</dt><dd>{_fact(value)}</dd>" for name, value in origin.items())
    return f"<details open><summary>How this was made</summary><dl>{body}</dl></details>"


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "<ul>" + "".join(f"<li>{escape(f'{name}: {_text(part)}')}</li>" for name, part in value.items()) + "</ul>"
        )
    return escape(_text(value))


def _text(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or value == "":
        return "none"
    return value if isinstance(value, str) else json.dumps(value, default=str)

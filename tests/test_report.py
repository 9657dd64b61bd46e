"""The report: complete, self-contained, escaped, well-formed; what it draws agrees with the table."""

import itertools
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
import torch
from small_pools import examples, pool

from robboost import InputError, Threat, compare
from robboost.comparison import Settings
from robboost.report import study, write_report

HOSTILE = '<img src=x onerror="alert(1)">&$\\frac'
POOL = dict(zip([HOSTILE, "conv", "m" * 60], pool(), strict=True))
FIT, TEST = examples(30, seed=31), examples(30, seed=32)
THREAT = Threat(0.14, clip=(0, 1))


@pytest.fixture(scope="module")
def comparison():
    return compare(POOL, fit=FIT, test=TEST, threat=THREAT, settings=Settings("ibp+crown", attack=None, cascade=False))


@pytest.fixture(scope="module")
def folder(comparison, tmp_path_factory):
    target = tmp_path_factory.mktemp("report")
    write_report(comparison, POOL, TEST, target, about={"file": HOSTILE, "more": {"nothing": ""}})
    return target


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen, self.attributes, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_whole_and_needs_nothing_else(folder):
    page = (folder / "report.html").read_text()
    parser = Tags()
    parser.feed(page)
    assert parser.open == []
    assert parser.seen.count("figure") == 6
    assert not {"script", "link", "iframe", "img"} & set(parser.seen)
    for tag, name, value in parser.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:image/png;base64,")), value
    assert not re.search(r"url\((?!#)", page)
    assert "@import" not in page


def test_every_fact_says_something(folder):
    page = (folder / "report.html").read_text()
    assert "<dt>attack</dt><dd>none</dd>" in page
    assert "<li>nothing: none</li>" in page


def test_names_are_escaped_everywhere(folder):
    page = (folder / "report.html").read_text()
    assert "<img" not in page
    assert "&lt;img src=x onerror=" in page
    for svg in (folder / "figures").glob("*.svg"):
        assert "<img" not in svg.read_text()


def test_figures_are_files_of_their_own(folder):
    names = {path.name for path in (folder / "figures").iterdir()}
    assert names == {
        f"{n}.{kind}" for n in ("margins", "radii", "weights", "overlap", "slopes", "images") for kind in ("png", "svg")
    }
    for path in (folder / "figures").iterdir():
        if path.suffix == ".svg":
            assert ET.fromstring(path.read_text()).tag.endswith("svg")
            assert "currentColor" not in path.read_text()
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


def test_ids_on_the_page_are_unique(folder):
    page = (folder / "report.html").read_text()
    # What several figures share (a clip path of the same size) is drawn alike; page sections must differ.
    sections = re.findall(r'<(?:figure|section) id="([^"]+)"', page)
    assert len(sections) == len(set(sections))


def test_study_agrees_with_the_table(comparison):
    found = study(comparison, POOL, *TEST, images=30)
    place = found.radii.index(THREAT.eps)
    assert found.radii[0] == 0
    for name in ("uniform", "RobBoost"):
        row, shares = comparison.row(name), found.certified[name]
        assert shares[place] == pytest.approx(1 - row.verified.value)
        assert shares[0] == pytest.approx(1 - row.clean.value)
        assert all(a >= b for a, b in itertools.pairwise(shares))
    margins = comparison.margins["RobBoost"]
    assert all(margins[n] > 0 for n in (*found.fragile, *found.secure))
    assert not any(margins[n] > 0 for n in found.failed)
    mix = comparison.mixes["RobBoost"] * comparison.fitted.scales
    combined = sum(weight * slope for weight, slope in zip(mix, found.slopes.members.values(), strict=True))
    torch.testing.assert_close(combined, found.slopes.mixes["RobBoost"])


def test_a_pool_that_certifies_nothing_still_reports(tmp_path):
    threat = Threat(0.9, clip=(0, 1))
    result = compare(POOL, fit=FIT, test=TEST, threat=threat, settings=Settings("ibp", attack=None, cascade=False))
    assert write_report(result, POOL, TEST, tmp_path).exists()


def test_bad_input(comparison, tmp_path):
    with pytest.raises(InputError, match="expected the 30 test images"):
        write_report(comparison, POOL, (TEST[0][:5], TEST[1][:5]), tmp_path)
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_report(comparison, POOL, TEST, tmp_path / "taken")

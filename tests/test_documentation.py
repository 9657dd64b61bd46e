"""Every Python snippet of the documentation runs, page by page, each page in one session from an empty folder."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if "```python" in page.read_text())


@pytest.mark.parametrize("page", PAGES)
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text()
    session: dict[str, object] = {"__name__": "page"}
    for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        line = text[: match.start(1)].count("\n")
        # Blank lines in front make a traceback show the page's line numbers.
        exec(compile("\n" * line + match[1], f"docs/{page}", "exec"), session)


def test_there_are_pages():
    assert {"bring-your-own-models.md", "bring-your-own-bounds.md"} <= set(PAGES)

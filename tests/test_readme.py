"""The README's example prints what the README says it prints."""

import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def test_example_and_output():
    code, expected = re.search(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.DOTALL).groups()
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    said, got = expected.strip(), printed.getvalue().strip()
    assert NUMBER.sub("#", got) == NUMBER.sub("#", said)
    # Another machine rounds otherwise: weights move by thousandths, and an image may change sides.
    for a, b in zip(NUMBER.findall(got), NUMBER.findall(said), strict=True):
        assert abs(float(a) - float(b)) <= 0.02 * abs(float(b)) + 1.1, (a, b)


def test_every_link_into_the_repository_exists():
    root = Path(__file__).parents[1]
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (root / target).exists(), target
